"""Whole runs from numpy arrays to numpy arrays, beside PyTorch at its best.

    python -m benchmarks host_to_host [--parts resnet50_b1,resnet50_b64,...] [--ways fp16,int8]
                                      [--modes max-autotune,reduce-overhead] [--compile-limit S]
                                      [--seconds S] [--no-overlap] [--keep FOLDER] [--into DIR]
                                      [--limit SECONDS]

A part is one model at one shape. Ours in fp16 and int8 and PyTorch (torch.compile in fp16,
channels_last, CUDA graphs, pinned memory, non_blocking copies) run in turn, each in processes of
its own, from arrays in ordinary memory and from page-locked ones (`OpenEngine.input_buffer`,
`pin_memory`), one run after another, and with 3 runs that overlap (batches only). The ratio is
PyTorch's time over ours, from the same memory and overlapping alike, with its 95 % interval.
`uint8_b64` takes images as uint8 [N, H, W, C], and both sides preprocess on the GPU.

The bus takes `bus_ms`, as measured in the same run from page-locked memory, both ways. A single run
takes at least the sum of bus and GPU, and overlapping ones the longer of the two: `floor_ms`.

Minutes of a part: 1.5 to race, and with an empty store and cold caches 1 for the graph, 1 for each
build, and 1 to 3 for max-autotune: about 5. With CRUCIBLE_HOME and --keep kept: 1.5. What does not
compile within --compile-limit seconds (150) is compiled by the next of --modes. All end after
--limit seconds (600): what is not done then has no result. `--build` only builds and compiles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Cell, Row, argument_parser
from benchmarks.gpu.contest import Entrant, Outcome, contest, cosine
from benchmarks.gpu.facts import interval_of
from benchmarks.gpu.host import Watch, restore, store, tensorrt_device
from benchmarks.gpu.measure_row import Options, make_way, with_failure, workload_of
from benchmarks.gpu.plans import feeds_of, graph_of, plan_of
from benchmarks.gpu.rows import WAYS, image, row_named, words_of
from benchmarks.gpu.rows import Row as Model
from benchmarks.gpu.torch_peers import COMPILE_MODES, cache_folder, peer_engine
from benchmarks.limits.from_host import compile_once, opened_from_host
from benchmarks.limits.part_results import measure_parts
from pipeline.backends.pytorch import backend as pytorch_
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import Tensors
from pipeline.errors import CrucibleError
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.plan.files import home
from pipeline.plan.schema import BenchmarkConfig
from pipeline.results.benchmarks import BenchmarkFailure, LatencyRow

NAME = "host_to_host"
PEER = "PyTorch"
OVERLAPPING = 3
PREPROCESS = ("preprocess.image={mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}",)


def _part(name: str, *ways: str) -> Model:
    model = row_named(name)
    assert model is not None
    return replace(model, ways=ways)


PARTS: Mapping[str, tuple[Model, tuple[str, ...]]] = {
    "resnet50_b1": (_part("resnet50_b1", "fp16", "int8"), ()),
    "resnet50_b64": (_part("resnet50_b64", "fp16", "int8"), ()),
    "uint8_b64": (
        Model("resnet50_raw_b64", "resnet50", image(64), ("fp16", "int8"), 0),
        PREPROCESS,
    ),
    "vit_b32": (_part("vit_b32", "fp16 folded", "int8 folded"), ()),
    "mobilenet_b1": (_part("mobilenet_b1", "fp16", "int8"), ()),
    "encoder_b32": (_part("encoder_b32", "fp16 surgery", "int8 surgery"), ()),
}
"""Model with our ways, and what its plan says besides."""


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    device = tensorrt_device()
    cache_folder(home())
    if arguments.keep:
        restore(home(), arguments.keep)
    parts = {name: partial(measured, name, arguments) for name in arguments.parts}
    run = {"seconds": arguments.seconds, "device": device}
    measure_parts(NAME, parts, targets_of, arguments.into, arguments.limit, run)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser(NAME, __doc__)
    parser.add_argument(
        "--parts", type=partial(_known, PARTS), default=tuple(PARTS), metavar="PART,PART"
    )
    parser.add_argument(
        "--ways",
        type=partial(_known, WAYS),
        default=(),
        metavar="WAY,WAY",
        help="of ours, instead of the part's own",
    )
    parser.add_argument(
        "--modes",
        type=partial(_known, COMPILE_MODES),
        default=COMPILE_MODES,
        metavar="MODE,MODE",
        help="of torch.compile: the first that ends in time",
    )
    parser.add_argument("--compile-limit", type=float, default=150.0, metavar="SECONDS")
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="of measuring, per entrant [%(default)s]"
    )
    parser.add_argument("--no-overlap", dest="overlap", action="store_false")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="where timing cache and Inductor's cache come from and go to",
    )
    parser.add_argument("--build", action="store_true", help="measure nothing")
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="[600]")
    return parser.parse_args(words)


def _known(names: Sequence[str] | Mapping[str, Any], text: str) -> tuple[str, ...]:
    found = words_of(text)
    if unknown := [name for name in found if name not in names]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}, got '{unknown[0]}'")
    return found


def measured(name: str, arguments: argparse.Namespace) -> list[Row]:
    """All rows of a part; ours and PyTorch's that fail are rows with the reason."""
    model, overrides = PARTS[name]
    options = Options(bare=False, overrides=overrides)
    context, graph = graph_of(plan_of(model, overrides))
    feeds = feeds_of(graph.inputs, {})
    failures: dict[str, dict[str, Any]] = {}
    entrants: list[Entrant] = []
    overlap = arguments.overlap and model.batch > 1
    for way in arguments.ways or model.ways:
        title = f"ours {way}"
        made = with_failure(
            failures, title, make_way, model, context, graph, options, way, failures
        )
        entrants += entrants_of(Entrant(title, made.engine), overlap) if made else []
    folder = home() / NAME / name
    peer = peer_engine(context.raw_source, graph, "best fp16", pytorch_.probe(), folder)
    mode = with_failure(failures, PEER, mode_in_time, peer, feeds, arguments)
    if mode:
        entrants += entrants_of(Entrant(PEER, peer, "torch", mode=mode), overlap)
    if arguments.keep:
        store(home(), arguments.keep)
    failed = [{"engine": title, "note": found["failed"]} for title, found in failures.items()]
    if arguments.build:
        return [*failed, *({"engine": entrant.name, "note": "built"} for entrant in entrants)]
    workload = workload_of(graph, {}, feeds, model.batch)
    outcomes = contest(
        entrants,
        workload,
        BenchmarkConfig(duration_s=arguments.seconds),
        Watch(),
        opened_from_host,
    )
    return [*failed, *rows_of(outcomes, model.batch)]


def mode_in_time(peer: Engine, feeds: Tensors, arguments: argparse.Namespace) -> str:
    """The first of the modes that compiles in time, which fills Inductor's cache."""
    *before, last = arguments.modes
    limit_s = arguments.compile_limit
    for mode in before:
        try:
            call_in_child(compile_once, peer, feeds, mode, name=mode, limit=TimeLimit(limit_s))
        except CrucibleError as error:
            print(f"   {mode}: {error.message}", file=sys.stderr, flush=True)
        else:
            return str(mode)
    call_in_child(compile_once, peer, feeds, last, name=last, limit=TimeLimit(limit_s))
    return str(last)


def entrants_of(entrant: Entrant, overlap: bool) -> list[Entrant]:
    """The same engine from ordinary and page-locked memory, and with runs that overlap."""
    found = [
        entrant,
        replace(entrant, name=f"{entrant.name}, pinned", pinned=True),
    ]
    if overlap:
        found += [
            replace(each, name=f"{each.name}, overlapped", sessions=OVERLAPPING) for each in found
        ]
    return found


# -- figures -----------------------------------------------------------------


def rows_of(outcomes: Sequence[Outcome], batch: int) -> list[Row]:
    """A row for each entrant."""
    latencies = {
        outcome.entrant.name: outcome.result.rows[0]
        for outcome in outcomes
        if not isinstance(outcome.result, BenchmarkFailure)
    }
    bus_ms = bus_of(
        [
            latencies[each.entrant.name]
            for each in outcomes
            if each.entrant.name in latencies and each.entrant.pinned and each.entrant.sessions == 1
        ]
    )
    answers = {each.entrant.name: each.loaded.outputs for each in outcomes if each.loaded}
    rows: list[Row] = []
    for outcome in outcomes:
        entrant = outcome.entrant
        engine = entrant.name.partition(",")[0]
        row: dict[str, Cell] = {
            "engine": engine,
            "memory": "page-locked" if entrant.pinned else "ordinary",
            "overlapping": entrant.sessions,
        }
        if isinstance(outcome.result, BenchmarkFailure):
            rows.append({**row, "note": outcome.result.reason})
            continue
        peer = PEER + entrant.name.removeprefix(engine)
        alone = latencies.get(engine)
        figures = figures_of(
            latencies[entrant.name],
            latencies.get(peer) if peer != entrant.name else None,
            alone.compute.median_s * 1e3 if alone else None,
            bus_ms,
            entrant.sessions > 1,
        )
        rows.append(
            {
                **row,
                **figures,
                "rows_per_s": batch / latencies[entrant.name].end_to_end.median_s,
                "cosine": cosine(answers.get(entrant.name, {}), answers.get(PEER, {})),
                "note": ", ".join((outcome.loaded.facts if outcome.loaded else {}).values()),
            }
        )
    return rows


def bus_of(rows: Sequence[LatencyRow]) -> float | None:
    """Both ways over the bus in ms: the fastest from page-locked memory, one run after another."""
    times = [(row.upload.median_s + row.download.median_s) * 1e3 for row in rows]
    return min(times, default=None)


def figures_of(
    mine: LatencyRow,
    peer: LatencyRow | None,
    gpu_ms: float | None,
    bus_ms: float | None,
    overlapping: bool,
) -> dict[str, float | str | None]:
    """Times in ms, the ratio of PyTorch's time over this one, and what this one is near to."""
    wall_ms = mine.end_to_end.median_s * 1e3
    ratio = interval_of(peer.end_to_end, mine.end_to_end) if peer else None
    value, low, high = ratio or (None, None, None)
    floor_ms = None
    if gpu_ms is not None and bus_ms is not None:
        floor_ms = max(gpu_ms, bus_ms) if overlapping else gpu_ms + bus_ms
    return {
        "wall_ms": wall_ms,
        "gpu_ms": gpu_ms,
        "bus_ms": bus_ms,
        "floor_ms": floor_ms,
        "floor_share": floor_ms / wall_ms if floor_ms else None,
        "binds": None if floor_ms is None else "bus" if (bus_ms or 0) > (gpu_ms or 0) else "GPU",
        "ratio": value,
        "ratio_low": low,
        "ratio_high": high,
    }


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    """In every part, from either memory, alone and overlapping: the best of ours is ahead of
    PyTorch.
    """
    best: dict[str, Row] = {}
    for row in rows:
        if row.get("ratio") is None:
            continue
        alike = "overlapping" if int(row["overlapping"] or 0) > 1 else "one after another"
        case = f"{row['part']}, {row['memory']} memory, {alike}"
        if case not in best or float(row["ratio"] or 0) > float(best[case]["ratio"] or 0):
            best[case] = row
    return {
        f"{case}: ahead of PyTorch (got {row['ratio']:.2f} with {row['engine']})": float(
            row["ratio_low"] or 0
        )
        > 1
        for case, row in best.items()
    }
