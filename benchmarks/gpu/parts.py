"""What the table of rows does not hold: best throughput, copies that overlap, what flexibility
costs. Each part is a few races.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.gpu.contest import Entrant, Outcome, contest
from benchmarks.gpu.facts import device_peaks, entry_of
from benchmarks.gpu.host import Watch
from benchmarks.gpu.measure_row import (
    Made,
    Options,
    build_facts,
    make,
    overrides_of,
    recipe_of,
    with_failure,
    with_profile,
    workload_of,
)
from benchmarks.gpu.plans import feeds_of, graph_of, plan_of
from benchmarks.gpu.rows import H200, Row, image, target
from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.compiler.candidates.stages import convert_model
from pipeline.compiler.context import CompileContext
from pipeline.core.artifacts import OnnxModel
from pipeline.plan.schema import BenchmarkConfig

BEST_IMAGES_PER_S = 75_000.0
STREAMS, OF_SMALL = (1, 2, 3), (1, 2, 4, 8)
"""Of batches from LARGE on, where a fourth brought nothing, and of smaller ones, which fill the GPU
less.
"""
LARGE = 256
GRAPH_PROFILE = {
    "batch": [1, 2, 8]
}  # at which the graph is checked; engines are built for one batch each


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine of a part. `points`: the sizes at which it is measured; of a fixed shape one,
    without sizes.
    """

    name: str
    inputs: Mapping[str, tuple[int | str, ...]]
    points: tuple[Mapping[str, int], ...]
    profile: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    way: str = "fp16"


def begun(options: Options) -> tuple[dict[str, Any], dict[str, dict[str, Any]], Watch]:
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"created": now, "overrides": list(options.overrides)}, {}, Watch()


def wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(word in name for word in only)


# -- throughput --------------------------------------------------------------


PLACEMENTS = (
    "int8",
    "int8 modelopt",
    "int8 implicit",
)  # folded, and without the first layer, were slower: docs/benchmarks/gpu.md


def throughput(
    options: Options, batch: int, level: int = 3, pixels: str = "float32"
) -> dict[str, Any]:
    """ResNet-50 in int8, input on the device: one race of all placements of Q/DQ, each on one
    stream and on several.
    """
    (document, entries, watch), known = begun(options), device_peaks()
    name = "resnet50" if pixels == "float32" else f"resnet50_{pixels}"
    row = Row(
        f"{name}_any_batch",
        name,
        {"image": ("batch", 3, 224, 224)},
        (),
        0,
        dtypes={"image": pixels},
    )
    streams = STREAMS if batch >= LARGE else OF_SMALL
    entrants: list[Entrant] = []
    models: list[OnnxModel] = []
    for way in options.ways or PLACEMENTS:
        label = f"{way} b{batch} level {level}"
        if placed := with_failure(entries, label, placed_engine, row, options, way, batch, level):
            built, made, model = placed
            entries[label] = build_facts(built, made)
            entrants += [
                Entrant(f"{label}, {count} stream{'s' * (count > 1)}", made.engine, "flow", count)
                for count in streams
            ]
            models.append(model)
    outcomes = (
        race_at(models[0], {"batch": batch}, batch, entrants, options, watch) if entrants else []
    )
    entries |= {outcome.entrant.name: entry_of(outcome, known) for outcome in outcomes}
    best = best_throughput(entries)
    goals = (
        [target("images per second, input on the device", best[1], "at least", BEST_IMAGES_PER_S)]
        if H200 in tensorrt_.probe().device
        else []
    )
    return {
        **document,
        "batch": batch,
        "input": pixels,
        "entries": entries,
        "best": best[0],
        "targets": goals,
        "gpu": watch.summary(),
    }


def placed_engine(
    row: Row, options: Options, way: str, batch: int, level: int
) -> tuple[CompileContext, Made, OnnxModel]:
    """The engine of one placement for one batch, from the graph of any batch."""
    context, model = graph_of(
        plan_of(row, (*options.overrides, *overrides_of(way)), [GRAPH_PROFILE])
    )
    built = with_profile(_at_level(context, level), {"batch": batch})
    return built, make(context, model, way, built), model


def _at_level(context: CompileContext, level: int) -> CompileContext:
    return replace(
        context,
        plan=context.plan.model_copy(
            update={
                "tensorrt": context.plan.tensorrt.model_copy(update={"optimization_level": level})
            }
        ),
    )


def best_throughput(entries: Mapping[str, Mapping[str, Any]]) -> tuple[str | None, float | None]:
    rates = {
        name: entry["throughput_per_s"]
        for name, entry in entries.items()
        if entry.get("throughput_per_s")
    }
    return max(rates.items(), key=lambda item: item[1], default=(None, None))


def race_at(
    model: OnnxModel,
    sizes: dict[str, int],
    rows: int,
    entrants: Sequence[Entrant],
    options: Options,
    watch: Watch,
) -> list[Outcome]:
    workload = workload_of(model, sizes, feeds_of(model.inputs, sizes), rows)
    return contest(entrants, workload, BenchmarkConfig(duration_s=options.seconds), watch)


# -- overlap -----------------------------------------------------------------

OVERLAP_BATCH = 64
BUFFERS = {
    "resident": (1, False),
    "copied, one set of buffers": (1, True),
    "copied, two sets": (2, True),
    "resident, two sets": (2, False),
}


def overlap(options: Options) -> dict[str, Any]:
    """ResNet-50 fp16: throughput with the input on the device and with its copy, which two sets of
    buffers hide; fp32 and uint8 input.
    """
    (document, entries, watch), known = begun(options), device_peaks()
    for name, model_name, dtype in (
        ("fp32", "resnet50", "float32"),
        ("uint8", "resnet50_uint8", "uint8"),
    ):
        row = Row(
            f"overlap_{name}", model_name, image(OVERLAP_BATCH), (), 0, dtypes={"image": dtype}
        )
        context, model = graph_of(plan_of(row, options.overrides))
        made = with_failure(entries, f"{name} input", make, context, model, "fp16")
        if made is None:
            continue
        entrants = [
            Entrant(f"{name} input, {text}", made.engine, "flow", count, upload)
            for text, (count, upload) in BUFFERS.items()
        ]
        outcomes = race_at(model, {}, OVERLAP_BATCH, entrants, options, watch)
        entries |= {outcome.entrant.name: entry_of(outcome, known) for outcome in outcomes}
    return {
        **document,
        "batch": OVERLAP_BATCH,
        "entries": entries,
        "targets": [],
        "gpu": watch.summary(),
    }


# -- flexibility -------------------------------------------------------------


def _batches(*sizes: int) -> tuple[Mapping[str, int], ...]:
    return tuple({"batch": size} for size in sizes)


FIXED: tuple[Mapping[str, int], ...] = ({},)
_FREE = {"image": ("batch", 3, 224, 224)}
_SIDES = {"image": (1, 3, "height", "width")}
_TOKENS = dict.fromkeys(("input_ids", "attention_mask"), (1, "sequence"))
_128 = dict.fromkeys(("input_ids", "attention_mask"), (1, 128))

LEVELS = tuple((f"level {level}", (f"tensorrt.optimization_level={level}",)) for level in (0, 5))
TIMINGS = (("each kernel timed once", ("tensorrt.timing_iterations=1",)),)
SPACES = tuple((f"workspace {mib} MiB", (f"tensorrt.workspace_mib={mib}",)) for mib in (64, 1024))

FLEXIBILITY: Mapping[str, tuple[Variant, ...]] = {
    "resnet50": (
        Variant("fixed b1", image(1), FIXED),
        Variant("fixed b8", image(8), FIXED),
        Variant("fixed b64", image(64), FIXED),
        Variant("batch 1 to 8", _FREE, _batches(1, 8), {"batch": [1, 8, 8]}),
        Variant("batch 1 to 64", _FREE, _batches(1, 8, 64), {"batch": [1, 8, 64]}),
        Variant(
            "height and width 160 to 448",
            _SIDES,
            tuple({"height": side, "width": side} for side in (224, 160, 448)),
            {"height": [160, 224, 448], "width": [160, 224, 448]},
        ),
        *(
            Variant(f"fixed b1, {name}", image(1), FIXED, overrides=overrides)
            for name, overrides in (*LEVELS, *SPACES, *TIMINGS)
        ),
    ),
    "encoder": (
        Variant("fixed 1x128", _128, FIXED),
        Variant(
            "sequence 64 to 256",
            _TOKENS,
            tuple({"sequence": size} for size in (128, 64, 256)),
            {"sequence": [64, 128, 256]},
        ),
        Variant(
            "sequence 1 to 1024",
            _TOKENS,
            tuple({"sequence": size} for size in (128, 1, 1024)),
            {"sequence": [1, 128, 1024]},
        ),
        *(
            Variant(f"fixed 1x128, {name}", _128, FIXED, overrides=overrides)
            for name, overrides in LEVELS
        ),
    ),
}


def flexibility(model_name: str, options: Options) -> dict[str, Any]:
    """Fixed against dynamic shapes, levels and workspaces, in fp16: one race for each shape that is
    measured, of all engines that take it.
    """
    (document, entries, watch), known = begun(options), device_peaks()
    built: list[tuple[Variant, CompileContext, OnnxModel, Made]] = []
    for variant in FLEXIBILITY[model_name]:
        if wanted(variant.name, options.only):
            made = with_failure(entries, variant.name, _built, model_name, variant, options)
            built += [made] if made else []
    for shapes, entered in by_shapes([(variant, model) for variant, _, model, _ in built]).items():
        sizes = dict(entered)
        entrants = [Entrant(built[index][0].name, built[index][3].engine) for index in sizes]
        first = next(iter(sizes))
        label = ", ".join(f"{name} {list(shape)}" for name, shape in shapes)
        for outcome in race_at(
            built[first][2], sizes[first], shapes[0][1][0], entrants, options, watch
        ):
            entries[f"{outcome.entrant.name} at {label}"] = entry_of(outcome, known)
    for variant, context, _, each in built:
        entries[variant.name] = build_facts(context, each)
    return {**document, "entries": entries, "targets": [], "gpu": watch.summary()}


def prepare_flexibility(model_name: str, options: Options) -> dict[str, Any]:
    """The graphs of all variants."""
    variants = [
        variant for variant in FLEXIBILITY[model_name] if wanted(variant.name, options.only)
    ]
    for variant in variants:
        context, model = _graph(model_name, variant, options)
        convert_model(context, model, recipe_of(context, variant.way))
    return {"prepared": [variant.name for variant in variants]}


def _built(
    model_name: str, variant: Variant, options: Options
) -> tuple[Variant, CompileContext, OnnxModel, Made]:
    context, model = _graph(model_name, variant, options)
    return variant, context, model, make(context, model, variant.way)


def _graph(model_name: str, variant: Variant, options: Options) -> tuple[CompileContext, OnnxModel]:
    profiles = [variant.profile] if variant.profile else []
    name = f"flexible_{model_name}_{'_'.join(variant.profile) or 'fixed'}"
    row = Row(
        name,
        model_name,
        variant.inputs,
        (),
        0,
        output="logits" if "image" in variant.inputs else "hidden",
    )
    sizes = {symbol: triple[1] for symbol, triple in variant.profile.items()}
    return graph_of(plan_of(row, (*options.overrides, *variant.overrides), profiles, sizes))


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def by_shapes(
    built: Sequence[tuple[Variant, OnnxModel]],
) -> dict[Shapes, list[tuple[int, dict[str, int]]]]:
    """Concrete shapes of the inputs -> which engines are measured there, each with its sizes.
    Pure.
    """
    found: dict[Shapes, list[tuple[int, dict[str, int]]]] = {}
    for index, (variant, model) in enumerate(built):
        for sizes in variant.points:
            shapes = tuple((spec.name, spec.resolve(sizes)) for spec in model.inputs)
            found.setdefault(shapes, []).append((index, dict(sizes)))
    return found
