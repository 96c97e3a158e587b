"""Advice that needs no other engine: the batch, and the clocks of the GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.benchmark.batch_sweep import batch_symbol, sweep_sizes
from pipeline.benchmark.elimination import MIN_NARROW_PAIRS
from pipeline.compiler.advice.width import why_wide
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import Profile
from pipeline.errors import PlanError
from pipeline.host.gpu_monitor import GpuUse
from pipeline.measurement.comparison import NotMeasurable, compare
from pipeline.measurement.statistics import Interval
from pipeline.results.advice import MIN_GAIN, Attempt, Outcome, judged
from pipeline.results.benchmarks import LatencyRow

MAX_BATCHES = 6  # of a sweep, each measured for as long as the first
SATURATED = 0.98  # of the highest throughput: a larger batch only makes requests wait


def sizes_of_sweep(engine: Engine, sizes: dict[str, int]) -> tuple[dict[str, int], ...]:
    """Return the measured sizes with other batches: powers of 2 within the profile.

    Empty for a model without a batch axis, and for a profile with one batch.
    """
    try:
        symbol = batch_symbol(engine.inputs)
    except PlanError:
        return ()
    if symbol not in sizes:
        return ()
    batches = _batches(sizes[symbol], symbol, engine.profiles)
    found = sweep_sizes(symbol, (), batches) if len(batches) > 1 else ()
    return tuple({**sizes, **each} for each in found)


def _batches(first: int, symbol: str, profiles: Sequence[Profile]) -> tuple[int, ...]:
    """Return the first batch, and the largest powers of 2 above it that the profiles allow."""
    largest = max(profile.dims[symbol].max for profile in profiles if symbol in profile.dims)
    powers = [2**exponent for exponent in range(largest.bit_length())]
    above = [power for power in powers if first < power <= largest]
    return (first, *above[-(MAX_BATCHES - 1) :])


def batch_attempt(
    rows: Sequence[LatencyRow], first: dict[str, int], symbol: str, budget_s: float
) -> Attempt:
    """Judge the smallest batch at which the throughput saturates, against the first one.

    The ratio is that of the times per sample. All rows are of one engine in one race, whose time
    was `budget_s`.
    """
    here = next(row for row in rows if row.sizes == first)
    best = max(row.throughput_per_s for row in rows)
    enough = [row for row in rows if row.throughput_per_s >= SATURATED * best]
    chosen = min(enough, key=lambda row: row.sizes[symbol])
    batch, now = chosen.sizes[symbol], first[symbol]
    attempt = Attempt(
        rule="batch",
        reason=f"throughput saturates at {symbol} {batch}; it was measured at {now}",
        how=f"send {batch} rows per call: benchmark.sizes={json.dumps([chosen.sizes])}",
        per="sample",
        outcome=Outcome.TOO_SMALL,
    )
    if chosen is here or batch < now:
        detail = f"{symbol} {now} has {here.throughput_per_s / best:.0%} of the highest throughput"
        return attempt.model_copy(update={"detail": detail})
    try:
        ratio = compare(here.end_to_end, chosen.end_to_end)
    except NotMeasurable as error:
        update = {"outcome": Outcome.UNMEASURED, "detail": error.text}
        return attempt.model_copy(update=update)
    rows_ratio = batch / now
    scaled = Interval(
        value=ratio.value * rows_ratio, low=ratio.low * rows_ratio, high=ratio.high * rows_ratio
    )
    reason = why_wide(here.end_to_end, chosen.end_to_end, MIN_NARROW_PAIRS, budget_s)
    return judged(attempt, scaled, reason)


def clock_attempt(use: GpuUse | None) -> Attempt | None:
    """Report a GPU that ran below its own highest clock; None if it did not, or is not known.

    The gain is an upper limit: only arithmetic follows the clock.
    """
    clock = use.sm_clock_mhz if use else None
    if clock is None or clock.most <= 0:
        return None
    loss = 1 - clock.median / clock.most
    if loss <= MIN_GAIN:
        return None
    return Attempt(
        rule="clocks",
        reason=(
            f"the GPU throttles: its clock was {clock.median:.0f} MHz in the middle of the run, of"
            f" {clock.most:.0f} at its start"
        ),
        how="cool it, raise its power limit, or leave it alone: `nvidia-smi -q -d PERFORMANCE`",
        outcome=Outcome.ADVISED,
        detail=f"saves {loss:.1%} at most: only arithmetic follows the clock",
    )
