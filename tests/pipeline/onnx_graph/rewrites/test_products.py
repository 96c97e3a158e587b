"""Adapters are merged into their layers, and widths are padded: the outputs stay the same."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.onnx_graph.rewrites import Rewrite, rewrite_function
from pipeline.onnx_graph.rewrites.aligned_products import align_products, aligned
from pipeline.onnx_graph.rewrites.folded_strides import fold_strides_by_name
from pipeline.onnx_graph.rewrites.merged_products import merge_products
from tests.pipeline.onnx_graph.rewrites.graphs import model, operators, rewritten, shape_of

ADAPTER = """g (float[batch, 8] x) => (float[batch, 8] y)
  { m = MatMul(x, w)  h = Add(m, b)  d = MatMul(x, lora_a)  u = MatMul(d, lora_b)  s = Mul(u, f)
    t = Add(h, s)  y = Relu(t) }"""
ADAPTER_WEIGHTS = {"w": (8, 8), "b": (8,), "lora_a": (8, 2), "lora_b": (2, 8)}
HALF = np.array(0.5, np.float32)


def test_an_adapter_becomes_part_of_its_layer() -> None:
    proto = model(ADAPTER, ADAPTER_WEIGHTS, f=HALF)
    after, names = rewritten(merge_products, proto, x=(3, 8))
    assert names == {"m", "h", "d", "u", "s", "t"}
    assert operators(after) == {"MatMul": 1, "Add": 1, "Relu": 1}


@pytest.mark.parametrize(
    "graph",
    [
        ADAPTER.replace("d = MatMul(x, lora_a)", "n = Neg(x) d = MatMul(n, lora_a)"),
        ADAPTER.replace("y = Relu(t)", "q = Add(t, u)  y = Relu(q)"),
        ADAPTER.replace("u = MatMul(d, lora_b)", "e = Relu(d) u = MatMul(e, lora_b)"),
    ],
)
def test_other_sums_stay(graph: str) -> None:
    """Another input, another reader of the adapter, or an activation in it."""
    proto = model(graph, ADAPTER_WEIGHTS, f=HALF)
    after, names = merge_products(proto)
    assert (names, after) == ((), proto)


def test_two_products_of_few_ranks_stay_because_a_whole_one_is_more_work() -> None:
    graph = """g (float[batch, 64] x) => (float[batch, 64] y)
      { a = MatMul(x, p)  b = MatMul(a, q)  c = MatMul(x, r)  d = MatMul(c, s)  y = Add(b, d) }"""
    weights = {"p": (64, 2), "q": (2, 64), "r": (64, 2), "s": (2, 64)}
    assert merge_products(model(graph, weights))[1] == ()


@pytest.mark.parametrize(
    ("columns", "padded"),
    [(127, 128), (128, 128), (64, 64), (126, 128), (100, 104), (33, 33), (1000, 1024), (65, 65)],
)
def test_a_width_is_padded_to_the_largest_multiple_that_adds_little(
    columns: int, padded: int
) -> None:
    assert aligned(columns) == padded


def test_a_layer_of_127_becomes_one_of_128_and_the_next_one_adds_nothing_for_it() -> None:
    graph = """g (float[batch, 16] x) => (float[batch, 4] y)
      { m = MatMul(x, w)  h = Add(m, b)  r = Sigmoid(h)  y = MatMul(r, v) }"""
    proto = model(graph, {"w": (16, 127), "b": (127,), "v": (127, 4)})
    after, names = rewritten(align_products, proto, x=(3, 16))
    assert names == {"m", "h", "r", "y"}
    assert operators(after) == operators(proto)
    shapes = sorted(tuple(each.dims) for each in after.graph.initializer)
    assert shapes == [(16, 128), (128,), (128, 4)]


def test_a_padded_layer_is_sliced_where_its_columns_are_counted() -> None:
    """A Softmax over 128 columns would be another one."""
    graph = """g (float[batch, 16] x) => (float[batch, 127] y)
      { m = Gemm<transB=1>(x, w, b)  y = Softmax<axis=-1>(m) }"""
    proto = model(graph, {"w": (127, 16), "b": (127,)})
    after, names = rewritten(align_products, proto, x=(3, 16))
    assert names == {"m"}
    assert operators(after) == {"Gemm": 1, "Slice": 1, "Softmax": 1}


def test_every_layer_of_a_chain_is_padded() -> None:
    graph = """g (float[batch, 16] x) => (float[batch, 5] y)
      { a = MatMul(x, w)  b = Gelu(a)  c = Gemm<transB=1>(b, v, k)  d = Relu(c)
         y = MatMul(d, u) }"""
    proto = model(graph, {"w": (16, 127), "v": (255, 127), "k": (255,), "u": (255, 5)})
    after, names = rewritten(align_products, proto, x=(3, 16))
    assert names == {"a", "b", "c", "d", "y"}
    assert (256, 128) in {tuple(each.dims) for each in after.graph.initializer}


def test_a_model_with_aligned_widths_stays() -> None:
    graph = "g (float[batch, 16] x) => (float[batch, 4] y) { m = MatMul(x, w) y = MatMul(m, v) }"
    proto = model(graph, {"w": (16, 128), "v": (128, 4)})
    assert align_products(proto) == (proto, ())
    assert shape_of(proto, "w") == (16, 128)


def test_folded_convolutions_are_named() -> None:
    graph = """g (float[1, 3, 8, 8] x) => (float[1, 16, 4, 4] y)
      { y = Conv<kernel_shape=[2, 2], strides=[2, 2]>(x, w) }"""
    proto = model(graph, {"w": (16, 3, 2, 2)})
    after, names = rewritten(fold_strides_by_name, proto, x=(1, 3, 8, 8))
    assert names == {"y"}
    assert operators(after) == {"SpaceToDepth": 1, "Conv": 1}
    other = model(graph.replace("[1, 3, 8, 8]", "[1, 8, 8, 8]"), {"w": (16, 8, 2, 2)})
    assert fold_strides_by_name(other) == (other, ())


@pytest.mark.parametrize("rewrite", Rewrite)
def test_every_rewrite_has_a_function_and_leaves_other_models_alone(rewrite: Rewrite) -> None:
    proto = model("g (float[2, 2] x) => (float[2, 2] y) { y = Relu(x) }", {})
    assert rewrite_function(rewrite)(proto) == (proto, ())
