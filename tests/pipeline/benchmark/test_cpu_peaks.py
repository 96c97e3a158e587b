from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.benchmark import cpu_peaks
from pipeline.benchmark.cpu_peaks import _product as product
from pipeline.benchmark.cpu_peaks import (
    busy_text,
    load_peaks,
    measure_caches,
    measure_copy,
    measure_if_quiet,
    measure_once,
    peaks_file,
    peaks_of,
    save_peaks,
    with_limits,
)
from pipeline.core.artifacts import Target
from pipeline.core.progress import CandidateFigures
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import ChildDied, ChildStopped
from pipeline.execution.stage_runner import Runner as StageRunner
from pipeline.execution.stage_runner import Stage
from pipeline.host.caches import Cache
from pipeline.host.gpu import MemoryLevel, Peaks
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, Benchmarks
from tests.builders.layers import real_table
from tests.builders.report import benchmark, engine

CPU = Target(backend="onnxruntime", version="1", device="cpu")
PEAKS = Peaks(
    device="cpu",
    source="measured",
    flops_per_s={Precision.FP32: 1e13, Precision.INT8: 4e13},
    bytes_per_s=2e10,
)


def test_peaks_are_kept_for_this_cpu_and_number_of_threads() -> None:
    assert load_peaks() is None
    save_peaks(PEAKS)
    assert load_peaks() == PEAKS
    assert peaks_of(CPU, 0) == PEAKS
    assert load_peaks(93) is None
    assert [file.suffix for file in peaks_file().parent.iterdir()] == [".json"]


def test_a_damaged_file_is_as_good_as_none() -> None:
    save_peaks(PEAKS)
    for rubbish in ("", "{", '{"flops_per_s": 3}'):
        peaks_file().write_text(rubbish)
        assert load_peaks() is None


def test_a_gpu_that_is_not_here_has_no_peaks() -> None:
    assert (
        peaks_of(
            CPU.model_copy(
                update={"compute_capability": "9.0", "device": "NVIDIA H200 of another host"}
            ),
            0,
        )
        is None
    )


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_product_runs_in_every_library_and_precision(backend: str, precision: Precision) -> None:
    peak = product(Recipe(backend=backend, precision=precision), 64, 1, 0.001)
    assert peak.flops_per_s > 1e6


class Runner:
    """A double that answers with given peaks, or fails."""

    def __init__(self, answer: Peaks | Exception | None) -> None:
        self.answer, self.calls = answer, list[Any]()

    def anew(self, stage: Stage, subject: str, function: Any, *arguments: object) -> Peaks | None:
        self.calls.append(arguments)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def once(answer: Peaks | Exception | None, budget_s: float = 60.0, **target: str) -> list[Any]:
    """The calls of a runner when a compile has measured its engines on this target."""
    runner = Runner(answer)
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32)
    here = engine(recipe, 1, Path("nowhere"))
    here = here.model_copy(update={"target": here.target.model_copy(update=target)})
    measure_once(cast("StageRunner", runner), [here], 0, budget_s)
    return runner.calls


def test_the_first_compile_measures_the_peaks_and_later_ones_find_them() -> None:
    assert once(PEAKS) == [(0, 3.0)]
    assert load_peaks() == PEAKS
    assert once(PEAKS) == []


def test_peaks_are_not_measured_without_time_nor_for_an_engine_on_a_gpu() -> None:
    assert once(PEAKS, budget_s=19) == once(PEAKS, compute_capability="9.0") == []
    assert once(PEAKS, budget_s=30) == [(0, 1.5)]


def test_a_busy_host_and_a_child_that_dies_leave_the_peaks_to_the_next_compile() -> None:
    assert once(None) == once(ChildDied("lost")) == [(0, 3.0)]
    assert load_peaks() is None
    with pytest.raises(ChildStopped):
        once(ChildStopped("cancelled"))


def test_peaks_measured_in_passing_are_dropped_if_others_had_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_peaks, "SIZES", (64, 32, 16))
    monkeypatch.setattr(cpu_peaks, "UNASKED_SECONDS", 0.001)
    monkeypatch.setattr(cpu_peaks, "COPY_BYTES", 2**20)
    monkeypatch.setattr(cpu_peaks, "MAX_WAITING", 1.0)
    said = list[str]()

    def say(share: float | None, text: str, figures: CandidateFigures | None = None) -> None:
        said.append(text)

    found = measure_if_quiet(1, 0.001, say)
    assert found is not None
    assert {Precision.FP32, Precision.INT8} <= found.flops_per_s.keys()
    assert sum("64 x 64" in text for text in said) > 1, "each precision once"
    assert not any("16 x 16" in text for text in said), "no more after the time"
    monkeypatch.setattr(cpu_peaks, "MAX_WAITING", -1.0)
    assert measure_if_quiet(1, 3.0) is None


@pytest.mark.parametrize(
    ("load", "message"), [(0.3, ""), (0.99, ""), (7.5, " on a busy host, load 7.5: too low")]
)
def test_a_busy_host_is_told_with_its_peaks(load: float, message: str) -> None:
    assert busy_text(load, 2) == message


def test_a_copy_counts_reading_and_writing() -> None:
    assert measure_copy(2, 0.001, size=2**20) > 1e6


def test_rows_are_seen_against_the_peaks_and_the_precision_that_really_ran(tmp_path: Path) -> None:
    save_peaks(PEAKS)
    int8, fp32 = (
        Recipe(backend="tensorrt", precision=Precision.INT8),
        Recipe(backend="onnxruntime", precision=Precision.FP32),
    )
    engines = [engine(fp32, 1, tmp_path), engine(int8, 1, tmp_path), engine(fp32, 1, tmp_path)]
    lost = BenchmarkFailure(label="lost", reason="died")
    benchmarks = Benchmarks(
        created="now", results=(benchmark("a", 2.0, None), benchmark("b", 1.0, 2.0), lost)
    )
    limited = with_limits(benchmarks, engines, {"b": real_table("resnet_fp32")}, 0)
    assert limited.peaks == (PEAKS,)
    assert limited.results[2] == lost
    bounds = [
        row.bound
        for result in limited.results
        if isinstance(result, BenchmarkReport)
        for row in result.rows
    ]
    assert [bound.precision if bound else None for bound in bounds] == [Precision.FP32] * 4, (
        "called int8, it ran fp32"
    )
    unseen = with_limits(benchmarks, engines, {}, 0).results[1]
    assert unseen.rows[0].bound.precision is Precision.INT8  # type: ignore[union-attr]


def test_every_cache_has_a_speed_and_the_one_before_sets_its_size() -> None:
    caches = (Cache(name="L2", size_bytes=2**16), Cache(name="L3", size_bytes=2**20))
    found = measure_caches(1, caches, 0.001)
    assert [(each.name, each.size_bytes) for each in found] == [("L2", 2**16), ("L3", 2**20)]
    assert all(each.bytes_per_s > 1e6 for each in found)
    assert measure_caches(1, (), 0.001) == ()


def test_data_larger_than_all_caches_come_from_memory() -> None:
    level = MemoryLevel(name="L2", size_bytes=100, bytes_per_s=1e11)
    peaks = PEAKS.model_copy(update={"caches": (level,)})
    assert peaks.level_of(100) == level
    assert (peaks.level_of(101).name, peaks.level_of(101).bytes_per_s) == ("memory", 2e10)
