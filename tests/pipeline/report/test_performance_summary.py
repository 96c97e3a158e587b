"""The summary of a row, its warnings, and rows in words."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.benchmark.roofline import bound_of
from pipeline.core.recipe import Precision
from pipeline.core.shapes import DimRange, Profile
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse, Span
from pipeline.measurement.clock import Samples
from pipeline.report.latency_sections import LIMIT_COLUMNS
from pipeline.report.performance_summary import (
    gpu_cost_line,
    gpu_lines,
    limit_cells,
    peaks_text,
    stats_of,
    summary_lines,
    summary_of,
    summary_rows,
)
from pipeline.results.benchmarks import LatencyRow, Totals
from pipeline.results.gpu_cost import GpuCost

PROFILE = Profile(dims={"batch": DimRange(min=1, opt=8, max=64)})
PEAKS = Peaks(
    device="EPYC, 2 threads",
    source="measured 2026-11-21",
    flops_per_s={Precision.FP32: 100e9},
    bytes_per_s=20e9,
)


def measured(
    compute_ms: float = 2.0,
    copies_ms: float = 0.25,
    enqueue_ms: float | None = None,
    latency_ms: float | None = None,
    spread: float = 0.0,
    batch: int = 8,
    walltime_s: float = 3.1,
    warmup_s: float = 0.3,
) -> LatencyRow:
    """A row as the benchmark makes it; on a GPU where enqueueing is timed."""
    clock = "host" if enqueue_ms is None else "device"

    def samples(ms: float, spread: float = 0.0, of: str = clock) -> Samples:
        values = ms * 1e-3 * (1 + spread * np.where(np.arange(1000) % 2, 1, -1))
        return Samples.model_validate(
            {"values_s": tuple(values.tolist()), "clock": of, "warmup_s": (warmup_s / 10,) * 10}
        )

    whole_ms = compute_ms + 2 * copies_ms if latency_ms is None else latency_ms
    return LatencyRow(
        sizes={"batch": batch},
        end_to_end=samples(whole_ms + 0.1, of="host"),
        upload=samples(copies_ms),
        compute=samples(compute_ms, spread),
        download=samples(copies_ms),
        latency=samples(whole_ms),
        enqueue=None if enqueue_ms is None else samples(enqueue_ms, of="host"),
        totals=Totals(queries=1200, walltime_s=walltime_s, timed_queries=240, compute_s=0.48),
        throughput_per_s=batch / ((whole_ms + 0.1) * 1e-3),
        flops_per_s=60e9,
        bytes_per_s=5e9,
    )


def test_the_summary_holds_what_trtexec_prints() -> None:
    summary = summary_of("engine", measured(enqueue_ms=0.1), [PROFILE])
    assert summary.warnings == ()
    assert summary.queries_per_s == pytest.approx(1200 / 3.1)
    assert summary.samples_per_s == pytest.approx(8 / 2.6e-3)
    assert (summary.timed_queries, summary.compute_s, summary.warmup_runs) == (240, 0.48, 10)
    assert summary.identity_off_s == pytest.approx(0, abs=1e-12)
    rows = summary_rows(summary)
    assert [row[0] for row in rows] == [
        "latency",
        "end to end, host",
        "enqueue",
        "upload (H2D)",
        "compute",
        "download (D2H)",
    ]
    assert rows[4][1:] == ("2.00 ms",) * 7
    text = "\n".join(summary_lines(summary))
    assert "387 queries/s (1,200 in 3.100 s of host walltime)" in text
    assert "mean latency 2.50 ms = upload + compute + download = 250 us + 2.00 ms + 250 us" in text
    assert "0.480 s in 240 further queries" in text
    assert type(summary).model_validate_json(summary.model_dump_json()) == summary


def test_on_a_cpu_there_is_no_enqueue() -> None:
    assert [row[0] for row in summary_rows(summary_of("engine", measured(), [PROFILE]))][
        2
    ] == "upload (H2D)"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (measured(spread=0.02), "vary by 2.0 %"),
        (
            measured(spread=0.02, enqueue_ms=0.1),
            "lock the clocks (nvidia-smi -lgc) and wait by spinning",
        ),
        (measured(enqueue_ms=1.7), "use a CUDA graph"),
        (measured(copies_ms=1.1), "copies dominate (2.20 ms): keep inputs on the device"),
        (measured(batch=4), "batch 4 is not what the engine was tuned for (batch 8)"),
        (measured(latency_ms=2.6), "do not add up to the latency: 100 us off"),
        (
            measured(walltime_s=0.2),
            "warmed up and measured for 0.30 s and 0.20 s, expected at least 0.2 s and 3 s",
        ),
        (measured(warmup_s=0.1), "warmed up and measured for 0.10 s"),
    ],
)
def test_each_warning_has_its_cause_and_its_advice(row: LatencyRow, message: str) -> None:
    (warning,) = summary_of("engine", row, [PROFILE]).warnings
    assert message in warning


def test_phases_may_be_off_by_what_reading_a_clock_takes() -> None:
    assert summary_of("engine", measured(latency_ms=2.54), [PROFILE]).warnings == ()
    assert (
        summary_of(
            "engine", measured(compute_ms=0.02, copies_ms=0.001, latency_ms=0.030), [PROFILE]
        ).warnings
        == ()
    )


def test_a_percentile_of_few_values_is_a_gap() -> None:
    assert stats_of(Samples(values_s=(1.0, 3.0))).model_dump() == {
        "min": 1,
        "max": 3,
        "mean": 2,
        "median": 2,
        "p90": None,
        "p95": None,
        "p99": None,
    }


def test_a_row_of_an_older_report_has_no_summary() -> None:
    with pytest.raises(ValueError, match="of an older report"):
        summary_of("engine", measured().model_copy(update={"totals": None}), [])


def test_rows_in_words() -> None:
    row = measured()
    assert limit_cells(row)[:2] == ("60.0", "5.00")
    bound = row.model_copy(update={"bound": bound_of(row, Precision.FP32, PEAKS)})
    assert limit_cells(bound)[:5] == ("60.0", "5.00", "60 % (fp32)", "25 %", "compute")
    assert len(limit_cells(bound)) == len(limit_cells(row)) == len(LIMIT_COLUMNS)
    assert (
        peaks_text(PEAKS)
        == "EPYC, 2 threads: fp32 100 GFLOP/s; memory 20.0 GB/s (measured 2026-11-21)"
    )


def test_what_the_gpu_did_is_told() -> None:
    use = GpuUse(
        uuid="GPU-1",
        samples=9,
        sm_clock_mhz=Span(least=1755, median=1980, most=1980),
        temperature_c=Span(least=40, median=40, most=40),
    )
    text = "\n".join(gpu_lines(use.model_copy(update={"other_processes": (7, 9)})))
    assert "GPU, 9 samples: SM clock 1980 (1755 to 1980) MHz, temperature 40 C" in text
    assert "other processes on the GPU: 7, 9" in text
    assert gpu_lines(None) == ()


def test_memory_and_energy_in_one_line() -> None:
    cost = GpuCost(
        weights_bytes=98_000_000,
        peak_bytes=640_000_000,
        peak_source="process",
        energy_per_1000_requests_j=312.4,
        missing={"activations": "its backend does not tell"},
    )
    assert gpu_cost_line(cost) == (
        "GPU memory and energy: weights 98.0 MB; the whole process 640 MB; 312 J per 1,000 requests"
        " (of the whole GPU); activations not known: its backend does not tell"
    )
