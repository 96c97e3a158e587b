"""Models of one GRU, LSTM or RNN in every form that ONNX gives them, and feeds for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from pipeline.core.artifacts import OnnxModel
from pipeline.core.shapes import DimRange, Profile, Tensors
from pipeline.onnx_graph.files import onnx_model

Operator = Literal["GRU", "LSTM", "RNN"]
Direction = Literal["forward", "reverse", "bidirectional"]

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
TIME, BATCH, WIDTH, HIDDEN = 6, 3, 8, 16
PROFILE = Profile(
    dims={"time": DimRange(min=1, opt=6, max=9), "batch": DimRange(min=1, opt=3, max=4)}
)


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a recurrent node."""

    operator: Operator
    direction: Direction = "forward"
    state: bool = False  # initial_h, of an LSTM initial_c too
    bias: bool = True
    lengths: bool = False  # sequence_lens
    dynamic: bool = True  # time and batch
    linear_before_reset: bool = False  # GRU
    peepholes: bool = False  # LSTM
    clip: float = 0.0  # 0: none
    only_last: bool = False  # Y is left out

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def __str__(self) -> str:
        switches = (
            "state",
            "bias",
            "lengths",
            "dynamic",
            "linear_before_reset",
            "peepholes",
            "clip",
            "only_last",
        )
        return "-".join(
            (self.operator, self.direction, *(name for name in switches if getattr(self, name)))
        )


def forms() -> Iterator[Form]:
    """Every operator and direction with and without each of its parts."""
    directions: tuple[Direction, ...] = ("forward", "reverse", "bidirectional")
    operators: tuple[Operator, ...] = ("GRU", "LSTM", "RNN")
    for operator in operators:
        for direction in directions:
            yield from (
                Form(operator, direction, state=state, bias=bias)
                for state in (False, True)
                for bias in (False, True)
            )
            yield Form(operator, direction, dynamic=False)
            yield Form(operator, direction, lengths=True)
        yield Form(operator, "bidirectional", only_last=True)
        yield Form(operator, clip=0.5)
    for direction in directions:
        yield Form("GRU", direction, linear_before_reset=True)
        yield Form("LSTM", direction, peepholes=True)
    yield Form("GRU", "bidirectional", state=True, linear_before_reset=True)
    yield Form("LSTM", "bidirectional", state=True, peepholes=True)
    yield Form("LSTM", "bidirectional", state=True, lengths=True)


def write(folder: Path, form: Form, opset: int = 17) -> OnnxModel:
    """x [time, batch, 8] -> y [time, directions, batch, 16], y_h, and of an LSTM y_c."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = helper.make_graph(
        [_node(form)], "recurrent", _inputs(form), _outputs(form), _weights(form)
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, folder / "model.onnx")
    return onnx_model(folder, "model.onnx")


def _node(form: Form) -> onnx.NodeProto:
    lstm = form.operator == "LSTM"
    names = ["x", "w", "r", "b" if form.bias else "", "lengths" if form.lengths else ""]
    names += ["h0" if form.state else ""]
    names += ["c0" if form.state else "", "p" if form.peepholes else ""] if lstm else []
    while not names[-1]:
        names.pop()
    outputs = ["" if form.only_last else "y", "y_h", *(["y_c"] if lstm else [])]
    attributes: dict[str, object] = {"hidden_size": HIDDEN, "direction": form.direction}
    attributes |= (
        {"linear_before_reset": int(form.linear_before_reset)} if form.operator == "GRU" else {}
    )
    attributes |= {"clip": form.clip} if form.clip else {}
    return helper.make_node(form.operator, names, outputs, name="recurrent", **attributes)


def _inputs(form: Form) -> list[onnx.ValueInfoProto]:
    state = [form.directions, _batch(form), HIDDEN]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [_time(form), _batch(form), WIDTH])
    ]
    values += (
        [helper.make_tensor_value_info("lengths", TensorProto.INT32, [_batch(form)])]
        if form.lengths
        else []
    )
    names = ("h0", "c0") if form.operator == "LSTM" else ("h0",)
    return values + [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, state)
        for name in names
        if form.state
    ]


def _outputs(form: Form) -> list[onnx.ValueInfoProto]:
    state = [form.directions, _batch(form), HIDDEN]
    shapes = {} if form.only_last else {"y": [_time(form), *state]}
    shapes |= {"y_h": state} | ({"y_c": state} if form.operator == "LSTM" else {})
    return [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in shapes.items()
    ]


def _time(form: Form) -> int | str:
    return "time" if form.dynamic else TIME


def _batch(form: Form) -> int | str:
    return "batch" if form.dynamic else BATCH


def _weights(form: Form) -> list[onnx.TensorProto]:
    random = np.random.default_rng(0)
    gates = GATES[form.operator] * HIDDEN
    shapes = {"w": (form.directions, gates, WIDTH), "r": (form.directions, gates, HIDDEN)}
    shapes |= {"b": (form.directions, 2 * gates)} if form.bias else {}
    shapes |= {"p": (form.directions, 3 * HIDDEN)} if form.peepholes else {}
    drawn = {
        name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()
    }
    return [numpy_helper.from_array(values, name) for name, values in drawn.items()]


def feeds_of(form: Form, time: int = TIME, batch: int = BATCH, seed: int = 0) -> Tensors:
    """Random inputs; rows of different lengths, none of them empty."""
    random = np.random.default_rng(seed)
    feeds = {"x": random.standard_normal((time, batch, WIDTH)).astype(np.float32)}
    if form.lengths:
        feeds["lengths"] = (np.arange(batch) % time + 1).astype(np.int32)
    for name in (("h0", "c0") if form.operator == "LSTM" else ("h0",)) if form.state else ():
        feeds[name] = random.standard_normal((form.directions, batch, HIDDEN)).astype(np.float32)
    return feeds
