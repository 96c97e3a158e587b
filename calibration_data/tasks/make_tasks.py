"""Write a small model, its sets and its plan for a metric.

    python calibration_data/tasks/make_tasks.py FOLDER [METRIC ...]
    crucible compile FOLDER/map/plan.yaml

    f1          classes of points, of which one is rare
    map         bright rectangles in noise; their boxes are a file in the format of COCO
    wer         words as rows of tones; their texts are a file of lines
    spearman    one number for each point
    sts         texts of numbered words in pairs, with the share of words that both have
    perplexity  texts of a chain of numbered words

The weights are written by hand or drawn, so there is nothing to train and nothing to download.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import yaml
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Array = NDArray[Any]
SIZES = {"calibration": 64, "selection": 200, "validation": 200}
CANDIDATES: list[dict[str, Any]] = [
    {"backend": "onnxruntime", "precision": "fp32"},
    # with the last layer, which is nearly all of these models
    {"backend": "onnxruntime", "precision": "int8", "placement": {"last_layer": True}},
]
BATCH = {"batch": [1, 8, 32]}
TEXT = "a tail or a stone in the mine no more tea and one lemon are best at noon"
WORDS, LETTERS = TEXT.split(), "".join(sorted(set(TEXT)))
CELL, CELLS = 8, 4  # pixels of a cell of the detector, cells per side


@dataclass(frozen=True)
class Task:
    """A model with inputs, and what a set of `n` samples is."""

    nodes: list[onnx.NodeProto]
    weights: Mapping[str, Array]
    inputs: Mapping[str, tuple[int, list[int | str]]]  # type and shape by name
    output: tuple[str, list[int | str]]
    samples: Callable[[np.random.Generator, int], dict[str, Array]]
    accuracy: dict[str, Any]
    labels: Callable[[dict[str, Array]], tuple[str, str]] | None = None  # suffix and text of a file


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def write_task(folder: Path, metric: str) -> Path:
    """Write the model, the sets and the plan of a metric. Returns the path of the plan."""
    task = TASKS[metric]()
    folder = folder / metric
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_model(task), folder / "model.onnx")
    data: dict[str, Any] = {}
    for seed, (role, size) in enumerate(SIZES.items()):
        arrays = task.samples(np.random.default_rng([seed, 7]), size)
        if task.labels is not None:
            suffix, text = task.labels(arrays)
            arrays = {name: array for name, array in arrays.items() if name in task.inputs}
            if role != "calibration":
                (folder / f"{role}{suffix}").write_text(text, encoding="utf-8")
                data.setdefault("labels", {})[role] = f"{role}{suffix}"
        np.savez_compressed(folder / f"{role}.npz", **arrays)  # type: ignore[arg-type]
        data[role] = f"{role}.npz"
    plan = {
        "model": {"path": "model.onnx"},
        "profiles": [BATCH],
        "data": data,
        "accuracy": {"metric": metric, "thresholds": {"min_cosine": None}, **task.accuracy},
        "candidates": CANDIDATES,
        "benchmark": {"sizes": [{"batch": 8}], "duration_s": 0.2, "budget_s": 10},
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    return path


def _model(task: Task) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, (kind, shape) in task.inputs.items()
    ]
    name, shape = task.output
    output = helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
    weights = [numpy_helper.from_array(array, name) for name, array in task.weights.items()]
    graph = helper.make_graph(task.nodes, "task", inputs, [output], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def _floats(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype=np.float32)


# -- points ------------------------------------------------------------------

FEATURES, CLASSES = 32, 5
CENTRES = np.random.default_rng(1).normal(0, 1, (CLASSES, FEATURES))


def _points(random: np.random.Generator, n: int) -> dict[str, Array]:
    labels = random.choice(CLASSES, n, p=[0.3, 0.25, 0.2, 0.15, 0.1])
    return {
        "x": _floats(CENTRES[labels] + random.normal(0, 1.8, (n, FEATURES))),
        "labels": labels.astype(np.int64),
    }


def f1() -> Task:
    """The nearest centre, as the largest of x.c - |c|^2 / 2."""
    return Task(
        [node("Gemm", "x w b", "scores")],
        {"w": _floats(CENTRES.T), "b": _floats(-(CENTRES**2).sum(axis=1) / 2)},
        {"x": (onnx.TensorProto.FLOAT, ["batch", FEATURES])},
        ("scores", ["batch", CLASSES]),
        _points,
        {"max_drop": 0.02, "max_class_drop": 0.06},
    )


def spearman() -> Task:
    """A layer that measures a point, and labels that are its noisy distance along a direction."""

    def samples(random: np.random.Generator, n: int) -> dict[str, Array]:
        points = _points(random, n)["x"]
        distance = points @ CENTRES[0] + random.normal(0, 3, n)
        return {"x": points, "labels": distance.astype(np.float32)}

    return Task(
        [node("MatMul", "x w", "score")],
        {"w": _floats(CENTRES[0][:, None])},
        {"x": (onnx.TensorProto.FLOAT, ["batch", FEATURES])},
        ("score", ["batch", 1]),
        samples,
        {"max_drop": 0.01},
    )


# -- boxes -------------------------------------------------------------------


def detection() -> Task:
    """Rectangles of two kinds of brightness, at most one in a cell of 8 x 8 pixels.

    A convolution sums each cell and its moments: the sum of x over the pixels of a rectangle gives
    its middle, and that of x squared its width.
    """
    place = np.arange(CELL) + 0.5
    columns, rows = np.meshgrid(place, place)
    kernels = np.stack([np.ones_like(columns), columns, rows, columns**2, rows**2])
    weights = np.zeros((10, 2, CELL, CELL))  # the five moments of each kind
    weights[:5, 0], weights[5:, 1] = kernels, kernels
    corners = np.stack(np.meshgrid(np.arange(CELLS), np.arange(CELLS)), axis=0)
    return Task(
        [
            node("Conv", "image kernels", "sums", strides=[CELL, CELL]),
            node("Reshape", "sums by_kind", "moments"),  # [batch, 2, 5, cells]
            node("Split", "moments", "mass mx my mxx myy", axis=2, num_outputs=5),
            node("Max", "mass tiny", "full"),
            *_middle_and_size("x"),
            *_middle_and_size("y"),
            node("Sub", "cx wx", "left0"),
            node("Add", "left0 corner_x", "left"),
            node("Sub", "cy wy", "top0"),
            node("Add", "top0 corner_y", "top"),
            node("Add", "cx wx", "right0"),
            node("Add", "right0 corner_x", "right"),
            node("Add", "cy wy", "bottom0"),
            node("Add", "bottom0 corner_y", "bottom"),
            node("Sub", "mass least", "over"),
            node("Tanh", "over", "score"),
            node("Mul", "mass zero", "nothing"),
            node("Add", "nothing kind", "class"),
            node("Concat", "left top right bottom score class", "rows", axis=2),
            node("Transpose", "rows", "last", perm=[0, 1, 3, 2]),  # [batch, 2, cells, 6]
            node("Reshape", "last as_boxes", "boxes"),
        ],
        {
            "kernels": _floats(weights),
            "by_kind": np.array([0, 2, 5, CELLS**2]),
            "tiny": _floats(np.array(1e-3)),
            "twelve_4th": _floats(np.array(3.0)),  # 12 / 4: half of the width
            "none": _floats(np.array(0.0)),
            "least": _floats(np.array(4.0)),
            "zero": _floats(np.array(0.0)),
            "kind": _floats(np.array([0, 1]).reshape(1, 2, 1, 1)),
            "corner_x": _floats(corners[0].reshape(1, 1, 1, -1) * CELL),
            "corner_y": _floats(corners[1].reshape(1, 1, 1, -1) * CELL),
            "as_boxes": np.array([0, 2 * CELLS**2, 6]),
        },
        {"image": (onnx.TensorProto.FLOAT, ["batch", 2, CELL * CELLS, CELL * CELLS])},
        ("boxes", ["batch", 2 * CELLS**2, 6]),
        _rectangles,
        {"max_drop": 0.02, "max_class_drop": 0.05},
        _coco,
    )


def _middle_and_size(axis: str) -> list[onnx.NodeProto]:
    """The middle c and half the width w of a rectangle, from its mean and mean square."""
    return [
        node("Div", f"m{axis} full", f"c{axis}"),
        node("Div", f"m{axis}{axis} full", f"square_{axis}"),
        node("Mul", f"c{axis} c{axis}", f"middle_{axis}"),
        node("Sub", f"square_{axis} middle_{axis}", f"variance0_{axis}"),
        node("Max", f"variance0_{axis} none", f"variance_{axis}"),
        node("Mul", f"variance_{axis} twelve_4th", f"half_{axis}"),
        node("Sqrt", f"half_{axis}", f"w{axis}"),
    ]


def _rectangles(random: np.random.Generator, n: int) -> dict[str, Array]:
    side = CELL * CELLS
    images = np.zeros((n, 2, side, side), np.float32)
    boxes = []
    for image in range(n):
        found = []
        for cell in random.choice(CELLS**2, random.integers(1, 4), replace=False):
            width, height = random.integers(3, CELL, 2)
            x = int(cell % CELLS * CELL + random.integers(0, CELL - width + 1))
            y = int(cell // CELLS * CELL + random.integers(0, CELL - height + 1))
            kind = int(random.integers(2))
            images[image, kind, y : y + height, x : x + width] = 1
            found.append((kind, x, y, int(width), int(height)))
        boxes.append(found)
    noise = random.normal(0, 0.02, images.shape) + 0.003
    return {"image": _floats(images + noise), "boxes": np.array(boxes, dtype=object)}


def _coco(arrays: dict[str, Array]) -> tuple[str, str]:
    annotations = [
        {"id": 0, "image_id": image, "category_id": kind, "bbox": box}
        for image, found in enumerate(arrays["boxes"])
        for kind, *box in found
    ]
    for number, annotation in enumerate(annotations, 1):
        annotation["id"] = number
    document = {
        "images": [{"id": image} for image in range(len(arrays["image"]))],
        "categories": [{"id": 0, "name": "red"}, {"id": 1, "name": "blue"}],
        "annotations": annotations,
    }
    return ".json", json.dumps(document)


# -- texts -------------------------------------------------------------------

BANDS, STEPS = 24, 80
TONES = np.random.default_rng(2).normal(0, 1, (len(LETTERS) + 1, BANDS))


def speech() -> Task:
    """Each letter is a tone over two steps, with silence behind. The model finds the nearest."""

    def samples(random: np.random.Generator, n: int) -> dict[str, Array]:
        sound = np.tile(TONES[0], (n, STEPS, 1))
        texts = []
        for sample in range(n):
            text = " ".join(random.choice(WORDS, 4))
            texts.append(text)
            for place, letter in enumerate(text):
                sound[sample, 3 * place : 3 * place + 2] = TONES[LETTERS.index(letter) + 1]
        noisy = sound + random.normal(0, 0.9, sound.shape)
        return {"sound": _floats(noisy), "texts": np.array(texts)}

    return Task(
        [node("MatMul", "sound w", "scores"), node("Add", "scores b", "logits")],
        {"w": _floats(TONES.T), "b": _floats(-(TONES**2).sum(axis=1) / 2)},
        {"sound": (onnx.TensorProto.FLOAT, ["batch", STEPS, BANDS])},
        ("logits", ["batch", STEPS, len(LETTERS) + 1]),
        samples,
        {"max_drop": 0.02, "tokens": ["", *LETTERS]},
        lambda arrays: (".jsonl", _lines({"text": text} for text in arrays["texts"].tolist())),
    )


def _lines(entries: Any) -> str:
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)


VOCABULARY, LENGTH, HIDDEN = 60, 12, 16
TABLE = np.random.default_rng(3).normal(0, 1, (VOCABULARY, HIDDEN))


def sentences() -> Task:
    """Vectors of words. A pair of texts has as many words in common as its label says."""

    def samples(random: np.random.Generator, n: int) -> dict[str, Array]:
        ids = random.integers(1, VOCABULARY, (n, LENGTH))
        common = random.integers(0, LENGTH + 1, n // 2)
        for pair, count in enumerate(common):
            ids[2 * pair + 1, :count] = ids[2 * pair, :count]
        lengths = np.repeat(random.integers(LENGTH // 2, LENGTH + 1, n // 2), 2)
        mask = np.arange(LENGTH) < lengths[:, None]
        shared = np.minimum(np.repeat(common, 2), lengths) / lengths
        return {
            "ids": np.where(mask, ids, 0),
            "mask": mask.astype(np.int64),
            "labels": shared.astype(np.float32),
        }

    return Task(
        # behind a text are vectors that mean nothing, as in a transformer
        [
            node("Gather", "table ids", "words"),
            node("MatMul", "words w", "hidden"),
            node("Cast", "mask", "words_only", to=onnx.TensorProto.BOOL),
            node("Unsqueeze", "words_only last", "columns"),
            node("Where", "columns hidden filling", "vectors"),
        ],
        {
            "table": _floats(TABLE),
            "w": _floats(np.linalg.qr(np.random.default_rng(4).normal(size=(HIDDEN, HIDDEN)))[0]),
            "filling": _floats(np.random.default_rng(6).normal(0, 2, HIDDEN)),
            "last": np.array([-1]),
        },
        {
            "ids": (onnx.TensorProto.INT64, ["batch", LENGTH]),
            "mask": (onnx.TensorProto.INT64, ["batch", LENGTH]),
        },
        ("vectors", ["batch", LENGTH, HIDDEN]),
        samples,
        {"max_drop": 0.01, "decode": "mean_pool", "mask": "mask"},
    )


def chain() -> Task:
    """The next word depends on the last one. The model knows the chain."""
    queries = np.random.default_rng(5).normal(0, 1, (HIDDEN, VOCABULARY))
    logits = TABLE @ queries / 2
    odds = np.exp(logits)
    odds /= odds.sum(axis=1, keepdims=True)

    def samples(random: np.random.Generator, n: int) -> dict[str, Array]:
        texts = np.zeros((n, LENGTH + 1), np.int64)
        texts[:, 0] = random.integers(0, VOCABULARY, n)
        for place in range(LENGTH):
            texts[:, place + 1] = [
                random.choice(VOCABULARY, p=odds[word]) for word in texts[:, place]
            ]
        lengths = random.integers(LENGTH // 2, LENGTH + 1, n)
        counted = np.arange(LENGTH) < lengths[:, None]
        return {"ids": texts[:, :-1], "labels": np.where(counted, texts[:, 1:], -100)}

    return Task(
        [node("Gather", "table ids", "words"), node("MatMul", "words w", "logits")],
        {"table": _floats(TABLE), "w": _floats(queries / 2)},
        {"ids": (onnx.TensorProto.INT64, ["batch", LENGTH])},
        ("logits", ["batch", LENGTH, VOCABULARY]),
        samples,
        {"max_drop": 0.1},
    )


TASKS: dict[str, Callable[[], Task]] = {
    "f1": f1,
    "map": detection,
    "wer": speech,
    "spearman": spearman,
    "sts": sentences,
    "perplexity": chain,
}


if __name__ == "__main__":
    for name in sys.argv[2:] or TASKS:
        print(write_task(Path(sys.argv[1]), name))
