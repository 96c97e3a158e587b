"""The clock of all latencies: samples, warm-up and blocks.

Times inside one block resemble each other more than times of different blocks do (the clock
frequency, the neighbours and the state of the caches last for a while). So the unit of the
statistics is the block: thousands of runs in one block are one observation. If an engine ran in
several processes, the process is the unit: see pipeline/measurement/comparison.py.
docs/explain/measuring.md explains the method.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from pipeline.core.frozen import Frozen
from pipeline.core.progress import MAX_LATENCY_S, LatencyFigures

Clock = Callable[[], float]
"""Seconds from an arbitrary start, never going back."""

monotonic: Clock = time.perf_counter

DRIFT = 0.05
"""Two medians that differ by more than this share have moved."""

TAIL_VALUES = 10
"""Values that a percentile needs beyond it: p99 needs 1,000 values, p95 200, p90 100."""

EARLIEST_END = 0.1
"""Share of a block's time after which the block may end, once it holds enough runs."""

NANOSECOND_DIGITS = 9
"""Decimal places of a time in seconds; the clock has no finer resolution."""

Floats = NDArray[np.float64]


class Samples(Frozen):
    """Raw times of one measured region, and of its warm-up."""

    values_s: tuple[float, ...]
    # Number of consecutive values in each block; empty: one block.
    blocks: tuple[int, ...] = ()
    # Number of consecutive blocks from each process; empty: one process.
    processes: tuple[int, ...] = ()
    # Generation of the interleaved run in which each process ran; empty: 0, 1, 2, ...
    generations: tuple[int, ...] = ()
    # Share of its time for which each process waited for a CPU; empty: not recorded.
    waiting: tuple[float, ...] = ()
    warmup_s: tuple[float, ...] = ()
    clock: Literal["host", "device"] = "host"
    stable: bool = True  # False: the median still moved between blocks

    @model_validator(mode="after")
    def _blocks_hold_all(self) -> Samples:
        if self.blocks and (min(self.blocks) < 1 or sum(self.blocks) != len(self.values_s)):
            raise ValueError(
                f"expected blocks of at least one value, {len(self.values_s)} together, got"
                f" {self.blocks}"
            )
        if self.processes and (min(self.processes) < 1 or sum(self.processes) != len(self.blocks)):
            raise ValueError(
                f"expected processes of at least one block, {len(self.blocks)} together, got"
                f" {self.processes}"
            )
        for values in (self.generations, self.waiting):
            if values and len(values) != max(1, len(self.processes)):
                raise ValueError(
                    f"expected one value for each of {len(self.processes)} processes, got {values}"
                )
        return self

    @property
    def median_s(self) -> float:
        return self.percentile_s(50)

    def percentile_s(self, percent: float) -> float:
        """Return a percentile in seconds. ValueError if there are too few values for it."""
        value = self.percentile_or_absent(percent)
        if value is None:
            raise ValueError(
                f"p{percent:g} needs {values_needed(percent)} values, there are"
                f" {len(self.values_s)}: measure for longer"
            )
        return value

    def percentile_or_absent(self, percent: float) -> float | None:
        """Return a percentile in seconds, or None if there are too few values for it."""
        if len(self.values_s) < values_needed(percent):
            return None
        return float(np.percentile(self.values_s, percent))

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """The quartiles in seconds; of too few values, twice the median."""
        low, high = self.percentile_or_absent(25), self.percentile_or_absent(75)
        if low is None or high is None:
            return self.median_s, self.median_s
        return low, high

    def by_block(self) -> tuple[Floats, ...]:
        """Return the values of each block, in order."""
        values = np.asarray(self.values_s, dtype=np.float64)
        if not self.blocks:
            return (values,)
        return tuple(np.split(values, np.cumsum(self.blocks)[:-1]))

    def block_medians_s(self) -> tuple[Floats, ...]:
        """Return the medians of each process's blocks, in order: of each process, [blocks]."""
        medians_s = np.array([np.median(block) for block in self.by_block()])
        return tuple(np.split(medians_s, np.cumsum(self.processes)[:-1].astype(int)))

    def process_medians_s(self) -> Floats:
        """Return the median of each process's values, in order: [processes]."""
        if not self.processes:
            return np.array([self.median_s])
        ends = np.cumsum(self.blocks)[np.cumsum(self.processes)[:-1] - 1]
        return np.array([np.median(part) for part in np.split(np.asarray(self.values_s), ends)])


def values_needed(percent: float) -> int:
    """Return the number of values that a percentile needs: ten beyond it, or one for the median.

    The result is `sys.maxsize` for the minimum and the maximum, which are never percentiles.
    """
    if percent == 50:
        return 1
    beyond = min(percent, 100 - percent)
    if beyond <= 0:
        return sys.maxsize
    return math.ceil(round(TAIL_VALUES * 100 / beyond, 6))


def latency_figures(
    times: Samples, shape: str, is_eliminated: bool = False
) -> LatencyFigures | None:
    """Return the latency as a plot shows it; None for one that no logarithmic axis can show."""
    low, high = times.quartiles_s
    if not (min(low, times.median_s) > 0 and max(high, times.median_s) <= MAX_LATENCY_S):
        return None
    return LatencyFigures(times.median_s, low, high, shape, is_eliminated)


def samples_from_blocks(
    blocks: Sequence[Sequence[float]],
    warmup_s: Sequence[float],
    clock: Literal["host", "device"] = "host",
    processes: Sequence[int] = (),
    generations: Sequence[int] = (),
    waiting: Sequence[float] = (),
) -> Samples:
    """Join blocks into Samples.

    `stable` is False if the medians of the earlier and the later half differ by more than 5 %.
    """
    medians = [float(np.median(block)) for block in blocks]
    half = len(medians) // 2
    return Samples(
        values_s=tuple(value for block in blocks for value in block),
        blocks=tuple(len(block) for block in blocks),
        processes=tuple(processes),
        generations=tuple(generations),
        waiting=tuple(waiting),
        warmup_s=tuple(warmup_s),
        clock=clock,
        stable=len(medians) < 2 or not _moved(medians[:half], medians[half:]),
    )


def thinned(values: Sequence[float], most: int) -> tuple[float, ...]:
    """Return every k-th value, with k chosen so that at most `most` values remain."""
    return tuple(values[:: max(1, math.ceil(len(values) / most))])


def measure_block(
    run: Callable[[], object],
    clock: Clock = monotonic,
    min_s: float = 0.5,
    min_runs: int = 1,
    enough_runs: int | None = None,
) -> tuple[float, ...]:
    """Time `run` repeatedly, for at least `min_s` seconds and at least `min_runs` runs.

    `run` must have finished its work when it returns. With `enough_runs`, the block ends before
    `min_s` once it holds that many runs, but not before a tenth of `min_s`.
    """
    times: list[float] = []
    begin = end = clock()
    while len(times) < min_runs or end - begin < min_s:
        if (
            enough_runs is not None
            and len(times) >= max(enough_runs, min_runs)
            and end - begin >= min_s * EARLIEST_END
        ):
            break
        start = clock()
        run()
        end = clock()
        times.append(round(end - start, NANOSECOND_DIGITS))
    return tuple(times)


@dataclass(frozen=True, slots=True)
class WarmUpOptions:
    """The end of a warm-up: after `min_runs` *and* `min_s`, once the median has settled.

    A warm-up ends after `max_s` in any case.
    """

    min_runs: int = 10
    min_s: float = 0.2
    max_s: float = 10.0


def warm_up(
    run: Callable[[], object], options: WarmUpOptions, clock: Clock = monotonic
) -> tuple[float, ...]:
    """Run until the medians of the last two quarters agree within 5 %.

    Return the time of every run. Reports show these times; no result uses them.
    """
    times = list(measure_block(run, clock, options.min_s, options.min_runs))
    while not _settled(times) and sum(times) < options.max_s:
        times += measure_block(run, clock, options.min_s / 2, max(1, options.min_runs // 2))
    return tuple(times)


def _settled(times: Sequence[float]) -> bool:
    third, fourth = times[len(times) // 2 : len(times) * 3 // 4], times[len(times) * 3 // 4 :]
    return not times or (len(times) >= 4 and not _moved(third, fourth))


def _moved(earlier: Sequence[float], later: Sequence[float]) -> bool:
    return abs(float(np.median(later)) / float(np.median(earlier)) - 1) > DRIFT
