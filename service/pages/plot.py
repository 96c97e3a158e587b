"""The plots of a result as data of SVGs: each engine by its latency and its accuracy, and how the
latencies of the winner and the fastest baseline are spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pipeline.formatting import shape_text, time_text
from pipeline.measurement.clock import Samples
from pipeline.report.entries import Entry, entries
from pipeline.results.report import Report

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 80, 40, 20, 50
TICKS = 4
LOW_HEIGHT = 200  # of the histogram
BINS = 60
MIN_VALUES = 50  # of an engine; a histogram of fewer shows chance
OUTER = 1.0  # percent of the values at either end that may lie outside the axis


@dataclass(frozen=True, slots=True)
class Point:
    """An engine: its place, and the bars of its intervals, in pixels."""

    number: int
    label: str
    state: str
    x: float
    y: float
    x_low: float  # quartiles of the latency; both `x` of too few values
    x_high: float
    y_low: float  # 95 % interval of the drop; both `y` without a metric
    y_high: float


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Empty if fewer than two engines have both a latency and an accuracy."""

    points: tuple[Point, ...] = ()
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    y_title: str = ""
    shape: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """The outline of one engine's histogram."""

    label: str
    state: str
    path: str
    median: float  # in pixels
    text: str  # the median


@dataclass(frozen=True, slots=True)
class Histogram:
    """Empty unless the winner and a baseline have at least MIN_VALUES latencies at one shape."""

    curves: tuple[Curve, ...] = ()
    x_ticks: tuple[Tick, ...] = ()
    shape: str = ""


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels. Latencies have a logarithmic one: engines differ by factors."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * n / TICKS for n in range(TICKS + 1)]


def plot_of(report: Report) -> Plot:
    """Place every engine that was measured and whose accuracy is known, all in the same measure."""
    metric = _metric(report)
    found = [
        (entry, entry.benchmark.rows[0].end_to_end, drop)
        for entry in entries(report)
        if entry.benchmark and entry.benchmark.rows and (drop := _drop(entry, metric))
    ]
    if len(found) < 2:
        return Plot()
    quartiles = [_quartiles(times) for _, times, _ in found]
    x = _scale([math.log(each) for pair in quartiles for each in pair], LEFT, WIDTH - RIGHT)
    y = _scale([each for _, _, drop in found for each in drop], TOP, HEIGHT - BOTTOM)
    points = tuple(
        Point(
            entry.number,
            entry.label,
            entry.state,
            x.at(math.log(times.median_s)),
            y.at(drop[1]),
            x.at(math.log(low)),
            x.at(math.log(high)),
            y.at(drop[0]),
            y.at(drop[2]),
        )
        for (entry, times, drop), (low, high) in zip(found, quartiles, strict=True)
    )
    return Plot(
        points,
        tuple(Tick(x.at(value), time_text(math.exp(value))) for value in x.ticks),
        tuple(Tick(y.at(value), f"{value:.3g}") for value in y.ticks),
        f"drop of {metric}" if metric else "1 - cosine to the reference",
        shape_text(_sizes(report)),
    )


def histogram_of(report: Report) -> Histogram:
    """Show how the latencies of the winner and of the fastest other baseline are spread."""
    sizes = _sizes(report)
    measured = [
        (entry, np.log(row.end_to_end.values_s))
        for entry in entries(report)
        if (row := entry.row(sizes)) and len(row.end_to_end.values_s) >= MIN_VALUES
    ]
    found = [next((each for each in measured if each[0].state == "winner"), None)]
    found.append(next((each for each in measured if each[0].state == "baseline"), None))
    shown = [each for each in found if each is not None]
    if len(shown) < 2:
        return Histogram()
    ends = [np.percentile(values, [OUTER, 100 - OUTER]) for _, values in shown]
    x = _scale([float(end) for pair in ends for end in pair], LEFT, WIDTH - RIGHT)
    counts = [
        np.histogram(np.clip(values, x.low, x.high), BINS, (x.low, x.high))[0] / len(values)
        for _, values in shown
    ]
    y = _Scale(0, max(float(each.max()) for each in counts), LOW_HEIGHT - BOTTOM, TOP)
    edges = [x.at(value) for value in np.linspace(x.low, x.high, BINS + 1)]
    curves = tuple(
        Curve(
            entry.label,
            entry.state,
            _steps(edges, [y.at(float(share)) for share in shares], y.begin),
            x.at(float(np.median(values))),
            time_text(math.exp(float(np.median(values)))),
        )
        for (entry, values), shares in zip(shown, counts, strict=True)
    )
    ticks = tuple(Tick(x.at(value), time_text(math.exp(value))) for value in x.ticks)
    return Histogram(curves, ticks, shape_text(sizes))


def _steps(edges: list[float], tops: list[float], ground: float) -> str:
    """Return the path of a closed outline of bars."""
    bars = "".join(f"V{top}H{edge}" for top, edge in zip(tops, edges[1:], strict=True))
    return f"M{edges[0]} {ground}{bars}V{ground}Z"


def _scale(values: list[float], begin: float, end: float) -> _Scale:
    low, high = min(values), max(values)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return _Scale(low - margin, high + margin, begin, end)


def _quartiles(times: Samples) -> tuple[float, float]:
    """Return the quartiles; of too few values, twice the median."""
    low, high = times.percentile_or_absent(25), times.percentile_or_absent(75)
    if low is None or high is None:
        return times.median_s, times.median_s
    return low, high


def _drop(entry: Entry, metric: str) -> tuple[float, float, float] | None:
    """Return low, middle and high of the drop; a baseline is the reference and has none."""
    if entry.candidate is None:
        return (0.0, 0.0, 0.0)
    validation = entry.candidate.selection
    if validation is None:
        return None
    if metric:
        found = validation.metric
        return None if found is None else (found.interval.low, found.drop, found.interval.high)
    cosine = validation.cosine
    return None if cosine is None else (1 - cosine, 1 - cosine, 1 - cosine)


def _metric(report: Report) -> str:
    """Return the name of the metric; empty if there is none."""
    for entry in entries(report):
        selection = entry.candidate.selection if entry.candidate else None
        if selection is not None and selection.metric is not None:
            return selection.metric.name
    return ""


def _sizes(report: Report) -> dict[str, int]:
    for entry in entries(report):
        if entry.benchmark and entry.benchmark.rows:
            return entry.benchmark.rows[0].sizes
    return {}
