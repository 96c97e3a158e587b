"""A delivered engine, checked or measured again: `crucible validate` and `crucible bench`. Never answered from the store."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.candidates import reference_outputs
from pipeline.compile import build_baselines, build_reference, export_model
from pipeline.config import Plan
from pipeline.core import Engine, OnnxModel
from pipeline.errors import ModelError
from pipeline.job import Job, batch_rows, open_job
from pipeline.peaks import with_limits
from pipeline.report import BenchmarkFailure, BenchmarkReport, Benchmarks, Report, ValidationReport
from pipeline.runner import Runner
from pipeline.stages.benchmark import benchmark, check_sizes
from pipeline.stages.validate import validate
from pipeline.sweep import Sweep, batch_symbol, sweep_of, sweep_sizes


def reopen_job(report: Report, plan: Plan, runner: Runner) -> Job:
    """The job of a delivered engine, for its plan with overrides; ModelError if the source is no longer what the engine was made from."""
    job = open_job(plan, runner)
    if job.source.digest != report.source_digest:
        raise ModelError("the model's source or weights have changed since this engine was compiled", "compile the plan again")
    return job


def validate_again(report: Report, plan: Plan, engine: Engine, runner: Runner) -> ValidationReport:
    """A delivered engine on its plan's validation set, or on the selection set where there is no other; never reused: its files may have changed."""
    job = reopen_job(report, plan, runner)
    reference = build_reference(job, export_model(job))
    samples = job.data.validation or job.data.selection
    arguments = (engine, reference_outputs(job, reference, samples), samples, job.plan.accuracy, batch_rows(job))
    found: ValidationReport = runner.run(validate, *arguments, name="validate", progress=runner.progress("validate"))
    return found


def benchmark_again(report: Report, plan: Plan, engine: Engine, runner: Runner) -> Benchmarks:
    """A delivered engine and its baselines in one interleaved run, the engine last; never reused."""
    job = reopen_job(report, plan, runner)
    exported = export_model(job)
    return _measured(report, plan, [*build_baselines(job, exported), engine], exported, runner)


def sweep_again(report: Report, plan: Plan, engine: Engine, runner: Runner, batches: Sequence[int], limit_s: float | None) -> Sweep:
    """A delivered engine alone, at every batch. PlanError for a batch outside its profiles, or a model without one."""
    symbol = batch_symbol(engine.inputs)
    sizes = sweep_sizes(symbol, engine.profiles, batches)
    check_sizes(sizes, engine.inputs, engine.profiles)
    job = reopen_job(report, plan, runner)
    asked = plan.model_copy(update={"benchmark": plan.benchmark.model_copy(update={"sizes": sizes})})
    (found,) = _measured(report, asked, [engine], export_model(job), runner).results
    assert isinstance(found, BenchmarkReport)
    return sweep_of(found.label, symbol, found.rows, limit_s)


def _measured(report: Report, plan: Plan, engines: Sequence[Engine], model: OnnxModel, runner: Runner) -> Benchmarks:
    """ModelError if one of them cannot be measured."""
    found: Benchmarks = runner.run(benchmark, engines, model, plan.benchmark, name="benchmark", progress=runner.progress("benchmark"))
    for result in found.results:
        if isinstance(result, BenchmarkFailure):
            raise ModelError(f"{result.label} cannot be measured: {result.reason}", "see `crucible doctor`")
    return with_limits(found, engines, {each.label: each.layers for each in report.candidates}, plan.benchmark.threads)
