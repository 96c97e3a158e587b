"""Find the bottleneck of a measured row (arithmetic, memory, overhead or copies) and a next step.

The compute time is compared with two limits: the graph's FLOPs at the peak of the precision that
ran, and its bytes at the peak of the memory. The bytes are those that all nodes of the source graph
read and write, scaled to the precision's width. An engine that fuses nodes moves fewer bytes, so
the second limit is an upper estimate. All functions are pure.
"""

from __future__ import annotations

from pipeline.core.recipe import ITEM_BYTES, Precision
from pipeline.formatting import number_text, time_text
from pipeline.host.gpu import Peaks
from pipeline.results.benchmarks import BenchmarkReport, Bound, LatencyRow

DOMINANT = 0.5  # share of the time from which a part is the bottleneck
ABOVE_PEAK = 1.1  # times the peak: more than the noise of its measurement
FAR = 4.0  # times both limits: neither arithmetic nor memory explains the time

TINY_S = 200e-6
"""Starting kernels and passing work to threads takes as long as this."""

WAIT_FOR_CPU = "the next compile on a quiet host measures the peaks"
MEASURE_CPU = "measure the peaks again: `crucible doctor --measure`"
MEASURE_GPU = "compare by hand with what `python -m benchmarks peak --gpu` measures on it"
NARROWER = {
    Precision.FP32: "fp16 or int8",
    Precision.TF32: "fp16 or int8",
    Precision.FP16: "int8 or fp8",
    Precision.BF16: "int8 or fp8",
}
NARROWER_ON_CPU = {
    Precision.FP32: "int8",
    Precision.TF32: "int8",
    Precision.FP16: "int8",
    Precision.BF16: "int8",
}


def with_bounds(
    report: BenchmarkReport, precision: Precision, peaks: Peaks | None
) -> BenchmarkReport:
    """Add the bottleneck of each row to a report.

    `precision` is that of the heavy layers, `peaks` are those of the device.
    """
    rows = []
    for row in report.rows:
        rows.append(row.model_copy(update={"bound": bound_of(row, precision, peaks)}))
    return report.model_copy(update={"rows": tuple(rows)})


def bound_of(row: LatencyRow, precision: Precision, peaks: Peaks | None) -> Bound:
    """Return the bottleneck of one row.

    Copies and overhead on the host are found without peaks; the others need them.
    """
    kind, why, next_step = _moving(row) or _computing(row, precision, peaks)
    width = ITEM_BYTES[precision] / ITEM_BYTES[Precision.FP32]
    flops_peak, bytes_peak = (
        (peaks.flops_per_s.get(precision), peaks.bytes_per_s) if peaks else (None, None)
    )
    return Bound.model_validate(
        {
            "kind": kind,
            "precision": precision,
            "share_of_peak_flops": (
                row.flops_per_s / flops_peak if row.flops_per_s and flops_peak else None
            ),
            "share_of_peak_bytes": (
                row.bytes_per_s * width / bytes_peak if row.bytes_per_s and bytes_peak else None
            ),
            "why": why,
            "next_step": next_step,
        }
    )


def _moving(row: LatencyRow) -> tuple[str, str, str] | None:
    """Return copies or the host's overhead as bottleneck if they take half of the time."""
    end_to_end_s = row.end_to_end.median_s
    copies_s, compute_s = row.upload.median_s + row.download.median_s, row.compute.median_s
    if copies_s > DOMINANT * (copies_s + compute_s):
        why = (
            f"copying to and from the device takes {time_text(copies_s)}, computing"
            f" {time_text(compute_s)}"
        )
        return (
            "copies",
            why,
            (
                "keep inputs on the device (DLPack), or give the model a narrower input type such"
                " as uint8"
            ),
        )
    host_s = end_to_end_s - copies_s - compute_s
    if host_s > DOMINANT * end_to_end_s:
        total = time_text(end_to_end_s)
        why = f"binding and fetching on the host take {time_text(host_s)} of {total}"
        return (
            "overhead",
            why,
            "send more rows per call: `crucible bench DIR --batch 1,2,4,8` shows the gain",
        )
    return None


def _computing(row: LatencyRow, precision: Precision, peaks: Peaks | None) -> tuple[str, str, str]:
    on_gpu = row.compute.clock == "device"
    compute_s, end_to_end_s = row.compute.median_s, row.end_to_end.median_s
    if row.flops_per_s is None or row.bytes_per_s is None:
        return (
            "unknown",
            "the graph's FLOPs or bytes are not known before it runs",
            "look at the slowest layers: `What really ran` in the report",
        )
    if peaks is None or not peaks.bytes_per_s:
        return (
            "unknown",
            "this device's peak rates are not known",
            MEASURE_GPU if on_gpu else WAIT_FOR_CPU,
        )
    if precision not in peaks.flops_per_s:
        return (
            "unknown",
            f"the {precision} peak of this device is not known",
            MEASURE_GPU if on_gpu else MEASURE_CPU,
        )
    arithmetic_s = row.flops_per_s * end_to_end_s / peaks.flops_per_s[precision]
    memory_s = (
        row.bytes_per_s
        * end_to_end_s
        * ITEM_BYTES[precision]
        / ITEM_BYTES[Precision.FP32]
        / peaks.bytes_per_s
    )
    limits = (
        f"its arithmetic {time_text(arithmetic_s)} ({precision}), its data {time_text(memory_s)} if"
        " nothing is fused"
    )
    why = f"computing takes {time_text(compute_s)}; at the device's peak {limits}"
    nearest_s = max(arithmetic_s, memory_s)
    if arithmetic_s > ABOVE_PEAK * compute_s:
        explanation = (
            f"{why}: no device is faster than its peak, so the peak was measured on a busy host, or"
            " kernels save multiplications (Winograd)"
        )
        return (
            "unknown",
            explanation,
            (
                "look at the slowest layers"
                if on_gpu
                else "measure the peaks again on a quiet host: `crucible doctor --measure`"
            ),
        )
    if arithmetic_s >= DOMINANT * compute_s:
        return "compute", why, _less_arithmetic(precision, on_gpu)
    if compute_s > FAR * nearest_s:
        times = (
            f": {number_text(compute_s / nearest_s)} times the nearer of the two"
            if nearest_s
            else ""
        )
        return "overhead", why + times, _less_overhead(nearest_s, on_gpu)
    if memory_s > arithmetic_s:
        return (
            "bandwidth",
            why,
            (
                f"move less: {_narrower(precision, on_gpu)}a larger batch, which reads the weights"
                " once for all rows"
            ),
        )
    return (
        "compute",
        why,
        (
            "look at the slowest layers (`What really ran` in the report): their kernels reach less"
            " than half of the peak"
        ),
    )


def _less_arithmetic(precision: Precision, on_gpu: bool) -> str:
    narrower = _narrower(precision, on_gpu)
    if narrower:
        return f"{narrower}a smaller model"
    return "a smaller model: this precision is the narrowest, and over half of its peak is reached"


def _narrower(precision: Precision, on_gpu: bool) -> str:
    narrower = (NARROWER if on_gpu else NARROWER_ON_CPU).get(precision)
    return f"try {narrower}, or " if narrower else ""


def _less_overhead(nearest_s: float, on_gpu: bool) -> str:
    if nearest_s > TINY_S:
        return (
            "look at the slowest layers (`What really ran` in the report): no kernel should be this"
            " far from both limits"
        )
    if on_gpu:
        return (
            "give it more work at once: a larger batch, and a CUDA graph where the engine has none"
        )
    return (
        "give it more work at once, a larger batch; or fewer threads (benchmark.threads), which"
        " then wait less for each other"
    )
