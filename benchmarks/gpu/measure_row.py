"""One row: model -> graph -> engines -> race -> what is written down. Everything but the bare
builds and PyTorch goes through the pipeline.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from benchmarks.gpu.bare import LOOP, build_bare
from benchmarks.gpu.contest import Entrant, contest
from benchmarks.gpu.facts import add_answers, device_peaks, entry_of, layer_facts, ratios
from benchmarks.gpu.host import Watch
from benchmarks.gpu.plans import feeds_of, graph_of, plan_of
from benchmarks.gpu.rows import WAYS, Row, targets
from benchmarks.gpu.torch_peers import COMPILE_MODES, LIMIT_S, look_at, peer_engine
from pipeline.backends import timing_cache
from pipeline.backends.pytorch import backend as pytorch_
from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.backends.tensorrt import library as trt_library
from pipeline.benchmark.interleaved import Workload
from pipeline.compiler.candidates.stages import build_engine, convert_model, prove_engine
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.recipe import Recipe
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import CrucibleError
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.execution.stage_runner import Stage, StageCall
from pipeline.measurement.clock import monotonic
from pipeline.onnx_graph.flops import node_costs, total
from pipeline.plan.files import home
from pipeline.plan.recipes import recipe_from_candidate
from pipeline.plan.schema import BenchmarkConfig, CandidateConfig
from pipeline.results.layer_table import LayerTable

T = TypeVar("T")
BARE = Stage("bare", timing_cache.FORMAT + 1, tensorrt_.DISTRIBUTIONS)
REWRITTEN = "simplify.rewrite_attention=true"
OVERRIDES = {
    " surgery": (REWRITTEN,),
    " folded": (REWRITTEN, "simplify.surgery=pipeline.folding:fold_strides"),
    " level 5": ("tensorrt.optimization_level=5",),
}
"""What ways whose names end so change in the plan besides its candidate."""
LOOKED_AT = ("compile fp16", "eager fp16")
"""Peers that run once in a child of their own before the race."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure, from the command line."""

    seconds: float = 1.5
    ways: tuple[str, ...] = ()  # empty: all of the row
    peers: bool = True
    bare: bool = True
    overrides: tuple[str, ...] = ()  # of the plan
    only: tuple[str, ...] = ()  # variants of a part
    modes: tuple[str, ...] = COMPILE_MODES  # of torch.compile, the first that ends in time
    build_only: bool = False  # fill the store and the caches, measure nothing


# -- engines -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Made:
    """One of ours with its bare twin and what it really runs."""

    way: str
    recipe: Recipe
    converted: OnnxModel
    engine: Engine
    tables: tuple[LayerTable, ...]  # of each profile
    bare: Engine | None = None


def recipe_of(context: CompileContext, way: str) -> Recipe:
    candidate = CandidateConfig.model_validate({"backend": "tensorrt", **WAYS[way]})
    return recipe_from_candidate(candidate, tensorrt_.probe(), context.plan, calibrated=True)


def make(
    context: CompileContext, model: OnnxModel, way: str, built: CompileContext | None = None
) -> Made:
    """Convert, build, prove.

    `built`: the context that gives the engine's profiles if they are not those of the graph.
    """
    recipe = recipe_of(context, way)
    tensorrt_.check_recipe(recipe, tensorrt_.probe())
    converted = convert_model(context, model, recipe)
    target_context = built or context
    engine = build_engine(target_context, converted, recipe)
    try:
        tables = prove_engine(target_context, engine, converted)
    except CrucibleError as error:  # the engine can be measured all the same
        print(f"   no layer table: {error.message}", file=sys.stderr, flush=True)
        tables = ()
    return Made(way, recipe, converted, engine, tables)


def build_twin(context: CompileContext, converted: OnnxModel, recipe: Recipe) -> Engine:
    """Build the same graph by the plain API, cached in the store as ours is."""
    call = StageCall(
        BARE,
        Engine,
        partial(build_bare, converted, recipe, context.build_options("tensorrt")),
        subject=recipe.label,
        target=context.target("tensorrt"),
    )
    return context.runner.stage(call)


def make_way(
    row: Row,
    context: CompileContext,
    model: OnnxModel,
    options: Options,
    way: str,
    entries: dict[str, dict[str, Any]],
) -> Made:
    """One of ours: of the row's graph, of the graph after surgery, or built with more kernels
    tried.
    """
    if more := overrides_of(way):
        other, model = graph_of(plan_of(row, (*options.overrides, *more)))
        context.runner.steps.extend(other.runner.steps)
        context = replace(other, runner=context.runner)
    made = make(context, model, way)
    return (
        replace(
            made,
            bare=with_failure(
                entries, f"bare {way}", build_twin, context, made.converted, made.recipe
            ),
        )
        if options.bare
        else made
    )


def overrides_of(way: str) -> tuple[str, ...]:
    return next((overrides for ending, overrides in OVERRIDES.items() if way.endswith(ending)), ())


def with_profile(context: CompileContext, profile: Mapping[str, Any]) -> CompileContext:
    """The same context, building for another range of shapes."""
    dims = Profile.model_validate({"dims": profile})
    return replace(context, plan=context.plan.model_copy(update={"profiles": (dims,)}))


# -- the row -----------------------------------------------------------------


def prepare_row(row: Row, options: Options) -> dict[str, Any]:
    """The graphs of a row, in every way that needs no GPU to be made: what the CPU does of it, for
    the store.
    """
    context, model = graph_of(plan_of(row, options.overrides))
    ways = options.ways or row.ways
    for way in ways:
        more = overrides_of(way)
        its_context, its_model = (
            graph_of(plan_of(row, (*options.overrides, *more))) if more else (context, model)
        )
        recipe = recipe_of(its_context, way)
        if recipe.realised_in != "flags":
            convert_model(its_context, its_model, recipe)
    return {"prepared": list(ways)}


def measure_row(row: Row, options: Options) -> dict[str, Any]:
    """All of one row, as far as it came; a way or a peer that fails is an entry with its reason."""
    begin = monotonic()
    row = replace(row, ways=options.ways or row.ways)
    context, model = graph_of(plan_of(row, options.overrides))
    feeds = feeds_of(model.inputs, {})
    entries: dict[str, dict[str, Any]] = {}
    made = engines_of(row, context, model, options, entries)
    entrants = entrants_of(made)
    if options.peers:
        entrants += peers_of(row, context, model, feeds, options, entries)
    if options.build_only:
        return {"built": [entrant.name for entrant in entrants], "entries": entries}
    foreign = timing_cache.other_processes(trt_library.host()[0].uuid)
    watch = Watch()
    outcomes = contest(
        entrants,
        workload_of(model, {}, feeds, row.batch),
        BenchmarkConfig(duration_s=options.seconds),
        watch,
    )
    known = device_peaks()
    entries |= {
        outcome.entrant.name: entries.get(outcome.entrant.name, {}) | entry_of(outcome, known)
        for outcome in outcomes
    }
    add_answers(entries, outcomes)
    for each in made:
        entries[f"ours {each.way}"] |= build_facts(context, each)
    gpu = tensorrt_.probe().device
    return {
        "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "seconds": round(monotonic() - begin, 1),
        "inputs": {name: list(shape) for name, shape in row.inputs.items()},
        "batch": row.batch,
        "overrides": list(options.overrides),
        "measured_s": options.seconds,
        "entries": entries,
        "ratios": ratios(outcomes, [each.way for each in made]),
        "targets": targets(row, entries, gpu),
        "gpu": watch.summary(),
        "foreign_processes": None if foreign.unknown else len(foreign.pids),
    }


def engines_of(
    row: Row,
    context: CompileContext,
    model: OnnxModel,
    options: Options,
    entries: dict[str, dict[str, Any]],
) -> list[Made]:
    """Ours in every way that can be built, each with its bare twin."""
    found = []
    for way in row.ways:
        made = with_failure(
            entries, f"ours {way}", make_way, row, context, model, options, way, entries
        )
        found += [made] if made else []
    return found


def with_failure(
    entries: dict[str, dict[str, Any]],
    name: str,
    function: Callable[..., T],
    *arguments: Any,
    **named: Any,
) -> T | None:
    """What the function gives; None, with its reason written down, where it fails."""
    try:
        return function(*arguments, **named)
    except CrucibleError as error:
        entries[name] = {"failed": error.message}
    except Exception as error:  # noqa: BLE001  the edge of a row: the others go on
        traceback.print_exc()
        entries[name] = {"failed": f"{type(error).__name__}: {error}"}
    print(f"   {name}: {entries[name]['failed']}", file=sys.stderr, flush=True)
    return None


def entrants_of(made: Sequence[Made]) -> list[Entrant]:
    """Ours, each with its bare twin; of the first, our engine file in a bare loop too."""
    entrants = []
    for number, each in enumerate(made):
        entrants.append(Entrant(f"ours {each.way}", each.engine))
        if each.bare:
            entrants.append(Entrant(f"bare {each.way}", each.bare, "bare"))
        if number == 0:
            loop = each.engine.model_copy(
                update={"recipe": each.recipe.model_copy(update={"variant": LOOP})}
            )
            entrants.append(Entrant(f"loop {each.way}", loop, "bare"))
    return entrants


def peers_of(
    row: Row,
    context: CompileContext,
    model: OnnxModel,
    feeds: Tensors,
    options: Options,
    entries: dict[str, dict[str, Any]],
) -> list[Entrant]:
    """PyTorch's entrants; those of LOOKED_AT are first run once in a child of their own, which
    fills Inductor's cache too.
    """
    entrants = []
    for peer in row.peers:
        name, engine = (
            f"torch {peer}",
            peer_engine(
                context.source, model, peer, pytorch_.probe(), home() / "gpu_models" / row.name
            ),
        )
        if peer not in LOOKED_AT:
            entrants.append(Entrant(name, engine, "torch"))
            continue
        for mode in options.modes if peer.startswith("compile") else ("",):
            before = entries.pop(name, {})  # why the mode before this one did not come to an end
            facts = with_failure(entries, name, looked_at, engine, feeds, mode)
            if facts is not None:
                entries[name] = {**facts, **({"mode_before": before["failed"]} if before else {})}
                entrants.append(Entrant(name, engine, "torch", mode=mode))
                break
    return entrants


def looked_at(engine: Engine, feeds: Tensors, mode: str) -> dict[str, Any]:
    """What `look_at` found, from an earlier command if there was one: compiling again would only
    find its own cache.
    """
    target = engine.target
    key = hashlib.sha256(
        f"{engine.digest} {target.version} {target.device} {mode}".encode()
    ).hexdigest()[:12]
    file = engine.root / f"looked_at_{key}.json"
    if not file.is_file():
        found = call_in_child(
            look_at, engine, feeds, mode, name=engine.recipe.label, limit=TimeLimit(LIMIT_S)
        )
        file.write_text(json.dumps(found), encoding="utf-8")
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return facts


def workload_of(model: OnnxModel, sizes: dict[str, int], feeds: Tensors, rows: int) -> Workload:
    costs = node_costs(model.path, sizes)
    moved = total(amount for cost in costs for amount in (cost.bytes_read, cost.bytes_written))
    return Workload(sizes, feeds, rows, total(cost.flops for cost in costs), moved)


def build_facts(context: CompileContext, made: Made) -> dict[str, Any]:
    """How long the build took, and what the engine really runs."""
    seconds = {step.digest: round(step.seconds, 1) for step in context.runner.steps}
    return {
        "recipe": made.recipe.label,
        "build_s": seconds.get(made.engine.root.name),
        "bare_build_s": seconds.get(made.bare.root.name) if made.bare else None,
        "engine_bytes": made.engine.size_bytes,
        "layers": layer_facts(made.tables[0], made.recipe) if made.tables else None,
        "notes": [note.text for note in (*made.converted.notes, *made.engine.notes)],
    }
