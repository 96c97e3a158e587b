"""Data and a plan for the tagger: numbered samples of different lengths, each with states of its
own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from tests.builders.cli import ONE_PROCESS
from tests.builders.tagger import FEATURES, HIDDEN, LAYERS, build

INT8 = {
    "backend": "onnxruntime",
    "precision": "int8",
    "method": "minmax",
    "placement": {"last_layer": True},
}  # of the head
COUNTS = {"calibration": 40, "selection": 60, "validation": 60}
STATE = {"dtype": "float32", "shape": [LAYERS, "batch", HIDDEN]}
INPUTS = [
    {"name": "x", "dtype": "float32", "shape": ["time", "batch", FEATURES]},
    *({"name": name, **STATE} for name in ("h0", "c0")),
]


def tagger_samples(role: str) -> list[dict[str, NDArray[np.generic]]]:
    """Sequences of 5 to 12 steps; the label of each step is the model's own answer."""
    import torch

    model, random = build(), np.random.default_rng(list(COUNTS).index(role))
    samples: list[dict[str, NDArray[np.generic]]] = []
    for index in range(COUNTS[role]):
        state = random.normal(0, 0.5, (2, LAYERS, 1, HIDDEN)).astype(np.float32)
        x = random.normal(0, 1, (5 + index % 8, 1, FEATURES)).astype(np.float32)
        with torch.no_grad():
            logits, *_ = model(*map(torch.from_numpy, (x, *state)))
        samples.append(
            {"x": x, "h0": state[0], "c0": state[1], "labels": logits.numpy().argmax(axis=-1)[:, 0]}
        )
    return samples


def write_tagger_data(folder: Path) -> None:
    """Write a .npz file of samples for each role."""
    for role in COUNTS:
        numbered = {
            f"{index}/{name}": array
            for index, sample in enumerate(tagger_samples(role))
            for name, array in sample.items()
        }
        np.savez(folder / f"{role}.npz", **numbered)  # type: ignore[arg-type]


def tagger_plan(**changes: object) -> dict[str, object]:
    """The plan without model and data. `changes` replace top-level keys."""
    return {
        "name": "tagger",
        "profiles": [{"time": [1, 8, 12], "batch": [1, 1, 4]}],
        "accuracy": {"metric": "top1", "max_drop": 0.1, "thresholds": {"min_cosine": 0.8}},
        "candidates": [{"backend": "onnxruntime", "precision": "fp32"}, INT8],
        "benchmark": ONE_PROCESS,
        **changes,
    }


def write_tagger_task(folder: Path, **changes: object) -> Path:
    """Three sets and a plan; returns the plan's path. `changes` replace top-level keys of the
    plan.
    """
    write_tagger_data(folder)
    place = {
        "entrypoint": "tagger:build",
        "python_path": str(Path(__file__).parent),
        "weights_from": "random: a test",
    }
    model = {**place, "inputs": INPUTS, "outputs": ["logits", "h", "c"]}
    plan = tagger_plan(model=model, data={role: f"{role}.npz" for role in COUNTS}, **changes)
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return folder / "plan.yaml"
