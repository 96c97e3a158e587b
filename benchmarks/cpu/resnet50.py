"""ResNet-50, batch 1: the best candidate against torch eager, as `crucible compile
configs/resnet50.yaml` reports it.

The ratio depends on the CPU: 8-bit dot products (AVX512-VNNI, AVX-VNNI, AMX) make int8 several
times as fast as fp32. On this benchmark int8 candidates have random weights and random data, so
only their speed counts, never their verdict.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import RESNET50, Row, publish, takes_no_arguments
from pipeline.host.environment import cpu_flags
from pipeline.plan.precisions import VNNI_FLAGS
from pipeline.report.files import load_report
from pipeline.results.benchmarks import BenchmarkReport
from pipeline.results.report import Report

RATIO_WITH_VNNI, RATIO_WITHOUT = 5.0, 3.3  # what was reached by hand on two hosts, rounded down


def main(words: Sequence[str]) -> None:
    takes_no_arguments("resnet50", __doc__, words)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pipeline.cli",
            "compile",
            str(RESNET50),
            "--out",
            folder,
            "--json",
        ]
        code = subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode
        if code not in (0, 2):  # 2: rejected, which is an answer too
            sys.exit(code)
        report = load_report(Path(folder))
    rows = rows_from_report(report)
    wanted = RATIO_WITH_VNNI if VNNI_FLAGS & set(cpu_flags()) else RATIO_WITHOUT
    best = max((float(row["ratio"] or 0) for row in rows), default=0.0)
    publish(
        "resnet50",
        rows,
        {
            f"best candidate at least {wanted}x torch eager at batch 1 (got {best:.2f}x)": best
            >= wanted
        },
    )


def rows_from_report(report: Report) -> list[Row]:
    """One row per engine, at the plan's first size."""
    measured = [
        report.baseline,
        *report.baselines,
        *(candidate.benchmark for candidate in report.candidates),
    ]
    return [row_of(benchmark) for benchmark in measured if benchmark is not None]


def row_of(benchmark: BenchmarkReport) -> Row:
    """Latency, rates, shares of the peaks as far as these are known here (`crucible doctor
    --measure`), and what binds it.
    """
    first = benchmark.rows[0]
    ratio, bound = first.ratio, first.bound
    return {
        "engine": benchmark.label,
        "sizes": str(first.sizes),
        "median_ms": first.end_to_end.median_s * 1e3,
        "runs": len(first.end_to_end.values_s),
        "stable": first.end_to_end.stable,
        "ratio": ratio.value if ratio else None,
        "ratio_low": ratio.low if ratio else None,
        "ratio_high": ratio.high if ratio else None,
        "gflops_per_s": first.flops_per_s / 1e9 if first.flops_per_s else None,
        "gbytes_per_s": first.bytes_per_s / 1e9 if first.bytes_per_s else None,
        "of_peak_flops_%": percent(bound.share_of_peak_flops) if bound else None,
        "of_peak_bytes_%": percent(bound.share_of_peak_bytes) if bound else None,
        "bound_by": bound.kind if bound else None,
        "peak_memory_mb": first.peak_memory_bytes / 1e6,
    }


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
