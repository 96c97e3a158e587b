"""Moves the output of a job's child to the server: the report with its engine, the artifacts of its
store, durations and timing caches.

The child has ended by then, and its output is untrusted: everything is verified in place, and then
moved by one rename.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path

from pipeline.core.artifacts import Engine
from pipeline.errors import CrucibleError, DamagedError, ModelError, StoreError, UserError
from pipeline.execution.durations import History
from pipeline.execution.store import (
    MANIFEST,
    Manifest,
    Store,
    check_digest,
    check_files,
    digest_of,
    sync,
)
from pipeline.host.replace_folder import Exchange, exchange_names, replace_folder
from pipeline.llm.engine import LanguageEngine, read_settings
from pipeline.llm.results import AnyReport, LanguageReport, load_any_report
from pipeline.report.bundle import ENGINE_FILE, check_engine, read_delivered
from pipeline.report.files import FIGURES, HTML_NAME, JSON_NAME, MARKDOWN_NAME
from service import logs
from service.jobs.redact import scrub_file
from service.storage.layout import Folders, Work

ENGINE = "engine"
EXPECTED = {JSON_NAME, MARKDOWN_NAME, HTML_NAME, FIGURES, ENGINE}
DIGESTS = "sha256.json"  # of the three forms; the engine has its own manifest
REPORT_FILES = (JSON_NAME, MARKDOWN_NAME, HTML_NAME)
SEND_AGAIN = "send the model again: the new job reuses the artifacts that are intact"
# with raw samples, a report of 64 candidates and several shapes has some tens of MiB
MAX_REPORT_BYTES = 256 * 2**20
MAX_HISTORY_BYTES, MAX_TIMES = 2**20, 1000
TIMING = "timing"  # as pipeline.backends.timing_cache lays it out, which the server does not import
CACHE, DESCRIPTION = "cache.bin", "target.json"
KEY = re.compile(r"[0-9a-f]{64}")

AnyEngine = Engine | LanguageEngine

log = logs.get("service.publish")


def publish(
    out: Path,
    target: Path,
    folders: Folders,
    exchange: Exchange = exchange_names,
) -> AnyReport:
    """Verify a report and its engine in `out`, remove this host's paths, and move it to `target`.

    StoreError names what is wrong. If an earlier attempt left a report at `target` before the
    database was updated, it is replaced in one step.
    """
    try:
        verified(out)
        for name in REPORT_FILES:
            scrub_file(out / name, folders)
        report = verified(out)
        _write_digests(out)
    except (CrucibleError, OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        message = error.message if isinstance(error, CrucibleError) else str(error)
        raise StoreError(
            f"the job ended with an invalid report: {message}",
            "retry the job; its log shows what it did",
        ) from error
    for path in out.rglob("*"):
        sync(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_folder(out, target, exchange)
    sync(target.parent)
    return report


def engine_digest(folder: Path) -> str | None:
    """Return the digest of a published engine with all its files; None without an engine."""
    manifest = folder / ENGINE / MANIFEST
    if not manifest.is_file():
        return None
    return Manifest.model_validate_json(manifest.read_bytes()).sha256


def verified(out: Path) -> AnyReport:
    """Load the report of a folder after checking every file. ValueError and others if a check
    fails.
    """
    for path in (out, *out.rglob("*")):
        status = path.lstat()
        is_plain_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        if not (stat.S_ISDIR(status.st_mode) or is_plain_file):
            raise ValueError(f"'{path.name}' is neither a plain file nor a folder")
    if unknown := {path.name for path in out.iterdir()} - EXPECTED:
        raise ValueError(f"unexpected files: {', '.join(sorted(unknown))}")
    missing = [name for name in REPORT_FILES if not (out / name).is_file()]
    if missing:
        raise ValueError(f"missing files: {', '.join(missing)}")
    if (size := (out / JSON_NAME).stat().st_size) > MAX_REPORT_BYTES:
        raise ValueError(f"expected {JSON_NAME} of at most {MAX_REPORT_BYTES} bytes, got {size}")
    report = load_any_report(out)
    _check_engine(out, report)
    return report


def _check_engine(out: Path, report: AnyReport) -> None:
    """Check that the engine is complete and is the one that the report names. If the report names
    none, there must be none.
    """
    engine: AnyEngine | None
    known: set[str | None] = {None, *(candidate.label for candidate in report.candidates)}
    if isinstance(report, LanguageReport):
        engine = report.delivered
        known.add("")
        if report.winner in known and report.winner != (
            report.delivered.label if report.delivered else ""
        ):
            raise ValueError(f"its winner is '{report.winner}', and its engine another one")
    else:
        engine = report.engine_delivered
        if report.baseline and report.verdict == "keep":
            known = {None, report.baseline.label}
        elif (
            report.baseline and report.verdict == "unproven"
        ):  # `keep`, if nothing had disturbed it
            known.add(report.baseline.label)
    if report.winner not in known:
        raise ValueError("its winner is not among its candidates")
    if report.verdict == "accepted" and not report.winner:
        raise ValueError("its verdict is accepted, but it names no winner")
    _check_files(out, engine)


def _check_files(out: Path, engine: AnyEngine | None) -> None:
    if engine is None:
        if (out / ENGINE).exists():
            raise ValueError("it names no engine, but the folder has one")
        return
    manifest = check_files(out / ENGINE, out, besides=(ENGINE_FILE,))
    delivered = read_delivered(out / ENGINE, type(engine))
    if delivered.model_dump() != engine.model_dump() or manifest.value != json.loads(
        engine.model_dump_json()
    ):
        raise ValueError("the engine in the folder is not the one that it names")
    if isinstance(engine, LanguageEngine):
        if engine.library == "transformers" or engine.recipe is None:
            raise ValueError(f"expected an engine that was built, got one of {engine.library}")
        read_settings(out / ENGINE)


# -- published reports -------------------------------------------------------------------------


def check_form(folder: Path, name: str) -> None:
    """Raise DamagedError unless a form of a published report is unchanged.

    A report from an earlier version has no digests: its report.json is parsed instead.
    """
    try:
        if not (folder / name).is_file():
            raise ValueError(f"'{name}' is missing")
        if (folder / DIGESTS).is_file():
            expected = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))[name]
            check_digest(folder, name, str(expected))
        elif name == JSON_NAME:
            load_any_report(folder)
    except UserError as error:
        raise _damaged_report(folder, f"'{name}' cannot be read") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _damaged_report(folder, error) from error


def published_any_report(folder: Path) -> AnyReport:
    """Return a published report, of engines or of a language model. DamagedError if it has
    changed.
    """
    check_form(folder, JSON_NAME)
    try:
        return load_any_report(folder)
    except UserError as error:  # published by another version
        raise _damaged_report(folder, f"'{JSON_NAME}' cannot be read") from error


def published_engine(folder: Path) -> AnyEngine:
    """Return the engine of a published report. DamagedError if a file has changed."""
    name = f"the engine of job {folder.name}"
    try:
        engine = read_any_engine(folder / ENGINE, name)
        check_engine(engine, name)
    except ModelError as error:
        raise DamagedError(f"{name} is damaged: '{ENGINE_FILE}' is missing", SEND_AGAIN) from error
    except DamagedError as error:
        raise DamagedError(error.message, SEND_AGAIN) from error
    return engine


def read_any_engine(folder: Path, name: str = "") -> AnyEngine:
    """Return an engine as its description has it. ModelError if there is none, DamagedError if the
    description is damaged; the message calls the engine `name`.
    """
    try:
        content = json.loads((folder / ENGINE_FILE).read_bytes())
    except (OSError, ValueError):  # reading it says what is wrong
        content = None
    if isinstance(content, dict) and "library" in content:
        return read_delivered(folder, LanguageEngine, name)
    return read_delivered(folder, Engine, name)


def _write_digests(out: Path) -> None:
    digests = {name: digest_of(out / name) for name in REPORT_FILES}
    (out / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def _damaged_report(folder: Path, reason: object) -> DamagedError:
    return DamagedError(f"the report of job {folder.name} is damaged: {reason}", SEND_AGAIN)


# -- other output of a job -----------------------------------------------------------------------


def take_over(work: Work, home: Path, store: Store | None = None) -> None:
    """Move the artifacts of the child's store into `store`, by default that of the home, and its
    durations and timing caches to the home. Invalid ones are left and logged.
    """
    for reason in (store or Store(home)).adopt(work.home):
        log.warning("artifact.refused", job=work.root.name, why=reason)
    _take_times(work.home, home)
    for folder in sorted((work.home / TIMING).glob("*")):
        _take_timing(folder, home / TIMING / folder.name)


def _take_times(source: Path, home: Path) -> None:
    """Add the child's new durations to the home's history. The child started with a copy of it."""
    file = source / "history.jsonl"
    if not file.is_file() or file.is_symlink() or file.stat().st_size > MAX_HISTORY_BYTES:
        return
    known, target = set(History(home).entries()), History(home)
    new = [entry for entry in History(source).entries() if entry not in known]
    for entry in new[-MAX_TIMES:]:
        target.add(entry.stage, entry.subject, entry.seconds, entry.plan, entry.device)


def _take_timing(folder: Path, target: Path) -> None:
    """Replace the home's timing cache by an intact one of the child. TensorRT refuses a cache of
    another device.
    """
    files = (folder / CACHE, folder / DESCRIPTION)
    if (
        folder.is_symlink()
        or not KEY.fullmatch(folder.name)
        or not all(file.is_file() and not file.is_symlink() for file in files)
    ):
        return
    try:
        description = json.loads(files[1].read_text(encoding="utf-8"))
        intact = description["sha256"] == hashlib.sha256(files[0].read_bytes()).hexdigest()
    except (ValueError, LookupError, TypeError):
        intact = False
    if intact:
        target.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.replace(target / file.name)
