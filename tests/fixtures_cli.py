"""A small labelled task as an ONNX model with data and a plan, and the crucible command run as a user runs it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import yaml
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

FEATURES, HIDDEN, CLASSES = 16, 64, 4
CANDIDATES = [{"backend": "onnxruntime", "precision": "fp32"}, {"backend": "onnxruntime", "precision": "int8"}]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def summary(self) -> dict[str, object]:
        loaded = json.loads(self.out.splitlines()[-1])
        assert isinstance(loaded, dict)
        return loaded


def crucible(*arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, python: str = sys.executable) -> Result:
    """Run the command in a process of its own."""
    done = subprocess.run(
        [python, "-m", "pipeline.cli", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=environment(env), check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "COLUMNS": "160", **(more or {})}


def write_model(path: Path) -> None:
    """A classifier of the sign pattern of two sums; weights chosen so that labels are exact, with noise to quantise."""
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
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def answers(x: NDArray[np.float32]) -> NDArray[np.int64]:
    """What the model itself says: the reference scores 1."""
    random = np.random.default_rng(0)
    first = random.normal(0, 0.3, (FEATURES, HIDDEN)).astype(np.float32)
    last = random.normal(0, 0.3, (HIDDEN, CLASSES)).astype(np.float32)
    return np.asarray(np.argmax(np.maximum(x @ first, 0) @ last, axis=1), dtype=np.int64)


def write_task(folder: Path, **changes: object) -> Path:
    """Model, three sets and plan; returns the plan's path. `changes` replace top-level keys of the plan."""
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model.onnx")
    for seed, (role, count) in enumerate({"calibration": 120, "selection": 220, "validation": 220}.items()):
        x = np.random.default_rng(seed + 1).normal(0, 1, (count, FEATURES)).astype(np.float32)
        np.savez(folder / f"{role}.npz", x=x, labels=answers(x))
    plan: dict[str, object] = {
        "name": "tiny",
        "model": {"path": "model.onnx"},
        "profiles": [{"batch": [1, 4, 16]}],
        "data": {role: f"{role}.npz" for role in ("calibration", "selection", "validation")},
        "accuracy": {"metric": "top1", "max_drop": 0.03},
        "candidates": CANDIDATES,
        "benchmark": {"duration_s": 0.3, "warmup_s": 0.05},
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump({**plan, **changes}))
    return folder / "plan.yaml"
