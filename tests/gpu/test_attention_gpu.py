"""An encoder as TorchScript exports it, with a mask of -inf: TensorRT builds it in 16 bits and in
8, and computes each attention in one kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.compiler.compile import compile_plan
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.plan.files import plan_from_document
from pipeline.results.precision_audit import fusions
from pipeline.results.report import Report

pytestmark = pytest.mark.gpu
WIDTH, HEADS, LAYERS, TOKENS = 256, 4, 2, 64
ENCODER = f"""
import torch

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("query", "key", "value", "out", "last"):
            setattr(self, name, torch.nn.Linear({WIDTH}, {WIDTH}))
        self.norm, self.second = torch.nn.LayerNorm({WIDTH}), torch.nn.LayerNorm({WIDTH})

    def forward(self, x, seen):
        projections = (self.query, self.key, self.value)
        apart = [each(x).unflatten(-1, ({HEADS}, -1)).transpose(1, 2) for each in projections]
        attended = torch.nn.functional.scaled_dot_product_attention(*apart, attn_mask=seen)
        x = self.norm(x + self.out(attended.transpose(1, 2).flatten(2)))
        return self.second(x + self.last(torch.nn.functional.gelu(x)))

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range({LAYERS})])

    def forward(self, x, mask):
        seen = (mask > 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        return x

def build():
    torch.manual_seed(0)
    return Encoder()
"""


def document(folder: Path, *candidates: dict[str, Any]) -> dict[str, Any]:
    (folder / "encoder.py").write_text(ENCODER)
    inputs = [
        {"name": "x", "dtype": "float32", "shape": [2, TOKENS, WIDTH]},
        {"name": "mask", "dtype": "int64", "shape": [2, TOKENS]},
    ]
    model = {
        "entrypoint": "encoder:build",
        "python_path": str(folder),
        "weights_from": "random: a test",
        "inputs": inputs,
        "outputs": ["y"],
    }
    data = {
        "calibration": {
            "generate": "random",
            "samples": 4,
            "because": "what is asked is how the engine computes",
            "seed": 5,
        }
    }
    return {
        "name": "encoder",
        "model": model,
        "data": data,
        "export": {"exporter": "torchscript"},
        "candidates": list(candidates),
        "benchmark": {"duration_s": 0.2},
    }


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("encoder")
    ways = [{"backend": "tensorrt", "precision": precision} for precision in ("fp16", "int8")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRUCIBLE_HOME", str(folder / "home"))  # the timing cache's
        return compile_plan(
            plan_from_document(document(folder, *ways), folder),
            Runner(Store(folder / "home")),
            "a test",
        )


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_attention_of_torchscript_is_in_one_kernel(report: Report, precision: str) -> None:
    (candidate,) = [each for each in report.candidates if precision in each.label]
    assert candidate.engine is not None, candidate.reason
    assert candidate.layers is not None
    assert f"attention (MatMul, Softmax, MatMul) in one kernel: {LAYERS} of {LAYERS}" in fusions(
        candidate.layers
    )


def test_fp16_answers_as_pytorch_does(report: Report) -> None:
    (candidate,) = [each for each in report.candidates if "fp16" in each.label]
    assert candidate.state == "measured", candidate.reason
