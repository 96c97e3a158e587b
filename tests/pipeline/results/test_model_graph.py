"""The graph of a model as a report shows it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.results import model_graph as module
from pipeline.results.model_graph import model_graph
from pipeline.results.report import GraphNode


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
    onnx.save(helper.make_model(graph), path)
    return path


def test_nodes_are_in_order_with_the_nodes_that_they_read(tmp_path: Path) -> None:
    assert model_graph(write_model(tmp_path / "m.onnx")) == (
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
    assert model_graph(write_model(tmp_path / "m.onnx")) == ()
