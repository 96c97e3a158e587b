"""Measure the candidates under load, for an objective other than latency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.execution.stage_runner import Stage, StageCall
from pipeline.plan.schema import BenchmarkConfig, LatencyLimit, Objective
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, LoadCurve, LoadRun
from pipeline.results.candidates import Candidate
from pipeline.stages.benchmark import benchmark_load

THROUGHPUT = Stage(
    "throughput",
    1,
    writes_files=False,
    needs_quiet_device=True,
    is_cacheable=lambda found: not found.provisional,
)
LATENCY_SHARE = 0.25
"""Share of the benchmark's budget for latencies, which then decide nothing."""


def limit_of(objective: Objective) -> float | None:
    """Return the limit of the p99 in seconds; None if the objective has none."""
    return objective.limit_s if isinstance(objective, LatencyLimit) else None


def measure_load(
    context: CompileContext,
    model: OnnxModel,
    baselines: Sequence[Engine],
    candidates: Iterable[Candidate],
) -> LoadRun | None:
    """Measure the baselines and the accurate candidates under load; None if latency decides."""
    if context.plan.objective == "latency":
        return None
    entries = [RaceEntry(engine, Role.BASELINE) for engine in baselines]
    entries += [
        RaceEntry(candidate.engine, Role.CANDIDATE)
        for candidate in candidates
        if candidate.engine and candidate.state == "measured"
    ]
    limit_s = limit_of(context.plan.objective)
    labels = tuple(entry.engine.recipe.label for entry in entries)
    call = StageCall(
        THROUGHPUT,
        LoadRun,
        partial(benchmark_load, entries, model.inputs, context.plan.benchmark, limit_s),
        depends_on=(labels, context.quiet_environment, context.plan.profiles),
    )
    return context.runner.stage(call)


def with_curves(
    results: Iterable[BenchmarkReport | BenchmarkFailure], load: LoadRun | None
) -> tuple[BenchmarkReport | BenchmarkFailure, ...]:
    """Return the results with the curves of the engines that were measured under load."""
    curves = {curve.label: curve for curve in load.curves} if load else {}
    found = []
    for result in results:
        curve = curves.get(result.label)
        if isinstance(result, BenchmarkReport) and isinstance(curve, LoadCurve):
            result = result.model_copy(update={"load": curve})
        found.append(result)
    return tuple(found)


def after_load(candidate: Candidate, run: LoadRun | None) -> Candidate:
    """Return the candidate, with the state that follows from its points."""
    found = {result.label: result for result in run.curves} if run else {}
    result = found.get(candidate.label)
    if isinstance(result, BenchmarkFailure):
        reason = f"under load: {result.reason}"
        return candidate.model_copy(update={"state": "failed", "reason": reason})
    if result is not None and result.best is None:
        return candidate.model_copy(
            update={"state": "over the limit", "reason": result.why_over_limit()}
        )
    return candidate


def shorter(options: BenchmarkConfig, objective: Objective) -> BenchmarkConfig:
    """Return the options for measuring latencies: less time if they decide nothing."""
    if objective == "latency":
        return options
    return options.model_copy(update={"budget_s": options.budget_s * LATENCY_SHARE})
