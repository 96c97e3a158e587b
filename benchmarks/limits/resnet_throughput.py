"""ResNet-50 in int8 on one GPU, input on the device: images per second by batch and streams, and
where the time goes.

    python -m benchmarks resnet_throughput [--parts int8_b256,int8_b1024,...] [--seconds S]
                                           [--streams 1,2,3] [--keep FOLDER] [--into DIR]
                                           [--limit SECONDS]

A part is one engine for one batch: explicit int8 as a compile builds it (`int8_bN`), with
`tensorrt.optimization_level: 5` (`level5_bN`), with the precisions that TensorRT chooses itself, as
by `precision_from: flags` (`implicit_bN`), and explicit int8 whose network input is int8
(`int8_input_bN`). No plan can ask for the last one, and clients would have to quantise: it shows
what the conversion of the fp32 input costs. Each stream has a session of its own; all share the
weights, and each run is one launch of a CUDA graph. Streams take turns in one process. The
slowest layers of each engine are listed, timed one by one.

Minutes of each part with an empty store: 1 to 1.5 (int8), 2 (level 5), 3 (implicit), 1 more once
for the graph. With CRUCIBLE_HOME kept: 0.4. All end after --limit seconds (300): what is not done
then has no result. The parts run in the order of `--parts`; by default int8_b256, int8_input_b256,
int8_b1024, int8_b512, int8_b2048, int8_b64, level5_b256 and implicit_b256.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median

import onnx

from benchmarks.common import RESULTS, Row, argument_parser
from benchmarks.gpu.contest import Flow
from benchmarks.gpu.host import gpu_state, restore, store, summary_of, tensorrt_device
from benchmarks.gpu.measure_row import Options
from benchmarks.gpu.parts import placed_engine
from benchmarks.gpu.rows import Row as Model
from benchmarks.limits.part_results import measure_parts, without
from pipeline import backends
from pipeline.compiler.candidates.stages import build_engine, prove_engine
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.errors import CrucibleError, ModelError
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.measurement.clock import measure_block
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import home
from pipeline.results.layer_table import LayerTable
from pipeline.results.precision_audit import node_text, slowest

NAME = "resnet_throughput"
USUAL, LEVEL = 3, 5
KINDS: Mapping[str, tuple[str, int]] = {
    "int8": ("int8", USUAL),
    "int8_input": ("int8", USUAL),
    "level5": ("int8", LEVEL),
    "implicit": ("int8 implicit", USUAL),
}
"""Way of gpu_models and optimisation level."""
DEFAULT = (
    "int8_b256",
    "int8_input_b256",
    "int8_b1024",
    "int8_b512",
    "int8_b2048",
    "int8_b64",
    "level5_b256",
    "implicit_b256",
)
GOAL, MLPERF = 80_000, 94_620
"""Images per second: the aim, and what MLPerf Inference has published for an H200 (offline)."""
ROUNDS, FLOW_LIMIT_S, NAMED = 5, 120.0, 10
SHOWN = ("sm_clock_mhz", "power_w")
MODEL = Model("resnet50_any_batch", "resnet50", {"image": ("batch", 3, 224, 224)}, (), 0)


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    device = tensorrt_device()
    if arguments.keep:
        restore(home(), arguments.keep)
    layers: list[Row] = []
    parts = {name: partial(measured, name, arguments, layers) for name in arguments.parts}
    run = {"seconds": arguments.seconds, "device": device}
    measure_parts(NAME, parts, targets_of, arguments.into, arguments.limit, run, {"layers": layers})


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser(NAME, __doc__)
    parser.add_argument("--parts", type=_parts, default=DEFAULT, metavar="PART,PART")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="for each number of streams [%(default)s]"
    )
    parser.add_argument(
        "--streams", type=_numbers, default=(1, 2, 3), metavar="N,N", help="[1,2,3]"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where the timing cache comes from and goes to"
    )
    parser.add_argument("--into", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="[300]")
    return parser.parse_args(words)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    for part in parts:
        kind, _, batch = part.rpartition("_b")
        if kind not in KINDS or not batch.isdigit():
            raise argparse.ArgumentTypeError(
                f"no part '{part}'; expected one of {', '.join(KINDS)} with a batch, as int8_b256"
            )
    return parts


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def measured(part: str, arguments: argparse.Namespace, layers: list[Row]) -> list[Row]:
    """The rows of one engine, one for each number of streams; its layers are added to `layers`."""
    kind, _, number = part.rpartition("_b")
    batch, (way, level) = int(number), KINDS[kind]
    engine, table = engine_of(kind, way, batch, level)
    if arguments.keep:
        store(home(), arguments.keep)
    found, state = call_in_child(
        flow_rates,
        engine,
        batch,
        arguments.streams,
        arguments.seconds,
        name=part,
        limit=TimeLimit(FLOW_LIMIT_S),
    )
    named = layer_rows(table) if table else []
    layers[:] = [*without(layers, part), *({"part": part, **row} for row in named)]
    return [
        {
            "batch": batch,
            "streams": count,
            "images_per_s": median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "ms_per_batch": batch / median(rates) * 1e3,
            "layers_ms": sum_ms(table) if table else None,
            **state,
        }
        for count, rates in found.items()
    ]


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    """The best of all that a plan can ask for."""
    rates = {
        f"{row['part']}, {row['streams']} streams": float(row["images_per_s"] or 0)
        for row in rows
        if row.get("images_per_s") and not str(row["part"]).startswith("int8_input")
    }
    if not rates:
        return {}
    name, best = max(rates.items(), key=lambda item: item[1])
    return {
        f"{least:,} images per second (got {best:,.0f}: {name})": best >= least
        for least in (GOAL, MLPERF)
    }


# -- engines -----------------------------------------------------------------


def engine_of(kind: str, way: str, batch: int, level: int) -> tuple[Engine, LayerTable | None]:
    """The engine for one batch and the times of its layers."""
    context, made, _ = placed_engine(MODEL, Options(bare=False), way, batch, level)
    if kind != "int8_input":
        return made.engine, next(iter(made.tables), None)
    model = with_int8_input(made.converted, home() / NAME / f"int8_input_{made.converted.digest}")
    engine = build_engine(context, model, made.recipe)
    try:
        tables = prove_engine(context, engine, model)
    except CrucibleError as error:  # the engine can be measured all the same
        print(f"   no layer table: {error.message}", file=sys.stderr, flush=True)
        tables = ()
    return engine, next(iter(tables), None)


def with_int8_input(model: OnnxModel, folder: Path) -> OnnxModel:
    """The quantised graph without the QuantizeLinear of its input, which is int8 instead.

    ModelError if the input goes anywhere else.
    """
    proto = onnx.load(model.path)
    (given,) = proto.graph.input
    takers = [node for node in proto.graph.node if given.name in node.input]
    if [node.op_type for node in takers] != ["QuantizeLinear"]:
        kinds = ", ".join(node.op_type for node in takers)
        raise ModelError(
            f"expected one QuantizeLinear behind '{given.name}', got {kinds}",
            "leave int8_input out",
        )
    (taker,) = takers
    for node in proto.graph.node:
        for index, name in enumerate(node.input):
            if name == taker.output[0]:
                node.input[index] = given.name
    proto.graph.node.remove(taker)
    given.type.tensor_type.elem_type = onnx.TensorProto.INT8
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, folder / "model.onnx")
    return onnx_model(folder, "model.onnx", model.precision)


def sum_ms(table: LayerTable) -> float:
    return sum(layer.seconds or 0.0 for layer in table.layers) * 1e3


def layer_rows(table: LayerTable) -> list[Row]:
    """The slowest layers."""
    whole_ms = sum_ms(table)
    return [
        {
            "ms": (layer.seconds or 0.0) * 1e3,
            "share": (layer.seconds or 0.0) * 1e3 / whole_ms,
            "precision": str(layer.precision),
            "kind": layer.kind,
            "nodes": node_text(layer),
            "tactic": layer.tactic[:120],
        }
        for layer in slowest(table.layers, NAMED)
    ]


# -- in the child ------------------------------------------------------------


def flow_rates(
    engine: Engine,
    batch: int,
    streams: Sequence[int],
    seconds: float,
    progress: Progress = silent,
) -> tuple[dict[int, list[float]], dict[str, float]]:
    """Images per second of each round, by the number of streams; and the GPU's clock and power."""
    feeds = draw_feeds(engine.inputs, {"batch": batch}, 0)
    states = []
    with ExitStack() as stack:
        loaded = stack.enter_context(closing(backends.load(engine)))
        sessions = [stack.enter_context(closing(loaded.session(0))) for _ in range(max(streams))]
        flows = {count: Flow(sessions[:count], feeds, upload=False) for count in streams}
        for flow in flows.values():
            flow.run()  # fills the buffers, and captures the graphs
        rates: dict[int, list[float]] = {count: [] for count in streams}
        order = random.Random(0)
        for _ in range(ROUNDS):
            for count in order.sample(list(streams), len(streams)):
                flow = flows[count]
                flow.run()
                times = measure_block(flow.run, min_s=seconds / ROUNDS)
                runs = len(times) * flow.depth * count
                rates[count].append(runs * batch / sum(times))
            states.append(gpu_state())
    figures = summary_of(states)
    return rates, {name: figures[name]["median"] for name in SHOWN if name in figures}
