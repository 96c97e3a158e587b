"""The graph of a model as a report shows it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.errors import ModelError
from pipeline.results import model_graph as module
from pipeline.results.graph_node import GraphNode, NodeWork
from pipeline.results.model_graph import ModelGraph, model_graph
from tests.pipeline.onnx_graph.builders import save


def write_model(path: Path) -> Path:
    """`x` and the constant `w`, two nodes, one of them without a name, and an If on `flag`, whose
    branches read `sum` from outside.
    """

    def branch(name: str) -> onnx.GraphProto:
        node = helper.make_node("Relu", ["sum"], [f"{name}_out"], name=f"{name}/Relu")
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [1])
        return helper.make_graph([node], name, [], [out])

    nodes = [
        helper.make_node("Add", ["x", "w"], ["sum"]),
        helper.make_node(
            "If", ["flag"], ["y"], name="if", then_branch=branch("a"), else_branch=branch("b")
        ),
        helper.make_node("Neg", ["y"], ["z"], name="neg", domain="com.example"),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [1]),
        helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
    ]
    outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1])]
    constants = [numpy_helper.from_array(np.ones(1, np.float32), "w")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return path


def test_nodes_are_in_order_with_the_nodes_that_they_read(tmp_path: Path) -> None:
    assert model_graph(write_model(tmp_path / "m.onnx")).nodes == (
        GraphNode(name="x", operator="input"),
        GraphNode(name="flag", operator="input"),
        GraphNode(name="sum", operator="Add", reads=(0,)),
        GraphNode(name="if", operator="If", reads=(1, 2)),
        GraphNode(name="neg", operator="com.example::Neg", reads=(3,)),
        GraphNode(name="z", operator="output", reads=(4,)),
    )


def test_a_graph_of_too_many_nodes_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_NODES", 2)
    assert model_graph(write_model(tmp_path / "m.onnx"), {}) == ModelGraph((), None)


MODEL = """g (float[N, 4] x, int64[N] ids) => (float[N, 2] z)
  <float16[4, 2] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64[2] shape = {-1, 2},
   float[5, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}>
{ h = Cast<to = 1>(w)  p = MatMul(x, h)  v = Reshape(p, shape)  e = Gather(table, ids)
  y = Add(v, e)  z = Mul(y, y) }"""


def test_nodes_have_the_work_of_each_tensor_that_they_move(tmp_path: Path) -> None:
    graph = model_graph(save(tmp_path, MODEL), {"N": 3})
    assert graph.sizes == {"N": 3}
    x, ids, cast, matmul, reshape, gather, add, mul, z = graph.nodes
    assert z.work is None
    assert ids.work == NodeWork(flops=0.0, moved_bytes=0, written_bytes=24, dtype="int64")
    assert x.work == NodeWork(flops=0.0, moved_bytes=0, written_bytes=48, dtype="float32")
    assert (matmul.reads, add.reads, mul.reads) == ((0, 2), (4, 5), (6,))
    assert cast.work == NodeWork(
        flops=0.0,
        moved_bytes=16 + 32,
        weight_bytes=16,
        written_bytes=32,
        dtype="float32",
        weight_dtype="float16",
    )
    assert matmul.work == NodeWork(
        flops=2 * 3 * 2 * 4,
        moved_bytes=48 + 32 + 24,
        read_bytes=(48, 32),
        written_bytes=24,
        dtype="float32",
    )
    assert reshape.work is not None
    assert (reshape.work.flops, reshape.work.moved_bytes) == (0.0, 0), "a view moves nothing"
    assert reshape.work.written_bytes == 24, "but a fused layer may write what it is a view of"
    assert gather.work == NodeWork(
        flops=0.0,
        moved_bytes=24 + 24 + 24,  # the rows that it takes, not the whole table
        weight_bytes=24,
        read_bytes=(24,),
        written_bytes=24,
        dtype="float32",
        weight_dtype="float32",
    )
    assert mul.work is not None
    assert mul.work.moved_bytes == 24 + 24, "a tensor that it reads twice counts once"


def test_work_that_depends_on_values_or_branches_is_unknown(tmp_path: Path) -> None:
    path = save(tmp_path, "g (float[N] x) => (int64[1, M] y) { i = NonZero(x)  y = Neg(i) }")
    assert [node.work for node in model_graph(path, {"N": 3}).nodes[1:]] == [None] * 3
    model = model_graph(write_model(tmp_path / "m.onnx"), {})
    known = [node.name for node in model.nodes if node.work]
    assert known == ["x", "flag", "sum"], "neither the If nor the foreign operator behind it"


def test_a_symbol_without_a_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dimension 'N', which has no size"):
        model_graph(save(tmp_path, MODEL), {})


def test_nodes_of_older_reports_have_no_work() -> None:
    node = GraphNode.model_validate({"name": "a", "operator": "Add", "reads": [0]})
    assert node.work is None
