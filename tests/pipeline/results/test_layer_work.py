"""The work and the roofline of layers, against counting by hand."""

from pathlib import Path

import pytest

from pipeline.core.recipe import Precision, Recipe
from pipeline.host.gpu import MemoryLevel, Peaks
from pipeline.results.graph_node import GraphNode, NodeWork
from pipeline.results.layer_table import Layer
from pipeline.results.layer_work import LayerWork, Limit, Unknown, work_of_layers
from pipeline.results.model_graph import model_graph
from tests.builders.layers import layer, table
from tests.pipeline.onnx_graph.builders import save

SIZES = {"batch": 8}
FP32, FP16 = (Recipe(backend="tensorrt", precision=p) for p in (Precision.FP32, Precision.FP16))
PEAKS = Peaks(
    device="H",
    source="known",
    flops_per_s={Precision.FP32: 1e3, Precision.FP16: 4e3},
    bytes_per_s=1e3,
)
# MatMul reads x [8, 4] and w [4, 4]; Add reads its result and x; Relu and Neg read the sum.
MODEL = """g (float[batch, 4] x, int64[batch] ids) => (float[batch, 4] r, float[batch, 4] n)
  <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16},
   float[9, 4] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
     22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36}>
{ m = MatMul(x, w)  s = Add(m, x)  r = Relu(s)  n = Neg(s)
  e = Gather(t, ids)  v = Squeeze(e)  z = NonZero(n) }"""
ROW = 8 * 4 * 4  # bytes of one activation in fp32
WEIGHTS = 4 * 4 * 4


@pytest.fixture
def graph(tmp_path: Path) -> tuple[GraphNode, ...]:
    return model_graph(save(tmp_path, MODEL), SIZES).nodes


def work(
    graph: tuple[GraphNode, ...],
    *layers: Layer,
    recipe: Recipe = FP32,
    peaks: Peaks | None = PEAKS,
) -> tuple[LayerWork, ...]:
    return work_of_layers(graph, SIZES, table(*layers), recipe, peaks)


def test_a_fused_layer_moves_what_crosses_its_border_only(graph: tuple[GraphNode, ...]) -> None:
    alone, fused, whole = (
        work(graph, layer("fp32", nodes=nodes))[0]
        for nodes in (("m",), ("m", "s"), ("m", "s", "r", "n"))
    )
    assert alone.flops == 2 * 8 * 4 * 4
    assert alone.moved_bytes == ROW + WEIGHTS + ROW
    assert fused.flops == alone.flops + 8 * 4
    assert fused.moved_bytes == ROW + WEIGHTS + ROW, "x is read once, m is not moved"
    assert whole.moved_bytes == ROW + WEIGHTS + 2 * ROW, "both outputs of the model are written"


def test_floats_have_the_widths_of_the_layer(graph: tuple[GraphNode, ...]) -> None:
    half = layer("fp16", nodes=("m",))
    mixed = layer("fp16", nodes=("m",), inputs=("int64", "fp16"), outputs=("fp32",))
    eight = layer("int8", nodes=("m",), inputs=("int8",), outputs=("fp16",))
    assert work(graph, half, recipe=FP16)[0].moved_bytes == (ROW + WEIGHTS + ROW) / 2
    assert work(graph, mixed, recipe=FP16)[0].moved_bytes == (ROW + WEIGHTS) / 2 + ROW
    assert work(graph, eight)[0].moved_bytes == (ROW + WEIGHTS) / 4 + ROW / 2
    narrow = Recipe(backend="onnxruntime", precision=Precision.INT4, weight_only=True)
    weights = layer("fp32", nodes=("m",), kind="MatMulNBits", inputs=("fp32",), outputs=("fp32",))
    assert work(graph, weights, recipe=narrow)[0].moved_bytes == ROW + WEIGHTS / 8 + ROW


def test_indices_keep_their_width(graph: tuple[GraphNode, ...]) -> None:
    gather = layer("none", nodes=("e",), heavy=False, inputs=("fp16", "int64"), outputs=("fp16",))
    (moved,) = work(graph, gather)
    assert moved.moved_bytes == ROW / 2 + 8 * 8 + ROW / 2
    assert (moved.flops, moved.limit) == (0.0, Limit.MEMORY)


def test_the_roofline_is_the_longer_of_arithmetic_and_memory(
    graph: tuple[GraphNode, ...],
) -> None:
    (memory,) = work(graph, layer("fp32", 1.0, nodes=("m",)))
    assert memory.limit is Limit.MEMORY
    assert memory.least_s == pytest.approx((2 * ROW + WEIGHTS) / 1e3)
    assert memory.share == pytest.approx(0.32)
    fast_memory = PEAKS.model_copy(update={"bytes_per_s": 1e6})
    (arithmetic,) = work(graph, layer("fp16", 0.1, nodes=("m",)), peaks=fast_memory)
    assert arithmetic.limit is Limit.ARITHMETIC
    assert arithmetic.share == pytest.approx(2 * 8 * 4 * 4 / 4e3 / 0.1)


def test_a_layer_that_is_not_heavy_needs_no_peak_of_its_precision(
    graph: tuple[GraphNode, ...],
) -> None:
    (relu,) = work(graph, layer("bf16", 1.0, nodes=("r",), heavy=False))
    assert relu.share == pytest.approx(ROW / 1e3)


@pytest.mark.parametrize(
    ("fields", "unknown"),
    [
        ({"nodes": ()}, Unknown.NO_NODES),
        ({"nodes": ("x", "reformatted")}, Unknown.NO_NODES),
        ({"nodes": ("r",)}, Unknown.NO_PRODUCT),
        ({"nodes": ("m",), "precision": "bf16"}, Unknown.PRECISION),
        ({"nodes": ("m",), "precision": "unknown"}, Unknown.PRECISION),
        ({"nodes": ("m",), "seconds": None}, Unknown.TIME),
        ({"nodes": ("v",), "heavy": False}, Unknown.NO_WORK),
        ({"nodes": ("z",), "heavy": False}, Unknown.SHAPES),
    ],
)
def test_it_is_told_why_a_share_is_not_known(
    graph: tuple[GraphNode, ...], fields: dict[str, object], unknown: Unknown
) -> None:
    (found,) = work(graph, layer(**{"precision": "fp32", **fields}))  # type: ignore[arg-type]
    assert (found.share, found.unknown) == (None, unknown)


def test_work_is_known_without_peaks(graph: tuple[GraphNode, ...]) -> None:
    no_memory = PEAKS.model_copy(update={"bytes_per_s": None})
    for peaks in (None, no_memory):
        (found,) = work(graph, layer("fp32", nodes=("m",)), peaks=peaks)
        assert found == LayerWork(
            flops=256, moved_bytes=320, weight_bytes=64, unknown=Unknown.PEAKS
        )


def test_flops_of_an_unknown_operator_leave_its_bytes(graph: tuple[GraphNode, ...]) -> None:
    matmul = graph[2]
    assert matmul.work is not None
    unknown = matmul.model_copy(update={"work": matmul.work.model_copy(update={"flops": None})})
    graph = (*graph[:2], unknown, *graph[3:])
    (found,) = work(graph, layer("fp32", nodes=("m",)))
    assert found == LayerWork(moved_bytes=320, weight_bytes=64, unknown=Unknown.OPERATORS)


def test_a_heavy_layer_named_after_its_bias_computes_the_product_before_it(
    graph: tuple[GraphNode, ...],
) -> None:
    (found,) = work(graph, layer("fp32", nodes=("s",)))
    (fused,) = work(graph, layer("fp32", nodes=("m", "s")))
    assert found == fused
    light, other = layer("fp32", nodes=("s",), heavy=False), layer("fp32", nodes=("r",))
    (alone,) = work(graph, light)
    assert alone.flops == 8 * 4, "a layer that multiplies nothing has no product"
    assert work(graph, other)[0].unknown is Unknown.NO_PRODUCT, "its product is not next to it"
    named = work(graph, layer("fp32", nodes=("s",)), layer("fp32", nodes=("m",)))
    assert named[0].unknown is Unknown.NO_PRODUCT, "another layer computes it"


def test_a_product_that_others_read_stays_out(tmp_path: Path) -> None:
    graph = model_graph(save(tmp_path, MODEL.replace("Neg(s)", "Neg(m)")), SIZES).nodes
    (found,) = work(graph, layer("fp32", nodes=("s",)))
    assert found.unknown is Unknown.NO_PRODUCT


def test_a_node_of_several_layers_is_that_of_the_heavy_one(graph: tuple[GraphNode, ...]) -> None:
    heavy, light = layer("fp32", nodes=("m",)), layer("fp32", nodes=("m", "r"), heavy=False)
    first, second = work(graph, heavy, light)
    assert first.share is not None
    assert second.unknown is Unknown.SHARED
    both = work(graph, heavy, heavy)
    assert [found.unknown for found in both] == [Unknown.SHARED] * 2


def test_other_sizes_and_older_reports_have_no_work(graph: tuple[GraphNode, ...]) -> None:
    layers = table(layer("fp32", nodes=("m",)))
    (other,) = work_of_layers(graph, {"batch": 4}, layers, FP32, PEAKS)
    assert other.unknown is Unknown.OTHER_SIZES
    (older,) = work_of_layers(graph, None, layers, FP32, PEAKS)
    assert older.unknown is Unknown.NO_GRAPH


def test_data_come_from_the_smallest_level_that_holds_them(graph: tuple[GraphNode, ...]) -> None:
    def level(name: str, size: int, rate: float) -> MemoryLevel:
        return MemoryLevel(name=name, size_bytes=size, bytes_per_s=rate)

    product = layer("fp32", 1.0, nodes=("m",))
    fast = PEAKS.model_copy(update={"flops_per_s": {Precision.FP32: 1e9}})
    large = fast.model_copy(update={"caches": (level("L2", 64, 1e5), level("L3", 320, 1e4))})
    (found,) = work(graph, product, peaks=large)
    assert found.level == "L3"
    assert found.least_s == pytest.approx(320 / 1e4)
    small = fast.model_copy(update={"caches": (level("L2", 319, 1e5),)})
    (found,) = work(graph, product, peaks=small)
    assert found.level == "memory"
    assert found.least_s == pytest.approx(320 / 1e3)


def test_weights_come_from_the_level_that_holds_those_of_all_layers() -> None:
    def node(weights: int) -> GraphNode:
        work = NodeWork(flops=1.0, moved_bytes=weights, weight_bytes=weights)
        return GraphNode(name=f"n{weights}", operator="MatMul", work=work)

    level = MemoryLevel(name="L2", size_bytes=200, bytes_per_s=1e5)
    peaks = PEAKS.model_copy(update={"flops_per_s": {Precision.FP32: 1e9}, "caches": (level,)})
    layers = table(layer("fp32", 1.0, nodes=("n100",)), layer("fp32", 1.0, nodes=("n150",)))
    graph = (node(100), node(150))
    works = work_of_layers(graph, {}, layers, FP32, peaks)
    assert [each.least_s for each in works] == [
        pytest.approx(100 / 1e3),
        pytest.approx(150 / 1e3),
    ]
    (alone,) = work_of_layers(graph[:1], {}, table(layers.layers[0]), FP32, peaks)
    assert alone.least_s == pytest.approx(100 / 1e5)


def test_a_share_above_the_peak_is_an_error_of_the_model_and_is_not_clipped(
    graph: tuple[GraphNode, ...],
) -> None:
    (found,) = work(graph, layer("fp32", 0.1, nodes=("m",)))
    assert found.share == pytest.approx(3.2)
    assert found.is_above_peak
    assert not work(graph, layer("fp32", 1.0, nodes=("m",)))[0].is_above_peak
