"""The plot of a result: one measure of accuracy for all engines."""

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.core.progress import MAX_DROP, MAX_LATENCY_S
from pipeline.formatting import time_text
from pipeline.report.entries import entries
from service.pages.plot import (
    BINS,
    BOTTOM,
    HEIGHT,
    LEFT,
    LOW_HEIGHT,
    NUMBER,
    RIGHT,
    TICK_WIDTH,
    TOP,
    WIDTH,
    Histogram,
    Plot,
    histogram_of,
    measured_so_far,
    plot_of,
    plot_of_measured,
)
from tests.pipeline.execution.figures import accuracy, candidate, latency
from tests.service.builders.jobs import write_out


def test_engines_are_placed_by_one_measure(tmp_path: Path) -> None:
    report = write_out(tmp_path / "out", tmp_path / "store")
    plot = plot_of(report)
    assert len(plot.points) >= 2
    assert all(0 < point.x < WIDTH and 0 < point.y < HEIGHT for point in plot.points)
    assert all(point.x_low <= point.x <= point.x_high for point in plot.points)
    winner = next(point for point in plot.points if point.state == "winner")
    unscored = tuple(
        each.model_copy(update={"selection": each.selection.model_copy(update={"metric": None})})
        if each.label == report.winner and each.selection
        else each
        for each in report.candidates
    )
    without = plot_of(report.model_copy(update={"candidates": unscored}))
    assert plot.y_title == without.y_title == "drop of top1"
    assert winner.label not in [point.label for point in without.points]
    assert plot_of(report.model_copy(update={"candidates": (), "baseline": None})) == Plot()


def test_candidates_are_placed_as_soon_as_both_figures_are_known() -> None:
    eager = candidate("eager", latency=latency(0.004), is_baseline=True)
    fast = candidate("fast", accuracy(0.02), latency(0.001))
    wrong = candidate("wrong", accuracy(0.5, passed=False), latency(0.002))
    slow = candidate("slow", accuracy(0.0), latency(0.1, is_eliminated=True))
    checked = candidate("checked", accuracy(0.1))
    measured = measured_so_far([checked, eager, fast, wrong, slow])
    assert [(each.number, each.state) for each in measured] == [
        (1, "not measured"),
        (2, "baseline"),
        (3, "measured"),
        (4, "failed accuracy"),
        (5, "stopped early"),
    ]
    plot = plot_of_measured(measured)
    assert [point.number for point in plot.points] == [2, 3, 4, 5]
    x = {point.label: point.x for point in plot.points}
    y = {point.label: point.y for point in plot.points}
    assert x["fast"] < x["wrong"] < x["eager"] < x["slow"]
    assert y["eager"] == y["slow"] < y["fast"] < y["wrong"]
    assert all(LEFT <= point.x_low <= point.x_high <= WIDTH - RIGHT for point in plot.points)
    assert all(TOP <= point.y_low <= point.y_high <= HEIGHT - BOTTOM for point in plot.points)
    assert (plot.y_title, plot.shape) == ("drop of top1", "batch 8")


def test_one_candidate_is_a_plot_and_none_is_not() -> None:
    assert len(plot_of_measured(measured_so_far([candidate("a", accuracy(), latency())])).points)
    assert plot_of_measured(measured_so_far([candidate("a", accuracy())])) == Plot()
    assert plot_of_measured(()) == Plot()


def test_a_candidate_in_another_measure_is_not_compared() -> None:
    by_cosine = candidate("cosine", accuracy(measure=""), latency())
    plot = plot_of_measured(measured_so_far([by_cosine]))
    assert plot.y_title == "1 - cosine to the reference"
    both = measured_so_far([by_cosine, candidate("metric", accuracy(), latency())])
    assert [point.label for point in plot_of_measured(both).points] == ["metric"]


@pytest.mark.parametrize("drop", [-MAX_DROP, 0.0, MAX_DROP])
@pytest.mark.parametrize("median_s", [1e-300, 1.0, MAX_LATENCY_S / 2])
def test_the_largest_figures_that_a_child_may_send_are_finite_pixels(
    drop: float, median_s: float
) -> None:
    extreme = candidate("x", replace(accuracy(), drop=drop), latency(median_s))
    plot = plot_of_measured(measured_so_far([extreme, candidate("y", accuracy(), latency())]))
    for point in plot.points:
        places = (point.x, point.y, point.x_low, point.x_high, point.y_low, point.y_high)
        assert all(math.isfinite(each) for each in places)


def test_the_spread_of_the_winner_and_of_a_baseline(tmp_path: Path) -> None:
    report = write_out(tmp_path / "out", tmp_path / "store")
    histogram = histogram_of(report)
    assert [curve.state for curve in histogram.curves] == ["winner", "baseline"]
    for curve in histogram.curves:
        edges = [float(each) for each in re.findall(r"H([0-9.]+)", curve.path)]
        tops = [float(each) for each in re.findall(r"V([0-9.]+)", curve.path)]
        assert len(edges) == BINS
        assert edges == sorted(edges)
        assert TOP <= min(tops) <= max(tops) <= LOW_HEIGHT - BOTTOM
        assert LEFT <= curve.median <= WIDTH - RIGHT
        assert curve.text in {
            time_text(entry.benchmark.rows[0].end_to_end.median_s)
            for entry in entries(report)
            if entry.benchmark
        }
    assert (
        histogram_of(report.model_copy(update={"baseline": None, "baselines": ()})) == Histogram()
    )


@pytest.mark.parametrize(
    ("times_s", "ticks"),
    [
        ((48e-6, 130e-6), ["50 us", "100 us", "150 us"]),
        ((1e-3, 1.02e-3), ["900 us", "1 ms", "1.1 ms", "1.2 ms"]),
        ((1e-6, 1.0), ["1 us", "10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s"]),
    ],
)
def test_axes_are_marked_at_round_values(times_s: tuple[float, float], ticks: list[str]) -> None:
    plot = plot_of_measured(
        measured_so_far(
            [
                candidate(str(number), accuracy(0.01 * number), latency(time_s))
                for number, time_s in enumerate(times_s)
            ]
        )
    )
    assert [tick.text for tick in plot.x_ticks] == ticks
    assert min(b.at - a.at for a, b in pairwise(plot.x_ticks)) >= TICK_WIDTH
    assert [tick.text for tick in plot.y_ticks] == ["-0.005", "0", "0.005", "0.01", "0.015"]


def test_no_number_covers_another() -> None:
    figures = [candidate(str(n), accuracy(0.0), latency(0.001 + n * 1e-6)) for n in range(4)]
    plot = plot_of_measured(measured_so_far([*figures, candidate("far", accuracy(), latency(9))]))
    near = [point.number_y for point in plot.points[:4]]
    assert [a - b for a, b in pairwise(near)] == [NUMBER] * 3
    assert plot.points[4].number_y == plot.points[4].y - 8
