"""The JSON answers of the service, each with an example for /docs."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from pydantic import ConfigDict, Field

from pipeline.core.frozen import Frozen
from pipeline.execution.stage_event import StageStatus
from pipeline.measurement.clock import Samples
from pipeline.measurement.statistics import Interval
from pipeline.report.files import HTML_NAME, JSON_NAME, MARKDOWN_NAME
from pipeline.results.accuracy import ValidationReport
from pipeline.results.benchmarks import BenchmarkReport, LatencyRow
from pipeline.results.candidates import Candidate
from pipeline.results.candidates import State as CandidateState
from pipeline.results.report import Report, Verdict
from pipeline.results.targets import Outcome, worst
from service.jobs.nodes import NO_NODE
from service.jobs.state import Failure, Job, ModelVersion, State
from service.jobs.store import Compile
from service.registry.traffic import Suggestion

# file names of a report's forms, by media type
FORMS = {
    "application/json": JSON_NAME,
    "text/markdown": MARKDOWN_NAME,
    "text/html": HTML_NAME,
}
EXAMPLE_ID = "01931f3a5b2c07d1e9a44c6f2"


def _example(**values: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [values]})


class Refusal(Frozen):
    """The body of every unsuccessful answer."""

    model_config = _example(
        error="no job '17'", code="service.not_found", next="GET /jobs lists yours"
    )

    error: str = Field(description="What was expected, and what came instead")
    code: str = Field(description="Stable code for programs")
    next: str = Field(default="", description="What to do next")


class Links(Frozen):
    """Paths of a job's resources."""

    job: str
    events: str
    log: str
    report: str | None = Field(description="Null until the job has a report")


class JobView(Frozen):
    """A job as its owner sees it."""

    model_config = _example(
        id=EXAMPLE_ID,
        name="resnet50",
        owner="key:3f9a0c1d7b",
        state="running",
        device="cpu",
        measures=None,
        recompiles=None,
        created="2026-11-21T10:00:00.000+00:00",
        started="2026-11-21T10:00:01.250+00:00",
        finished=None,
        attempt=1,
        estimate_s=95.0,
        elapsed_s=42.1,
        progress={
            "stage": "build",
            "subject": "onnxruntime int8",
            "fraction": 0.4,
            "text": "",
            "elapsed_s": 3.2,
            "estimate_s": 8.0,
        },
        verdict=None,
        winner=None,
        failure=None,
        links={
            "job": f"/jobs/{EXAMPLE_ID}",
            "events": f"/jobs/{EXAMPLE_ID}/events",
            "log": f"/jobs/{EXAMPLE_ID}/log",
            "report": None,
        },
    )

    id: str
    name: str
    owner: str
    state: State
    device: str
    measures: ModelVersion | None = Field(
        default=None,
        description="The model version that a benchmark measures; null for a compile",
    )
    recompiles: ModelVersion | None = Field(
        default=None,
        description="The model version whose traffic chose the profiles; null for other jobs",
    )
    target: str = Field(
        default="", description="What it requires of a device; empty: the device, by its name"
    )
    waits_for_node: str = Field(default="", description="Why no node can run it now")
    created: str
    started: str | None
    finished: str | None
    sandbox: tuple[str, ...] = Field(
        default=(), description="Layers of the sandbox that held during its last attempt"
    )
    attempt: int = Field(
        description="Number of starts: more than one if the server was restarted meanwhile"
    )
    estimate_s: float | None = Field(
        description=(
            "Usual duration of your jobs of this name on this device; null if none has succeeded"
        )
    )
    elapsed_s: float | None = Field(
        description="Duration of the last attempt until now or its end; null before the first"
    )
    progress: StageStatus | None = Field(
        description="The current stage; `estimate_s` is its usual duration on this server"
    )
    verdict: Verdict | None
    winner: str | None
    failure: Failure | None
    links: Links


class TargetView(Frozen):
    """One target of a compile."""

    name: str
    outcome: Outcome | None = Field(
        description=(
            "The verdict; `unavailable` if no node has the device; `failed` or `cancelled`; null"
            " until then"
        )
    )
    job: JobView


class CompileView(Frozen):
    """A compile for the targets of its plan: a job for each."""

    id: str
    name: str
    outcome: Outcome | None = Field(description="The worst one; null until all targets have ended")
    targets: tuple[TargetView, ...]
    link: str


class JobPage(Frozen):
    """Some jobs, newest first."""

    jobs: tuple[JobView, ...]
    next: str | None = Field(
        description="Value of `after` for the next page; null on the last page"
    )


class RecompileView(Frozen):
    """A model that is compiled again."""

    model: str
    version: int = Field(description="The version that is compiled again")
    built_by: str = Field(description="The job whose model, plan and data are compiled again")
    suggestion: Suggestion | None = Field(
        description="The profiles that its traffic suggests; null where its plan stays as it is"
    )
    job: JobView | None = Field(description="The new job; null for a dry run")


class LimitView(Frozen):
    """A limit, and what is used of it now."""

    model_config = _example(
        setting="max_queued", meaning="waiting jobs", per="owner", used=3, limit=1000
    )

    setting: str = Field(description="The setting of the service that raises it")
    meaning: str
    per: Literal["key", "owner"]
    used: int
    limit: int | None = Field(description="null: no limit")


class LimitsView(Frozen):
    """The limits of a caller."""

    owner: str
    key: str | None = Field(description="The key's prefix; null without a key")
    limits: tuple[LimitView, ...]


class NodeView(Frozen):
    """A server or a node that runs jobs."""

    id: str
    name: str = Field(description="The name of its host")
    kind: Literal["server", "node", "ray"]
    version: str
    address: str = Field(
        default="", description="Where a proxy reaches it; empty: it takes no requests"
    )
    live: bool = Field(description="Whether it has sent a heartbeat lately")
    silent_s: float = Field(description="Time since its last heartbeat")
    labels: dict[str, dict[str, str]] = Field(description="By device; targets ask for them")
    jobs: tuple[str, ...] = Field(description="The jobs that it runs now")


class NodePage(Frozen):
    """Who runs jobs: live ones, and those that have gone in the last hour."""

    nodes: tuple[NodeView, ...]


class Health(Frozen):
    status: Literal["ok"]


class Readiness(Frozen):
    status: Literal["ready"]
    jobs: str = Field(description="`ready`, or why no job is accepted", examples=["ready"])


def view_of_job(job: Job, now: dt.datetime) -> JobView:
    """Convert a job to its client view, without its child's pid and its identity."""
    here = f"/jobs/{job.id}"
    links = Links(
        job=here,
        events=f"{here}/events",
        log=f"{here}/log",
        report=f"/reports/{job.id}" if job.state == "succeeded" else None,
    )
    shared = JobView.model_fields.keys() & Job.model_fields.keys()
    return JobView(
        **{name: getattr(job, name) for name in shared}, elapsed_s=_elapsed_s(job, now), links=links
    )


def view_of_compile(compiled: Compile, now: dt.datetime) -> CompileView:
    """Convert a compile to its client view."""
    targets = tuple(
        TargetView(
            name=target.title, outcome=outcome_of(target.job), job=view_of_job(target.job, now)
        )
        for target in compiled.targets
    )
    outcomes = [target.outcome for target in targets if target.outcome is not None]
    ended = len(outcomes) == len(targets)
    return CompileView(
        id=compiled.id,
        name=compiled.targets[0].job.name,
        outcome=worst(outcomes) if ended else None,
        targets=targets,
        link=f"/compiles/{compiled.id}",
    )


def outcome_of(job: Job) -> Outcome | None:
    """Return how the job of a target has ended; None until then."""
    if job.verdict is not None:
        return job.verdict
    if job.failure is not None and job.failure.code == NO_NODE:
        return "unavailable"
    match job.state:
        case "failed" | "cancelled":
            return job.state
    return None


def _elapsed_s(job: Job, now: dt.datetime) -> float | None:
    if job.started is None:
        return None
    if job.finished:
        return job.took_s
    running_s = (now - dt.datetime.fromisoformat(job.started)).total_seconds()
    return round(max(0.0, running_s), 3)


# -- parts of reports --------------------------------------------------------


class Times(Frozen):
    """One measured region in numbers; the raw values are at /reports/{id}/samples."""

    count: int
    median_ms: float | None
    p95_ms: float | None = Field(description="Null if there are too few values")
    p99_ms: float | None
    stable: bool = Field(description="False if the median still drifted during the measurement")


class LatencyAt(Frozen):
    """The latency of one engine at one shape."""

    sizes: dict[str, int]
    end_to_end: Times
    upload: Times
    compute: Times
    download: Times
    throughput_per_s: float
    ratio: Interval | None = Field(
        description="Baseline / this engine, with its 95 % interval; null for the baseline"
    )
    ratio_missing: str = Field(default="", description="Why there is no ratio")
    peak_memory_bytes: int


class EngineLatency(Frozen):
    label: str
    rows: tuple[LatencyAt, ...]


class LatencyView(Frozen):
    """The latencies of the baselines and the candidates."""

    name: str
    verdict: Verdict
    winner: str | None
    ratio: Interval | None = Field(description="Of the winner to the baseline, at the first shape")
    ratio_missing: str = Field(default="", description="Why there is no ratio")
    benchmarked: str
    baseline: EngineLatency | None
    baselines: tuple[EngineLatency, ...]
    candidates: tuple[EngineLatency, ...] = Field(description="The measured candidates")


class CandidateAccuracy(Frozen):
    label: str
    state: CandidateState
    reason: str
    selection: ValidationReport | None


class AccuracyView(Frozen):
    """The accuracy of the engines."""

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    reference: str
    winner: str | None
    validation: ValidationReport | None = Field(description="Of the winner, on the validation set")
    candidates: tuple[CandidateAccuracy, ...]


def latency_of_report(report: Report) -> LatencyView:
    """Extract the latencies of a report."""
    measured = [
        candidate.benchmark for candidate in report.candidates if candidate.benchmark is not None
    ]
    return LatencyView(
        name=report.name,
        verdict=report.verdict,
        winner=report.winner,
        ratio=report.ratio,
        ratio_missing=report.ratio_missing,
        benchmarked=report.benchmarked or report.created,
        baseline=_engine(report.baseline) if report.baseline else None,
        baselines=tuple(map(_engine, report.baselines)),
        candidates=tuple(map(_engine, measured)),
    )


def accuracy_of_report(report: Report) -> AccuracyView:
    """Extract the accuracy of a report."""
    return AccuracyView(
        name=report.name,
        verdict=report.verdict,
        reasons=report.reasons,
        reference=report.reference,
        winner=report.winner,
        validation=report.validation,
        candidates=tuple(map(_accuracy, report.candidates)),
    )


def samples_of_report(report: Report) -> list[dict[str, Any]]:
    """Extract all raw values, by engine and shape."""
    measured = [
        report.baseline,
        *report.baselines,
        *(candidate.benchmark for candidate in report.candidates),
    ]
    return [
        benchmark.model_dump(mode="json", include={"label": True, "rows": {"__all__": RAW}})
        for benchmark in measured
        if benchmark is not None
    ]


RAW = {"sizes", "end_to_end", "upload", "compute", "download"}


def _accuracy(candidate: Candidate) -> CandidateAccuracy:
    return CandidateAccuracy(
        label=candidate.label,
        state=candidate.state,
        reason=candidate.reason,
        selection=candidate.selection,
    )


def _engine(benchmark: BenchmarkReport) -> EngineLatency:
    return EngineLatency(label=benchmark.label, rows=tuple(map(_latency, benchmark.rows)))


def _latency(row: LatencyRow) -> LatencyAt:
    return LatencyAt(
        sizes=row.sizes,
        end_to_end=times_of(row.end_to_end),
        upload=times_of(row.upload),
        compute=times_of(row.compute),
        download=times_of(row.download),
        throughput_per_s=row.throughput_per_s,
        ratio=row.ratio,
        ratio_missing=row.ratio_missing,
        peak_memory_bytes=row.peak_memory_bytes,
    )


def times_of(samples: Samples) -> Times:
    """Return the numbers of a measured region."""
    return Times(
        count=len(samples.values_s),
        median_ms=_percentile_ms(samples, 50),
        p95_ms=_percentile_ms(samples, 95),
        p99_ms=_percentile_ms(samples, 99),
        stable=samples.stable,
    )


def _percentile_ms(samples: Samples, percent: int) -> float | None:
    value_s = samples.percentile_or_absent(percent)
    return None if value_s is None else value_s * 1e3
