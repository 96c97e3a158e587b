"""Benchmark: measure all engines in one interleaved run, as rows of a report.

`benchmark` measures their latency, `benchmark_load` their throughput under load.
`pipeline/benchmark/interleaved.py` runs the engines in turn, and `pipeline/benchmark/load.py`
searches for each engine's best batch size and number of sessions.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.backends.timing_cache import other_processes
from pipeline.benchmark.elimination import Role, StopReason
from pipeline.benchmark.interleaved import (
    BLOCK_S,
    VALUES_PER_BLOCK,
    Block,
    Contestant,
    Peer,
    R,
    RaceEntry,
    Workload,
    contend,
    race,
)
from pipeline.benchmark.load import (
    NO_BATCH_AXIS,
    SEARCH_SHARE,
    Search,
    Searched,
    batch_symbol_of_all,
    contend_under_load,
    load_sizes,
    session_counts,
    session_threads,
    tail_s,
)
from pipeline.core.artifacts import Engine, Note, OnnxModel
from pipeline.core.progress import CandidateFigures, Progress, silent
from pipeline.core.shapes import Point, Profile, TensorSpec
from pipeline.errors import PlanError
from pipeline.execution.child_process import Child
from pipeline.host.environment import usable_cores
from pipeline.host.gpu import find_gpus
from pipeline.host.gpu_monitor import watching
from pipeline.measurement.clock import Samples, monotonic, samples_from_blocks
from pipeline.measurement.comparison import NotMeasurable, Obstacle, compare
from pipeline.measurement.statistics import Interval
from pipeline.plan.schema import BenchmarkConfig
from pipeline.results.benchmarks import (
    BenchmarkFailure,
    BenchmarkReport,
    Benchmarks,
    LatencyRow,
    LoadCurve,
    LoadRun,
    Totals,
)

OUT_OF_TIME = "the time for measuring (`benchmark.budget_s`) was over after {processes}"
ENOUGH_RUNS = 200
"""Runs that determine a block's median.

More runs of a very fast engine waste time unless far percentiles are needed.
"""


def benchmark(
    entries: Sequence[RaceEntry[Engine]],
    model: OnnxModel,
    options: BenchmarkConfig,
    enough_runs: int | None = ENOUGH_RUNS,
    progress: Progress = silent,
) -> Benchmarks:
    """Measure the latency of every engine at every size, in one interleaved run.

    Ratios refer to the fastest baseline. `model` is the source graph: its FLOPs apply to all
    engines. An engine that fails gives a BenchmarkFailure in its position; the others continue. A
    block may end before its time once it holds `enough_runs` runs, or never if that is None.
    PlanError if a size lies outside the profiles.
    """
    engines = [entry.engine for entry in entries]
    workloads = workloads_from_plan(engines, model, options)
    shapes = [workload.shape for workload in workloads]

    def start(engine: Engine) -> Peer:
        prepared = with_threads(engine, options.threads or usable_cores())
        return Child(contend, prepared, workloads, name=engine.recipe.label)

    on_gpu = any(engine.is_on_gpu for engine in engines)
    gpu = next((gpu.uuid for gpu in find_gpus().devices), "") if on_gpu else ""
    others = other_processes(gpu).pids if gpu else ()
    with watching(gpu) as watch:
        contestants = race(
            entries,
            shapes,
            options,
            start,
            progress,
            enough_runs=enough_runs,
            gpu=gpu,
            block_s=BLOCK_S,
        )
    use = watch.use((*others, *(other_processes(gpu).pids if gpu else ())))
    host = BusyHost(os.getloadavg()[0], usable_cores())
    baseline = baseline_of(contestants)
    return Benchmarks(
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        results=results(contestants, workloads, host),
        baseline=baseline.engine.recipe.label if baseline else "",
        load_1min=round(host.load_1min, 2),
        gpu_use=use,
    )


def figures_of(
    engines: Sequence[Engine], baselines: Collection[str], run: Benchmarks
) -> tuple[CandidateFigures, ...]:
    """Return the latency of each engine of a run, for the live plot. `baselines` are labels."""
    return tuple(
        result.figures(engine.recipe.precision, result.label in baselines)
        for engine, result in zip(engines, run.results, strict=True)
        if isinstance(result, BenchmarkReport)
    )


def without_figures(progress: Progress) -> Progress:
    """Return a progress that leaves figures out: times under load are not those of the plot."""

    def forward(fraction: float | None, text: str, figures: CandidateFigures | None = None) -> None:
        if figures is None:
            progress(fraction, text)

    return forward


@dataclass(frozen=True, slots=True)
class BusyHost:
    """The load of the host, for the message about a missing ratio."""

    load_1min: float
    cores: int

    def too_busy(self, evidence: str) -> str:
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return f"this host is too busy to tell: load {self.load_1min:.1f} on {cores}; {evidence}"


def with_threads(engine: Engine, threads: int) -> Engine:
    """Return the engine with a number of threads to load it with, equal for all engines.

    It may differ from the number of threads of the build.
    """
    return engine.model_copy(update={"threads": threads})


# -- throughput under load ---------------------------------------------------


def benchmark_load(
    entries: Sequence[RaceEntry[Engine]],
    inputs: tuple[TensorSpec, ...],
    options: BenchmarkConfig,
    limit_s: float | None,
    progress: Progress = silent,
) -> LoadRun:
    """Measure every engine under load, then compare all at their best points.

    The best point has the highest throughput whose p99 is within `limit_s`; None: no limit. The
    search takes half of the budget, and the comparison a quarter. An engine that fails gives a
    BenchmarkFailure in its position. PlanError if a point has too few requests for its p99.
    """
    cores = usable_cores()
    workloads = load_workloads(inputs, entries[0].engine.profiles, options)

    def start(engine: Engine, sessions: int, tried: Sequence[Workload] = workloads) -> Peer:
        threads = session_threads(options.threads, cores, sessions, engine.is_on_gpu)
        prepared = with_threads(engine, threads)
        return Child(contend_under_load, prepared, sessions, tried, name=engine.recipe.label)

    searched = Search(
        entries,
        workloads,
        session_counts(options.threads, cores, all(each.engine.is_on_gpu for each in entries)),
        limit_s,
        options,
        monotonic() + options.budget_s * SEARCH_SHARE,
        start,
        progress,
    ).run()
    if batch_symbol_of_all(inputs) is None:
        for one in searched:
            one.untried.insert(0, NO_BATCH_AXIS)
    best = {one.engine.digest: one.best(limit_s) for one in searched}

    def start_at_best(engine: Engine) -> Peer:
        point = best[engine.digest]
        assert point is not None
        tried = [workload for workload in workloads if workload.sizes == point.sizes]
        return start(engine, point.sessions, tried)

    racing = [entry for entry in entries if best[entry.engine.digest]]
    quarter = options.model_copy(update={"budget_s": options.budget_s / 4})
    contestants = []
    if racing:
        contestants = race(
            racing, ["best point"], quarter, start_at_best, without_figures(progress)
        )
    host = BusyHost(os.getloadavg()[0], cores)
    baseline = baseline_of(contestants)
    return LoadRun(
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        curves=curves(searched, contestants, limit_s, host),
        baseline=baseline.engine.recipe.label if baseline else "",
    )


def load_workloads(
    inputs: tuple[TensorSpec, ...], profiles: Sequence[Profile], options: BenchmarkConfig
) -> tuple[Workload, ...]:
    """Return the workloads to try, by ascending batch.

    The other symbols have the sizes of the first benchmarked shape.
    """
    # This import loads onnx, which the service does without.
    from pipeline.onnx_graph.feeds import draw_feeds

    first = dict(options.sizes[0]) if options.sizes else {}
    if not first and profiles:
        first = profiles[0].sizes("opt")
    return tuple(
        Workload(
            sizes=sizes,
            feeds=draw_feeds(inputs, sizes, 0, values_at(sizes, profiles)),
            rows=rows_per_run(inputs, sizes),
        )
        for sizes in load_sizes(batch_symbol_of_all(inputs), profiles, first)
    )


def curves(
    searched: Sequence[Searched],
    contestants: Sequence[Contestant[Engine]],
    limit_s: float | None,
    host: BusyHost,
) -> tuple[LoadCurve | BenchmarkFailure, ...]:
    """Return the curve of each engine in the search, or a failure, in order."""
    baseline = baseline_of(contestants)
    no_baseline_is_within = not any(
        one.best(limit_s) for one in searched if one.role is Role.BASELINE
    )
    by_digest = {contestant.engine.digest: contestant for contestant in contestants}
    found: list[LoadCurve | BenchmarkFailure] = []
    for one in searched:
        contestant = by_digest.get(one.engine.digest)
        label = one.engine.recipe.label
        failure, may_pass = one.failure, one.may_pass
        if contestant is not None and contestant.failure:
            failure, may_pass = contestant.failure, contestant.may_pass
        if failure:
            found.append(BenchmarkFailure(label=label, reason=failure, provisional=may_pass))
            continue
        curve = LoadCurve(
            label=label,
            limit_s=limit_s,
            points=tuple(one.points),
            best=one.best(limit_s),
            untried=tuple(one.untried),
        )
        if contestant is not None:
            compared = None if contestant is baseline else baseline
            ratio, ratio_missing = ratio_to(contestant, compared, 0, host)
            if no_baseline_is_within:
                ratio_missing = "no baseline has a point within the limit"
            measured = {
                "sample_time": end_to_end_samples(contestant, 0),
                "p99_s": tail_s(contestant.blocks[0]),
                "ratio": ratio,
                "ratio_missing": ratio_missing,
            }
            curve = curve.model_copy(update=measured)
        found.append(curve)
    return tuple(found)


# -- what to measure ---------------------------------------------------------


def workloads_from_plan(
    engines: Sequence[Engine], model: OnnxModel, options: BenchmarkConfig
) -> tuple[Workload, ...]:
    """Return the workloads of the plan's sizes, or of each profile's opt size.

    All sizes are checked against all engines before any measurement starts.
    """
    if not engines:
        raise PlanError(
            "expected at least one engine to measure, got none",
            "give engines, or candidates in the plan",
        )
    opt_sizes = tuple(profile.sizes("opt") for profile in engines[0].profiles)
    choices = options.sizes or opt_sizes or ({},)
    for engine in engines:
        check_sizes(choices, model.inputs, engine.profiles)
    profiles = engines[0].profiles
    return tuple(
        _workload(sizes, values_at(sizes, profiles), model)
        for index, sizes in enumerate(choices)
        if sizes not in choices[:index]
    )


def values_at(sizes: dict[str, int], profiles: Sequence[Profile]) -> dict[str, tuple[int, ...]]:
    """Return the values of the shape inputs at these sizes.

    They are those of the profile's point with exactly these sizes, or else the profile's opt
    values.
    """
    matching = [profile for profile in profiles if profile.holds(sizes)]
    points: tuple[Point, ...] = ("opt", "min", "max")
    for profile in matching:
        for point in points:
            if profile.sizes(point) == sizes:
                return profile.values_at(point)
    return matching[0].values_at("opt") if matching else {}


def check_sizes(
    choices: Iterable[dict[str, int]], inputs: Sequence[TensorSpec], profiles: Sequence[Profile]
) -> None:
    """Raise PlanError unless each choice fits the inputs and lies inside a profile.

    A choice must give a size to every symbol of the inputs, and to no other.
    """
    symbols = {symbol for spec in inputs for symbol in spec.symbols}
    for sizes in choices:
        if set(sizes) != symbols:
            raise PlanError(
                "benchmark.sizes: expected a size for each of"
                f" {', '.join(sorted(symbols)) or 'no symbols'}, got {sizes}",
                "give a size for every symbolic dimension of the inputs, and for no other",
            )
        if profiles and not any(profile.holds(sizes) for profile in profiles):
            allowed = "; ".join(_ranges(profile) for profile in profiles)
            raise PlanError(
                f"benchmark.sizes: expected {allowed}, got {sizes}",
                "measure inside the profiles, or widen a profile and compile again",
            )


def _ranges(profile: Profile) -> str:
    return ", ".join(f"{name} {dim.min} to {dim.max}" for name, dim in profile.dims.items())


def _workload(
    sizes: dict[str, int], values: dict[str, tuple[int, ...]], model: OnnxModel
) -> Workload:
    from pipeline.onnx_graph.feeds import draw_feeds
    from pipeline.onnx_graph.flops import node_costs, total

    costs = node_costs(model.path, sizes)
    amounts = []
    for cost in costs:
        amounts += [cost.bytes_read, cost.bytes_written]
    return Workload(
        sizes=sizes,
        feeds=draw_feeds(model.inputs, sizes, 0, values),
        rows=rows_per_run(model.inputs, sizes),
        flops=total(cost.flops for cost in costs),
        moved_bytes=total(amounts),
    )


def rows_per_run(inputs: Sequence[TensorSpec], sizes: dict[str, int]) -> int:
    """Return the batch size: the size of the symbol that is the first dimension of every input.

    The result is 1 if there is no such symbol.
    """
    symbol = batch_symbol_of_all(inputs)
    return 1 if symbol is None else sizes[symbol]


# -- the report --------------------------------------------------------------


def results(
    contestants: Sequence[Contestant[Engine]], workloads: Sequence[Workload], host: BusyHost
) -> tuple[BenchmarkReport | BenchmarkFailure, ...]:
    """Return a report or a failure for each contestant, in order."""
    baseline = baseline_of(contestants)
    reports: list[BenchmarkReport | BenchmarkFailure] = []
    for contestant in contestants:
        label = contestant.engine.recipe.label
        if contestant.failure:
            failure = BenchmarkFailure(
                label=label, reason=contestant.failure, provisional=contestant.may_pass
            )
            reports.append(failure)
            continue
        compared = None if contestant is baseline else baseline
        rows = tuple(
            _row(contestant, compared, index, workload, host)
            for index, workload in enumerate(workloads)
        )
        notes = _notes(contestant, rows)
        stopped = stop_text(contestant)
        reports.append(BenchmarkReport(label=label, rows=rows, stopped=stopped, notes=notes))
    return tuple(reports)


def baseline_of(contestants: Sequence[Contestant[R]]) -> Contestant[R] | None:
    """Return the fastest baseline, to which all ratios refer."""
    baselines = [
        contestant
        for contestant in contestants
        if contestant.role is Role.BASELINE and not contestant.failure
    ]
    return min(baselines, key=lambda baseline: baseline.runner().level_s, default=None)


def stop_text(contestant: Contestant[R]) -> str:
    """Return why a contestant was stopped early, or "" for one that ran to the end."""
    stop, count = contestant.stop, len(contestant.generations)
    if stop is None:
        return ""
    processes = "1 process" if count == 1 else f"{count} processes"
    if stop.reason is StopReason.SHOWN:
        return f"stopped after {processes}: it cannot win"
    return f"stopped after {processes}: {stop.times_slower:.2f} times as slow as {stop.best}"


def ratio_to(
    contestant: Contestant[R], baseline: Contestant[R] | None, index: int, host: BusyHost
) -> tuple[Interval | None, str]:
    """Return how many times as fast as the baseline a contestant is, or why that is unknown."""
    if baseline is None:
        return None, ""
    try:
        return compare(
            end_to_end_samples(baseline, index), end_to_end_samples(contestant, index)
        ), ""
    except NotMeasurable as error:
        if error.obstacle is not Obstacle.OUT_OF_TIME:
            return None, host.too_busy(error.text)
        stopped = stop_text(contestant) or stop_text(baseline)
        return None, stopped or OUT_OF_TIME.format(processes=error.text)


def _row(
    contestant: Contestant[Engine],
    baseline: Contestant[Engine] | None,
    index: int,
    workload: Workload,
    host: BusyHost,
) -> LatencyRow:
    blocks = contestant.blocks[index]
    timed = [
        [block for block in of_process if block.timed_runs]
        for of_process in contestant.by_process(index)
    ]
    phases = [block for of_process in timed for block in of_process]
    on_gpu = contestant.engine.is_on_gpu
    device = partial(
        samples_from_blocks,
        warmup_s=(),
        clock="device" if on_gpu else "host",
        processes=[len(of_process) for of_process in timed],
        generations=contestant.generations,
    )
    end_to_end = end_to_end_samples(contestant, index)
    median_s = end_to_end.median_s
    ratio, ratio_missing = ratio_to(contestant, baseline, index, host)
    enqueue = device([block.enqueue_s for block in phases], clock="host") if on_gpu else None
    return LatencyRow(
        sizes=workload.sizes,
        end_to_end=end_to_end,
        upload=device([block.upload_s for block in phases]),
        compute=device([block.compute_s for block in phases]),
        download=device([block.download_s for block in phases]),
        latency=device([block.latency_s for block in phases]),
        enqueue=enqueue,
        totals=_totals(blocks),
        throughput_per_s=workload.rows / median_s,
        flops_per_s=None if workload.flops is None else workload.flops / median_s,
        bytes_per_s=None if workload.moved_bytes is None else workload.moved_bytes / median_s,
        ratio=ratio,
        ratio_missing=ratio_missing,
        peak_memory_bytes=max(block.peak_memory_bytes for block in blocks),
        gpu=contestant.gpu_costs[index] if contestant.gpu_costs else None,
    )


def _totals(blocks: Sequence[Block]) -> Totals:
    return Totals(
        queries=sum(block.runs for block in blocks),
        walltime_s=sum(block.run_s for block in blocks),
        timed_queries=sum(block.timed_runs for block in blocks),
        compute_s=sum(block.timed_compute_s for block in blocks),
    )


def end_to_end_samples(contestant: Contestant[R], index: int) -> Samples:
    """Return the times of complete runs of a contestant at a workload."""
    blocks = contestant.blocks[index]
    rewarm = [time for block in blocks for time in block.rewarm_s]
    return samples_from_blocks(
        [block.end_to_end_s for block in blocks],
        [*contestant.warmups[index], *rewarm],
        processes=contestant.processes[index],
        generations=contestant.generations,
        waiting=contestant.waiting(index),
    )


def _notes(contestant: Contestant[Engine], rows: Sequence[LatencyRow]) -> tuple[Note, ...]:
    notes = []
    if any(not row.end_to_end.stable for row in rows):
        text = (
            "the median still moved between blocks: something else may use this host; measure again"
            " when it is quiet"
        )
        notes.append(Note(stage="benchmark", text=text))
    if any(block.runs > VALUES_PER_BLOCK for blocks in contestant.blocks for block in blocks):
        text = f"of a block with over {VALUES_PER_BLOCK:,} runs every k-th time is kept"
        notes.append(Note(stage="benchmark", text=text, level="info"))
    return tuple(notes)
