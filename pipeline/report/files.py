"""A report as files.

report.json is for programs, report.md for a terminal or a pull request, and report.html for people.
Each figure is a file of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.core.artifacts import NoteCode
from pipeline.errors import UserError
from pipeline.report.figures.drawing import Plot
from pipeline.report.html import page, targets_page
from pipeline.report.markdown import markdown
from pipeline.results.report import SCHEMA_VERSION, Report, ReportFiles
from pipeline.results.targets import TargetsSummary

R = TypeVar("R", bound=BaseModel)

JSON_NAME, MARKDOWN_NAME, HTML_NAME = "report.json", "report.md", "report.html"
TARGETS_JSON, TARGETS_HTML = "targets.json", "targets.html"  # of several targets
FIGURES = "figures"  # the folder of the figures
OLD_NOTE_CODES = {
    (
        "the latencies are those of a new run of the baselines and the engine; no other candidate"
        " was measured beside them"
    ): NoteCode.REMEASURED,
    (
        "latency was measured while engines served on the same device: it decides nothing about"
        " speed"
    ): NoteCode.CONTENDED,
    (
        "this candidate was chosen by latencies that were measured while engines served on the"
        " same device: another may be faster"
    ): NoteCode.CHOSEN_CONTENDED,
}
"""Codes by the texts of notes in reports from before notes had codes."""


def write_report(report: Report, folder: Path) -> ReportFiles:
    """Write all files, each atomically, and report.json last: if it exists, all are complete."""
    (folder / FIGURES).mkdir(parents=True, exist_ok=True)
    files = ReportFiles(
        folder=folder,
        json_file=folder / JSON_NAME,
        markdown_file=folder / MARKDOWN_NAME,
        html_file=folder / HTML_NAME,
    )
    write_file(files.html_file, page(report, partial(_svg_of, folder / FIGURES)))
    write_file(files.markdown_file, markdown(report))
    write_file(files.json_file, report.model_dump_json(indent=1))
    return files


def write_targets(summary: TargetsSummary, folder: Path) -> None:
    """Write the summary of several targets, whose reports are in folders of their names."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / TARGETS_HTML, targets_page(summary))
    write_file(folder / TARGETS_JSON, summary.model_dump_json(indent=1))


def _svg_of(folder: Path, plot: Plot) -> str:
    """Return the figure's `<svg>` element.

    It is read from its file if that shows the same values; otherwise it is drawn and written there.
    """
    file, mark = folder / f"{plot.name}.svg", f"<!-- {plot.key} -->\n"
    if file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
        if text.startswith(mark):
            return text.removeprefix(mark)
    drawing = plot.draw()
    write_file(file, mark + drawing)
    return drawing


def load_report(path: Path) -> Report:
    """Read the report of a folder, or its report.json.

    UserError if there is none, or if another version wrote it.
    """
    file = report_file(path)
    return report_from_json(file.read_bytes(), str(file), file.parent)


def report_file(path: Path) -> Path:
    """Return the report.json of a folder, or that file itself. UserError if there is none."""
    file = path / JSON_NAME if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"no report at '{file}'",
            "give the folder that `crucible compile` named, or the report.json in it",
        )
    return file


def report_from_json(text: bytes, where: str, folder: Path) -> Report:
    """Parse a report.json. `where` names it in messages, and `folder` holds its engines.

    UserError if it is not a report, or if another version wrote it.
    """
    return report_from_document(document_of_report(text, where), where, folder)


def document_of_report(text: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object of a report of any kind. UserError if it is none."""
    try:
        document = json.loads(text)
        document["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"'{where}' is not a report: {error}",
            "give the report.json that `crucible compile` wrote",
        ) from error
    parsed: dict[str, Any] = document
    return parsed


def report_from_document(document: dict[str, Any], where: str, folder: Path) -> Report:
    """Check the parsed report of engines; as `report_from_json`."""
    if document.get("kind") == "language_model":
        raise UserError(
            f"'{where}' is the report of a language model, expected one of engines",
            "`crucible report` shows it",
        )
    report = checked_report(document, Report, SCHEMA_VERSION, where, folder)
    return _with_note_codes(report)


def checked_report(
    document: dict[str, Any], kind: type[R], version: int, where: str, folder: Path
) -> R:
    """Check a parsed report of this kind, and set the folders of its engines."""
    if (written := document["schema_version"]) != version:
        raise UserError(
            f"'{where}' has schema version {written}, this Crucible reads {version}",
            "compile again with this version",
        )
    _set_roots(document, folder)
    try:
        return kind.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise UserError(
            f"'{where}' does not fit the schema: {error}",
            "compile again; docs/reference/report.schema.json is the schema",
        ) from error


def _with_note_codes(report: Report) -> Report:
    """Add the codes to the notes of a report from before notes had codes."""
    notes = (
        note.model_copy(update={"code": note.code or OLD_NOTE_CODES.get(note.text)})
        for note in report.notes
    )
    return report.model_copy(update={"notes": tuple(notes)})


def _set_roots(document: dict[str, Any], folder: Path) -> None:
    """Set the folder of each engine, which is no part of an artifact's content."""
    candidates = document.get("candidates")
    for candidate in candidates if isinstance(candidates, list) else ():
        if isinstance(candidate, dict) and isinstance(candidate.get("engine"), dict):
            candidate["engine"]["root"] = str(folder)
    if isinstance(document.get("delivered"), dict):
        document["delivered"]["root"] = str(folder / "engine")


def schema() -> str:
    """Return the JSON schema of report.json, as published in docs/reference/report.schema.json."""
    return json.dumps(Report.model_json_schema(mode="serialization"), indent=1) + "\n"


def write_file(file: Path, text: str) -> None:
    """Write a file in one step."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise
