"""Models in ONNX for the builder, and engines of the doubles, ready to be loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from pipeline.backends.tensorrt.messages import logger_of
from pipeline.backends.tensorrt.session import TrtLoaded, load_engine
from pipeline.core.artifacts import Engine, OnnxModel, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, Tensors, TensorSpec
from pipeline.onnx_graph.files import onnx_model
from tests.pipeline.backends.cuda_double import CudaDouble
from tests.pipeline.backends.tensorrt.trt_double import Arrays, Program, TensorRTDouble

X = TensorSpec(name="x", dtype="float32", shape=("n", 2), kind="dynamic")
FLAG = TensorSpec(name="flag", dtype="bool", shape=())
Y = TensorSpec(name="y", dtype="float32", shape=("n", 2), kind="dynamic")
Value = tuple[str, int, Sequence[int | str]]


def save(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    weights: Sequence[onnx.TensorProto] = (),
    precision: Precision = Precision.FP32,
) -> OnnxModel:
    """Write a model whose nodes are of opset 20 or of the domain com.acme."""
    folder.mkdir(exist_ok=True)
    values = [
        [helper.make_tensor_value_info(*value) for value in side] for side in (inputs, outputs)
    ]
    graph = helper.make_graph(list(nodes), "test", *values, list(weights))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.acme", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    return onnx_model(folder, "model.onnx", precision)


def save_product(
    folder: Path, weight: NDArray[np.float32], dtype: int, precision: Precision
) -> OnnxModel:
    """Write `y = x @ weight` with x [n, rows] and y [n, columns] in fp32, multiplied in `dtype`."""
    rows, columns = weight.shape
    nodes = [
        helper.make_node("Cast", ["x"], ["x_low"], name="down", to=dtype),
        helper.make_node("MatMul", ["x_low", "w"], ["y_low"], name="matmul"),
        helper.make_node("Cast", ["y_low"], ["y"], name="up", to=TensorProto.FLOAT),
    ]
    x, y = ("x", TensorProto.FLOAT, ["n", rows]), ("y", TensorProto.FLOAT, ["n", columns])
    tensor = helper.make_tensor("w", dtype, weight.shape, weight.ravel().tolist())
    return save(folder, nodes, [x], [y], [tensor], precision)


def doubled(arrays: Arrays) -> Arrays:
    """Return `2 * x + flag`."""
    return {"y": arrays["x"] * 2 + arrays["flag"]}


DOUBLE = Program(
    inputs={"x": ("FLOAT", (-1, 2)), "flag": ("BOOL", ())},
    outputs={"y": "FLOAT"},
    run=doubled,
    shapes=lambda shapes, host: {"y": shapes["x"]},
)


def feeds(rows: int, start: float = 0) -> Tensors:
    """Feeds of DOUBLE whose values count up from `start`."""
    return {
        "x": np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + np.float32(start),
        "flag": np.array(True),
    }


def positions(arrays: Arrays) -> Arrays:
    """Return the positions of the values that are not 0."""
    return {"where": np.stack(np.nonzero(arrays["x"]))}


POSITIONS = Program(
    inputs={"x": ("FLOAT", (-1, 2))},
    outputs={"where": "INT64"},
    run=positions,
    shapes=lambda shapes, host: {"where": (2, -1)},
)
WHERE = TensorSpec(name="where", dtype="int64", shape=(2, "found"), kind="data-dependent")


class Bench:
    """Doubles and a folder, ready to load engines of programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cuda = CudaDouble()

    def engine(
        self,
        program: Program = DOUBLE,
        inputs: tuple[TensorSpec, ...] = (X, FLAG),
        outputs: tuple[TensorSpec, ...] = (Y,),
        profiles: tuple[Profile, ...] = (Profile(dims={"n": [0, 2, 16]}),),
        recipe: Recipe | None = None,
    ) -> Engine:
        self.trt = TensorRTDouble(self.cuda, {"the engine": program})
        (self.folder / "engine.plan").write_text("the engine")
        return Engine(
            root=self.folder,
            file="engine.plan",
            digest=hashlib.sha256(b"the engine").hexdigest(),
            target=Target(
                backend="tensorrt", version="10.6.0", device="double", compute_capability="9.0"
            ),
            recipe=recipe or Recipe(backend="tensorrt", precision=Precision.FP32),
            inputs=inputs,
            outputs=outputs,
            profiles=profiles,
            threads=0,
            size_bytes=10,
        )

    def load(self, engine: Engine, device: str = "") -> TrtLoaded:
        return load_engine(self.trt, engine, logger_of(self.trt), device, rt=self.cuda)
