from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.benchmark.cpu_peaks import _product as product
from pipeline.benchmark.cpu_peaks import (
    busy_text,
    load_peaks,
    measure_copy,
    peaks_file,
    peaks_of,
    save_peaks,
    with_limits,
)
from pipeline.core import Precision, Recipe, Target
from pipeline.host.gpu import Peaks
from pipeline.results.report import BenchmarkFailure, BenchmarkReport, Benchmarks
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
