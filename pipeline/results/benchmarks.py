"""Results of benchmarks: latencies at each shape, and throughput under load."""

from __future__ import annotations

from typing import Literal

from pipeline.core.artifacts import Note
from pipeline.core.frozen import Frozen
from pipeline.core.progress import CandidateFigures
from pipeline.core.recipe import Precision
from pipeline.formatting import number_text, shape_text, time_text
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse
from pipeline.measurement.clock import Samples, latency_figures
from pipeline.measurement.comparison import MAX_WAITING
from pipeline.measurement.statistics import Interval
from pipeline.results.gpu_cost import GpuCost


class Bound(Frozen):
    """The bottleneck of a row, and the next step."""

    kind: Literal["compute", "bandwidth", "overhead", "copies", "unknown"]
    precision: Precision  # of the peak: the precision of the heavy layers
    # of the row's FLOP/s; None: the peak, or the graph's FLOPs, are unknown
    share_of_peak_flops: float | None = None
    # of the bytes of the unfused graph in this precision; over 1: fused, or kept in caches
    share_of_peak_bytes: float | None = None
    why: str
    next_step: str


class Totals(Frozen):
    """Sums over all runs, including those with times that were not stored."""

    queries: int  # whole runs, bind to fetch
    walltime_s: float  # of them, on the host's clock
    timed_queries: int  # further runs, with timed phases
    compute_s: float  # of those, on the session's timer


class LatencyRow(Frozen):
    """One engine at one shape."""

    sizes: dict[str, int]
    end_to_end: Samples  # bind to fetch, host clock
    upload: Samples
    compute: Samples
    download: Samples
    # upload to download, in the same runs as these three; None: an older report
    latency: Samples | None = None
    # of the call that starts the work, host clock; None on a CPU, where it returns when the work is
    # done
    enqueue: Samples | None = None
    totals: Totals | None = None
    # samples (rows of the batch axis; 1 where there is none) per second, at the median
    throughput_per_s: float
    flops_per_s: float | None  # None: the graph's FLOPs are unknown
    bytes_per_s: float | None
    # baseline / this, geometric mean over pairs of processes, 95 % interval; None for the baseline
    ratio: Interval | None = None
    ratio_missing: str = ""  # why a compared row has no ratio
    peak_memory_bytes: int = 0  # of the child process
    gpu: GpuCost | None = None  # None: on a CPU, or an older report
    bound: Bound | None = None

    @property
    def samples_per_request(self) -> int:
        """Return the rows of the batch axis in one run; 1 where there is none."""
        return round(self.throughput_per_s * self.end_to_end.median_s)


class LoadPoint(Frozen):
    """Throughput of one engine at one batch size and one number of sessions.

    Each session runs one request after another in a thread of its own.
    """

    sizes: dict[str, int]
    batch: int | None  # rows of a request; None: the model has no batch axis
    sessions: int
    requests: int  # that were measured
    samples_per_s: float  # of all sessions together
    p50_s: float  # of a request
    p99_s: float | None = None  # None: fewer than 1,000 requests
    waiting: float = 0.0  # share of the time for which the sessions waited for a CPU

    @property
    def has_waited(self) -> bool:
        """True if the host was too busy for this point's own figures."""
        return self.waiting > MAX_WAITING

    @property
    def where(self) -> str:
        """`batch 8 with 2 sessions`."""
        sessions = f"{self.sessions} session{'s' if self.sessions > 1 else ''}"
        return sessions if self.batch is None else f"batch {self.batch} with {sessions}"

    def in_words(self) -> str:
        """`batch 8 with 2 sessions: 1,234 samples/s, p99 12.1 ms`."""
        tail = f"median {time_text(self.p50_s)}"
        if self.p99_s is not None:
            tail = f"p99 {time_text(self.p99_s)}"
        waited = ""
        if self.has_waited:
            waited = f", waiting for a CPU for {self.waiting:.0%} of its time"
        return f"{self.where}: {number_text(self.samples_per_s)} samples/s, {tail}{waited}"


class LoadCurve(Frozen):
    """The points of one engine, and the comparison of its best one with other engines."""

    label: str
    limit_s: float | None = None  # of the p99 of a request; None: no limit
    points: tuple[LoadPoint, ...]
    # of the highest throughput within the objective's limit; None: no point is within it
    best: LoadPoint | None = None
    untried: tuple[str, ...] = ()  # points that were not tried, and why
    # seconds per sample at the best point, one value for each block, in several processes
    sample_time: Samples | None = None
    p99_s: float | None = None  # of a request at the best point, in all these processes
    # throughput / throughput of the baseline, each at its best point, 95 % interval
    ratio: Interval | None = None
    ratio_missing: str = ""  # why a compared engine has no ratio

    @property
    def nearest(self) -> LoadPoint:
        """The point with the shortest requests."""
        return min(self.points, key=lambda point: point.p99_s or point.p50_s)

    def by_sessions(self) -> tuple[tuple[int, tuple[LoadPoint, ...]], ...]:
        """Return the points of each number of sessions, by ascending batch."""
        counts = sorted({point.sessions for point in self.points})
        return tuple(
            (count, tuple(point for point in self.points if point.sessions == count))
            for count in counts
        )

    def over_limit(self) -> str:
        """Describe that the p99 over all processes is over the limit; empty if it is not."""
        if self.limit_s is None or self.p99_s is None or self.p99_s <= self.limit_s:
            return ""
        return (
            f"over all processes the p99 is {time_text(self.p99_s)}, over the limit of"
            f" {time_text(self.limit_s)}"
        )

    def why_over_limit(self) -> str:
        """Describe the nearest point of an engine that has none within the limit."""
        limit = "" if self.limit_s is None else f" within {time_text(self.limit_s)}"
        return f"no point has its p99{limit}; the nearest is {self.nearest.in_words()}"


class BenchmarkReport(Frozen):
    """All rows of one engine, with notes on the measurement."""

    label: str
    rows: tuple[LatencyRow, ...]
    load: LoadCurve | None = None  # None: the objective is latency
    stopped: str = ""  # why it ran in fewer processes than others, in words
    notes: tuple[Note, ...] = ()

    def figures(self, precision: Precision, is_baseline: bool) -> CandidateFigures:
        """Return the latency at the first shape, for the live plot."""
        latency = None
        if self.rows:
            row = self.rows[0]
            latency = latency_figures(row.end_to_end, shape_text(row.sizes), bool(self.stopped))
        return CandidateFigures(self.label, precision, is_baseline, latency=latency)


class BenchmarkFailure(Frozen):
    """The reason why an engine could not be measured."""

    label: str
    reason: str
    provisional: bool = False  # a transient failure: the next run measures again


class Benchmarks(Frozen):
    """Results of one interleaved run, in the order of the request."""

    created: str  # UTC
    results: tuple[BenchmarkReport | BenchmarkFailure, ...]
    # label of the engine that all ratios refer to: the fastest baseline; empty: none could be
    # measured
    baseline: str = ""
    load_1min: float = 0.0  # of the host's processes at the end, those of the benchmark included
    peaks: tuple[Peaks, ...] = ()  # of the devices they ran on, as far as they are known
    gpu_use: GpuUse | None = None  # None on a host without a GPU

    @property
    def provisional(self) -> bool:
        return any(
            isinstance(result, BenchmarkFailure) and result.provisional for result in self.results
        )


class LoadRun(Frozen):
    """The curves of all engines, in the order of the request."""

    created: str  # UTC
    curves: tuple[LoadCurve | BenchmarkFailure, ...]
    # label of the engine that all ratios refer to: the baseline of the highest throughput; empty:
    # no baseline is within the limit
    baseline: str = ""

    @property
    def provisional(self) -> bool:
        """True if the next run should measure again: a failure may pass, or points waited."""
        return any(
            curve.provisional
            if isinstance(curve, BenchmarkFailure)
            else any(point.has_waited for point in curve.points)
            for curve in self.curves
        )
