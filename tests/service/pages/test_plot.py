"""The plot of a result: one measure of accuracy for all engines."""

import re
from pathlib import Path

from pipeline.formatting import time_text
from pipeline.report.entries import entries
from service.pages.plot import (
    BINS,
    BOTTOM,
    HEIGHT,
    LEFT,
    LOW_HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Histogram,
    Plot,
    histogram_of,
    plot_of,
)
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
