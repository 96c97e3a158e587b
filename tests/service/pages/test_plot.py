"""The plot of a result: one measure of accuracy for all engines."""

from pathlib import Path

from service.pages.plot import HEIGHT, WIDTH, Plot, plot_of
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
