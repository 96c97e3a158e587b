"""The figure of the roofline: dots for layers, lines for the peaks of the device."""

from itertools import pairwise

import pytest

from pipeline.host.gpu import MemoryLevel
from pipeline.report.figures import plots
from pipeline.report.figures.roofline import rooflines
from tests.builders.report import PEAKS_OF_H200, proven_report, worked_report


def test_each_layer_that_computes_is_a_dot_below_the_peaks_that_it_ran_in() -> None:
    report = worked_report()
    (plot,) = rooflines(report)
    (data,) = plot.figure.args
    (peaks,) = report.peaks
    assert data.gb_per_s == pytest.approx((peaks.bytes_per_s or 0.0) / 1e9)
    assert data.dots
    assert all(one.seconds >= other.seconds for one, other in pairwise(data.dots)), "slowest first"
    assert {name for name, _ in data.roofs} == {dot.precision for dot in data.dots}
    assert data.dots[0].name in plot.caption
    assert peaks.source in plot.caption
    drawing = plot.draw()
    assert all(f"{name}: " in drawing for name, _ in data.roofs)
    assert plot.key in {each.key for each in plots(report)}


def test_caches_of_known_speed_have_a_slope_of_their_own() -> None:
    level = MemoryLevel(name="L2", size_bytes=2**20, bytes_per_s=1e13)
    (plot,) = rooflines(worked_report(PEAKS_OF_H200.model_copy(update={"caches": (level,)})))
    (data,) = plot.figure.args
    assert data.caches == (("L2", 1e4),)
    assert "L2: 10,000 GB/s" in plot.draw()


def test_without_peaks_or_work_there_is_no_figure() -> None:
    assert rooflines(worked_report(peaks=None)) == ()
    assert rooflines(proven_report()) == ()


def test_equal_values_have_equal_keys_whatever_draws_them() -> None:
    keys = [plot.key for _ in range(2) for plot in plots(worked_report())]
    assert keys[: len(keys) // 2] == keys[len(keys) // 2 :]
    assert len(set(keys)) == len(keys) // 2
