"""The plots of a job as data of SVGs: each engine by its latency and its accuracy, while they are
measured and in the result, and how the latencies of the winner and the fastest baseline are spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pipeline.core.progress import PERPLEXITY, AccuracyFigures, CandidateFigures, LatencyFigures
from pipeline.formatting import shape_text, time_text
from pipeline.llm.render import timed
from pipeline.llm.results import LanguageReport
from pipeline.measurement.clock import latency_figures
from pipeline.report.entries import Entry, entries
from pipeline.results.report import Report

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 80, 40, 20, 50
TICKS = 4  # about as many on an axis
TICK_WIDTH = 60  # pixels of a time beside the next
SMALLEST = -300  # power of ten
NUMBER = 14  # pixels of a point's number, either way
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
    number_y: float = 0.0  # where the number stands, above those of near points


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """Empty if no engine has both a latency and an accuracy. A result needs two."""

    points: tuple[Point, ...] = ()
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    y_title: str = ""
    shape: str = ""
    limit: Tick | None = None  # of the drop


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

    def ticks(self, text: Callable[[float], str]) -> tuple[Tick, ...]:
        """Mark round values."""
        found = _round_values(self.low, self.high)
        return tuple(Tick(self.at(value), text(value)) for value in found)

    def log_ticks(self) -> tuple[Tick, ...]:
        """Mark round times on a scale of their logarithms: as many as have room for their text."""
        for values in _round_times(self.low / math.log(10), self.high / math.log(10)):
            ticks = [Tick(self.at(math.log(value)), _short_time(value)) for value in values]
            if all(after.at - tick.at >= TICK_WIDTH for tick, after in pairwise(ticks)):
                return tuple(ticks)
        return ()


@dataclass(frozen=True, slots=True)
class Measured:
    """An engine with what is known of it, as a point and as a row of the table beside it."""

    number: int
    label: str
    state: str
    precision: str
    is_baseline: bool
    accuracy: AccuracyFigures | None
    latency: LatencyFigures | None

    def drop(self, measure: str) -> tuple[float, float, float] | None:
        """Return low, middle and high of the drop in a measure; None if it is not known.

        A baseline is the reference and has none.
        """
        if self.is_baseline:
            return (0.0, 0.0, 0.0)
        if self.accuracy is None or self.accuracy.measure != measure:
            return None
        return (self.accuracy.low, self.accuracy.drop, self.accuracy.high)


def plot_of(report: Report) -> Plot:
    """Place every engine that was measured and whose accuracy is known, all in the same measure."""
    plot = plot_of_measured([_measured_of_entry(entry) for entry in entries(report)])
    return plot if len(plot.points) >= 2 else Plot()


def plot_of_language(report: LanguageReport) -> Plot:
    """Place every engine of a language model that was timed, numbered as in its tables."""
    benchmark = report.plan.benchmark
    shape = f"{benchmark.prompt_tokens} tokens in, {benchmark.output_tokens} out"
    numbers = {each.label: number for number, each in enumerate(report.candidates, start=1)}
    engines = []
    for times in timed(report):
        assert times.answer is not None
        result = report.result(times.label)
        judged = result.judged if result else None
        is_baseline = times is report.baseline
        state = "winner" if times.label == report.winner else "measured"
        engines.append(
            Measured(
                numbers.get(times.label, 0),
                times.label,
                "baseline" if is_baseline else state,
                "",
                is_baseline,
                judged.figures if judged else None,
                latency_figures(times.answer, shape),
            )
        )
    plot = plot_of_measured(engines, report.plan.accuracy.max_perplexity_increase)
    return plot if len(plot.points) >= 2 else Plot()


def measured_so_far(figures: Sequence[CandidateFigures]) -> tuple[Measured, ...]:
    """Number the candidates of a running job in the order in which they appeared."""
    return tuple(
        Measured(
            number,
            each.label,
            _state_so_far(each),
            each.precision,
            each.is_baseline,
            each.accuracy,
            each.latency,
        )
        for number, each in enumerate(figures, start=1)
    )


def _state_so_far(figures: CandidateFigures) -> str:
    if figures.is_baseline:
        return "baseline"
    if figures.accuracy is not None and not figures.accuracy.passed:
        return "failed accuracy"
    if figures.latency is None:
        return "not measured"
    return "stopped early" if figures.latency.is_eliminated else "measured"


def plot_of_measured(engines: Sequence[Measured], limit: float | None = None) -> Plot:
    """Place every engine whose latency and accuracy are known. Empty if there is none.

    `limit`: the largest drop that is allowed, which gets a line.
    """
    measure = measure_of(engines)
    found = [
        (engine, engine.latency, drop)
        for engine in engines
        if engine.latency and (drop := engine.drop(measure))
    ]
    if not found:
        return Plot()
    times = [each for _, latency, _ in found for each in (latency.low_s, latency.high_s)]
    x = _scale([math.log(each) for each in times], LEFT, WIDTH - RIGHT)
    drops = [each for _, _, drop in found for each in drop]
    y = _scale([*drops, *([] if limit is None else [limit])], TOP, HEIGHT - BOTTOM)
    points = tuple(
        Point(
            engine.number,
            engine.label,
            engine.state,
            x.at(math.log(latency.median_s)),
            y.at(drop[1]),
            x.at(math.log(latency.low_s)),
            x.at(math.log(latency.high_s)),
            y.at(drop[0]),
            y.at(drop[2]),
        )
        for engine, latency, drop in found
    )
    return Plot(
        _with_numbers(points),
        x.log_ticks(),
        y.ticks(lambda value: f"{value:.3g}"),
        title_of(measure),
        found[0][1].shape,
        None if limit is None else Tick(y.at(limit), f"limit: {limit:.3g}"),
    )


def _with_numbers(points: Iterable[Point]) -> tuple[Point, ...]:
    """Raise the number of each point above the numbers that it would cover."""
    placed: list[Point] = []
    for point in points:
        number_y = point.y - 8
        while any(
            abs(other.x - point.x) < NUMBER and abs(other.number_y - number_y) < NUMBER
            for other in placed
        ):
            number_y -= NUMBER
        placed.append(replace(point, number_y=number_y))
    return tuple(placed)


def title_of(measure: str) -> str:
    if not measure:
        return "1 - cosine to the reference"
    return f"{'increase' if measure == PERPLEXITY else 'drop'} of {measure}"


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
    return Histogram(curves, x.log_ticks(), shape_text(sizes))


def _steps(edges: list[float], tops: list[float], ground: float) -> str:
    """Return the path of a closed outline of bars."""
    bars = "".join(f"V{top}H{edge}" for top, edge in zip(tops, edges[1:], strict=True))
    return f"M{edges[0]} {ground}{bars}V{ground}Z"


def _round_values(low: float, high: float) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten from `low` to `high`, about TICKS."""
    rough = (high - low) / TICKS
    if not rough:
        return []  # smaller than any number
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((1, 2, 5, 10), key=lambda digit: abs(math.log(digit * power / rough))) * power
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _round_times(low: float, high: float) -> Iterator[list[float]]:
    """Return round values between two powers of ten, first many and then fewer."""
    powers = range(math.ceil(max(low, SMALLEST) - 1), math.floor(high) + 1)
    found = [
        float(f"{digit}e{power}")
        for power in powers
        for digit in (1, 2, 5)
        if low <= power + math.log10(digit) <= high
    ]
    if len(found) < TICKS - 1:  # the times differ little: the scale is almost linear
        yield _round_values(10**low, 10**high)
    yield found
    for every in range(1, len(powers) + 1):
        yield [float(f"1e{power}") for power in powers[::every] if low <= power <= high]


def _short_time(seconds: float) -> str:
    """Return the text of a round time without zeros behind the point: `50 us`."""
    number, unit = time_text(seconds).split(" ")
    return f"{float(number):g} {unit}"


def _scale(values: list[float], begin: float, end: float) -> _Scale:
    low, high = min(values), max(values)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return _Scale(low - margin, high + margin, begin, end)


def _measured_of_entry(entry: Entry) -> Measured:
    candidate, rows = entry.candidate, entry.benchmark.rows if entry.benchmark else ()
    selection = candidate.selection if candidate else None
    latency = latency_figures(rows[0].end_to_end, shape_text(rows[0].sizes)) if rows else None
    return Measured(
        entry.number,
        entry.label,
        entry.state,
        candidate.recipe.precision if candidate else "",
        candidate is None,
        selection.figures if selection else None,
        latency,
    )


def measure_of(engines: Iterable[Measured]) -> str:
    """Return the name of the metric; empty if there is none."""
    measures = (engine.accuracy.measure for engine in engines if engine.accuracy)
    return next((measure for measure in measures if measure), "")


def _sizes(report: Report) -> dict[str, int]:
    for entry in entries(report):
        if entry.benchmark and entry.benchmark.rows:
            return entry.benchmark.rows[0].sizes
    return {}
