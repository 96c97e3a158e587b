from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.progress import LatencyFigures
from pipeline.measurement.clock import (
    Samples,
    WarmUpOptions,
    latency_figures,
    measure_block,
    samples_from_blocks,
    thinned,
    values_needed,
    warm_up,
)
from tests.pipeline.measurement.noisy_host import NoisyHost


@pytest.mark.parametrize(
    ("percent", "needed"), [(50, 1), (90, 100), (95, 200), (99, 1000), (99.9, 10_000), (1, 1000)]
)
def test_percentile_needs_ten_values_beyond_it(percent: float, needed: int) -> None:
    assert values_needed(percent) == needed
    enough = Samples(values_s=tuple(float(i) for i in range(needed)))
    assert enough.percentile_s(percent) == pytest.approx(np.percentile(range(needed), percent))
    if needed > 1:
        short = Samples(values_s=enough.values_s[1:])
        assert short.percentile_or_absent(percent) is None
        with pytest.raises(
            ValueError, match=f"p{percent:g} needs {needed} values, there are {needed - 1}"
        ):
            short.percentile_s(percent)


@pytest.mark.parametrize("percent", [0, 100])
def test_extremes_are_never_percentiles(percent: float) -> None:
    assert Samples(values_s=(1.0,) * 2000).percentile_or_absent(percent) is None


def test_median_of_nothing_raises() -> None:
    with pytest.raises(ValueError, match="p50 needs 1 values, there are 0"):
        _ = Samples(values_s=()).median_s


def test_median() -> None:
    assert Samples(values_s=(1.0, 2.0, 6.0)).median_s == 2.0


def test_quartiles_need_values_on_both_sides() -> None:
    many = Samples(values_s=tuple(float(number) for number in range(1, 102)))
    assert many.quartiles_s == (26.0, 76.0)
    assert Samples(values_s=(1.0, 2.0, 6.0)).quartiles_s == (2.0, 2.0)


def test_a_latency_is_a_figure_if_a_logarithmic_axis_can_show_it() -> None:
    assert latency_figures(Samples(values_s=(1.0, 2.0, 6.0)), "batch 1", True) == LatencyFigures(
        2.0, 2.0, 2.0, "batch 1", True
    )
    for value in (0.0, -1.0, 1e10, math.nan):
        assert latency_figures(Samples(values_s=(value,)), "batch 1") is None


def test_blocks_must_hold_all_values() -> None:
    samples = Samples(values_s=(1.0, 2.0, 3.0), blocks=(1, 2))
    assert [block.tolist() for block in samples.by_block()] == [[1.0], [2.0, 3.0]]
    assert Samples.model_validate_json(samples.model_dump_json()) == samples
    for wrong in ((1, 1), (3, 0)):
        with pytest.raises(
            ValidationError, match="expected blocks of at least one value, 3 together"
        ):
            Samples(values_s=(1.0, 2.0, 3.0), blocks=wrong)
        with pytest.raises(
            ValidationError, match="expected processes of at least one block, 3 together"
        ):
            Samples(values_s=(1.0, 2.0, 3.0), blocks=(1, 1, 1), processes=wrong)


def test_medians_of_processes() -> None:
    values = (1.0, 2.0, 6.0, 7.0, 8.0, 9.0)
    assert Samples(
        values_s=values, blocks=(1, 2, 1, 2), processes=(2, 2)
    ).process_medians_s().tolist() == [2.0, 8.0]
    assert Samples(
        values_s=values, blocks=(1, 2, 1, 2), processes=(1, 3)
    ).process_medians_s().tolist() == [1.0, 7.0]
    assert Samples(values_s=values).process_medians_s().tolist() == [6.5]


def test_drift_between_blocks_is_not_stable() -> None:
    assert samples_from_blocks([[1.0, 1.0], [1.02, 1.02], [1.0, 1.0], [1.01, 1.01]], ()).stable
    assert not samples_from_blocks([[1.0, 1.0], [1.0, 1.0], [1.1, 1.1], [1.1, 1.1]], ()).stable
    assert samples_from_blocks([[1.0, 9.0]], ()).stable, "one block cannot drift"


def test_thinned_keeps_every_kth() -> None:
    assert thinned([0.0, 1.0, 2.0, 3.0, 4.0], 2) == (0.0, 3.0)
    assert thinned([0.0, 1.0], 2) == (0.0, 1.0)
    assert thinned([], 2) == ()


def test_block_lasts_for_time_and_runs() -> None:
    host = NoisyHost(0, noise=0.0, stalls=0.0)
    assert measure_block(lambda: host.work(0.1), host.clock, min_s=0.45) == (0.1,) * 5
    assert len(measure_block(lambda: host.work(10.0), host.clock, min_s=0.5, min_runs=3)) == 3
    assert measure_block(lambda: host.work(1.0), host.clock, min_s=0, min_runs=0) == ()


@pytest.mark.parametrize(
    ("run_s", "min_runs", "enough_runs", "runs"),
    [
        (0.001, 1, None, 1000),
        (0.001, 1, 500, 500),
        (0.01, 1, 500, 100),  # time ends it first
        (0.001, 1, 20, 100),  # not before a tenth of the time
        (0.001, 800, 500, 800),
        (0.01, 300, 200, 300),
    ],
)
def test_a_block_may_end_with_enough_runs(
    run_s: float,
    min_runs: int,
    enough_runs: int | None,
    runs: int,
) -> None:
    host = NoisyHost(0, noise=0.0, stalls=0.0)
    times = measure_block(
        lambda: host.work(run_s),
        host.clock,
        min_s=1.0,
        min_runs=min_runs,
        enough_runs=enough_runs,
    )
    assert len(times) == pytest.approx(runs, abs=1)  # sums of floats
    assert set(times) == {run_s}


def test_warm_up_goes_on_until_the_median_settles() -> None:
    host = NoisyHost(1, noise=0.001, stalls=0.0)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        host.work(0.01 * (1 + 2 * 0.9**calls))

    times = warm_up(run, WarmUpOptions(min_runs=5, min_s=0.0), host.clock)
    assert len(times) > 20, "ten runs are not enough here"
    assert times[-1] == pytest.approx(0.01, rel=0.2)


def test_warm_up_ends_even_if_nothing_settles() -> None:
    host = NoisyHost(2)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        host.work(0.01 * calls)

    times = warm_up(run, WarmUpOptions(min_runs=2, min_s=0.01, max_s=3.0), host.clock)
    assert 3.0 <= sum(times) < 6.0


def test_warm_up_can_be_left_out() -> None:
    assert warm_up(lambda: None, WarmUpOptions(min_runs=0, min_s=0)) == ()
