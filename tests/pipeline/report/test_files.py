"""Reports as files: they are complete, and can be read back."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from pipeline.core.artifacts import Note, NoteCode
from pipeline.errors import UserError
from pipeline.report.files import OLD_NOTE_CODES, load_report, schema, write_report
from pipeline.results.module_findings import ModuleFindings, Wait
from pipeline.results.report import Report
from tests.builders.report import proven_report

ROOT = Path(__file__).parents[3]


def test_three_files_are_written_and_the_json_reads_back_equal(
    report: Report, tmp_path: Path
) -> None:
    files = write_report(report, tmp_path / "out")
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {"report.json", "report.md", "report.html", "figures"}
    assert load_report(files.folder).model_dump() == report.model_dump()
    assert load_report(files.json_file).verdict == "accepted"


@pytest.mark.parametrize(("text", "code"), OLD_NOTE_CODES.items())
def test_notes_of_a_report_from_before_codes_get_theirs(
    report: Report, tmp_path: Path, text: str, code: NoteCode
) -> None:
    document = json.loads(report.model_dump_json())
    for note in document["notes"]:
        del note["code"]
    document["notes"].append({"stage": "benchmark", "text": text, "level": "warning"})
    (tmp_path / "report.json").write_text(json.dumps(document))
    *others, last = load_report(tmp_path).notes
    assert tuple(others) == report.notes
    assert last == Note(stage="benchmark", text=text, code=code)


def test_a_report_from_before_gpu_costs_opens(report: Report, tmp_path: Path) -> None:
    document = json.loads(report.model_dump_json())
    for row in document["baseline"]["rows"]:
        del row["gpu"]
    (tmp_path / "report.json").write_text(json.dumps(document))
    assert load_report(tmp_path).baseline == report.baseline


def test_every_figure_is_also_a_file_of_its_own(report: Report, tmp_path: Path) -> None:
    write_report(report, tmp_path)
    again = report.model_copy(update={"operators": report.operators[:1]})
    before = {file.name: file.read_text() for file in (tmp_path / "figures").iterdir()}
    write_report(again, tmp_path)
    after = {file.name: file.read_text() for file in (tmp_path / "figures").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"operators.svg"}
    written = (tmp_path / "report.html").read_text()
    assert written.count("<svg") == len(after) == 4
    assert all(text.partition("\n")[2] in written for text in after.values())


def test_a_figure_that_shows_the_same_values_is_not_drawn_again(
    report: Report, tmp_path: Path
) -> None:
    write_report(report, tmp_path)
    file = tmp_path / "figures" / "pareto.svg"
    mark, _, drawing = file.read_text().partition("\n")
    file.write_text(f"{mark}\n<svg>planted</svg>")
    write_report(report, tmp_path)
    assert "<svg>planted</svg>" in (tmp_path / "report.html").read_text()
    file.write_text(f"<!-- other values -->\n{drawing}")
    write_report(report, tmp_path)
    assert file.read_text() == f"{mark}\n{drawing}"


def test_precision_per_engine_is_drawn_in_a_figure_of_its_own(tmp_path: Path) -> None:
    written = write_report(proven_report(), tmp_path).html_file.read_text()
    assert written.count("<svg") == 5
    drawn = (tmp_path / "figures" / "precision.svg").read_text()
    assert all(text in drawn for text in ("int8 94 %", "fp16 96 %", "fp32 100 %", "moves data"))
    assert load_report(tmp_path).candidates[0].layers == proven_report().candidates[0].layers


def test_a_rejected_report_without_winner_validation_or_figures_is_written_whole(
    report: Report, tmp_path: Path
) -> None:
    nothing = {
        "winner": None,
        "ratio": None,
        "validation": None,
        "baseline": None,
        "baselines": (),
        "steps": (),
        "operators": (),
    }
    bare = tuple(
        item.model_copy(update={"benchmark": None, "selection": None, "engine": None})
        for item in report.candidates
    )
    fields = {
        "verdict": "rejected",
        "reasons": ("no candidate came through",),
        "nearest_miss": "openvino bf16",
        "candidates": bare,
    }
    files = write_report(report.model_copy(update={**nothing, **fields}), tmp_path)
    text = files.html_file.read_text()
    assert "Nearest miss: openvino bf16" in text
    assert 'class="banner rejected"' in text
    assert "<svg" not in text


def test_the_published_schema_is_in_step_and_a_report_fits_it(report: Report) -> None:
    published = (ROOT / "docs" / "reference" / "report.schema.json").read_text()
    assert published == schema(), "write it again: make reference"
    jsonschema.validate(json.loads(report.model_dump_json()), json.loads(published))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no report at"),
        ("{", "is not a report"),
        ("[]", "is not a report"),
        ('{"name": "x"}', "is not a report"),
        ('{"schema_version": 99}', "schema version 99, this Crucible reads 1"),
        ('{"schema_version": 1, "name": "x"}', "does not fit the schema"),
        ('{"schema_version": 1, "candidates": 3}', "does not fit the schema"),
    ],
)
def test_a_file_that_is_no_report_is_named(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(UserError) as raised:
        load_report(tmp_path)
    assert message in raised.value.message
    assert str(tmp_path) in raised.value.message
    assert raised.value.next_step


def test_a_report_from_before_modules_were_examined_is_read(report: Report, tmp_path: Path) -> None:
    findings = ModuleFindings(waits=(Wait(call=".item()", where="net.py:3", count=1),))
    write_report(report.model_copy(update={"module": findings}), tmp_path)
    assert load_report(tmp_path).module == findings
    file = tmp_path / "report.json"
    document = json.loads(file.read_text())
    del document["module"]
    file.write_text(json.dumps(document))
    assert load_report(tmp_path).module is None
