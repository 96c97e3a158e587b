"""What the service says, in the form in which it says it; with an example of each for /docs."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

from pydantic import ConfigDict, Field

from pipeline.core import Frozen
from pipeline.measurement.clock import Samples
from pipeline.measurement.statistics import Interval
from pipeline.report.files import HTML_NAME, JSON_NAME, MARKDOWN_NAME
from pipeline.results.report import (
    BenchmarkReport,
    Candidate,
    LatencyRow,
    Report,
    ValidationReport,
    Verdict,
)
from pipeline.results.report import State as CandidateState
from service.jobs.state import Failure, Job, Measures, Progress, State

FORMS = {
    "application/json": JSON_NAME,
    "text/markdown": MARKDOWN_NAME,
    "text/html": HTML_NAME,
}  # of reports, by what Accept asks for
EXAMPLE_ID = "01931f3a5b2c07d1e9a44c6f2"


def _example(**values: Any) -> ConfigDict:
    return ConfigDict(json_schema_extra={"examples": [values]})


class Refusal(Frozen):
    """The body of every answer that is no success."""

    model_config = _example(
        error="no job '17'", code="service.not_found", next="GET /jobs lists yours"
    )

    error: str = Field(description="What was expected, and what came")
    code: str = Field(description="Stable; for programs")
    next: str = Field(default="", description="What to do")


class Links(Frozen):
    """Where more of a job is."""

    job: str
    events: str
    log: str
    report: str | None = Field(description="Null as long as there is none")


class JobView(Frozen):
    """A job as its owner sees it."""

    model_config = _example(
        id=EXAMPLE_ID,
        name="resnet50",
        owner="key:3f9a0c1d7b",
        state="running",
        device="cpu",
        measures=None,
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
    measures: Measures | None = Field(
        default=None,
        description="Of a benchmark: the model and the version that it measures; null: it compiles",
    )
    created: str
    started: str | None
    finished: str | None
    attempt: int = Field(
        description="How often it was started: more than once if the server was restarted meanwhile"
    )
    estimate_s: float | None = Field(
        description=(
            "How long your jobs of this name usually take on this device; null if none has"
            " succeeded"
        )
    )
    elapsed_s: float | None = Field(
        description="Of the last attempt, until now or its end; null before it"
    )
    progress: Progress | None = Field(
        description="The stage that runs; `estimate_s` is how long it usually takes here"
    )
    verdict: Verdict | None
    winner: str | None
    failure: Failure | None
    links: Links


class JobPage(Frozen):
    """Some jobs, newest first."""

    jobs: tuple[JobView, ...]
    next: str | None = Field(
        description="Give it as `after` for the next page; null: this was the last"
    )


class Health(Frozen):
    status: Literal["ok", "ready"]


def view_of_job(job: Job, now: dt.datetime) -> JobView:
    """What of a job is told. Not its child's pid, and not its identity."""
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


def _elapsed_s(job: Job, now: dt.datetime) -> float | None:
    if job.started is None:
        return None
    return (
        job.took_s
        if job.finished
        else round(max(0.0, (now - dt.datetime.fromisoformat(job.started)).total_seconds()), 3)
    )


# -- parts of reports --------------------------------------------------------


class Times(Frozen):
    """One measured region in numbers; the raw values are at /reports/{id}/samples."""

    count: int
    median_ms: float | None
    p95_ms: float | None = Field(description="Null where there are too few values to know it")
    p99_ms: float | None
    stable: bool = Field(description="False: the median still moved while it was measured")


class LatencyAt(Frozen):
    """One engine at one shape."""

    sizes: dict[str, int]
    end_to_end: Times
    upload: Times
    compute: Times
    download: Times
    throughput_per_s: float
    ratio: Interval | None = Field(
        description="Baseline / this with its 95 % interval; null for the baseline itself"
    )
    ratio_missing: str = Field(default="", description="Why there is no ratio")
    peak_memory_bytes: int


class EngineLatency(Frozen):
    label: str
    rows: tuple[LatencyAt, ...]


class LatencyView(Frozen):
    """How fast the baselines and the candidates are."""

    name: str
    verdict: Verdict
    winner: str | None
    ratio: Interval | None = Field(description="Of the winner to the baseline, at the first shape")
    ratio_missing: str = Field(default="", description="Why there is no ratio")
    benchmarked: str
    baseline: EngineLatency | None
    baselines: tuple[EngineLatency, ...]
    candidates: tuple[EngineLatency, ...] = Field(description="Those that were measured")


class CandidateAccuracy(Frozen):
    label: str
    state: CandidateState
    reason: str
    selection: ValidationReport | None


class AccuracyView(Frozen):
    """What the engines' answers are worth."""

    name: str
    verdict: Verdict
    reasons: tuple[str, ...]
    reference: str
    winner: str | None
    validation: ValidationReport | None = Field(description="Of the winner, on the validation set")
    candidates: tuple[CandidateAccuracy, ...]


def latency_of_report(report: Report) -> LatencyView:
    """The speed in a report."""
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
    """The accuracy in a report."""
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
    """Every raw value, by engine and shape: for analyses of one's own."""
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
        end_to_end=_times(row.end_to_end),
        upload=_times(row.upload),
        compute=_times(row.compute),
        download=_times(row.download),
        throughput_per_s=row.throughput_per_s,
        ratio=row.ratio,
        ratio_missing=row.ratio_missing,
        peak_memory_bytes=row.peak_memory_bytes,
    )


def _times(samples: Samples) -> Times:
    median, p95, p99 = (
        None if (value := samples.percentile_or_absent(p)) is None else value * 1e3
        for p in (50, 95, 99)
    )
    return Times(
        count=len(samples.values_s), median_ms=median, p95_ms=p95, p99_ms=p99, stable=samples.stable
    )
