from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.measurement.measure import (
    Samples,
    WarmUpOptions,
    bootstrap,
    bootstrap_mean,
    cpu_flags,
    environment,
    measure_block,
    peak_memory_bytes,
    ratio_of_medians,
    samples_from_blocks,
    student_quantile,
    thinned,
    usable_cores,
    values_needed,
    warm_up,
)
from tests.builders.nvml import Device, Nvml, install_nvml

TRIALS = 1000


@dataclass
class NoisyHost:
    """A synthetic clock and the work that moves it: noise per run, rare stalls, a level per block,
    and one per round shared by all.
    """

    seed: int
    noise: float = 0.03
    block_level: float = 0.004
    round_level: float = 0.01
    stalls: float = 0.02
    now_s: float = 0.0
    level: float = 1.0
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def clock(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        stall = 1.5 if self.random.random() < self.stalls else 1.0
        self.now_s += (
            seconds * self.level * stall * float(np.exp(self.random.normal(0, self.noise)))
        )


def race(host: NoisyHost, runs_s: tuple[float, ...], rounds: int) -> list[Samples]:
    """Every contestant one block of 50 runs per round, in random order."""
    blocks: list[list[tuple[float, ...]]] = [[] for _ in runs_s]
    for _ in range(rounds):
        shared = float(np.exp(host.random.normal(0, host.round_level)))
        for index in host.random.permutation(len(runs_s)):
            host.level = shared * float(np.exp(host.random.normal(0, host.block_level)))
            run_s = runs_s[index]
            blocks[index].append(
                measure_block(partial(host.work, run_s), host.clock, min_s=50 * run_s)
            )
    return [samples_from_blocks(taken, ()) for taken in blocks]


# -- samples -----------------------------------------------------------------


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


# -- taking times ------------------------------------------------------------


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


def test_peak_memory_is_of_the_process_itself() -> None:
    """A small child of a large process: ru_maxrss would report the parent's size."""
    script = f"""
import subprocess, sys
large = b"x" * 400_000_000
child = '''import sys; sys.path[:0] = {sys.path!r}
from pipeline.measurement.measure import peak_memory_bytes
print(peak_memory_bytes())'''
command = [sys.executable, "-c", child]
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert 10_000_000 < int(printed) < 300_000_000
    before = peak_memory_bytes()
    large = np.ones(50_000_000 // 8)
    assert peak_memory_bytes() >= before
    assert large.sum() > 0


# -- intervals ---------------------------------------------------------------


@pytest.mark.parametrize("rounds", [4, 6, 10])
def test_equal_candidates_are_found_equal(rounds: int) -> None:
    """The same candidate entered twice: the 95 % interval holds 1 in about 95 of 100 races; 89 to
    99 of 100 are left to chance in 200.
    """
    trials = 200
    hits = 0
    for seed in range(trials):
        baseline, candidate = race(NoisyHost(seed), (0.01, 0.01), rounds)
        hits += not ratio_of_medians(baseline, candidate, seed, resamples=500).excludes(1.0)
    assert 0.89 <= hits / trials <= 0.99


def test_five_percent_slower_is_told_apart() -> None:
    trials = 200
    found = 0
    for seed in range(trials):
        baseline, candidate = race(NoisyHost(seed), (0.01, 0.0105), rounds=6)
        interval = ratio_of_medians(baseline, candidate, seed, resamples=500)
        found += interval.high < 1.0
    assert found / trials >= 0.95


def test_blocks_alone_do_not_know_how_processes_differ() -> None:
    """Why there are several: one process each, six blocks, 1.5 % between processes, and the
    interval is wrong more often than right.
    """
    random = np.random.default_rng(2)
    hits = 0
    for seed in range(100):
        levels = random.normal(0, 0.015, 2)
        sides = [
            samples_from_blocks(
                np.exp(
                    random.normal(level, 0.004, (6, 1)) + random.normal(0, 0.01, (6, 20))
                ).tolist(),
                (),
            )
            for level in levels
        ]
        hits += not ratio_of_medians(*sides, seed, resamples=200).excludes(1.0)
    assert hits < 50


def test_ratio_is_of_the_medians_and_repeatable() -> None:
    baseline, candidate = race(NoisyHost(3), (0.03, 0.01), rounds=6)
    interval = ratio_of_medians(baseline, candidate, seed=1)
    assert interval.value == pytest.approx(baseline.median_s / candidate.median_s)
    assert interval.low < interval.value < interval.high
    assert interval == ratio_of_medians(baseline, candidate, seed=1)
    assert interval.excludes(1.0)


def test_resampled_medians_equal_those_of_built_resamples() -> None:
    from pipeline.measurement.measure import _draws, _medians

    random = np.random.default_rng(0)
    blocks = [random.normal(10, 1, size) for size in (21, 33, 7, 40, 15)]
    drawn = _draws(random, len(blocks), 50)
    built = [
        np.concatenate(
            [np.repeat(block, int(times)) for block, times in zip(blocks, row, strict=True)]
        )
        for row in drawn
    ]
    lower = [np.sort(values)[(len(values) - 1) // 2] for values in built]
    assert _medians(blocks, drawn) == pytest.approx(lower)


def test_unequal_numbers_of_blocks_are_drawn_apart() -> None:
    baseline, _ = race(NoisyHost(4), (0.01, 0.01), rounds=6)
    candidate, _ = race(NoisyHost(5), (0.005, 0.005), rounds=8)
    interval = ratio_of_medians(baseline, candidate)
    assert interval.low < interval.value < interval.high
    assert interval.excludes(1.0)


def test_one_block_gives_no_interval() -> None:
    many = Samples(values_s=(1.0,) * 1000)
    with pytest.raises(ValueError, match="expected at least 2 blocks on each side, got 1 and 1"):
        ratio_of_medians(many, many)


def test_constant_times_give_a_point() -> None:
    constant = samples_from_blocks([[1.0] * 5] * 6, ())
    interval = ratio_of_medians(constant, constant)
    assert (interval.value, interval.low, interval.high) == (1.0, 1.0, 1.0)


def test_bootstrap_mean_covers_the_truth() -> None:
    random = np.random.default_rng(0)
    drops = [random.choice([-1.0, 0.0, 1.0], 200, p=[0.02, 0.93, 0.05]) for _ in range(200)]
    hits = sum(
        not bootstrap_mean(values.tolist(), seed, resamples=400).excludes(0.03)
        for seed, values in enumerate(drops)
    )
    assert 0.89 <= hits / 200 <= 0.99


def test_bootstrap_mean_of_equal_values_is_a_point_and_of_one_is_refused() -> None:
    interval = bootstrap_mean([0.0] * 50)
    assert (interval.value, interval.low, interval.high) == (0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="expected at least 2 values, got 1"):
        bootstrap_mean([0.1])


def test_the_interval_of_a_whole_sets_figure_holds_it_and_survives_undefined_resamples() -> None:
    scores = np.linspace(0, 1, 100)
    found = bootstrap(lambda drawn: float(scores[drawn].mean()), 100, resamples=200)
    assert found.low < found.value < found.high
    assert found.high - found.low == pytest.approx(4 * scores.std() / 10, rel=0.25)
    assert bootstrap(lambda drawn: float(scores[drawn].mean()), 100) == bootstrap_mean(
        scores.tolist()
    )
    undefined = bootstrap(
        lambda drawn: 0.25 if np.array_equal(drawn, np.arange(3)) else float("nan"), 3
    )
    assert (undefined.low, undefined.value, undefined.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def teststudent_quantiles(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, abs=1e-3)


def test_the_example_in_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "measurement.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert re.fullmatch(r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", capsys.readouterr().out.strip())


# -- the host ----------------------------------------------------------------


def test_environment_names_this_host() -> None:
    here = environment()
    assert here.cpu
    assert here.cpu_flags == cpu_flags() == tuple(sorted(here.cpu_flags))
    assert 1 <= here.cores == usable_cores()
    assert here.memory_bytes > 2**28
    assert here.packages["numpy"] == np.__version__


def test_environment_names_the_gpus_their_driver_and_tensorrt_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a virtual machine without /proc/driver/nvidia, with TensorRT's bindings unpacked by
    hand.
    """
    gpus = [Device("NVIDIA H200", f"GPU-{number}") for number in range(2)]
    install_nvml(tmp_path / "nvml", monkeypatch, Nvml(*gpus, driver="580.159"))
    package = tmp_path / "tensorrt_cu12_bindings-10.6.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorrt-cu12-bindings\nVersion: 10.6.0\n"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    here = environment()
    assert here.gpus == ("NVIDIA H200", "NVIDIA H200")
    assert here.gpu_driver == "580.159"
    assert here.packages["tensorrt-cu12-bindings"] == "10.6.0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (environment().gpus, environment().gpu_driver) == ((), None)


def test_looking_at_the_host_imports_nothing_heavy() -> None:
    script = (
        "import sys; from pipeline.measurement.measure import environment; environment(); "
        "print({'torch', 'onnxruntime', 'openvino', 'onnx'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )
