"""Reports as files: what people read, that nothing in them is markup by accident, and that they can
be read back.
"""

from __future__ import annotations

import html.parser
import json
import re
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from pipeline.benchmark.roofline import bound_of, with_bounds
from pipeline.cli.terminal import (
    candidate_table,
    console,
    first_rows,
    limits_table,
    print_limits,
    verdict_lines,
)
from pipeline.core import Precision
from pipeline.errors import UserError
from pipeline.formatting import bytes_text, date, number_text, time_text
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse
from pipeline.measurement.measure import Interval
from pipeline.report.files import load_report, schema, write_report
from pipeline.report.html import page
from pipeline.report.markdown import markdown
from pipeline.report.tables import _grouped, entries, left, right, sections
from pipeline.results.report import Report
from tests.builders.report import EVIL, proven_report, sample_report

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def report() -> Report:
    return sample_report()


@pytest.fixture(scope="module")
def html_page(report: Report) -> str:
    return page(report)


class Structure(html.parser.HTMLParser):
    """Collects tags and ids, and checks that every element is closed in order."""

    VOID = frozenset({"meta", "link", "br", "path", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for key, value in attrs if key == "id" and value]
        self.urls += [
            value for key, value in attrs if key in {"src", "href", "xlink:href"} and value
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def parsed(text: str) -> Structure:
    structure = Structure()
    structure.feed(text)
    return structure


# -- files
# ------------------------------------------------------------------------------


def test_three_files_are_written_and_the_json_reads_back_equal(
    report: Report, tmp_path: Path
) -> None:
    files = write_report(report, tmp_path / "out")
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {"report.json", "report.md", "report.html", "figures"}
    assert load_report(files.folder).model_dump() == report.model_dump()
    assert load_report(files.json_file).verdict == "accepted"


def test_every_figure_is_also_a_file_of_its_own(report: Report, tmp_path: Path) -> None:
    write_report(report, tmp_path)
    again = report.model_copy(update={"operators": report.operators[:1]})
    before = {file.name: file.read_text() for file in (tmp_path / "figures").iterdir()}
    write_report(again, tmp_path)
    after = {file.name: file.read_text() for file in (tmp_path / "figures").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"operators.svg"}
    written = (tmp_path / "report.html").read_text()
    assert written.count("<svg") == len(after) == 4
    assert all(text in written for text in after.values())


def test_the_published_schema_is_in_step_and_a_report_fits_it(report: Report) -> None:
    published = (ROOT / "docs" / "report.schema.json").read_text()
    assert published == schema(), (
        "write it again: python -c 'from pipeline.report.files import schema; print(schema(),"
        ' end="")\' > docs/report.schema.json'
    )
    jsonschema.validate(json.loads(report.model_dump_json()), json.loads(published))


@pytest.mark.parametrize(
    ("content", "said"),
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
def test_a_file_that_is_no_report_is_named(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    with pytest.raises(UserError) as raised:
        load_report(tmp_path)
    assert said in raised.value.message
    assert str(tmp_path) in raised.value.message
    assert raised.value.next_step


# -- content
# ------------------------------------------------------------------------------


def test_entries_are_numbered_from_fast_to_slow_with_the_unmeasured_last(report: Report) -> None:
    lines = entries(report)
    assert [line.number for line in lines] == list(range(1, 11))
    assert lines[0].part == "winner"
    assert [line.state for line in lines[-2:]] == ["refused", "built"]
    assert {line.label for line in lines if line.part == "baseline"} == {
        "pytorch eager fp32",
        "pytorch traced fp32",
    }


def test_markdown_tells_verdict_reasons_command_and_every_candidate(report: Report) -> None:
    text = markdown(report)
    assert text.startswith("# digits: accepted\n")
    assert (
        "openvino int8 nncf u8s8 runs at 6.09 \\[6.00, 6.17\\] times the speed of pytorch eager"
        " fp32" in text
    )
    assert "    crucible compile configs/digits.yaml" in text
    assert "- serve it: crucible serve" in text
    assert all(
        candidate.label in text and candidate.reason in text for candidate in report.candidates
    )
    assert "avx512_vnni" in text
    assert "2026-03-01 09:00 UTC" in text  # when a reused step ran


def test_percentiles_are_absent_without_enough_values(report: Report) -> None:
    rows = {
        row[1]: row
        for section in sections(report)
        if section.key == "candidates"
        for row in section.tables[0].rows
    }
    headings = (
        next(section for section in sections(report) if section.key == "candidates")
        .tables[0]
        .headings
    )
    p90, p99 = headings.index("p90"), headings.index("p99")
    assert rows["openvino int8 nncf u8s8"][p99] != "-"
    assert rows["openvino fp32"][p99] == "-"  # 400 values
    assert rows["openvino fp32"][p90] != "-"


def test_every_row_has_as_many_cells_as_its_table_has_columns(report: Report) -> None:
    tables = [table for section in sections(report) for table in section.tables]
    assert {len(row) - len(table.columns) for table in tables for row in table.rows} == {0}


def test_a_benchmark_from_the_store_says_so_with_its_date(report: Report) -> None:
    steps = tuple(step.model_copy(update={"reused": True}) for step in report.steps)
    text = markdown(
        report.model_copy(update={"steps": steps, "benchmarked": "2026-02-01T08:00:00+00:00"})
    )
    assert "Measured 2026-02-01 08:00 UTC, in an earlier run" in text


def test_what_the_user_has_is_kept_in_the_first_sentence(report: Report) -> None:
    kept = {
        "verdict": "keep",
        "winner": "pytorch eager fp32",
        "ratio": Interval(value=1.02, low=0.97, high=1.07),
    }
    text = markdown(report.model_copy(update=kept))
    assert (
        "Keep pytorch eager fp32: no candidate that kept its accuracy is measurably faster. The"
        " fastest runs at 1.02 \\[0.97, 1.07\\]" in text
    )


def test_where_the_host_cannot_tell_the_report_says_so_instead_of_a_number(report: Report) -> None:
    busy = (
        "this host is too busy to tell: load 4.1 on 2 cores; the slowest process took 340 times as"
        " long as the fastest"
    )
    first, *others = report.candidates
    assert first.benchmark is not None
    row = first.benchmark.rows[0].model_copy(update={"ratio": None, "ratio_missing": busy})
    untold = first.model_copy(
        update={"benchmark": first.benchmark.model_copy(update={"rows": (row,)})}
    )
    text = markdown(
        report.model_copy(
            update={
                "ratio": None,
                "ratio_missing": busy,
                "verdict": "unproven",
                "candidates": (untold, *others),
            }
        )
    )
    assert "how fast it is could not be measured" in text
    assert "not measurable" in text
    assert busy in text


def test_a_rejected_winner_is_not_shown_as_a_winner(report: Report) -> None:
    rejected = report.model_copy(update={"verdict": "rejected"})
    assert entries(rejected)[0].state == "measured"
    assert '<tr class="winner">' not in page(rejected)
    assert '<tr class="winner">' in page(report)


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
    told = {
        "verdict": "rejected",
        "reasons": ("no candidate came through",),
        "nearest_miss": "openvino bf16",
        "candidates": bare,
    }
    files = write_report(report.model_copy(update={**nothing, **told}), tmp_path)
    text = files.html_file.read_text()
    assert "Nearest miss: openvino bf16" in text
    assert 'class="banner rejected"' in text
    assert "<svg" not in text


# -- what really ran
# ------------------------------------------------------------------------------


def test_every_proven_engine_is_told_with_its_shares_and_fusions() -> None:
    section = next(section for section in sections(proven_report()) if section.key == "layers")
    shares, fused, *slowest = section.tables
    assert shares.columns == (
        *left("#", "engine"),
        *right("fp32", "fp16", "int8", "reformats", "not known", "layers", "of them reformats"),
    )
    assert shares.rows == (
        ("1", "tensorrt int8 implicit entropy", "-", "-", "94 %", "6.1 %", "-", "24", "2"),
        ("2", "tensorrt fp16 flags", "-", "96 %", "-", "3.8 %", "-", "27", "4"),
        ("5", "tensorrt rescued fp16 flags", "99.9 %", "-", "-", "0.1 %", "-", "24", "1"),
    )
    assert shares.emphasised == 0
    assert fused.rows[1][2] == "Conv + Relu in one kernel: 9; Conv + Add + Relu in one kernel: 8"
    assert all(table.folded for table in slowest)
    assert [
        table.title for table in slowest
    ] == [  # of the winner, and of what is called by a wrong name
        "The 15 slowest layers of tensorrt int8 implicit entropy",
        "The 15 slowest layers of tensorrt rescued fp16 flags",
    ]
    assert slowest[1].rows[0][1:5] == (
        "12 %",
        "fp32",
        "tactic",
        "/layer4/layer4.1/conv2/Conv, /layer4/layer4.1/Add, /layer4/layer4.1/relu_1/Relu",
    )


def test_a_mislabelled_candidate_says_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    report = proven_report()
    assert "called fp16, but its heavy layers run 0 % fp16, 100 % fp32" in markdown(report)
    console().print(candidate_table(report))
    shown = " ".join(capsys.readouterr().out.split())
    assert "mislabelled" in shown
    assert "int8 94 %" in shown
    assert "really ran" not in str(
        [column.header for column in candidate_table(sample_report()).columns]
    )


def test_a_rescue_is_told_step_by_step() -> None:
    section = next(section for section in sections(proven_report()) if section.key == "rescue")
    assert section.paragraphs == ("tensorrt fp16 flags: keep /fc/Gemm in fp32",)
    assert section.tables[0].rows == (
        (
            "tensorrt fp16 flags",
            "opt shape moved to min",
            "tensorrt rescued fp16 flags",
            "mislabelled",
        ),
        ("tensorrt fp16 flags", "worst nodes kept in fp32", "-", "not tried"),
    )
    assert "  rescue of tensorrt fp16 flags: keep /fc/Gemm in fp32" in verdict_lines(
        proven_report()
    )


def test_precision_per_engine_is_drawn_in_a_figure_of_its_own(tmp_path: Path) -> None:
    written = write_report(proven_report(), tmp_path).html_file.read_text()
    assert written.count("<svg") == 5
    drawn = (tmp_path / "figures" / "precision.svg").read_text()
    assert all(text in drawn for text in ("int8 94 %", "fp16 96 %", "fp32 100 %", "moves data"))
    assert load_report(tmp_path).candidates[0].layers == proven_report().candidates[0].layers


# -- the page
# ------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_stands_alone(html_page: str) -> None:
    structure = parsed(html_page)
    assert structure.open == []
    assert "script" not in structure.tags
    assert [url for url in structure.urls if not url.startswith("#")] == []
    assert re.findall(r"url\((?!#)", html_page) == []
    assert "default-src 'none'" in html_page


def test_ids_are_unique_though_each_figure_brings_its_own(html_page: str) -> None:
    structure = parsed(html_page)
    assert len(structure.ids) == len(set(structure.ids))
    assert {url.removeprefix("#") for url in structure.urls} <= set(structure.ids)


def test_figures_speak_to_screen_readers_and_stages_show_what_was_reused(html_page: str) -> None:
    assert html_page.count('role="img" aria-label="') == html_page.count("<svg") == 4
    assert "Pareto front" in html_page
    assert html_page.count('class="reused" style="width:') == 4
    assert html_page.count('class="ran" style="width:') == 4


@pytest.mark.parametrize("made", [sample_report, proven_report])
def test_names_from_a_model_are_text_everywhere(
    made: Callable[..., Report], tmp_path: Path
) -> None:
    evil = made(evil=EVIL)
    files = write_report(evil, tmp_path)
    written = files.html_file.read_text()
    assert "alert(" in written
    assert "<script" not in written
    assert parsed(written).open == []
    prose = "\n".join(
        line for line in files.markdown_file.read_text().splitlines() if not line.startswith("    ")
    )  # code is literal
    assert "alert(" in prose
    assert "<script" not in prose
    lines = prose.splitlines()
    tables = [line for line in lines if line.startswith("| ") and "alert" in line]
    assert tables
    assert all(
        len(re.split(r"(?<!\\)\|", line))
        == len(re.split(r"(?<!\\)\|", lines[lines.index(line) - 1]))
        for line in tables
    )
    assert json.loads(files.json_file.read_text())["command"] == evil.command


# -- numbers
# ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (4.12e-4, "412 us"),
        (5.214e-3, "5.21 ms"),
        (0.0999951, "100 ms"),
        (0.99996, "1.00 s"),
        (12.34, "12.3 s"),
        (7e-7, "0.70 us"),
        (150, "2.5 min"),
    ],
)
def test_times_have_three_digits_and_a_unit(seconds: float, said: str) -> None:
    assert time_text(seconds) == said


def test_sizes_counts_and_dates() -> None:
    assert [bytes_text(count) for count in (0, 999, 1000, 999_900, 2_130_000, 16_400_000_000)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.00 MB",
        "2.13 MB",
        "16.4 GB",
    ]
    assert [number_text(value) for value in (0.5, 74.6, 1234.5)] == ["0.50", "74.6", "1,234"]
    assert date("2026-03-02T10:11:40+00:00") == "2026-03-02 10:11 UTC"


# -- what binds a row
# ------------------------------------------------------------------------------


def bounded(report: Report) -> Report:
    """The report as a host gives it whose fp32 peak is known, with moved bytes for the baseline
    only.
    """
    peaks = Peaks(
        device="EPYC, 2 threads",
        source="measured 2026-11-21",
        flops_per_s={Precision.FP32: 1e12},
        bytes_per_s=50e9,
    )
    assert report.baseline
    rows = tuple(row.model_copy(update={"bytes_per_s": 4e9}) for row in report.baseline.rows)
    baseline = with_bounds(report.baseline.model_copy(update={"rows": rows}), Precision.FP32, peaks)
    candidates = tuple(
        (
            each.model_copy(
                update={"benchmark": with_bounds(each.benchmark, each.recipe.precision, peaks)}
            )
            if each.benchmark
            else each
        )
        for each in report.candidates
    )
    use = GpuUse(uuid="GPU-1", samples=3, other_processes=(4711,))
    return report.model_copy(
        update={"baseline": baseline, "candidates": candidates, "peaks": (peaks,), "gpu_use": use}
    )


def test_what_binds_each_row_is_told_in_every_form(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    made = bounded(report)
    for text in (markdown(made), page(made)):
        assert "What binds each row" in text
        assert (
            "Peaks of EPYC, 2 threads: fp32 1,000 GFLOP/s; memory 50.0 GB/s (measured 2026-11-21)."
            in text
        )
        assert "61 % (fp32)" in text, "8.2 GFLOP in 13.4 ms"
        assert "try int8, or a smaller model" in text
        assert "other processes on the GPU: 4711" in text
    (limits,) = (section for section in sections(made) if section.key == "limits")
    measured = [entry for entry in entries(made) if entry.benchmark]
    assert [len(table.rows) for table in limits.tables] == [len(measured)] * 2
    console().print(limits_table(first_rows(made)))
    told = [line for line in capsys.readouterr().out.splitlines() if "pytorch eager fp32" in line]
    assert all(each in told[0] for each in ("612", "4.00", "61 % (fp32)", "8.0 %", "compute"))
    assert any("what binds it is unknown" in line for line in verdict_lines(made)), (
        "the winner's bytes are not known"
    )


def test_rates_are_printed_also_where_no_peak_is_known(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.baseline
    row = report.baseline.rows[0].model_copy(update={"bytes_per_s": 4e9})
    print_limits(
        console(), [("fast", row.model_copy(update={"bound": bound_of(row, Precision.FP32, None)}))]
    )
    told = capsys.readouterr().out
    (line,) = (line for line in told.splitlines() if "fast" in line)
    assert "612" in line
    assert "4.00" in line
    assert (
        "what binds each row is not known: measure them once: `crucible doctor --measure`" in told
    )
    assert "of peak" not in told


def test_a_report_without_verdicts_on_rows_has_no_such_section(report: Report) -> None:
    assert all(section.key != "limits" for section in sections(report))


def test_a_note_of_the_graph_itself_names_no_engine() -> None:
    notes = [
        ("", "said of all"),
        ("openvino int8", "said of all"),
        ("openvino int8", "said of one"),
        ("openvino int8", "said of one"),
    ]
    assert _grouped(notes) == ("said of all", "said of one (openvino int8)")
