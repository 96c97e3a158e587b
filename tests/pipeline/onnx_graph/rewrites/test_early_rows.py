"""Rows are taken before the products that compute all of them, where nothing else reads these."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from pipeline.onnx_graph.rewrites.early_rows import take_rows_early
from tests.pipeline.onnx_graph.rewrites.graphs import model, operators, rewritten

WEIGHTS = {"w": (8, 8), "b": (8,), "v": (8, 4)}
ONE = np.array(0, np.int64)


def positions(proto: onnx.ModelProto) -> dict[str, int]:
    return {node.name: index for index, node in enumerate(proto.graph.node)}


@pytest.mark.parametrize(
    ("selection", "constants"),
    [
        ("Gather<axis=1>(n, i)", {"i": ONE}),
        ("Gather<axis=1>(n, i)", {"i": np.array(-1, np.int64)}),
        ("Gather<axis=1>(n, i)", {"i": np.array([3, 1], np.int64)}),
        ("Slice(n, s, e, a)", {"s": [1], "e": [3], "a": [1]}),
        ("Slice(n, s, e, a)", {"s": [-2], "e": [2**62], "a": [-2]}),
    ],
)
def test_a_block_of_which_some_rows_are_read_computes_only_these(
    selection: str, constants: dict[str, Any]
) -> None:
    """The residual reads the same rows, so it is taken too."""
    rank = 2 if np.ndim(constants.get("i", [0])) == 0 else 3
    out = "float[batch, d]" if rank == 2 else "float[batch, r, d]"
    graph = f"""g (float[batch, 6, 8] x) => ({out} y)
      {{ m = MatMul(x, w)  h = Add(m, b)  r = Relu(h)  s2 = Add(r, x)
         n = LayerNormalization<axis=-1>(s2, b)  t = {selection}  y = MatMul(t, v) }}"""
    numbers = {name: np.array(value, np.int64) for name, value in constants.items()}
    proto = model(graph, WEIGHTS, **numbers)
    after, names = rewritten(take_rows_early, proto, x=(2, 6, 8))
    assert names == {"m", "h", "r", "s2", "n"}
    first = after.graph.node[0]
    assert first.op_type in ("Gather", "Slice")
    assert first.input[0] == "x"
    assert operators(after)["MatMul"] == 2


def test_queries_are_taken_and_keys_are_not() -> None:
    graph = """g (float[batch, 6, 8] x) => (float[batch, 8] y)
      { q = MatMul(x, w)  k = MatMul(x, u)  kt = Transpose<perm=[0, 2, 1]>(k)  s = MatMul(q, kt)
        p = Softmax<axis=-1>(s)  o = MatMul(p, x)  y = Gather<axis=1>(o, i) }"""
    proto = model(graph, {"w": (8, 8), "u": (8, 8)}, i=ONE)
    _, names = rewritten(take_rows_early, proto, x=(2, 6, 8))
    assert names == {"q", "s", "p", "o"}


@pytest.mark.parametrize("shape", [[2, 6, 2, 4], [0, 0, 2, 4], [2, -1, 2, 4]])
def test_heads_are_split_for_the_taken_rows_only(shape: list[int]) -> None:
    graph = """g (float[2, 6, 8] x) => (float[2, 2, 4] y)
      { m = MatMul(x, w)  h = Reshape(m, shape)  t = Transpose<perm=[0, 2, 1, 3]>(h)  r = Relu(t)
        y = Gather<axis=2>(r, i) }"""
    proto = model(graph, {"w": (8, 8)}, i=ONE, shape=np.array(shape, np.int64))
    after, names = rewritten(take_rows_early, proto, x=(2, 6, 8))
    assert names == {"m", "h", "t", "r"}
    assert operators(after)["Squeeze"] == 1


def test_a_shape_that_is_computed_is_changed_in_its_constant_part() -> None:
    graph = """g (float[batch, 6, 8] x) => (float[batch, 2, 4] y)
      { n = Shape<start=0, end=1>(x)  shape = Concat<axis=0>(n, rest)  m = MatMul(x, w)
        h = Reshape(m, shape)  y = Gather<axis=1>(h, i) }"""
    proto = model(graph, {"w": (8, 8)}, i=ONE, rest=np.array([6, 2, 4], np.int64))
    _, names = rewritten(take_rows_early, proto, x=(3, 6, 8))
    assert names == {"m", "h"}


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("m = MatMul(x, w)  r = Relu(m)  y = Gather<axis=1>(r, i)  z = Neg(r)", "another reader"),
        (
            "m = MatMul(x, w)  r = Softmax<axis=1>(m)  y = Gather<axis=1>(r, i)  z = Neg(x)",
            "rows depend on each other",
        ),
        ("r = Relu(x)  y = Gather<axis=1>(r, i)  z = Neg(x)", "no product"),
        ("m = MatMul(x, w)  y = Gather<axis=2>(m, i)  z = Neg(x)", "columns"),
        (
            "m = MatMul(x, w)  f = Flatten(m)  y = Gather<axis=1>(f, i)  z = Neg(x)",
            "no rule for the operator",
        ),
    ],
)
def test_nothing_moves(body: str, why: str) -> None:
    proto = model(
        f"g (float[2, 6, 8] x) => (float[r, s] y, float[a, b, c] z) {{ {body} }}",
        {"w": (8, 8)},
        i=ONE,
    )
    if "Flatten" in body:
        proto.graph.output[0].type.tensor_type.shape.dim.pop()
    after, names = take_rows_early(proto)
    assert (names, after) == ((), proto), why


def test_a_selection_by_an_input_stays() -> None:
    graph = """g (float[2, 6, 8] x, int64[1] i) => (float[2, 1, 8] y)
      { m = MatMul(x, w)  y = Gather<axis=1>(m, i) }"""
    assert take_rows_early(model(graph, {"w": (8, 8)}))[1] == ()


@pytest.mark.parametrize(
    ("tokens", "selection", "constants", "moves"),
    [
        ("6", "Slice(m, s, e, a)", {"s": [1], "e": [2**62]}, False),
        ("6", "Gather<axis=1>(m, i)", {"i": [0, 1, 0, 1]}, False),
        ("6", "Slice(m, s, e, a)", {"s": [0], "e": [3]}, True),
        ("tokens", "Slice(m, s, e, a)", {"s": [1], "e": [2**62]}, False),
        ("tokens", "Slice(m, s, e, a)", {"s": [1], "e": [-1]}, False),
        ("tokens", "Slice(m, s, e, a)", {"s": [-3], "e": [-1]}, False),
        ("tokens", "Slice(m, s, e, a)", {"s": [-3], "e": [-2]}, True),
        ("tokens", "Slice(m, s, e, a)", {"s": [-1], "e": [2**62]}, True),
        ("tokens", "Slice(m, s, e, a)", {"s": [0], "e": [1]}, True),
        ("tokens", "Gather<axis=1>(m, i)", {"i": [2]}, True),
        ("tokens", "Gather<axis=1>(m, i)", {"i": [0, 2]}, False),
    ],
)
def test_only_few_rows_move(
    tokens: str, selection: str, constants: dict[str, list[int]], moves: bool
) -> None:
    """A model that drops its first token reads all others: its products stay."""
    graph = f"""g (float[batch, {tokens}, 8] x) => (float[batch, r, 8] y)
      {{ m = MatMul(x, w)  y = {selection} }}"""
    numbers = {name: np.array(value, np.int64) for name, value in {**constants, "a": [1]}.items()}
    proto = model(graph, {"w": (8, 8)}, **numbers)
    if moves:
        assert rewritten(take_rows_early, proto, x=(2, 6, 8))[1] == {"m"}
    else:
        assert take_rows_early(proto) == (proto, ())


def test_a_gemm_is_taken_on_its_rows() -> None:
    graph = """g (float[6, 8] x) => (float[4] y)
      { m = Gemm(x, v, c)  r = Tanh(m)  y = Gather<axis=0>(r, i) }"""
    proto = model(graph, {"v": (8, 4), "c": (4,)}, i=ONE)
    _, names = rewritten(take_rows_early, proto, x=(6, 8))
    assert names == {"m", "r"}


def test_a_bias_of_every_row_is_taken_too() -> None:
    """Position embeddings have as many rows as the input."""
    graph = """g (float[batch, 6, 8] x) => (float[batch, 8] y)
      { m = MatMul(x, w)  s = Add(m, p)  k = ReduceMean<keepdims=1>(s, a)  d = Sub(s, k)
        y = Gather<axis=1>(d, i) }"""
    weights = {"w": (8, 8), "p": (1, 6, 8)}
    proto = model(graph, weights, i=ONE, a=np.array([-1], np.int64))
    _, names = rewritten(take_rows_early, proto, x=(2, 6, 8))
    assert names == {"m", "s", "k", "d"}


def test_a_model_of_an_old_opset_stays() -> None:
    proto = model(
        "g (float[2, 6, 8] x) => (float[2, 8] y) { m = MatMul(x, w)  y = Gather<axis=1>(m, i) }",
        {"w": (8, 8)},
        i=ONE,
    )
    assert take_rows_early(proto)[1] == ("m",)
    proto.opset_import[0].version = 11
    assert take_rows_early(proto) == (proto, ())
