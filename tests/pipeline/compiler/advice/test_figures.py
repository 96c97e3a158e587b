"""Advice from figures: where throughput saturates, and a GPU below its own clock."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.compiler.advice.figures import batch_attempt, clock_attempt, sizes_of_sweep
from pipeline.core.artifacts import Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.host.gpu_monitor import GpuUse, Span
from pipeline.measurement.clock import Samples
from pipeline.results.advice import Outcome
from pipeline.results.benchmarks import LatencyRow
from tests.builders.report import engine, latency_row


def row(batch: int, seconds: float, spread: float = 0.001) -> LatencyRow:
    """Return a row of six processes, with medians that differ by `spread`."""
    medians = seconds * (1 + spread * np.linspace(-1, 1, 6))
    values = tuple(float(median) for median in medians for _ in range(3))
    samples = Samples(values_s=values, blocks=(3,) * 6, processes=(1,) * 6)
    made = latency_row(seconds * 1e3, batch, None, 10)
    return made.model_copy(
        update={"end_to_end": samples, "throughput_per_s": batch / samples.median_s}
    )


def test_the_smallest_batch_within_two_percent_of_the_highest_throughput_is_advised() -> None:
    rows = (row(1, 1e-3), row(2, 1.2e-3), row(4, 2e-3), row(8, 3.99e-3))
    found = batch_attempt(rows, {"batch": 1}, "batch", 60.0)
    assert found.outcome is Outcome.ADVISED
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.0, rel=0.01)
    assert '"batch": 4' in found.how
    assert found.per == "sample"


def test_a_batch_of_unsteady_processes_promises_nothing() -> None:
    found = batch_attempt((row(1, 1e-3, 0.2), row(4, 2e-3, 0.3)), {"batch": 1}, "batch", 60.0)
    assert found.outcome is Outcome.TOO_WIDE
    assert "processes of each engine differ by up to 1.86 times" in found.detail


def test_a_batch_that_saturates_is_kept() -> None:
    rows = (row(2, 1e-3), row(4, 2e-3), row(8, 4e-3))
    found = batch_attempt(rows, {"batch": 2}, "batch", 60.0)
    assert (found.outcome, found.ratio) == (Outcome.TOO_SMALL, None)
    assert "batch 2 has 100% of the highest throughput" in found.detail


def test_batches_without_enough_processes_are_not_compared() -> None:
    one = Samples(values_s=(1e-3,) * 3, blocks=(3,), processes=(1,))
    rows = tuple(
        row(batch, 1e-3).model_copy(update={"end_to_end": one, "throughput_per_s": batch * 1e3})
        for batch in (1, 2)
    )
    found = batch_attempt(rows, {"batch": 1}, "batch", 60.0)
    assert found.outcome is Outcome.UNMEASURED
    assert "expected at least" in found.detail


def engine_with(shape: tuple[int | str, ...], *ranges: tuple[int, int, int]) -> Engine:
    made = engine(Recipe(backend="onnxruntime", precision=Precision.FP32), 1, Path("nowhere"))
    profiles = tuple(
        Profile(dims={"batch": DimRange(min=low, opt=opt, max=high)}) for low, opt, high in ranges
    )
    inputs = (TensorSpec(name="x", dtype="float32", shape=shape),)
    return made.model_copy(update={"inputs": inputs, "profiles": profiles})


def test_a_sweep_takes_powers_of_two_within_the_profile() -> None:
    wide = engine_with(("batch", 3), (1, 3, 40))
    assert sizes_of_sweep(wide, {"batch": 3}) == tuple(
        {"batch": batch} for batch in (3, 4, 8, 16, 32)
    )
    assert len(sizes_of_sweep(engine_with(("batch", 3), (1, 1, 4096)), {"batch": 1})) == 6


def test_a_model_with_one_batch_has_no_sweep() -> None:
    assert sizes_of_sweep(engine_with((1, 3)), {}) == ()
    assert sizes_of_sweep(engine_with(("batch", 3), (1, 1, 1)), {"batch": 1}) == ()
    assert sizes_of_sweep(engine_with(("batch", 3), (1, 1, 4)), {"tokens": 1}) == ()


def test_a_gpu_that_throttles_is_named_with_the_most_it_costs() -> None:
    def use(median: float) -> GpuUse:
        clock = Span(least=900, median=median, most=2000)
        return GpuUse(uuid="GPU-1", samples=9, sm_clock_mhz=clock)

    found = clock_attempt(use(1800))
    assert found is not None
    assert found.outcome is Outcome.ADVISED
    assert "1800 MHz" in found.reason
    assert "10.0% at most" in found.detail
    assert clock_attempt(use(1990)) is None
    assert clock_attempt(None) is None
    assert clock_attempt(GpuUse(uuid="GPU-1", samples=1)) is None
