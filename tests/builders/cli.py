"""A small labelled task as an ONNX model with data and a plan, and the crucible command run as a
user runs it.
"""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from service.cli.main import main

FEATURES, HIDDEN, CLASSES = 16, 64, 4
CANDIDATES = [
    {"backend": "onnxruntime", "precision": "fp32"},
    {"backend": "onnxruntime", "precision": "int8", "method": "minmax"},
]


ONE_PROCESS = {"duration_s": 0.3, "warmup_s": 0.05, "budget_s": 0.01}
"""Each engine is measured in one process, which is quick and says nothing: the verdict about right
engines is `unproven`, however fast they are.
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, Any]:
        loaded = json.loads(self.out.splitlines()[-1])
        assert isinstance(loaded, dict)
        return loaded


def crucible(
    *arguments: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    python: str = sys.executable,
) -> Result:
    """Run the command in a process of its own."""
    result = subprocess.run(
        [python, "-m", "pipeline.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(env),
        check=False,
    )
    return Result(result.returncode, result.stdout, result.stderr)


def crucible_here(*arguments: str | Path, cwd: Path) -> Result:
    """Run the command in this process, which saves the second that a new one takes to import
    everything: for what ends before any stage is run.
    """
    out, err, on_term = io.StringIO(), io.StringIO(), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setenv("COLUMNS", "160")
        patch.setattr(sys, "argv", ["crucible", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    signal.signal(signal.SIGTERM, on_term)
    return Result(int(ended.value.code or 0), out.getvalue(), err.getvalue())


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    """Environment of a child that imports this checkout."""
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))
    )  # a GPU host's packages may lie there
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "160", **(more or {})}


def write_model(path: Path) -> None:
    """A classifier of the sign pattern of two sums; weights chosen so that labels are exact, with
    noise to quantise.
    """
    random = np.random.default_rng(0)
    first = random.normal(0, 0.3, (FEATURES, HIDDEN)).astype(np.float32)
    last = random.normal(0, 0.3, (HIDDEN, CLASSES)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], name="hidden"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], name="classifier"),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", FEATURES])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(first, "w1"), numpy_helper.from_array(last, "w2")],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path
    )


def answers(x: NDArray[np.float32]) -> NDArray[np.int64]:
    """What the model itself says: the reference scores 1."""
    random = np.random.default_rng(0)
    first = random.normal(0, 0.3, (FEATURES, HIDDEN)).astype(np.float32)
    last = random.normal(0, 0.3, (HIDDEN, CLASSES)).astype(np.float32)
    return np.asarray(np.argmax(np.maximum(x @ first, 0) @ last, axis=1), dtype=np.int64)


def write_task(folder: Path, **changes: object) -> Path:
    """Model, three sets and plan; returns the plan's path. `changes` replace top-level keys of the
    plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model.onnx")
    for seed, (role, count) in enumerate(
        {"calibration": 120, "selection": 220, "validation": 220}.items()
    ):
        x = np.random.default_rng(seed + 1).normal(0, 1, (count, FEATURES)).astype(np.float32)
        np.savez(folder / f"{role}.npz", x=x, labels=answers(x))
    plan: dict[str, object] = {
        "name": "tiny",
        "model": {"path": "model.onnx"},
        "profiles": [{"batch": [1, 4, 16]}],
        "data": {role: f"{role}.npz" for role in ("calibration", "selection", "validation")},
        "accuracy": {"metric": "top1", "max_drop": 0.03},
        "candidates": CANDIDATES,
        "benchmark": ONE_PROCESS,
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump({**plan, **changes}))
    return folder / "plan.yaml"


WIDTH, INNER = 64, 256


def write_overflowing_model(path: Path) -> None:
    """Two plain layers, a block whose inner values grow with the square of the input's scale,
    LayerNorm, two plain layers.

    x [batch, 64] fp32 -> y [batch, 4]. On inputs of the scale 1 the block reaches some 10,000; on
    inputs of the scale 5 over 100,000, which fp16 cannot hold: there an fp16 engine answers NaN.
    What overflows lies between two MatMuls, so that a GPU must write it to memory.
    """
    random = np.random.default_rng(7)

    def weights(name: str, rows: int, columns: int, gain: float) -> TensorProto:
        return numpy_helper.from_array(
            (gain * random.normal(0, rows**-0.5, (rows, columns))).astype(np.float32), name
        )

    nodes = [
        helper.make_node("MatMul", ["x", "w_in"], ["x1"], name="stem"),
        helper.make_node("Relu", ["x1"], ["r1"], name="stem_relu"),
        helper.make_node("MatMul", ["r1", "w_trunk"], ["x2"], name="trunk"),
        helper.make_node("Mul", ["x2", "x2"], ["sq"], name="square"),
        helper.make_node("MatMul", ["sq", "w_up"], ["up"], name="up"),
        helper.make_node("Relu", ["up"], ["wide"], name="wide_relu"),
        helper.make_node("MatMul", ["wide", "w_down"], ["down"], name="down"),
        helper.make_node(
            "LayerNormalization", ["down", "scale", "shift"], ["norm"], name="norm", axis=-1
        ),
        helper.make_node("MatMul", ["norm", "w_mid"], ["x3"], name="mid"),
        helper.make_node("Relu", ["x3"], ["r3"], name="mid_relu"),
        helper.make_node("MatMul", ["r3", "w_out"], ["y"], name="classifier"),
    ]
    constants = [
        weights("w_in", WIDTH, INNER, 1.4),
        weights("w_trunk", INNER, WIDTH, 1.4),
        weights("w_up", WIDTH, INNER, 500.0),
    ]
    constants += [
        weights("w_down", INNER, WIDTH, 0.02),
        weights("w_mid", WIDTH, INNER, 1.4),
        weights("w_out", INNER, CLASSES, 1.0),
    ]
    constants += [
        numpy_helper.from_array(np.ones(WIDTH, np.float32), "scale"),
        numpy_helper.from_array(np.zeros(WIDTH, np.float32), "shift"),
    ]
    graph = helper.make_graph(
        nodes,
        "overflowing",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        constants,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path
    )


def overflowing_task(folder: Path, calibrated: bool = False, **changes: object) -> Path:
    """A model that overflows in fp16 on every eighth sample of selection and validation; returns
    the plan's path.

    Calibration holds such samples too where `calibrated`, and none else.

    The labels are the model's own answers. The plan asks for tensorrt fp16; `changes` replace its
    top-level keys.
    """
    import onnxruntime

    folder.mkdir(parents=True, exist_ok=True)
    write_overflowing_model(folder / "model.onnx")
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    for seed, (role, count) in enumerate(
        {"calibration": 200, "selection": 240, "validation": 240}.items()
    ):
        x = np.random.default_rng(seed + 11).normal(0, 1, (count, WIDTH)).astype(np.float32)
        if role != "calibration" or calibrated:
            x[5::8] *= 5
        np.savez(folder / f"{role}.npz", x=x, labels=session.run(None, {"x": x})[0].argmax(axis=1))
    plan: dict[str, object] = {
        "name": "overflowing",
        "model": {"path": "model.onnx"},
        "profiles": [{"batch": [1, 8, 32]}],
        "data": {role: f"{role}.npz" for role in ("calibration", "selection", "validation")},
        "accuracy": {"metric": "top1", "max_drop": 0.01},
        "candidates": [{"backend": "tensorrt", "precision": "fp16"}],
        "benchmark": {"duration_s": 0.5, "warmup_s": 0.05},
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump({**plan, **changes}))
    return folder / "plan.yaml"
