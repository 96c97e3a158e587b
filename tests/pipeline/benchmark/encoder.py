"""A small encoder with a mask of one row per token and positions as inputs, and a plan for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline import backends
from pipeline.compiler.graph import export_plan
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.progress import silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import load_plan
from pipeline.plan.schema import Plan
from pipeline.report.bundle import seal
from tests.builders.cli import ONE_PROCESS
from tests.builders.halves import run_here

WORDS, LONGEST, WIDTH = 50, 128, 16
PACKING = {"axis": "tokens", "mask": "attention_mask", "positions": "position_ids"}

MODULE = f"""
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding({WORDS}, {WIDTH})
        self.positions = nn.Embedding({LONGEST}, {WIDTH})
        self.query, self.key, self.value = (nn.Linear({WIDTH}, {WIDTH}) for _ in range(3))

    def forward(self, input_ids, attention_mask, position_ids):
        hidden = self.words(input_ids) + self.positions(position_ids)
        scores = self.query(hidden) @ self.key(hidden).transpose(1, 2)
        scores = SCORES
        hidden = hidden + torch.softmax(scores, -1) @ self.value(hidden)
        return HIDDEN


def build():
    return Encoder().eval()
"""
SCORES = "scores.masked_fill(attention_mask == 0, -1e9)"
NO_MASK = "scores + 0.0 * attention_mask.to(scores.dtype)"
HIDDEN = "hidden"
MEAN = "hidden + hidden.mean(1, keepdim=True)"
POOLED = "hidden[:, 0]"


def encoder_plan(folder: Path, scores: str = SCORES, hidden: str = HIDDEN, **serving: Any) -> Plan:
    """The plan of an encoder, with data. `scores`, `hidden`: expressions of its module."""
    folder.mkdir(exist_ok=True)
    text = MODULE.replace("= SCORES", f"= {scores}").replace("return HIDDEN", f"return {hidden}")
    name = f"encoder_{abs(hash((scores, hidden)))}"  # an imported module is not read again
    (folder / f"{name}.py").write_text(text)
    random = np.random.default_rng(0)
    for role in ("selection", "validation"):
        np.savez(
            folder / f"{role}.npz",
            input_ids=random.integers(0, WORDS, (8, LONGEST)),
            attention_mask=np.ones((8, LONGEST, LONGEST), np.int64),
            position_ids=np.tile(np.arange(LONGEST), (8, 1)),
        )
    rows = ["batch", "tokens"]
    plan = {
        "model": {
            "entrypoint": f"{name}:build",
            "python_path": ".",
            "weights_from": "random",
            "inputs": [
                {"name": "input_ids", "dtype": "int64", "shape": rows},
                {"name": "attention_mask", "dtype": "int64", "shape": [*rows, "tokens"]},
                {"name": "position_ids", "dtype": "int64", "shape": rows},
            ],
            "outputs": ["last_hidden_state"],
        },
        "profiles": [{"batch": [1, 4, 8], "tokens": [2, 64, LONGEST]}],
        "data": {role: f"{role}.npz" for role in ("selection", "validation")},
        "candidates": [{"backend": "onnxruntime", "precision": "fp32"}],
        "benchmark": {**ONE_PROCESS, "sizes": [{"batch": 1, "tokens": 64}]},
        "serving": {"packing": {**PACKING, **serving}},
    }
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return load_plan(folder / "plan.yaml")


def encoder_engine(plan: Plan, folder: Path) -> Engine:
    """Its fp32 engine, without a compile's measuring."""
    model = export_plan(plan, Runner(Store(folder / "store"), run=run_here), simplified=False)
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32, realised_in="graph")
    (out := folder / "engine").mkdir()
    engine = backends.backend("onnxruntime").build(
        model, recipe, BuildOptions(profiles=plan.profiles, threads=1), out, silent
    )
    seal(engine.root, engine)
    return engine
