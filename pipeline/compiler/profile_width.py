"""Measure what the width of a profile costs: a candidate beside an engine for one shape only.

An engine that takes a range of sizes is tuned for the opt of its profile. At another size it may be
slower than an engine that takes this size only. So the recipe is built again with min = opt = max,
and both engines are measured in one interleaved run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import RaceEntry
from pipeline.compiler.candidates.fallback import ANY_SHAPE
from pipeline.compiler.candidates.prepare import CANNOT_BUILD
from pipeline.compiler.candidates.stages import build_engine, convert_model
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.recipe import Recipe
from pipeline.core.shapes import DimRange, Profile, ValueRange
from pipeline.errors import InternalError
from pipeline.execution.stage_runner import Stage, StageCall
from pipeline.formatting import shape_text
from pipeline.measurement.statistics import Interval
from pipeline.results.benchmarks import BenchmarkFailure, Benchmarks
from pipeline.results.candidates import Candidate, ProfileWidth, WidthRow
from pipeline.stages.benchmark import ENOUGH_RUNS, benchmark, values_at

MAX_COST = 1.02  # of a shape, as a ratio; less is not worth another profile


def _is_measured(found: Benchmarks) -> bool:
    """Return False for a run on a busy host: the next compile measures again."""
    cost, _ = cost_from_run(found)
    return cost is not None


WIDTH = Stage("width", 1, writes_files=False, needs_quiet_device=True, is_cacheable=_is_measured)


def measure_width(
    context: CompileContext, model: OnnxModel, winner: Candidate | None
) -> ProfileWidth | None:
    """Measure the cost at the first and the last benchmarked shape; None if the plan does not ask.

    `winner`: the fastest accurate candidate, if there is one.
    """
    if not context.plan.measure_profile_width:
        return None
    if winner is None or winner.engine is None or winner.benchmark is None:
        return ProfileWidth(advice="No candidate was measured that kept its accuracy.")
    shapes = [row.sizes for row in winner.benchmark.rows]
    ends = shapes if len(shapes) < 2 else [shapes[0], shapes[-1]]
    rows = tuple(_row(context, model, winner.engine, sizes) for sizes in ends)
    return ProfileWidth(label=winner.label, rows=rows, advice=advice(winner.recipe, rows))


def _row(
    context: CompileContext, model: OnnxModel, engine: Engine, sizes: dict[str, int]
) -> WidthRow:
    """Return the cost at one shape."""
    if 0 in sizes.values():
        return WidthRow(sizes=sizes, missing="no profile is tuned for a size of 0")
    profiles = (fixed_profile(sizes, engine.profiles),)
    if engine.profiles == profiles:
        return WidthRow(sizes=sizes, missing="the profile holds this shape only")
    only = replace(context, plan=context.plan.model_copy(update={"profiles": profiles}))
    subject = f"{engine.recipe.label} at {shape_text(sizes)}"
    try:
        converted = convert_model(context, model, engine.recipe)
        fixed = build_engine(only, converted, engine.recipe, subject)
    except CANNOT_BUILD as error:
        reason = f"the engine for this shape cannot be built: {error.message}"
        return WidthRow(sizes=sizes, missing=reason)
    except InternalError as error:  # the other results are still good
        reason = f"a bug in Crucible, please report it: {error.message}"
        return WidthRow(sizes=sizes, missing=reason)
    entries = [RaceEntry(engine, Role.BASELINE), RaceEntry(fixed, Role.CANDIDATE)]
    options = context.plan.benchmark.model_copy(update={"sizes": (sizes,)})
    call = StageCall(
        WIDTH,
        Benchmarks,
        partial(benchmark, entries, model, options, ENOUGH_RUNS),
        depends_on=(context.quiet_environment,),
        subject=subject,
    )
    cost, missing = cost_from_run(context.runner.stage(call))
    return WidthRow(sizes=sizes, cost=cost, missing=missing)


def fixed_profile(sizes: dict[str, int], profiles: Sequence[Profile]) -> Profile:
    """Return the profile with min = opt = max at these sizes, with the values measured there."""
    return Profile(
        dims={name: DimRange(min=size, opt=size, max=size) for name, size in sizes.items()},
        values={
            name: ValueRange(min=values, opt=values, max=values)
            for name, values in values_at(sizes, profiles).items()
        },
    )


def cost_from_run(found: Benchmarks) -> tuple[Interval | None, str]:
    """Return how many times as long the first engine takes as the second, or why it is unknown."""
    first, second = found.results
    if isinstance(first, BenchmarkFailure):
        return None, first.reason
    if isinstance(second, BenchmarkFailure):
        return None, second.reason
    row = second.rows[0]
    return row.ratio, row.ratio_missing


def advice(recipe: Recipe, rows: Sequence[WidthRow]) -> str:
    """Return what follows from the costs, in one sentence."""
    measured = [shape_text(row.sizes) for row in rows if row.cost]
    if not measured:
        reasons = "; ".join(f"at {shape_text(row.sizes)}, {row.missing}" for row in rows)
        return f"The cost is not measurable: {reasons}."
    costly = [shape_text(row.sizes) for row in rows if is_costly(row)]
    if not costly:
        return (
            f"No cost above {(MAX_COST - 1) * 100:.0f} % was measured at"
            f" {' and at '.join(measured)}: keep the profiles."
        )
    shapes = " and at ".join(costly)
    if recipe.backend in ANY_SHAPE:
        return (
            f"At {shapes} an engine for one shape is faster: {recipe.backend} makes one engine for"
            " all profiles, so compile a plan of its own for such a shape."
        )
    return (
        f"At {shapes} an engine for one shape is faster: split `profiles`, so that each such shape"
        " is the opt of a profile of its own."
    )


def is_costly(row: WidthRow) -> bool:
    """Return True if the whole interval of the cost is above MAX_COST."""
    return row.cost is not None and row.cost.low > MAX_COST
