"""Reports as Markdown: the sentences that people read."""

from __future__ import annotations

from pipeline.measurement.statistics import Interval
from pipeline.report.markdown import markdown
from pipeline.results.report import Report


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


def test_a_benchmark_from_the_store_says_so_with_its_date(report: Report) -> None:
    steps = tuple(step.model_copy(update={"reused": True}) for step in report.steps)
    text = markdown(
        report.model_copy(update={"steps": steps, "benchmarked": "2026-02-01T08:00:00+00:00"})
    )
    assert "Measured 2026-02-01 08:00 UTC, in an earlier run" in text


def test_what_the_user_has_is_kept_in_the_first_sentence(report: Report) -> None:
    fields = {
        "verdict": "keep",
        "winner": "pytorch eager fp32",
        "ratio": Interval(value=1.02, low=0.97, high=1.07),
    }
    text = markdown(report.model_copy(update=fields))
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
    assert "its speed could not be measured" in text
    assert "not measurable" in text
    assert busy in text
