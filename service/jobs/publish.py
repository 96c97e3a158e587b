"""What a job's child leaves behind becomes the server's: the report with its engine, the artifacts
of its store, times and timing caches.

The child is gone by then, and is not believed: everything is checked where it lies, and moved into
its place by one rename.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path

from pipeline.core import Engine
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
from pipeline.report.bundle import ENGINE_FILE, check_engine, read_engine
from pipeline.report.files import FIGURES, HTML_NAME, JSON_NAME, MARKDOWN_NAME, load_report
from pipeline.results.report import Report
from service import logs
from service.jobs.redact import scrub_file
from service.storage.layout import Folders, Work

ENGINE = "engine"
EXPECTED = {JSON_NAME, MARKDOWN_NAME, HTML_NAME, FIGURES, ENGINE}
DIGESTS = "sha256.json"  # of the three forms; the engine has a manifest of its own
REPORT_FILES = (JSON_NAME, MARKDOWN_NAME, HTML_NAME)
SEND_AGAIN = "send the model again: that makes a new job, which takes what is left from the store"
MAX_REPORT_BYTES = (
    256 * 2**20
)  # raw samples make one of 64 candidates and several shapes some tens of MiB
MAX_HISTORY_BYTES, MAX_TIMES = 2**20, 1000
TIMING = "timing"  # as pipeline.backends.timing_cache lays it out, which the server does not import
CACHE, ABOUT = "cache.bin", "target.json"
KEY = re.compile(r"[0-9a-f]{64}")

log = logs.get("service.publish")


def publish(
    out: Path,
    place: Path,
    folders: Folders,
    exchange: Exchange = exchange_names,
) -> Report:
    """Verify a report and its engine in `out`, and make it `place`, without paths of this host.

    StoreError says what does not hold. What an attempt left there that ended between this and the
    database is replaced in one step.
    """
    try:
        verified(out)
        for name in REPORT_FILES:
            scrub_file(out / name, folders)
        report = verified(out)
        _write_digests(out)
    except (CrucibleError, OSError, LookupError, TypeError, ValueError, RecursionError) as error:
        said = error.message if isinstance(error, CrucibleError) else str(error)
        raise StoreError(
            f"the job ended with a report that does not hold: {said}",
            "retry the job; its log tells what it did",
        ) from error
    for path in out.rglob("*"):
        sync(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    replace_folder(out, place, exchange)
    sync(place.parent)
    return report


def engine_digest(place: Path) -> str | None:
    """The digest of a published engine with all its files; None where the report has none."""
    manifest = place / ENGINE / MANIFEST
    return (
        Manifest.model_validate_json(
            manifest.read_bytes(),
        ).sha256
        if manifest.is_file()
        else None
    )


def verified(out: Path) -> Report:
    """The report of a folder, if every file there is what it says it is; ValueError and others if
    not.
    """
    for path in (out, *out.rglob("*")):
        about = path.lstat()
        if not (
            stat.S_ISDIR(about.st_mode) or (stat.S_ISREG(about.st_mode) and about.st_nlink == 1)
        ):
            raise ValueError(f"'{path.name}' is neither a plain file nor a folder")
    if unknown := {path.name for path in out.iterdir()} - EXPECTED:
        raise ValueError(f"there are files that do not belong to it: {', '.join(sorted(unknown))}")
    missing = [name for name in REPORT_FILES if not (out / name).is_file()]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    if (size := (out / JSON_NAME).stat().st_size) > MAX_REPORT_BYTES:
        raise ValueError(f"{JSON_NAME} has {size} bytes, at most {MAX_REPORT_BYTES} are read")
    report = load_report(out)
    _check_engine(out, report)
    return report


def _check_engine(out: Path, report: Report) -> None:
    """The engine is there, whole, and the one of which the report speaks; where the report names
    none, there is none.
    """
    known = {each.label for each in report.candidates}
    if report.verdict == "keep" and report.baseline:
        known = {report.baseline.label}
    if report.winner is not None and report.winner not in known:
        raise ValueError("its winner is not among its candidates")
    if report.verdict == "accepted" and report.winner is None:
        raise ValueError("it is accepted without a winner")
    engine = report.engine_delivered
    if engine is None:
        if (out / ENGINE).exists():
            raise ValueError("there is an engine although none was delivered")
        return
    manifest = check_files(out / ENGINE, out, besides=(ENGINE_FILE,))
    delivered = read_engine(out / ENGINE)
    if delivered.model_dump() != engine.model_dump() or manifest.value != json.loads(
        engine.model_dump_json()
    ):
        raise ValueError("its engine is not the one that it names")


# -- what was published -------------------------------------------------------------------------


def check_form(folder: Path, name: str) -> None:
    """Raise DamagedError unless a form of a published report is what was published.

    A report that an earlier version published has no digests: its report.json is read instead.
    """
    try:
        if not (folder / name).is_file():
            raise ValueError(f"'{name}' is missing")
        if (folder / DIGESTS).is_file():
            expected = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))[name]
            check_digest(folder, name, str(expected))
        elif name == JSON_NAME:
            load_report(folder)
    except UserError as error:
        raise _damaged_report(folder, f"'{name}' cannot be read") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _damaged_report(folder, error) from error


def published_report(folder: Path) -> Report:
    """Return a report that `publish` put there; DamagedError if it is not what it was."""
    check_form(folder, JSON_NAME)
    try:
        return load_report(folder)
    except UserError as error:  # as it was published, by another version
        raise _damaged_report(folder, f"'{JSON_NAME}' cannot be read") from error


def published_engine(folder: Path) -> Engine:
    """Return the engine of a published report; DamagedError if a file is not what it was."""
    name = f"the engine of job {folder.name}"
    try:
        engine = read_engine(folder / ENGINE, name)
        check_engine(engine, name)
    except ModelError as error:
        raise DamagedError(f"{name} is damaged: '{ENGINE_FILE}' is missing", SEND_AGAIN) from error
    except DamagedError as error:
        raise DamagedError(error.message, SEND_AGAIN) from error
    return engine


def _write_digests(out: Path) -> None:
    digests = {name: digest_of(out / name) for name in REPORT_FILES}
    (out / DIGESTS).write_text(json.dumps(digests, indent=1), encoding="utf-8")


def _damaged_report(folder: Path, reason: object) -> DamagedError:
    return DamagedError(f"the report of job {folder.name} is damaged: {reason}", SEND_AGAIN)


# -- what else a job made -----------------------------------------------------------------------


def take_over(work: Work, home: Path) -> None:
    """Move what the child's store made into the store of the home; and its times and timing caches.
    What does not hold is left, and logged.
    """
    for why in Store(home).adopt(work.home):
        log.warning("artifact.refused", job=work.root.name, why=why)
    _take_times(work.home, home)
    for folder in sorted((work.home / TIMING).glob("*")):
        _take_timing(folder, home / TIMING / folder.name)


def _take_times(source: Path, home: Path) -> None:
    """What the child's history has and the home's has not: the child began with a copy."""
    file = source / "history.jsonl"
    if not file.is_file() or file.is_symlink() or file.stat().st_size > MAX_HISTORY_BYTES:
        return
    known, target = set(History(home).entries()), History(home)
    for entry in [entry for entry in History(source).entries() if entry not in known][-MAX_TIMES:]:
        target.add(entry.stage, entry.subject, entry.seconds, entry.plan, entry.device)


def _take_timing(folder: Path, place: Path) -> None:
    """A timing cache that is whole replaces the one that is there, which the child began with.
    TensorRT refuses that of another device.
    """
    files = (folder / CACHE, folder / ABOUT)
    if (
        folder.is_symlink()
        or not KEY.fullmatch(folder.name)
        or not all(file.is_file() and not file.is_symlink() for file in files)
    ):
        return
    try:
        about = json.loads(files[1].read_text(encoding="utf-8"))
        whole = about["sha256"] == hashlib.sha256(files[0].read_bytes()).hexdigest()
    except (ValueError, LookupError, TypeError):
        whole = False
    if whole:
        place.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.replace(place / file.name)
