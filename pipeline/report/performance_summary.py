"""Measured rows as text: the bottleneck of each, and the summary that `crucible bench` prints.

The summary is like that of trtexec. Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeline.core.frozen import Frozen
from pipeline.core.shapes import Profile
from pipeline.formatting import bytes_text, number_text, shape_text, time_text
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse, Span
from pipeline.measurement.clock import Samples
from pipeline.measurement.statistics import Interval
from pipeline.results.benchmarks import Bound, LatencyRow
from pipeline.results.gpu_cost import GpuCost
from pipeline.results.precision_audit import percent_text
from pipeline.results.targets import TargetResult

TAILS = (50, 90, 95, 99)
MIN_WARMUP_S, MIN_WALLTIME_S = 0.2, 3.0
MAX_VARIATION = 0.01  # of the compute times: standard deviation over mean, as trtexec warns
# Share of the compute time. On an idle stream the compute time is never shorter than the enqueue.
# So above this share the GPU waits for the host.
ENQUEUE_SHARE = 0.8
# The latency may differ from the sum of its phases by either of these, because reading a clock
# between the phases takes time.
IDENTITY_SHARE, IDENTITY_S = 0.02, 10e-6


def ratio_text(row: LatencyRow | None, stopped: str = "") -> str:
    """Return `9.28 (8.9 to 9.7)`, or in two words why there is no ratio.

    `stopped` says why the engine ran in few processes.
    """
    if row is None:
        return ""
    if row.ratio:
        return interval_text(row.ratio)
    if stopped:
        return "stopped early"
    return "not measurable" if row.ratio_missing else ""


def interval_text(ratio: Interval | None) -> str:
    """Return `9.28 (8.9 to 9.7)`; "" without a ratio."""
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""


TARGET_HEADINGS = ("target", "device", "verdict", "winner", "median", "speed-up")


def target_cells(result: TargetResult) -> tuple[str, ...]:
    """Return the cells of one target for TARGET_HEADINGS."""
    unit = "thread" if result.threads == 1 else "threads"
    threads = f", {result.threads} {unit}" if result.threads else ""
    return (
        result.name,
        f"{result.device or result.target}{threads}",
        result.outcome,
        result.winner or result.reason,
        time_text(result.latency_s) if result.latency_s is not None else "",
        interval_text(result.ratio),
    )


# -- the bottleneck of a row -------------------------------------------------


def limit_cells(row: LatencyRow) -> tuple[str, ...]:
    """Return the cells of one row for `LIMIT_COLUMNS` in latency_sections.py."""
    flops, rate = _rates(row)
    bound = row.bound
    if bound is None:
        return flops, rate, "-", "-", "-", "-", "-"
    arithmetic = (
        f"{_share(bound.share_of_peak_flops)} ({bound.precision})"
        if bound.share_of_peak_flops
        else "-"
    )
    return (
        flops,
        rate,
        arithmetic,
        _share(bound.share_of_peak_bytes),
        bound.kind,
        bound.why,
        bound.next_step,
    )


def bound_text(bound: Bound) -> str:
    """Return `bound by compute: computing takes ...; next: ...`."""
    kind = "its bottleneck is unknown" if bound.kind == "unknown" else f"bound by {bound.kind}"
    return f"{kind}: {bound.why}; next: {bound.next_step}"


def peaks_text(peaks: Peaks) -> str:
    """Return the peaks as text.

    Example: `AMD EPYC, 2 threads: fp32 92.1, int8 264 GFLOP/s; memory 21.3 GB/s (measured
    2026-01-31)`.
    """
    arithmetic, memory = "arithmetic not known", "memory not known"
    if peaks.flops_per_s:
        rates = [f"{name} {number_text(rate / 1e9)}" for name, rate in peaks.flops_per_s.items()]
        arithmetic = f"{', '.join(rates)} GFLOP/s"
    if peaks.bytes_per_s:
        caches = [f"{each.name} {number_text(each.bytes_per_s / 1e9)}" for each in peaks.caches]
        rates = [*caches, f"memory {number_text(peaks.bytes_per_s / 1e9)}"]
        memory = f"{', '.join(rates)} GB/s"
    return f"{peaks.device}: {arithmetic}; {memory} ({peaks.source})"


def _rates(row: LatencyRow) -> tuple[str, str]:
    flops, moved = (
        number_text(rate / 1e9) if rate else "-" for rate in (row.flops_per_s, row.bytes_per_s)
    )
    return flops, moved


def _share(share: float | None) -> str:
    return percent_text(share) if share else "-"


# -- the summary -------------------------------------------------------------


class Stats(Frozen):
    """One region over all its values, in seconds. A percentile is None if there are too few."""

    min: float
    max: float
    mean: float
    median: float
    p90: float | None
    p95: float | None
    p99: float | None


class Summary(Frozen):
    """The summary of one engine at one shape, as trtexec prints it."""

    label: str
    sizes: dict[str, int]
    queries: int
    walltime_s: float  # of all queries, host clock
    queries_per_s: float
    samples_per_s: float  # rows of the batch, at the median
    latency: Stats  # upload + compute + download, on the session's timer
    end_to_end: Stats  # bind to fetch, host clock
    enqueue: Stats | None  # None on a CPU, where the call returns when the work is done
    upload: Stats
    compute: Stats
    download: Stats
    timed_queries: int  # further queries, whose phases were timed
    compute_s: float  # sum over the timed queries
    warmup_runs: int
    warmup_s: float
    identity_off_s: float  # mean latency minus the sum of the means of its phases
    warnings: tuple[str, ...]


def summary_of(label: str, row: LatencyRow, profiles: Sequence[Profile]) -> Summary:
    """Return the summary of a row. ValueError for a row of an older report, which has no sums."""
    if row.totals is None or row.latency is None:
        raise ValueError(f"the row of {label} has no sums: it is of an older report")
    off_s = float(np.mean(row.latency.values_s)) - sum(
        float(np.mean(part.values_s)) for part in (row.upload, row.compute, row.download)
    )
    return Summary(
        label=label,
        sizes=row.sizes,
        queries=row.totals.queries,
        walltime_s=row.totals.walltime_s,
        queries_per_s=row.totals.queries / row.totals.walltime_s,
        samples_per_s=row.throughput_per_s,
        latency=stats_of(row.latency),
        end_to_end=stats_of(row.end_to_end),
        enqueue=stats_of(row.enqueue) if row.enqueue else None,
        upload=stats_of(row.upload),
        compute=stats_of(row.compute),
        download=stats_of(row.download),
        timed_queries=row.totals.timed_queries,
        compute_s=row.totals.compute_s,
        warmup_runs=len(row.end_to_end.warmup_s),
        warmup_s=sum(row.end_to_end.warmup_s),
        identity_off_s=off_s,
        warnings=tuple(_warnings(row, row.totals.walltime_s, off_s, profiles)),
    )


def stats_of(samples: Samples) -> Stats:
    """Summarise the stored values (every k-th of a fast model)."""
    values = np.asarray(samples.values_s)
    median, p90, p95, p99 = (samples.percentile_or_absent(percent) for percent in TAILS)
    return Stats(
        min=float(values.min()),
        max=float(values.max()),
        mean=float(values.mean()),
        median=median or 0.0,
        p90=p90,
        p95=p95,
        p99=p99,
    )


def _warnings(
    row: LatencyRow, walltime_s: float, off_s: float, profiles: Sequence[Profile]
) -> Iterator[str]:
    on_gpu, compute = row.compute.clock == "device", np.asarray(row.compute.values_s)
    if sum(row.end_to_end.warmup_s) < MIN_WARMUP_S or walltime_s < MIN_WALLTIME_S:
        shortest = f"at least {MIN_WARMUP_S:g} s and {MIN_WALLTIME_S:g} s"
        yield (
            f"warmed up and measured for {sum(row.end_to_end.warmup_s):.2f} s and {walltime_s:.2f}"
            f" s, expected {shortest}: a longer run says more"
        )
    if not _adds_up(row, off_s):
        yield (
            f"upload, compute and download do not add up to the latency: {time_text(abs(off_s))}"
            " off; something else ran between them"
        )
    variation = float(compute.std() / compute.mean()) if compute.mean() else 0.0
    if variation > MAX_VARIATION:
        advice = (
            "lock the clocks (nvidia-smi -lgc) and wait by spinning"
            if on_gpu
            else "leave the host to this run, and set the governor to performance"
        )
        yield (
            f"the compute times vary by {100 * variation:.1f} % (standard deviation), over"
            f" {100 * MAX_VARIATION:g} %: {advice}"
        )
    if row.enqueue and row.enqueue.median_s > ENQUEUE_SHARE * row.compute.median_s:
        enqueue, computing = time_text(row.enqueue.median_s), time_text(row.compute.median_s)
        yield (
            f"enqueueing takes {enqueue}, computing {computing}: the GPU waits for the host; use a"
            " CUDA graph"
        )
    copies_s = row.upload.median_s + row.download.median_s
    if copies_s > row.compute.median_s:
        yield (
            f"copies dominate ({time_text(copies_s)}): keep inputs on the device, or give the model"
            " a narrower input type"
        )
    if profiles and row.sizes not in [profile.sizes("opt") for profile in profiles]:
        usual = "; ".join(shape_text(profile.sizes("opt")) for profile in profiles)
        yield (
            f"{shape_text(row.sizes)} is not what the engine was tuned for ({usual}): give it a"
            " profile with this opt"
        )


def _adds_up(row: LatencyRow, off_s: float) -> bool:
    return row.latency is None or abs(off_s) <= max(
        IDENTITY_S, IDENTITY_SHARE * float(np.mean(row.latency.values_s))
    )


def summary_rows(summary: Summary) -> tuple[tuple[str, ...], ...]:
    """Return the name, min, max, mean, median, p90, p95 and p99 of every region."""
    regions = {
        "latency": summary.latency,
        "end to end, host": summary.end_to_end,
        "enqueue": summary.enqueue,
        "upload (H2D)": summary.upload,
        "compute": summary.compute,
        "download (D2H)": summary.download,
    }
    return tuple((name, *_stats_cells(stats)) for name, stats in regions.items() if stats)


def _stats_cells(stats: Stats) -> Iterator[str]:
    for _, value in stats:
        yield "-" if value is None else time_text(value)


def summary_lines(summary: Summary) -> tuple[str, ...]:
    """Return the lines below the table of times."""
    phases = " + ".join(
        time_text(part.mean) for part in (summary.upload, summary.compute, summary.download)
    )
    return (
        f"throughput: {number_text(summary.queries_per_s)} queries/s ({summary.queries:,} in"
        f" {summary.walltime_s:.3f} s of host walltime); {number_text(summary.samples_per_s)}"
        " samples/s at the median",
        f"compute: {summary.compute_s:.3f} s in {summary.timed_queries:,} further queries, whose"
        " phases were timed",
        f"mean latency {time_text(summary.latency.mean)} = upload + compute + download = {phases}"
        f" (off by {time_text(abs(summary.identity_off_s))}, allowed {100 * IDENTITY_SHARE:g} % or"
        f" {time_text(IDENTITY_S)})",
        f"warm-up: {summary.warmup_runs:,} queries, {summary.warmup_s:.2f} s",
    )


def gpu_cost_line(cost: GpuCost) -> str:
    """Return the GPU memory and the energy of a row in one line."""
    sizes = {
        "weights": cost.weights_bytes,
        "activations": cost.activation_bytes,
        "the whole process": cost.peak_bytes,
    }
    known = [f"{name} {bytes_text(size)}" for name, size in sizes.items() if size is not None]
    if cost.energy_per_1000_requests_j is not None:
        energy = number_text(cost.energy_per_1000_requests_j)
        known.append(f"{energy} J per 1,000 requests (of the whole GPU)")
    unknown = [f"{figure} not known: {reason}" for figure, reason in cost.missing.items()]
    return f"GPU memory and energy: {'; '.join((*known, *unknown))}"


def gpu_lines(use: GpuUse | None) -> tuple[str, ...]:
    """Return the GPU's clocks, power and load during the run; nothing without a GPU."""
    if use is None:
        return ()
    spans = {
        "SM clock": (use.sm_clock_mhz, "MHz"),
        "memory clock": (use.memory_clock_mhz, "MHz"),
        "power": (use.power_w, "W"),
        "temperature": (use.temperature_c, "C"),
        "busy": (use.busy_percent, "% (a kernel ran; not how full the GPU was)"),
    }
    known = [f"{name} {_span_text(span)} {unit}" for name, (span, unit) in spans.items() if span]
    others = ", ".join(map(str, use.other_processes)) or "none"
    return (
        f"GPU, {use.samples} samples: {', '.join(known) or 'no values'}",
        f"other processes on the GPU: {others}",
    )


def _span_text(span: Span) -> str:
    if span.least == span.most:
        return f"{span.median:.0f}"
    return f"{span.median:.0f} ({span.least:.0f} to {span.most:.0f})"
