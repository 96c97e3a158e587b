"""Two models that low precision breaks in one node each, with data and a plan."""

from pathlib import Path

import numpy as np
import onnx
import yaml
from onnx import TensorProto, helper, numpy_helper

from tests.builders.cli import ONE_PROCESS

WIDTH, CLASSES = 64, 4
# what one channel is stretched by: an 8-bit step becomes wider than the values of all others; its
# square overflows fp16
LARGE = 600.0


def write_stretched(path: Path) -> None:
    """Four plain layers; before the second, one channel of 64 is stretched, and its weights are as
    much smaller: in fp32 nothing changes.

    Per tensor, 8 bits leave the other 63 channels nothing, so the layer `broken` breaks. x [batch,
    64] fp32 -> y [batch, 4].
    """
    stretch = np.ones(WIDTH, np.float32)
    stretch[0] = LARGE
    weights = _weights("first", "broken", "third", "classifier")
    weights["broken"] /= stretch[:, None]
    nodes = [
        *_layer("first", "x", "r1"),
        helper.make_node("Mul", ["r1", "stretch"], ["wide"], name="stretch"),
        *_layer("broken", "wide", "r2"),
        *_layer("third", "r2", "r3"),
        helper.make_node("MatMul", ["r3", "w_classifier"], ["y"], name="classifier"),
    ]
    _write(
        path, nodes, {**{f"w_{name}": array for name, array in weights.items()}, "stretch": stretch}
    )


def write_squaring(path: Path) -> None:
    """Plain layers and two LayerNorms, of which the second reads values of some hundreds: fp16
    holds them, and not their squares.
    """
    weights = _weights("first", "second", "third", "classifier")
    weights["second"] *= LARGE
    ones, zeros = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    nodes = [
        *_layer("first", "x", "r1"),
        helper.make_node(
            "LayerNormalization", ["r1", "ones", "zeros"], ["n1"], name="harmless", axis=-1
        ),
        helper.make_node("MatMul", ["n1", "w_second"], ["wide"], name="second"),
        helper.make_node(
            "LayerNormalization", ["wide", "ones", "zeros"], ["n2"], name="squares", axis=-1
        ),
        *_layer("third", "n2", "r3"),
        helper.make_node("MatMul", ["r3", "w_classifier"], ["y"], name="classifier"),
    ]
    _write(
        path,
        nodes,
        {**{f"w_{name}": array for name, array in weights.items()}, "ones": ones, "zeros": zeros},
    )


def _weights(*names: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    sizes = {name: CLASSES if name == "classifier" else WIDTH for name in names}
    return {
        name: random.normal(0, (2 / WIDTH) ** 0.5, (WIDTH, size)).astype(np.float32)
        for name, size in sizes.items()
    }


def _layer(name: str, source: str, target: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("MatMul", [source, f"w_{name}"], [f"{target}_sum"], name=name),
        helper.make_node("Relu", [f"{target}_sum"], [target], name=f"{name}_relu"),
    ]


def _write(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> None:
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path
    )


def write_broken_task(folder: Path, model: str, **changes: object) -> Path:
    """The model `stretched` or `squaring` with three sets, labelled by its own answers, and a plan,
    whose path is returned.
    """
    import onnxruntime

    {"stretched": write_stretched, "squaring": write_squaring}[model](folder / "model.onnx")
    session = onnxruntime.InferenceSession(
        str(folder / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    for seed, (role, count) in enumerate(
        {"calibration": 200, "selection": 240, "validation": 240}.items()
    ):
        x = np.random.default_rng(seed + 31).normal(0, 1, (count, WIDTH)).astype(np.float32)
        np.savez(folder / f"{role}.npz", x=x, labels=session.run(None, {"x": x})[0].argmax(axis=1))
    plan: dict[str, object] = {
        "name": model,
        "model": {"path": "model.onnx"},
        "profiles": [{"batch": [1, 8, 32]}],
        "data": {role: f"{role}.npz" for role in ("calibration", "selection", "validation")},
        "accuracy": {"metric": "top1", "max_drop": 0.05, "thresholds": {"min_cosine": 0.8}},
        "simplify": {"enabled": False},
        "benchmark": ONE_PROCESS,
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump({**plan, **changes}))
    return folder / "plan.yaml"
