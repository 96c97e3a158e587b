"""Trace an engine: a few runs in which the calls of the host, and what the library records inside
them, get a time each.

Tracing costs time, so no figure of a benchmark comes from here. How much it costs is measured too:
the same process runs the engine without it first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

from pipeline import backends
from pipeline.backends.base import Session, run_session
from pipeline.backends.tracing import Tracer
from pipeline.benchmark.interleaved import Workload, profile_for
from pipeline.core.artifacts import Engine
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Tensors
from pipeline.host.nvtx import Ranges, find_ranges, range_of
from pipeline.measurement.clock import Clock, monotonic
from pipeline.results.timeline import EngineTrace, TracedRun, Window

WARMUP_RUNS = 2  # of each session; OpenVINO's counters lose precision with every run
RUNS = 10
MIN_RUNS, MAX_S = 2, 10.0  # of a slow engine: after so many seconds no further run begins


def trace_engine(engine: Engine, workload: Workload, progress: Progress = silent) -> EngineTrace:
    """Trace an engine at one shape, in this process."""
    profile = profile_for(engine, workload)
    progress(None, "runs without tracing")
    untraced_s = _untraced_s(engine, profile, workload.feeds)
    progress(None, "runs with tracing")
    ranges = find_ranges(engine.is_on_gpu)
    with closing(backends.open_tracer(engine, profile)) as tracer:
        for _ in range(WARMUP_RUNS):
            run_session(tracer.session, workload.feeds)
        tracer.start(WARMUP_RUNS)
        runs = [
            _ranged_run(tracer, workload.feeds, ranges, f"{engine.recipe.label}, run {number}")
            for number in run_numbers()
        ]
        activity = tracer.stop(runs)
    return EngineTrace(
        label=engine.recipe.label,
        device=engine.target.device,
        sizes=workload.sizes,
        runs=runs,
        activity=activity,
        untraced_s=untraced_s,
        traced_s=min(run.window.seconds for run in runs),
        nvtx=ranges is not None,
        on_gpu=engine.is_on_gpu,
    )


def _untraced_s(engine: Engine, profile: int, feeds: Tensors, clock: Clock = monotonic) -> float:
    with (
        closing(backends.load(engine)) as loaded,
        closing(loaded.session(profile)) as session,
    ):
        times = []
        for _ in range(WARMUP_RUNS):
            run_session(session, feeds)
        for _ in run_numbers(clock):
            begin = clock()
            run_session(session, feeds)
            times.append(clock() - begin)
    return min(times)


def run_numbers(clock: Clock = monotonic) -> Iterator[int]:
    """Count the runs from 1, until there are RUNS, or MAX_S have passed after MIN_RUNS."""
    began_s = clock()
    for number in range(1, RUNS + 1):
        if number > MIN_RUNS and clock() - began_s > MAX_S:
            return
        yield number


def _ranged_run(tracer: Tracer, feeds: Tensors, ranges: Ranges | None, name: str) -> TracedRun:
    with range_of(ranges, name):
        return trace_run(tracer, feeds, ranges)


def trace_run(
    tracer: Tracer, feeds: Tensors, ranges: Ranges | None = None, clock: Clock = monotonic
) -> TracedRun:
    """Run once from host arrays to host arrays, and return when each call began and ended."""
    calls: dict[str, Window] = {}
    for step, call in steps_of(tracer.session, feeds).items():
        with range_of(ranges, step):
            begin = clock()
            if step == "execute":
                with tracer.mark():
                    call()
            else:
                call()
            calls[step] = Window(begin, clock())
    return TracedRun(calls)


def steps_of(session: Session, feeds: Tensors) -> dict[str, Callable[[], object]]:
    """Return the calls of one run, in order."""
    return {
        "bind": partial(session.bind, feeds),
        "upload": session.upload,
        "execute": session.execute,
        "download": session.download,
        "synchronize": session.synchronize,
        "fetch": session.fetch,
    }
