"""Bootstrap intervals of ratios, means and other figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from pipeline.core.frozen import Frozen
from pipeline.measurement.clock import Floats, Samples

CONFIDENCE = 0.95
RESAMPLES = 2000

FEW_BLOCKS = 6
"""With fewer blocks than this, their resamples give no quantiles (see `_widened`)."""

GRID = 1000
"""Points on which a resampled median is looked up: far finer than its error."""


class Interval(Frozen):
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def excludes(self, number: float) -> bool:
        return not self.low <= number <= self.high


def ratio_of_medians(
    baseline: Samples, candidate: Samples, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Return median(baseline) / median(candidate), with a bootstrap over blocks.

    For code that is timed in one process: the interval does not include the differences between
    processes (`comparison.compare` does). Equal numbers of blocks on both sides are the rounds of
    one interleaved run. Block i of both sides is then drawn together, so that the influences on a
    round cancel. ValueError if a side has one block.
    """
    baseline_blocks, candidate_blocks = baseline.by_block(), candidate.by_block()
    fewest = min(len(baseline_blocks), len(candidate_blocks))
    if fewest < 2:
        raise ValueError(
            f"expected at least 2 blocks on each side, got {len(baseline_blocks)} and"
            f" {len(candidate_blocks)}: measure for longer"
        )
    random = np.random.default_rng(seed)
    baseline_draws = _draws(random, len(baseline_blocks), resamples)
    candidate_draws = baseline_draws
    if len(candidate_blocks) != len(baseline_blocks):
        candidate_draws = _draws(random, len(candidate_blocks), resamples)
    baseline_medians = _medians(baseline_blocks, baseline_draws)
    logs = np.log(baseline_medians / _medians(candidate_blocks, candidate_draws))
    value = math.log(baseline.median_s / candidate.median_s)
    low, high = _widened(value, logs, fewest)
    return Interval(value=math.exp(value), low=math.exp(low), high=math.exp(high))


def bootstrap_mean(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Return the mean of independent values with its bootstrap 95 % interval.

    Each value belongs to one sample of a data set, such as the paired drop of a metric.
    """
    array = np.asarray(values, dtype=np.float64)  # [n]
    return bootstrap(lambda drawn: float(array[drawn].mean()), array.size, seed, resamples)


def bootstrap(
    figure: Callable[[NDArray[np.int64]], float],
    samples: int,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return a figure of independent samples with its bootstrap 95 % interval.

    `figure` computes it from the indices of the drawn samples. It returns NaN for a resample that
    has no such figure (a class that was not drawn); such resamples are excluded. ValueError if
    there are fewer than two samples.
    """
    if samples < 2:
        raise ValueError(
            f"expected at least 2 values, got {samples}: one value says nothing about others"
        )
    random = np.random.default_rng(seed)
    value = figure(np.arange(samples))
    resampled = np.array([figure(random.integers(0, samples, samples)) for _ in range(resamples)])
    resampled = resampled[np.isfinite(resampled)]
    low, high = _widened(value, resampled, samples) if resampled.size else (value, value)
    return Interval(value=value, low=low, high=high)


def _draws(random: np.random.Generator, blocks: int, resamples: int) -> Floats:
    """Return how often each resample contains each block: [resamples, blocks]."""
    counts = random.multinomial(blocks, np.full(blocks, 1 / blocks), size=resamples)
    return counts.astype(np.float64)


def _medians(blocks: Sequence[Floats], drawn: Floats) -> Floats:
    """Return the median of every resample, without building the resamples: [resamples].

    A median lies between the smallest and the largest block median. The function searches a grid
    of values there: the number of values of a resample at or below a grid point is a weighted sum
    of the blocks' counts.
    """
    ordered = [np.sort(block) for block in blocks]
    medians = [np.median(block) for block in ordered]
    pooled = np.unique(np.concatenate([*ordered, medians]))
    grid = pooled[(pooled >= min(medians)) & (pooled <= max(medians))]
    grid = grid[np.linspace(0, len(grid) - 1, min(GRID, len(grid))).round().astype(int)]
    counts = np.stack([np.searchsorted(block, grid, side="right") for block in ordered])
    below = counts.astype(np.float64)  # [blocks, grid]
    half = drawn @ np.array([len(block) for block in ordered]) / 2  # [resamples]
    resampled: Floats = grid[(drawn @ below >= half[:, None]).argmax(axis=1)]
    return resampled


def _widened(value: float, resampled: Floats, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a bootstrap over n units, widened because n is small.

    The plain percentile interval is too narrow by sqrt((n - 1) / n), and its normal quantile should
    be Student's: Hesterberg, What Teachers Should Know About the Bootstrap (2015). Resamples cannot
    reach beyond the units they are drawn from, so with very few units the same factor multiplies
    their standard deviation instead.
    """
    normal = NormalDist()
    factor = student_quantile(n - 1) * math.sqrt(n / (n - 1))
    if n < FEW_BLOCKS:
        half = factor * float(resampled.std())
        return value - half, value + half
    tail = normal.cdf(-factor)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return min(value, float(low)), max(value, float(high))


def student_quantile(degrees: int) -> float:
    """Return Student's t at 97.5 %, correct to 0.001.

    Small degrees of freedom are in a table; the others use Cornish and Fisher's expansion
    (Abramowitz and Stegun 26.7.5).
    """
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
    if degrees <= len(table):
        return table[degrees - 1]
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first, second, third = (
        z**3 + z,
        5 * z**5 + 16 * z**3 + 3 * z,
        3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z,
    )
    return z + first / (4 * degrees) + second / (96 * degrees**2) + third / (384 * degrees**3)
