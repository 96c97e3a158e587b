"""Small models in ONNX's text form with weights of random numbers, and their outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from tests.pipeline.onnx_graph.builders import parse

if TYPE_CHECKING:
    from pipeline.onnx_graph.rewrites import RewriteFunction

Weights = Mapping[str, tuple[int, ...]]


def model(graph: str, weights: Weights, **constants: object) -> onnx.ModelProto:
    """Return a model with these initializers: random floats, and constants as they are."""
    random = np.random.default_rng(0)
    proto = parse(graph, 20)
    for name, shape in weights.items():
        array = random.normal(0, 0.3, shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    for node in proto.graph.node:
        node.name = node.output[0]
    onnx.checker.check_model(proto)
    return proto


def outputs(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=providers)
    results: list[np.ndarray] = session.run(None, dict(feeds))
    return results


def rewritten(
    rewrite: RewriteFunction, proto: onnx.ModelProto, **shapes: tuple[int, ...]
) -> tuple[onnx.ModelProto, set[str]]:
    """Return the rewritten model and its nodes, after a comparison of all outputs."""
    after, names = rewrite(proto)
    onnx.checker.check_model(after, full_check=True)
    random = np.random.default_rng(1)
    feeds = {name: random.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    for expected, actual in zip(outputs(proto, feeds), outputs(after, feeds), strict=True):
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    return after, set(names)


def operators(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node)


def shape_of(proto: onnx.ModelProto, name: str) -> tuple[int, ...]:
    """Return the shape of an initializer."""
    return tuple(next(each.dims for each in proto.graph.initializer if each.name == name))
