"""A delivered engine, checked or measured again: `crucible validate` and `crucible bench`. Never answered from the store."""

from __future__ import annotations

from pipeline.candidates import reference_outputs
from pipeline.compile import build_baselines, export_model
from pipeline.config import Plan
from pipeline.core import Engine
from pipeline.errors import ModelError
from pipeline.job import Job, batch_rows, open_job
from pipeline.report import BenchmarkFailure, BenchmarkReport, Benchmarks, Report, ValidationReport
from pipeline.runner import Runner
from pipeline.stages.benchmark import benchmark
from pipeline.stages.validate import validate


def reopen_job(report: Report, plan: Plan, runner: Runner) -> Job:
    """The job of a delivered engine, for its plan with overrides; ModelError if the source is no longer what the engine was made from."""
    job = open_job(plan, runner)
    if job.source.digest != report.source_digest:
        raise ModelError("the model's source or weights have changed since this engine was compiled", "compile the plan again")
    return job


def validate_again(report: Report, plan: Plan, engine: Engine, runner: Runner) -> ValidationReport:
    """A delivered engine on its plan's validation set, or on the selection set where there is no other; never reused: its files may have changed."""
    job = reopen_job(report, plan, runner)
    reference = build_baselines(job, export_model(job))[0]
    samples = job.data.validation or job.data.selection
    arguments = (engine, reference_outputs(job, reference, samples), samples, job.plan.accuracy, batch_rows(job))
    found: ValidationReport = runner.run(validate, *arguments, name="validate", progress=runner.progress("validate"))
    return found


def benchmark_again(report: Report, plan: Plan, engine: Engine, runner: Runner) -> list[BenchmarkReport]:
    """A delivered engine and its baselines in one interleaved run; never reused."""
    job = reopen_job(report, plan, runner)
    exported = export_model(job)
    engines = [*build_baselines(job, exported), engine]
    found: Benchmarks = runner.run(benchmark, engines, exported, plan.benchmark, name="benchmark", progress=runner.progress("benchmark"))
    for result in found.results:
        if isinstance(result, BenchmarkFailure):
            raise ModelError(f"{result.label} cannot be measured: {result.reason}", "see `crucible doctor`")
    return [result for result in found.results if isinstance(result, BenchmarkReport)]
