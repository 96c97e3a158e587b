"""The models of report.json: all results of a compile."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.core import (
    MAX_DROP,
    AccuracyFigures,
    CandidateFigures,
    Engine,
    Frozen,
    KeptNode,
    Note,
    Precision,
    Recipe,
)
from pipeline.formatting import number_text, shape_text, time_text
from pipeline.host.environment import Environment
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse
from pipeline.measurement.clock import Samples, latency_figures
from pipeline.measurement.comparison import MAX_WAITING
from pipeline.measurement.statistics import Interval
from pipeline.plan.schema import Plan
from pipeline.results.advice import Advice
from pipeline.results.gpu_cost import GpuCost
from pipeline.results.graph_node import GraphNode
from pipeline.results.layer_table import LayerTable
from pipeline.results.module_findings import ModuleFindings

SCHEMA_VERSION = 1

Verdict = Literal["accepted", "keep", "unproven", "rejected"]


class OutputError(Frozen):
    """Errors of one output over all samples, against the reference."""

    output: str
    max_abs: float
    mean_abs: float
    max_rel: float
    cosine: float  # smallest over samples
    snr_db: float  # signal to noise over all samples; 200 = identical
    nan: int  # values that are NaN on one side only; they count here, not in the errors above
    inf: int  # values that are infinite on one side only, or of the other sign
    worst_sample: int  # index into the set
    # of indices only; their errors above are those of the reference's scores at the indices
    agreement: float | None = None
    passed: bool
    failures: tuple[str, ...] = ()  # each threshold that was exceeded: expected and actual


class ClassDrop(Frozen):
    """The drop of a metric on one class."""

    name: str
    samples: int  # with this class
    reference: float
    candidate: float
    drop: float
    interval: Interval


class MetricResult(Frozen):
    """A task metric on the same samples. The drop is how much worse the candidate is."""

    name: str
    reference: float
    candidate: float
    lower_is_better: bool = False  # an error rate: the drop is candidate minus reference
    drop: float
    interval: Interval  # 95 % interval of the drop, paired by sample
    max_drop: float
    worst_class: ClassDrop | None = None  # of the classes with enough samples; None: there is none
    judged_classes: int = 0  # classes with enough samples
    small_classes: int = 0  # classes with too few
    max_class_drop: float | None = None  # None: classes have no limit
    passed: bool


InputSource = Literal["samples", "generated"]


class SizeCheck(Frozen):
    """Result of the accuracy gate at one size, besides the run over the whole set."""

    profile: int  # counted from 0
    # of all symbols, or of the one that counts rows where samples bring the others
    sizes: dict[str, int]
    inputs: InputSource  # generated: no sample has these sizes
    samples: int  # rows that were compared, without copies; 0: none
    cosine: float | None = None  # smallest over samples and outputs
    drop: float | None = None  # of the metric
    failures: tuple[str, ...] = ()
    not_checked: str = ""  # why nothing could be compared

    def in_words(self, profiles: int) -> str:
        """Return the size for messages, and whether inputs are generated."""
        return self.where(profiles) + (", generated inputs" if self.inputs == "generated" else "")

    def where(self, profiles: int) -> str:
        """Return the size, with the profile if there are several."""
        return size_text(self.sizes) + (f", profile {self.profile + 1}" if profiles > 1 else "")


def size_text(sizes: dict[str, int]) -> str:
    """`batch = 8, sequence = 128`."""
    return (
        ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        or "the sizes of the samples"
    )


class DataFault(StrEnum):
    """A fault of the data, which no other engine can mend."""

    LABELS = "labels"  # the reference itself scores at chance
    CALIBRATION = "calibration"  # the calibration set's ranges do not fit the selection set


SetRole = Literal["selection", "validation", "generated"]


class ValidationReport(Frozen):
    """Accuracy of one engine on one set, against the reference."""

    role: SetRole
    set_digest: str
    samples: int
    outputs: tuple[OutputError, ...]
    metric: MetricResult | None = None  # None: no data, or a score was NaN (then a failure says so)
    sizes: tuple[SizeCheck, ...] = ()  # other sizes of every profile; empty for the validation set
    # missing or renamed outputs, shapes, dtypes, NaN, thresholds, the metric, at any size
    failures: tuple[str, ...] = ()
    data_faults: tuple[DataFault, ...] = ()  # that may explain the failures
    notes: tuple[Note, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def cosine(self) -> float | None:
        """The smallest cosine of all outputs but indices, which have their agreement."""
        return smallest_cosine(self.outputs)

    @property
    def figures(self) -> AccuracyFigures | None:
        """The drop as a plot shows it: of the metric, or else of the cosine. None if there is
        neither, or if it is not finite.
        """
        if self.metric is not None:
            measure, interval = self.metric.name, self.metric.interval
            low, drop, high = interval.low, self.metric.drop, interval.high
        elif self.cosine is not None:
            measure, low = "", 1 - self.cosine
            drop = high = low
        else:
            return None
        if not all(abs(each) <= MAX_DROP for each in (low, drop, high)):  # NaN compares as False
            return None
        return AccuracyFigures(measure, drop, low, high, self.passed)

    def figures_of(self, recipe: Recipe) -> CandidateFigures:
        """Return the accuracy of the candidate that this report is about, for the live plot."""
        return CandidateFigures(recipe.label, recipe.precision, accuracy=self.figures)


def smallest_cosine(outputs: Iterable[OutputError]) -> float | None:
    """Return the smallest cosine of all outputs but indices; None if there is no other output."""
    return min((each.cosine for each in outputs if each.agreement is None), default=None)


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


class Step(Frozen):
    """One stage run of the compile."""

    stage: str
    subject: str  # candidate's label, or empty
    seconds: float  # of work; for a reused artifact, the seconds of the original run
    reused: bool
    created: str  # UTC; of the artifact, so that a reused one shows its date
    digest: str


class OperatorTable(Frozen):
    """Operators of the graph after one stage."""

    stage: str
    operators: dict[str, int]
    size_bytes: int


State = Literal[
    "measured", "failed accuracy", "over the limit", "mislabelled", "built", "refused", "failed"
]


class Origin(StrEnum):
    """Where a candidate comes from."""

    PLAN = "plan"
    FALLBACK = "fallback"  # an attempt of a rescue
    ABLATION = "ablation"  # a candidate with one placement switch reversed
    BASELINE = "baseline"


class Candidate(Frozen):
    """One recipe with the results of all stages that it reached."""

    label: str
    recipe: Recipe
    origin: Origin = Origin.PLAN
    # over the limit: at no point within the objective's; built: runs on other hosts only;
    # mislabelled: does not run the precision it is called by, however it answers
    state: State
    reason: str = ""  # why it stopped
    engine: Engine | None = None
    # what the conversion left in fp32, beside the nodes that the recipe names
    kept_fp32: tuple[KeptNode, ...] = ()
    layers: LayerTable | None = None  # what really ran; None: this backend gives no evidence
    # of the profiles after the first, where they have kernels of their own
    other_layers: tuple[LayerTable, ...] = ()
    selection: ValidationReport | None = None
    benchmark: BenchmarkReport | None = None
    notes: tuple[Note, ...] = ()  # of calibration, conversion and build

    @property
    def title(self) -> str:
        """The label for readers: `tensorrt fp16, 2 nodes in fp32`.

        Only the label itself is unique per recipe.
        """
        count = len(self.kept_fp32)
        if not count:
            return self.label
        return f"{self.label}, {count} {'node' if count == 1 else 'nodes'} in fp32"


class NodeHarm(Frozen):
    """Harm of low precision to one node.

    Errors are relative to the norm of the fp32 outputs, in the worst batch.
    """

    node: str
    operator: str
    largest: float  # magnitude among its inputs and outputs, in fp32
    overflows: bool = False  # so near to the limit of fp16 that other inputs will exceed it
    error: float  # of its outputs if only this node is low, and all nodes before it are fp32
    accumulated: float = 0.0  # of its outputs if every node has the engine's precision


class NodeRanking(Frozen):
    """Nodes worth keeping in fp32.

    First those that overflow, by their largest value, then the others by their own error.
    """

    nodes: tuple[NodeHarm, ...] = ()
    samples: int = 0
    failure: str = ""  # why there is no ranking


class RescueStep(Frozen):
    """One step of a rescue, as text."""

    step: str  # what was tried: "opt shape moved to min"
    label: str  # of its candidate; empty: nothing was built
    outcome: str


class Rescue(Frozen):
    """Rescue of a candidate that failed its accuracy: its steps in order, and the conclusion."""

    label: str  # of the candidate that failed
    steps: tuple[RescueStep, ...]
    ranking: NodeRanking | None = None  # None: it ended before the ranking of nodes
    conclusion: str  # the cause, if it is known, and the next step


class AblationRow(Frozen):
    """Effect of one reversed placement switch.

    Accuracy is of the selection set, speed of the first benchmarked shape.
    """

    switch: str
    before: bool  # in the candidate whose switches were reversed
    after: bool
    # of the candidate with this switch reversed; empty: the graph is the same either way, so
    # nothing was built
    label: str = ""
    state: State | None = None  # of that candidate
    reason: str = ""
    drop: float | None = None  # of the metric; None: no metric, or no answers
    drop_change: float | None = None  # above 0: reversed, it loses more
    cosine: float | None = None  # the smallest of all outputs
    cosine_change: float | None = None
    # median before over median after, 95 % interval; above 1: reversed, it is faster
    ratio: Interval | None = None


class Ablation(Frozen):
    """Effect of each placement switch on the best int8 candidate."""

    # of that candidate; empty: there was none with Q/DQ placed by Crucible that gave answers
    label: str
    rows: tuple[AblationRow, ...] = ()


class WidthRow(Frozen):
    """The cost of the width of a profile at one shape, against an engine for this shape only."""

    sizes: dict[str, int]
    # median of the candidate / median of that engine, 95 % interval; above 1: the width costs time
    cost: Interval | None = None
    missing: str = ""  # why there is no cost


class ProfileWidth(Frozen):
    """What the width of its profiles costs the fastest accurate candidate."""

    label: str = ""  # of the candidate; empty: none was measured
    rows: tuple[WidthRow, ...] = ()
    advice: str  # what follows from the costs


class PackingProof(Frozen):
    """Comparison of sequences in one row of the delivered engine with each of them alone."""

    sequences: int = 0  # compared ones
    rows: int = 0  # that they were packed into
    # of all outputs, relative to the largest value; None: not compared, or not finite
    largest_error: float | None = None
    reason: str = ""  # why packing is off; empty: it is on


class Report(Frozen):
    """All evidence of a compile: plan, steps, measurements, verdict and reasons."""

    schema_version: int = Field(default=SCHEMA_VERSION, description="Version of this format.")
    name: str = Field(description="The plan's name.")
    created: str = Field(description="When the report was written, in UTC.")
    command: str = Field(description="The command that repeats this compile exactly.")
    plan: Plan
    source_digest: str = Field(description="Digest of the model, its weights and its code.")
    environment: Environment
    steps: tuple[Step, ...] = Field(description="What ran, with its times, and what was reused.")
    operators: tuple[OperatorTable, ...] = Field(
        description="The operators of the graph, before and after simplification."
    )
    graph: tuple[GraphNode, ...] = Field(
        default=(),
        description=(
            "The graph after simplification, in execution order. Empty: too large, or an older"
            " report."
        ),
    )
    graph_sizes: dict[str, int] | None = Field(
        default=None,
        description=(
            "The sizes at which the work of the nodes is counted: the opt sizes of the first"
            " profile. null: it was not counted."
        ),
    )
    reference: str = Field(
        description="What the accuracy is compared with, such as `PyTorch eager fp32`."
    )
    baseline: BenchmarkReport | None = Field(
        description="The fastest of the baselines. All ratios refer to it."
    )
    baselines: tuple[BenchmarkReport, ...] = Field(default=(), description="Further baselines.")
    candidates: tuple[Candidate, ...] = Field(
        description="All candidates with their state, accuracy and speed."
    )
    rescues: tuple[Rescue, ...] = Field(
        default=(), description="Fallbacks: the steps for candidates that failed their accuracy."
    )
    ablation: Ablation | None = Field(
        default=None,
        description="What each switch of the placement does. null: the plan did not ask for it.",
    )
    profile_width: ProfileWidth | None = Field(
        default=None,
        description="What the width of the profile costs. null: the plan did not ask for it.",
    )
    module: ModuleFindings | None = Field(
        default=None,
        description=(
            "What a run of the user's PyTorch module showed about its code. null: the model is no"
            " PyTorch code, or an older report."
        ),
    )
    advice: Advice | None = Field(
        default=None,
        description="What would make the winner faster. null: the plan did not ask for it.",
    )
    winner: str | None = Field(
        default=None, description="Label of the winner; with `keep` that of the baseline."
    )
    best_point: LoadPoint | None = Field(
        default=None,
        description=(
            "The best point of the delivered engine by the objective, which serving uses by"
            " default. null: the objective is latency, or the delivered engine was not measured"
            " under load."
        ),
    )
    ratio: Interval | None = Field(
        default=None,
        description=(
            "Speed-up of the winner over the baseline, at the first shape or by the objective;"
            " with `keep` that of the fastest accurate candidate."
        ),
    )
    ratio_missing: str = Field(default="", description="Why there is no ratio.")
    delivered: Engine | None = Field(
        default=None,
        description=(
            "The engine that the verdict stands for. null: rejected, it cannot be delivered, or an"
            " older report."
        ),
    )
    validation: ValidationReport | None = Field(
        default=None, description="Accuracy of the winner on the validation set."
    )
    packing: PackingProof | None = Field(
        default=None,
        description=(
            "Whether the delivered engine may pack. null: no engine is delivered, or the plan does"
            " not declare packing."
        ),
    )
    verdict: Verdict
    reasons: tuple[str, ...] = Field(default=(), description="Why the verdict is what it is.")
    next_steps: tuple[str, ...] = Field(default=(), description="What to do next.")
    nearest_miss: str | None = Field(
        default=None, description="Label of the candidate that came nearest to its limits."
    )
    notes: tuple[Note, ...] = Field(default=(), description="Notes on the compile as a whole.")
    peaks: tuple[Peaks, ...] = Field(
        default=(), description="Peaks of the devices that were measured, as far as they are known."
    )
    gpu_use: GpuUse | None = Field(
        default=None, description="Use of the GPU while the latencies were measured."
    )
    benchmarked: str = Field(
        default="", description="UTC date of the latency figures; older than `created` if reused"
    )

    def title_of(self, label: str) -> str:
        """Return the title of the candidate with this label; for any other label, the label."""
        titles = (candidate.title for candidate in self.candidates if candidate.label == label)
        return next(titles, label)

    @property
    def has_engine(self) -> bool:
        """True if an engine was delivered with this report."""
        return self.engine_delivered is not None

    @property
    def engine_delivered(self) -> Engine | None:
        """The delivered engine. Reports of earlier versions name it only by their winner."""
        if self.delivered or self.verdict in ("rejected", "keep"):
            return self.delivered
        for candidate in self.candidates:
            if candidate.label == self.winner:
                return candidate.engine
        return None

    @property
    def benchmark_delivered(self) -> BenchmarkReport | None:
        """The latencies of the delivered engine."""
        for benchmark in self._benchmarks():
            if benchmark.label == self.winner:
                return benchmark
        return None

    @property
    def is_baseline_over_limit(self) -> bool:
        """True if no baseline has a point within the objective's limit: there is no ratio."""
        curve = self.baseline.load if self.baseline else None
        return curve is not None and curve.best is None

    @property
    def curves(self) -> dict[str, LoadCurve]:
        """The curves under load, by the label of their engine."""
        return {each.label: each.load for each in self._benchmarks() if each.load}

    def _benchmarks(self) -> list[BenchmarkReport]:
        """Return the latencies of all baselines and candidates that were measured."""
        of_candidates = (candidate.benchmark for candidate in self.candidates)
        all_engines = (self.baseline, *self.baselines, *of_candidates)
        return [benchmark for benchmark in all_engines if benchmark is not None]

    def every_note(self) -> tuple[tuple[str, Note], ...]:
        """Return all notes, each with the label of its engine, or "" for a note on the compile."""
        notes = [("", note) for note in self.notes]
        if self.validation:
            notes += [("", note) for note in self.validation.notes]
        for benchmark in self._benchmarks():
            notes += [(benchmark.label, note) for note in benchmark.notes]
        for candidate in self.candidates:
            notes += [(candidate.label, note) for note in candidate.notes]
            if candidate.selection:
                notes += [(candidate.label, note) for note in candidate.selection.notes]
        return tuple(notes)


class ReportFiles(Frozen):
    """Paths of a written report."""

    folder: Path
    json_file: Path
    markdown_file: Path
    html_file: Path
