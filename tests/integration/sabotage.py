"""Faults planted in a compile: a stand-in for the runner's `run` that lets one stage work as ever
and spoils what it takes or makes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.compiler.compile import compile_plan
from pipeline.core.artifacts import Engine, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Recipe
from pipeline.execution.child_process import TimeLimit
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.plan.files import load_plan
from pipeline.results.report import Report
from tests.builders.cli import CLASSES, FEATURES, HIDDEN, write_model, write_task
from tests.builders.halves import run_here

Fault = Callable[[onnx.ModelProto], None]
FP32 = [{"backend": "onnxruntime", "precision": "fp32"}]
INT8 = [
    {
        "backend": "onnxruntime",
        "precision": "int8",
        "method": "minmax",
        "placement": {"last_layer": True},
    }
]  # both layers
ACCURACY = {
    "metric": "top1",
    "max_drop": 0.03,
    "thresholds": {"min_cosine": 0.95},
}  # a sound int8 engine has 0.977 on its worst sample
QUICK = {"duration_s": 0.1, "warmup_s": 0.02, "sizes": [{"batch": 4}]}


@dataclass
class Saboteur:
    """Runs the real stages in this process, which is quicker; only latencies are made up.

    `after_convert` changes the quantised graph, `before_build` the graph that the candidate is
    built from.
    """

    folder: Path
    after_convert: Fault | None = None
    before_build: Fault | None = None
    planted: list[str] = field(default_factory=list)

    def __call__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        name: str,
        log: Path | None = None,
        progress: Progress = silent,
        limit: TimeLimit | None = None,
    ) -> Any:
        if function.__name__ == "build" and self.before_build and is_candidate(arguments):
            arguments = (
                self._spoiled(arguments[0], self.folder, self.before_build),
                *arguments[1:],
            )
        result = run_here(function, *arguments, name=name, log=log, progress=progress)
        if function.__name__ == "convert" and self.after_convert:
            return self._spoiled(result, result.root, self.after_convert)
        return result

    def _spoiled(self, model: OnnxModel, folder: Path, fault: Fault) -> OnnxModel:
        proto = read_proto(model.path)
        fault(proto)
        write_proto(proto, folder / "model.onnx")
        self.planted.append(fault.__name__)
        return onnx_model(folder, "model.onnx", model.precision, model.notes)


def is_candidate(arguments: tuple[Any, ...]) -> bool:
    """Whether a build is that of a candidate; the reference of an ONNX file is built by the same
    stage.
    """
    return any(isinstance(each, Recipe) and each.variant != "as given" for each in arguments)


def write_sabotaged(folder: Path, candidates: list[dict[str, Any]]) -> Path:
    """The tiny task with one candidate; returns the plan's path."""
    return write_task(folder, candidates=candidates, benchmark=QUICK, accuracy=ACCURACY)


def compiled(
    folder: Path,
    candidates: list[dict[str, Any]],
    after_convert: Fault | None = None,
    before_build: Fault | None = None,
) -> Report:
    """The tiny task with one candidate and one fault, compiled by the real stages. The fault must
    have been planted.
    """
    plan = folder / "plan.yaml"
    if not plan.exists():
        write_sabotaged(folder, candidates)
    (folder / "spoiled").mkdir()
    saboteur = Saboteur(folder / "spoiled", after_convert, before_build)
    report = compile_plan(
        load_plan(plan), Runner(Store(folder / "home"), run=saboteur), "crucible compile plan.yaml"
    )
    assert saboteur.planted == [fault.__name__ for fault in (after_convert, before_build) if fault]
    return report


def engine_of(report: Report) -> Engine:
    engine = report.candidates[0].engine
    assert engine is not None
    return engine


# -- faults ------------------------------------------------------------------


def one_scale_times_8(proto: onnx.ModelProto) -> None:
    """The scale of the hidden activation, for quantising and for what comes back."""
    scales = {
        node.input[1]
        for node in proto.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == "r"
    }
    (tensor,) = (each for each in proto.graph.initializer if each.name in scales)
    tensor.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(8), tensor.name)
    )


def one_weight_scale_times_8(proto: onnx.ModelProto) -> None:
    """The scales with which the weight of the hidden layer comes back."""
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    (node,) = (
        node
        for node in proto.graph.node
        if node.op_type == "DequantizeLinear"
        and node.input[0] in constants
        and "w1" in node.input[0]
    )
    tensor = constants[node.input[1]]
    tensor.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(8), tensor.name)
    )


def never_quantised(proto: onnx.ModelProto) -> None:
    """The fp32 graph that conversion began with; it goes on under the name of int8."""
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        write_model(Path(file.name))
        proto.CopyFrom(onnx.load(file.name))


def classes_permuted(proto: onnx.ModelProto) -> None:
    """The scores of the classes in another order."""
    (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == "w2")
    weight.CopyFrom(
        numpy_helper.from_array(
            np.ascontiguousarray(numpy_helper.to_array(weight)[:, [1, 2, 3, 0]]), "w2"
        )
    )


def samples_permuted(proto: onnx.ModelProto) -> None:
    """The rows of each batch in reverse: every answer is right, for another sample."""
    _rename_result(proto, "straight")
    reverse = [
        numpy_helper.from_array(np.array([number], np.int64), name)
        for name, number in (("from", -1), ("to", -(2**31)), ("axis", 0), ("by", -1))
    ]
    proto.graph.initializer.extend(reverse)
    proto.graph.node.append(
        helper.make_node("Slice", ["straight", "from", "to", "axis", "by"], ["y"], name="reverse")
    )


def another_model(proto: onnx.ModelProto) -> None:
    """Other weights behind the same interface."""
    random = np.random.default_rng(99)
    for tensor in proto.graph.initializer:
        shape = {"w1": (FEATURES, HIDDEN), "w2": (HIDDEN, CLASSES)}[tensor.name]
        tensor.CopyFrom(
            numpy_helper.from_array(random.normal(0, 0.3, shape).astype(np.float32), tensor.name)
        )


def output_renamed(proto: onnx.ModelProto) -> None:
    _rename_result(proto, "logits")
    proto.graph.output[0].name = "logits"


def one_value(value: float, sample: np.ndarray) -> Fault:
    """A fault that makes the first score of one sample, known by its first feature, `value`."""

    def one_value_not_finite(proto: onnx.ModelProto) -> None:
        _rename_result(proto, "sound")
        constants = {
            "first": np.array([0], np.int64),
            "is": sample[:1],
            "class": np.eye(1, CLASSES, dtype=bool),
            "value": np.array(value, np.float32),
        }
        proto.graph.initializer.extend(
            numpy_helper.from_array(array, name) for name, array in constants.items()
        )
        proto.graph.node.extend(
            [
                helper.make_node("Gather", ["x", "first"], ["feature"], name="feature", axis=1),
                helper.make_node("Equal", ["feature", "is"], ["here"], name="here"),
                helper.make_node("And", ["here", "class"], ["spoil"], name="spoil"),
                helper.make_node("Where", ["spoil", "value", "sound"], ["y"], name="spoiled"),
            ]
        )

    return one_value_not_finite


def _rename_result(proto: onnx.ModelProto, name: str) -> None:
    for node in proto.graph.node:
        node.output[:] = [name if output == "y" else output for output in node.output]
    assert proto.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
