"""Measure the candidates in one run with the baselines."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

from pipeline.benchmark.cpu_peaks import measure_once, with_limits
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.candidates.ablation import ablation_from
from pipeline.compiler.candidates.further import Prepared
from pipeline.compiler.context import CompileContext
from pipeline.compiler.objective import after_load, measure_load, shorter, with_curves
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.progress import CandidateFigures
from pipeline.execution.stage_runner import Runner, Stage, StageCall
from pipeline.plan.baselines import call_of
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport, Benchmarks, LoadCurve
from pipeline.results.candidates import Ablation, Candidate, Origin, ProfileWidth, Rescue
from pipeline.stages.benchmark import ENOUGH_RUNS, benchmark, figures_of

BENCHMARK = Stage(
    "benchmark",
    9,
    writes_files=False,
    needs_quiet_device=True,
    is_cacheable=lambda found: not found.provisional,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements: candidates with their latencies, the baselines, and what was tried."""

    candidates: tuple[Candidate, ...]
    rescues: tuple[Rescue, ...]
    ablation: Ablation | None
    baselines: tuple[BenchmarkReport, ...]
    run: Benchmarks
    call: str = ""  # how the user calls the fastest baseline, where that is a PyTorch module
    profile_width: ProfileWidth | None = None

    @property
    def curve(self) -> LoadCurve | None:
        """The curve of the fastest baseline; None if latency decides."""
        return self.baselines[0].load if self.baselines else None


def measure(
    context: CompileContext, model: OnnxModel, baselines: list[Engine], prepared: Prepared
) -> Measured:
    """Measure the candidates interleaved with the baselines.

    A candidate that cannot be measured gets the reason. If latency does not decide, all are
    measured under load first, and all ratios refer to the baseline of the highest throughput.
    """
    load = measure_load(context, model, baselines, prepared.candidates)
    prepared = replace(
        prepared, candidates=tuple(after_load(candidate, load) for candidate in prepared.candidates)
    )
    entries = entries_of(baselines, prepared, load.baseline if load else "")
    engines = [entry.engine for entry in entries]
    labels = tuple(engine.recipe.label for engine in engines)
    call = StageCall(
        BENCHMARK,
        Benchmarks,
        partial(
            benchmark,
            entries,
            model,
            shorter(context.plan.benchmark, context.plan.objective),
            ENOUGH_RUNS,
        ),
        depends_on=(labels, context.quiet_environment, context.plan.profiles),
        figures=partial(figures_of, engines, [engine.recipe.label for engine in baselines]),
    )
    report_baselines(context.runner, baselines)
    run = context.runner.stage(call)
    options = context.plan.benchmark
    measure_once(context.runner, engines, options.threads, options.budget_s)
    layers = {candidate.label: candidate.layers for candidate in prepared.candidates}
    run = with_limits(run, engines, layers, options.threads)
    results = with_curves(run.results, load)
    run = run.model_copy(update={"results": results})
    found = {result.label: result for result in results}
    candidates = tuple(
        with_benchmark(candidate, found.get(candidate.label)) for candidate in prepared.candidates
    )
    ablation = Ablation(label="") if context.plan.ablate else None
    if prepared.ablated:
        ablation = ablation_from(prepared.ablated, candidates)
    return Measured(
        candidates=candidates,
        rescues=prepared.rescues,
        ablation=ablation,
        baselines=baselines_first(run, baselines),
        run=run,
        call=call_of_fastest(run, baselines),
    )


def report_baselines(runner: Runner, baselines: Iterable[Engine]) -> None:
    """Report which engines are baselines: the race does not know all of them as such."""
    for engine in baselines:
        recipe = engine.recipe
        runner.report(BENCHMARK, CandidateFigures(recipe.label, recipe.precision, is_baseline=True))


def call_of_fastest(run: Benchmarks, baselines: Iterable[Engine]) -> str:
    """Return the Python call of the fastest baseline; empty if it is not a PyTorch module."""
    recipes = (engine.recipe for engine in baselines if engine.recipe.label == run.baseline)
    return next((call_of(recipe) for recipe in recipes if recipe.backend == "pytorch"), "")


def entries_of(
    baselines: Iterable[Engine], prepared: Prepared, decisive: str = ""
) -> list[RaceEntry[Engine]]:
    """Return every engine to measure, with its role.

    `decisive` is the label of the baseline that all ratios refer to; empty: the fastest one.
    """
    compared = prepared.ablated.labels if prepared.ablated else frozenset()
    entries = []
    for engine in baselines:
        may_decide = decisive in ("", engine.recipe.label)
        entries.append(RaceEntry(engine, Role.BASELINE if may_decide else Role.SHOWN))
    for candidate in prepared.candidates:
        if candidate.engine is None or not worth_measuring(candidate, compared):
            continue
        role = Role.CANDIDATE if candidate.state == "measured" else Role.SHOWN
        if candidate.label in compared:
            role = Role.COMPARED
        entries.append(RaceEntry(candidate.engine, role))
    return entries


def baselines_first(run: Benchmarks, baselines: Iterable[Engine]) -> tuple[BenchmarkReport, ...]:
    """Return the measured baselines, the one that all ratios refer to first."""
    labels = {engine.recipe.label for engine in baselines}
    reports = [
        result
        for result in run.results
        if isinstance(result, BenchmarkReport) and result.label in labels
    ]
    return tuple(sorted(reports, key=lambda report: report.label != run.baseline))


def worth_measuring(candidate: Candidate, compared: Collection[str]) -> bool:
    """Return whether to benchmark a candidate: its precision is proved and its outputs checked.

    The accuracy may have failed: the plot of accuracy against latency shows such candidates too.
    Failed attempts of a rescue are left out, unless the ablation has `compared` them.
    """
    if candidate.selection is None or candidate.state == "mislabelled":
        return False
    is_failed_attempt = candidate.origin is Origin.FALLBACK and candidate.state != "measured"
    return not is_failed_attempt or candidate.label in compared


def with_benchmark(
    candidate: Candidate, result: BenchmarkReport | BenchmarkFailure | None
) -> Candidate:
    """Add the result of the benchmark to the candidate."""
    if isinstance(result, BenchmarkFailure):
        return candidate.model_copy(
            update={"state": "failed", "reason": f"benchmark: {result.reason}"}
        )
    return candidate.model_copy(update={"benchmark": result})
