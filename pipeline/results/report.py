"""What a compile found, as data: the models behind report.json."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.core import Engine, Frozen, KeptNode, Note, Precision, Recipe
from pipeline.host.gpu import Peaks
from pipeline.host.gpu_monitor import GpuUse
from pipeline.measurement.measure import Environment, Interval, Samples
from pipeline.plan.schema import Plan
from pipeline.results.layer_table import LayerTable

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
    passed: bool
    failures: tuple[str, ...] = ()  # each threshold that was broken: asked and got


class MetricResult(Frozen):
    """A task metric of candidate and reference on the same samples; the drop is reference minus
    candidate.
    """

    name: str
    reference: float
    candidate: float
    drop: float
    interval: Interval  # 95 % interval of the drop, paired by sample
    max_drop: float
    passed: bool


class SizeCheck(Frozen):
    """What the gate found at one size besides that of the whole set."""

    profile: int  # counted from 0
    # of all symbols, or of the one that counts rows where samples bring the others
    sizes: dict[str, int]
    inputs: Literal["samples", "generated"]  # generated: no sample has these sizes
    samples: int  # rows that were compared, those that repeat another not counted; 0: none
    cosine: float | None = None  # smallest over samples and outputs
    drop: float | None = None  # of the metric, reference minus candidate
    failures: tuple[str, ...] = ()
    not_checked: str = ""  # why nothing could be compared

    def in_words(self, profiles: int) -> str:
        """The size, for messages, and whether inputs are generated."""
        return self.where(profiles) + (", generated inputs" if self.inputs == "generated" else "")

    def where(self, profiles: int) -> str:
        """The size; the profile is named where there are several."""
        return size_text(self.sizes) + (f", profile {self.profile + 1}" if profiles > 1 else "")


def size_text(sizes: dict[str, int]) -> str:
    """`batch = 8, sequence = 128`."""
    return (
        ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
        or "the sizes of the samples"
    )


class ValidationReport(Frozen):
    """Whether one engine still gives the right answers on one set."""

    role: Literal["selection", "validation", "generated"]
    set_digest: str
    samples: int
    outputs: tuple[OutputError, ...]
    metric: MetricResult | None = None  # None: no data, or a score was NaN (then a failure says so)
    sizes: tuple[SizeCheck, ...] = ()  # other sizes of every profile; empty for the validation set
    # missing or renamed outputs, shapes, dtypes, NaN, thresholds, the metric, at any size
    failures: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures


class Bound(Frozen):
    """What binds a row: what its time goes to, and the one thing to do next."""

    kind: Literal["compute", "bandwidth", "overhead", "copies", "unknown"]
    precision: Precision  # whose peak is meant: the one that the heavy layers run in
    # of the row's FLOP/s; None: the peak, or the graph's FLOPs, are unknown
    share_of_peak_flops: float | None = None
    # of the bytes of the unfused graph in this precision; over 1: fused, or kept in caches
    share_of_peak_bytes: float | None = None
    why: str
    next_step: str


class Totals(Frozen):
    """Sums over all runs, those whose times were not kept included."""

    queries: int  # whole runs, bind to fetch
    walltime_s: float  # of them, on the host's clock
    timed_queries: int  # further runs, whose phases were timed
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
    ratio_missing: str = ""  # why there is no ratio, of a row that is compared
    peak_memory_bytes: int = 0  # of the child process
    bound: Bound | None = None


class BenchmarkReport(Frozen):
    """All rows of one engine, and how they were measured."""

    label: str
    rows: tuple[LatencyRow, ...]
    stopped: str = ""  # why it ran in fewer processes than others, in words
    notes: tuple[Note, ...] = ()


class BenchmarkFailure(Frozen):
    """An engine that could not be measured."""

    label: str
    reason: str
    provisional: bool = False  # by a failure that may pass: measured again by the next run


class Benchmarks(Frozen):
    """All that ran in one interleaved run, in the order asked for."""

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


class Step(Frozen):
    """One stage of the compile as it ran."""

    stage: str
    subject: str  # candidate's label, or empty
    seconds: float  # of work; when reused, the seconds it took then
    reused: bool
    created: str  # UTC; of the artifact, so that a reused one shows its date
    digest: str


class OperatorTable(Frozen):
    """Operators of the graph at one point of the line."""

    stage: str
    operators: dict[str, int]
    size_bytes: int


State = Literal["measured", "failed accuracy", "mislabelled", "built", "refused", "failed"]


class Candidate(Frozen):
    """One recipe's way through the line, as far as it came."""

    label: str
    recipe: Recipe
    # built: runs on other hosts only; mislabelled: does not run the precision it is called by,
    # however it answers
    state: State
    reason: str = ""  # why it did not come further
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
        """The label as people read it: `tensorrt fp16, 2 nodes in fp32`. The label itself tells
        recipes apart.
        """
        count = len(self.kept_fp32)
        return (
            f"{self.label}, {count} {'node' if count == 1 else 'nodes'} in fp32"
            if count
            else self.label
        )


class NodeHarm(Frozen):
    """What a low precision does to one node. Errors are relative to the norm of what fp32 gives
    there, in the worst batch.
    """

    node: str
    operator: str
    largest: float  # magnitude among its inputs and outputs, in fp32
    overflows: bool = False  # comes so near to the limit of fp16 that other inputs will go beyond
    error: float  # of its outputs if this node alone is low, all before it fp32
    accumulated: float = 0.0  # of its outputs if every node is as low as in the engine


class NodeRanking(Frozen):
    """The nodes that are worth keeping in fp32: those that overflow, largest values first, then the
    others by their own error.
    """

    nodes: tuple[NodeHarm, ...] = ()
    samples: int = 0
    failure: str = ""  # why there is no ranking


class RescueStep(Frozen):
    """One step of a rescue, in words."""

    step: str  # what was tried: "opt shape moved to min"
    label: str  # of the candidate that it made; empty: nothing was built
    outcome: str


class Rescue(Frozen):
    """What was tried for a candidate that failed its accuracy, in order, and what it says."""

    label: str  # of the candidate that failed
    steps: tuple[RescueStep, ...]
    ranking: NodeRanking | None = None  # None: it ended before nodes were looked at
    conclusion: str  # the cause as far as it is known, and what to do


class AblationRow(Frozen):
    """One switch of the placement reversed, and what that did on the selection set and at the first
    benchmarked shape.
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
    """What each switch does to the best int8 candidate."""

    # of that candidate; empty: there was none with Q/DQ placed by Crucible that gave answers
    label: str
    rows: tuple[AblationRow, ...] = ()


class Report(Frozen):
    """Everything a sceptic needs: the plan, what was done, what was measured, what was decided and
    why.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    created: str
    command: str  # repeats this compile exactly
    plan: Plan
    source_digest: str  # of model, weights and code
    environment: Environment
    steps: tuple[Step, ...]
    operators: tuple[OperatorTable, ...]
    reference: str  # what the accuracy reference is: "PyTorch eager fp32", "ONNX Runtime fp32"
    baseline: BenchmarkReport | None  # the fastest of the baselines: all ratios refer to it
    baselines: tuple[BenchmarkReport, ...] = ()  # further baselines: traced, compile
    candidates: tuple[Candidate, ...]
    rescues: tuple[Rescue, ...] = ()
    ablation: Ablation | None = None  # None: the plan did not ask for it
    winner: str | None = None  # a candidate's label; with `keep` that of the baseline
    # of the winner to the baseline, at the first shape; with `keep` of the fastest accurate
    # candidate
    ratio: Interval | None = None
    ratio_missing: str = ""  # why there is no ratio
    # the engine that the verdict stands for; None: rejected, not to be had, or an older report
    delivered: Engine | None = None
    validation: ValidationReport | None = None  # of the winner, on the validation set
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    nearest_miss: str | None = None
    notes: tuple[Note, ...] = ()
    peaks: tuple[Peaks, ...] = ()  # of the devices that were measured, as far as they are known
    gpu_use: GpuUse | None = None  # while the latencies were measured
    benchmarked: str = Field(
        default="", description="UTC date of the latency figures; older than `created` if reused"
    )

    def title_of(self, label: str) -> str:
        """The title of the candidate with this label; of anything else the label itself."""
        return next((each.title for each in self.candidates if each.label == label), label)

    @property
    def has_engine(self) -> bool:
        """Whether an engine was delivered with this report."""
        return self.engine_delivered is not None

    @property
    def engine_delivered(self) -> Engine | None:
        """The engine that was delivered with this report; reports of earlier versions name it by
        their winner only.
        """
        if self.delivered or self.verdict in ("rejected", "keep"):
            return self.delivered
        return next((each.engine for each in self.candidates if each.label == self.winner), None)

    @property
    def benchmark_delivered(self) -> BenchmarkReport | None:
        """The latencies of the engine that was delivered."""
        measured = (self.baseline, *self.baselines, *(each.benchmark for each in self.candidates))
        return next((each for each in measured if each and each.label == self.winner), None)

    def every_note(self) -> tuple[tuple[str, Note], ...]:
        """All notes, each with the label of its engine, or "" if it is about the whole."""
        found = [
            ("", note)
            for note in (*self.notes, *(self.validation.notes if self.validation else ()))
        ]
        for benchmark in (
            self.baseline,
            *self.baselines,
            *(candidate.benchmark for candidate in self.candidates),
        ):
            found += [(benchmark.label, note) for note in benchmark.notes] if benchmark else []
        for candidate in self.candidates:
            found += [
                (candidate.label, note)
                for note in (
                    *candidate.notes,
                    *(candidate.selection.notes if candidate.selection else ()),
                )
            ]
        return tuple(found)


class ReportFiles(Frozen):
    """Where a report lies."""

    folder: Path
    json_file: Path
    markdown_file: Path
    html_file: Path
