"""Fake quantisers that `pipeline.quantize_aware` places: where, what they learn, and what becomes
of them in a graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import pipeline
from pipeline.backends.pytorch.quantize_aware.fake_quantizer import FakeQuantizer
from pipeline.backends.pytorch.quantize_aware.frozen import freeze_fake_quantizers
from pipeline.backends.pytorch.quantize_aware.placement import QUANTIZERS
from pipeline.core.artifacts import ModelSource
from pipeline.core.progress import silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import ModelError, PlanError
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import read_proto
from pipeline.plan.schema import ExportConfig, SimplifyConfig
from pipeline.quantization.half_precision import flatten
from pipeline.quantization.lint.rules import lint
from pipeline.stages.convert import convert
from pipeline.stages.export import export
from pipeline.stages.simplify import simplify

IMAGE = TensorSpec(name="image", dtype="float32", shape=("batch", 3, 8, 8), kind="dynamic")
PROFILES = (Profile.model_validate({"dims": {"batch": [1, 2, 8]}}),)


class Residual(nn.Module):
    """Two convolutions with norms and a residual, pooled, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc1, self.fc2 = nn.Linear(8 * 16, 16), nn.Linear(16, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.bn1(self.conv1(image)))
        x = torch.relu(x + self.bn2(self.conv2(x)))
        x = functional.max_pool2d(x, 2).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


class Products(nn.Module):
    """A weight in the forward method, a number that is added, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 5) / 3)
        self.shared, self.last = nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.table + 1
        return self.last(self.shared(self.shared(x)))


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def residual() -> nn.Module:
    torch.manual_seed(0)
    net = Residual().train()
    for _ in range(20):  # statistics of the norms
        net(torch.randn(16, 3, 8, 8) * 2 + 0.5)
    return net.eval()


def weights(net: nn.Module) -> list[str]:
    return sorted(
        name for name, module in net.named_modules() if parametrize.is_parametrized(module)
    )


def activations(net: nn.Module) -> list[str]:
    return sorted(name for name, _ in net.get_submodule(QUANTIZERS).named_children())


def test_quantisers_are_where_the_rules_for_pairs_put_them() -> None:
    net = residual()
    made = pipeline.quantize_aware(net, "openvino")
    assert weights(made) == ["conv1", "conv2", "fc1"], "the classifier answers in floats"
    assert not any(isinstance(module, nn.BatchNorm2d) for module in made.modules()), "folded"
    assert activations(made) == ["conv2", "flatten", "image", "relu"]
    assert activations(pipeline.quantize_aware(net, "tensorrt")) == ["flatten", "image", "relu"], (
        "the kernel of conv2 adds the residual, so its own result stays as it is"
    )
    whole = pipeline.quantize_aware(net, "openvino", first_layer=False, last_layer=True)
    assert weights(whole) == ["conv2", "fc1", "fc2"]
    for patterns in (["conv*"], "conv*"):
        kept = pipeline.quantize_aware(net, "openvino", keep_fp32=patterns)
        assert weights(kept) == ["fc1"]


def test_the_module_given_stays_as_it_was() -> None:
    net = residual()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    made = pipeline.quantize_aware(net)
    assert made.training is False
    assert pipeline.quantize_aware(net.train()).training is True
    made.train()(torch.randn(4, 3, 8, 8)).sum().backward()
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_before_any_batch_only_the_weights_are_rounded() -> None:
    net, image = residual(), torch.randn(4, 3, 8, 8)
    made = pipeline.quantize_aware(net)
    want, got = net(image).detach(), made(image).detach()
    assert not torch.equal(want, got)
    assert torch.allclose(want, got, atol=0.05 * float(want.abs().max()))


def test_weights_in_the_forward_method_and_shared_layers_are_rounded_once() -> None:
    made = pipeline.quantize_aware(Products(), "openvino")
    held = made.get_submodule(QUANTIZERS).table.parametrizations.weight
    assert (held[0].axis, tuple(held[0].scale(held.original).shape)) == (1, (5,))
    assert "table" not in made.state_dict(), "it moved"
    assert len(made.shared.parametrizations.weight) == 1
    assert made.train()(torch.randn(3, 6)).shape == (3, 2)


def test_a_fake_quantiser_learns_its_range_and_lets_gradients_through() -> None:
    fake = FakeQuantizer().train()
    x = torch.tensor([0.5, -2.0, 1.0], requires_grad=True)
    assert torch.allclose(fake(x), x, atol=2 / 127)
    assert float(fake.bound) == 2.0
    fake(torch.tensor([4.0]))
    assert float(fake.bound) == pytest.approx(2.1), "a moving average"
    fake(torch.tensor([float("inf")]))
    assert float(fake.bound) == pytest.approx(2.1), "no range of a batch that overflowed"
    fake.eval()(torch.tensor([100.0]))
    assert float(fake.bound) == pytest.approx(2.1), "evaluation learns nothing"
    y = torch.tensor([1.0, 50.0], requires_grad=True)
    fake(y).sum().backward()
    assert y.grad is not None
    assert y.grad.tolist() == [1.0, 0.0]


def test_it_trains_in_mixed_precision() -> None:
    made = pipeline.quantize_aware(residual()).train()
    with torch.autocast("cpu", torch.bfloat16):
        answer = made(torch.randn(4, 3, 8, 8))
    answer.float().sum().backward()
    assert answer.dtype is torch.bfloat16
    assert all(parameter.grad is not None for parameter in made.parameters())


def train(net: nn.Module, steps: int = 5) -> nn.Module:
    optimizer = torch.optim.SGD(net.train().parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(net(torch.randn(16, 3, 8, 8)), torch.randint(4, (16,))).backward()
        optimizer.step()
    return net.eval()


def build(backend: str) -> nn.Module:
    """The entrypoint of the plan below."""
    return pipeline.quantize_aware(Residual(), backend)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "tensorrt"])
def test_the_graph_passes_lint_and_answers_alike(backend: str, tmp_path: Path) -> None:
    from safetensors.torch import save_model

    net = train(pipeline.quantize_aware(residual(), backend))
    save_model(net, str(tmp_path / "w.safetensors"))
    entry = "tests.pipeline.backends.pytorch.test_quantize_aware:"
    source = ModelSource(
        entrypoint=f"{entry}build_{backend}",
        python_path=Path(__file__).parents[4],
        weights=tmp_path / "w.safetensors",
        inputs=(IMAGE,),
        outputs=("scores",),
    )
    image = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)
    folders = [tmp_path / name for name in ("exported", "simpler", "converted")]
    for folder in folders:
        folder.mkdir()
    exported = export(source, PROFILES, ExportConfig(), ({"image": image},), folders[0])
    simpler = simplify(exported, PROFILES, SimplifyConfig(), (), folders[1], silent)
    rest = Precision.FP16 if backend == "tensorrt" else Precision.FP32
    recipe = Recipe(backend=backend, precision=Precision.INT8, quantizer="given", rest=rest)
    converted = convert(simpler, recipe, None, ({"image": image},), folders[2])
    graph = flatten(read_proto(converted.path)).graph
    assert [finding.rule for finding in lint(graph, backend)] == []
    got = open_reference(converted.path)({"image": image})["scores"]
    want = net(torch.from_numpy(image)).detach().numpy()
    assert np.abs(got - want).max() <= 0.02 * np.abs(want).max()
    count = sum(node.op_type == "DequantizeLinear" for node in graph.node)
    assert count >= 6, "three activations and three weights at least"


def build_onnxruntime() -> nn.Module:
    return build("onnxruntime")


def build_openvino() -> nn.Module:
    return build("openvino")


def build_tensorrt() -> nn.Module:
    return build("tensorrt")


def test_what_has_seen_no_data_is_refused() -> None:
    with pytest.raises(ModelError, match=r"fake quantisers have seen no data \(the first is"):
        freeze_fake_quantizers(pipeline.quantize_aware(residual()))


@pytest.mark.parametrize(
    ("net", "arguments", "error", "text"),
    [
        (Branching(), {}, ModelError, "torch.fx cannot trace the model: TraceError"),
        (5, {}, ModelError, "expected a torch.nn.Module, got int"),
        (nn.ReLU(), {}, ModelError, "nothing can be quantised"),
        (nn.Linear(3, 3), {}, ModelError, "nothing can be quantised"),
        (residual(), {"keep_fp32": ["cnv*"]}, ModelError, "no module matches 'cnv\\*'"),
        (residual(), {"backend": "tflite"}, PlanError, "no rules for the backend 'tflite'"),
        (pipeline.quantize_aware(residual()), {}, ModelError, "has fake quantisers already"),
    ],
)
def test_what_cannot_be_done_is_refused_by_a_sentence(
    net: nn.Module, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        pipeline.quantize_aware(net, **arguments)
