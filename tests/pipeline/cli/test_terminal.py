"""Tables for a terminal, and what is shown while stages run."""

import io
import time

import pytest
from rich.console import Console

from pipeline.cli.stage_progress import StageProgress, expectation
from pipeline.cli.terminal import benchmark_table, candidate_table, console
from pipeline.core.progress import AccuracyFigures, CandidateFigures
from pipeline.execution.stage_event import StageEvent
from pipeline.measurement.clock import Samples
from pipeline.results.benchmarks import BenchmarkReport, LatencyRow
from tests.builders.report import sample_report
from tests.pipeline.execution.figures import accuracy, candidate, latency


def test_a_percentile_that_too_few_values_do_not_give_is_a_gap() -> None:
    part = Samples(values_s=(0.002,) * 600)  # enough for p90, too few for p99
    row = LatencyRow(
        sizes={"batch": 1},
        end_to_end=part,
        upload=part,
        compute=part,
        download=part,
        throughput_per_s=500.0,
        flops_per_s=None,
        bytes_per_s=None,
    )
    columns = benchmark_table([BenchmarkReport(label="engine", rows=(row,))]).columns
    assert [list(column.cells) for column in columns[2:5]] == [["2.000 ms"], ["2.000 ms"], ["-"]]


def test_a_label_that_looks_like_markup_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    part = Samples(values_s=(0.002,) * 6)
    row = LatencyRow(
        sizes={},
        end_to_end=part,
        upload=part,
        compute=part,
        download=part,
        throughput_per_s=500.0,
        flops_per_s=None,
        bytes_per_s=None,
    )
    console().print(benchmark_table([BenchmarkReport(label="fp16 keep [cC]onv*,[/]", rows=(row,))]))
    assert "fp16 keep [cC]onv*,[/]" in capsys.readouterr().out


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console().print("metric:a:b")
    assert capsys.readouterr().out == "metric:a:b\n"


def test_a_baseline_that_was_built_to_be_delivered_is_a_line_of_its_own() -> None:
    """It was neither timed as it is delivered, nor has it a reason."""
    report = sample_report()
    kept = report.candidates[0].model_copy(
        update={"label": "kept", "state": "built", "reason": "", "benchmark": None}
    )
    table = candidate_table(report.model_copy(update={"candidates": (*report.candidates, kept)}))
    states = dict(zip(*(map(str, column.cells) for column in table.columns[:2]), strict=True))
    assert states[kept.title] == "built"


def test_a_long_reason_ends_between_words() -> None:
    table = candidate_table(sample_report())
    states = [str(cell) for cell in table.columns[1].cells]
    assert "refused: ONNX Runtime computes fp16 graphs on the CPU in fp32, ..." in states


# -- stages as they run ------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain() -> Console:
    return Console(file=io.StringIO(), width=130)


def output_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("elapsed_s", "estimate_s", "text"),
    [
        (0.0, 68.0, "about 68 s left"),
        (28.2, 68.0, "about 40 s left"),
        (70.0, 68.0, "usually 68 s"),
        (60.0, 1860.0, "about 30 min left"),
        (5.0, None, ""),
        (0.0, 1.0, ""),
    ],
)
def test_what_is_expected_of_a_stage(elapsed_s: float, estimate_s: float | None, text: str) -> None:
    assert expectation(elapsed_s, estimate_s) == text


def test_the_first_figures_of_a_candidate_are_a_line_each() -> None:
    clock, console = Clock(), plain()
    shown = StageProgress(console, every_s=30, clock=clock)

    def measured(*found: CandidateFigures) -> str:
        for figures in found:
            shown(StageEvent("benchmark", "", 0.5, state="progress", figures=figures))
        return output_of(console)

    checked = candidate("int8[a]", accuracy(0.01, "top1"))
    assert measured(checked, checked) == (
        "  passes             int8[a]: loss of top1 0.01 (0.005 to 0.015)\n"
    )
    exact = AccuracyFigures("", 2e-5, 2e-5, 2e-5, passed=False)
    assert measured(candidate("fp16", exact)).endswith(
        "  fails              fp16: 1 - cosine 2e-05\n"
    )
    timed = candidate("int8[a]", latency=latency(0.00123))
    text = measured(timed, candidate("int8[a]", latency=latency(0.002)), candidate("bf16"))
    assert text.endswith("  timing             int8[a]: first runs 1.23 ms\n")
    clock.now += 60
    shown.say_alive()
    assert output_of(console) == text, "no stage runs"


def test_nothing_is_said_of_candidates_where_quiet() -> None:
    console = plain()
    shown = StageProgress(console, quiet=True)
    figures = candidate("int8", accuracy())
    shown(StageEvent("validate", "", state="progress", figures=figures))
    assert output_of(console) == ""


def test_a_long_stage_says_that_it_is_alive() -> None:
    clock, console = Clock(), plain()
    shown = StageProgress(console, every_s=30, clock=clock)
    shown.say_alive()
    shown(StageEvent("build", "tensorrt fp16", estimate_s=68.0, state="started"))
    clock.now += 29
    shown.say_alive()
    assert output_of(console) == ""
    shown(
        StageEvent(
            "build",
            "tensorrt fp16",
            0.4,
            "[timing] kernels",
            elapsed_s=29.0,
            estimate_s=68.0,
            state="progress",
        )
    )
    clock.now += 2
    shown.say_alive()
    assert (
        output_of(console)
        == "  running   31.0 s  build tensorrt fp16  40%, about 37 s left, [timing] kernels\n"
    )
    shown(StageEvent("build", "tensorrt fp16", seconds=33.0, state="finished"))
    clock.now += 100
    shown.say_alive()
    assert output_of(console).splitlines()[1:] == ["  done      33.0 s  build tensorrt fp16"]


def test_each_of_two_stages_says_that_it_is_alive_and_ends_on_its_own() -> None:
    """The first one started ends last."""
    clock, console = Clock(), plain()
    shown = StageProgress(console, every_s=30, clock=clock)
    shown(StageEvent("build", "a", state="started"))
    clock.now += 20
    shown(StageEvent("build", "b", state="started"))
    shown(StageEvent("build", "b", 0.5, "half way", state="progress"))
    clock.now += 15
    shown.say_alive()
    assert output_of(console).splitlines() == ["  running   35.0 s  build a"], (
        "b has not run for long"
    )
    clock.now += 20
    shown.say_alive()
    assert output_of(console).splitlines()[1:] == [
        "  running   55.0 s  build a",
        "  running   35.0 s  build b  50%, half way",
    ]
    shown(StageEvent("build", "b", seconds=40.0, state="finished"))
    clock.now += 5
    shown.say_alive()
    shown(StageEvent("build", "a", text="no kernel", state="failed"))
    clock.now += 100
    shown.say_alive()
    assert [line.split()[0] for line in output_of(console).splitlines()[3:]] == [
        "done",
        "running",
        "failed",
    ]
    assert output_of(console).splitlines()[4] == "  running   60.0 s  build a"


def test_a_stage_that_was_only_interrupted_is_not_called_failed() -> None:
    console = plain()
    shown = StageProgress(console, every_s=30, clock=Clock())
    shown(StageEvent("build", "a", state="started"))
    shown(StageEvent("build", "a", state="cancelled"))
    shown.say_alive()
    assert [line.split() for line in output_of(console).splitlines()] == [
        ["cancelled", "build", "a"]
    ]


def test_a_silent_stage_is_shown_alive_too() -> None:
    console = plain()
    with StageProgress(console, every_s=0.02) as shown:
        shown(StageEvent("build", "", state="started"))
        end = time.monotonic() + 60
        while "running" not in output_of(console) and time.monotonic() < end:
            time.sleep(0.01)
    assert "s  build" in output_of(console)


def test_a_quiet_run_says_nothing() -> None:
    console = plain()
    with StageProgress(console, quiet=True, every_s=0.01) as shown:
        shown(StageEvent("build", "", estimate_s=5.0, state="started"))
        time.sleep(0.05)
        shown(StageEvent("build", "", state="finished"))
    assert output_of(console) == ""


def test_bars_show_what_is_left() -> None:
    console = Console(file=io.StringIO(), width=130, force_terminal=True, color_system=None)
    with StageProgress(console) as shown:
        shown(StageEvent("build", "x", estimate_s=68.0, state="started"))
        shown(
            StageEvent(
                "build", "x", 0.25, "timing", elapsed_s=0.1, estimate_s=68.0, state="progress"
            )
        )
        shown._bars.refresh()
        assert "about 68 s left" in output_of(console)
        shown(StageEvent("build", "x", seconds=60.0, state="finished"))
    assert "done      60.0 s  build x" in output_of(console)


BUILD_A, BUILD_B = "build [dim]a[/dim]", "build [dim]b[/dim]"


def test_each_of_two_stages_has_a_bar_until_it_ends() -> None:
    console = Console(file=io.StringIO(), width=130, force_terminal=True, color_system=None)
    with StageProgress(console) as shown:
        bars = shown._bars
        shown(StageEvent("build", "a", estimate_s=68.0, state="started"))
        shown(StageEvent("build", "b", estimate_s=20.0, state="started"))
        shown(StageEvent("build", "b", 0.25, "timing", state="progress"))
        assert [(bar.description, bar.completed) for bar in bars.tasks] == [
            (BUILD_A, 0.0),
            (BUILD_B, 0.25),
        ]
        shown(StageEvent("build", "a", 0.5, "timing", state="progress"))
        shown(StageEvent("build", "b", seconds=20.0, state="finished"))
        assert [(bar.description, bar.completed) for bar in bars.tasks] == [(BUILD_A, 0.5)]
        shown(StageEvent("build", "b", state="started"))
        shown(StageEvent("build", "a", seconds=60.0, state="finished"))
        assert [bar.description for bar in bars.tasks] == [BUILD_B]
        shown(StageEvent("build", "b", text="no kernel", state="failed"))
        assert bars.tasks == []
    text = output_of(console)
    assert text.index("20.0 s  build b") < text.index("60.0 s  build a") < text.index("failed")
