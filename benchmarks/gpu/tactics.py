"""Whether what surrounds a build changes which kernels TensorRT chooses: the same graph built again
and again from an empty timing cache.

ResNet-50 at batch 1 in fp16: its kernels take about 5 us each, so what happens between two of them
while they are timed can decide.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.bare import LOOP, serialized, written
from benchmarks.gpu.contest import Entrant
from benchmarks.gpu.facts import device_peaks, entry_of
from benchmarks.gpu.measure_row import Options, recipe_of, with_failure
from benchmarks.gpu.parts import begun, race_at, wanted
from benchmarks.gpu.plans import graph_of, plan_of
from benchmarks.gpu.rows import row_named
from pipeline.backends import timing_cache
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt.messages import builders_logger_of, logger_of
from pipeline.compiler.candidates.stages import convert_model
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Recipe
from pipeline.execution.stage_runner import Stage
from pipeline.plan.files import home

TACTICS = Stage("tactics", 1)
REPEATS, PAUSE_S = 3, 30.0
KINDS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "after a pause": ("pause",),
    "timed once": ("once",),
    "watched": ("watched",),
    "listened to": ("listened to",),
    "all together": ("detailed", "watched", "listened to"),
    "as Crucible builds": ("detailed", "in C++"),
}
"""What is done in a build besides the plain API's: the GPU idle for a while before; kernels timed
once instead of eight times; a progress monitor and a logger in Python, which TensorRT calls (the
logger for every message, however unimportant); detailed verbosity; TensorRT's own logger with
warnings.
"""


def tactics(options: Options) -> dict[str, Any]:
    """Every kind REPEATS times, then one race of all these engines in bare loops."""
    row = row_named("resnet50_b1")
    assert row is not None
    (document, entries, watch), known = begun(options), device_peaks()
    context, model = graph_of(plan_of(row, options.overrides))
    recipe = recipe_of(context, "fp16")
    converted = convert_model(context, model, recipe)
    entrants = []
    for number in range(1, REPEATS + 1):
        for kind in (kind for kind in KINDS if wanted(kind, options.only)):
            name = f"{kind} {number}"
            engine = with_failure(
                entries,
                name,
                _built,
                context,
                converted,
                recipe.model_copy(update={"variant": name}),
            )
            entrants += (
                [
                    Entrant(
                        name,
                        engine.model_copy(
                            update={"recipe": recipe.model_copy(update={"variant": LOOP})}
                        ),
                        "bare",
                    )
                ]
                if engine
                else []
            )
    seconds = {
        step.subject: round(step.seconds, 1)
        for step in context.runner.steps
        if step.stage == TACTICS.name
    }
    for outcome in race_at(model, {}, 1, entrants, options, watch) if entrants else []:
        entries[outcome.entrant.name] = entry_of(outcome, known) | {
            "build_s": seconds.get(outcome.entrant.name)
        }
    return {**document, "batch": 1, "entries": entries, "targets": [], "gpu": watch.summary()}


def _built(context: CompileContext, converted: OnnxModel, recipe: Recipe) -> Engine:
    """Never from the store: the same build again is what is looked at."""
    out = home() / "gpu_models" / "tactics" / recipe.variant
    out.mkdir(parents=True, exist_ok=True)
    engine: Engine = context.runner.anew(
        TACTICS,
        recipe.variant,
        build_kind,
        converted,
        recipe,
        context.build_options("tensorrt"),
        out,
    )
    return engine


def build_kind(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """The engine of a converted graph from an empty timing cache, in the way that its recipe's
    variant names.
    """
    gpu, _ = trt_library.host()
    trt, kind = trt_library.library(), KINDS[recipe.variant.rpartition(" ")[0]]
    watching = _monitor(trt)
    logger = (
        logger_of(trt)
        if "listened to" in kind
        else builders_logger_of(trt)
        if "in C++" in kind
        else None
    )

    def change(config: Any) -> None:
        if "once" in kind:
            config.avg_timing_iterations = 1
        if "detailed" in kind:
            config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if "watched" in kind:
            config.progress_monitor = watching

    with timing_cache.gpu_lock(gpu.uuid, progress):
        time.sleep(PAUSE_S if "pause" in kind else 0.0)
        plan = serialized(trt, model, recipe, options, b"", change, logger)
    return written(plan, model, recipe, options, out)


def _monitor(trt: Any) -> Any:
    """The least that a progress monitor can be."""

    class Monitor(trt.IProgressMonitor):
        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            pass

        def step_complete(self, phase_name: str, step: int) -> bool:
            return True

        def phase_finish(self, phase_name: str) -> None:
            pass

    return Monitor()
