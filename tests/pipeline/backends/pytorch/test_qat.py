"""PyTorch models with fake quantisers: frozen, exported with every scale, or refused by name."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import numpy_helper

from pipeline.backends.pytorch.export import Job, Refused, torchscript
from pipeline.backends.pytorch.module import load_module, run_module
from pipeline.backends.pytorch.quantize_aware.frozen import (
    check_ranges,
    freeze_fake_quantizers,
    holds_fake_quantizers,
    scales_run,
)
from pipeline.core.artifacts import ModelSource, OnnxModel
from pipeline.core.progress import silent
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import ModelError
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.plan.schema import ExportConfig, SimplifyConfig
from pipeline.quantization.existing_qdq import QDQ, given_precision, lost_scales, scales_of
from pipeline.stages.export import export, scale_notes
from pipeline.stages.simplify import simplify
from tests.builders.qat import digits, prepared, trained

IMAGE = TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8), kind="dynamic")
PROFILES = (Profile.model_validate({"dims": {"batch": [1, 8, 32]}}),)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    weights = trained(tmp_path_factory.mktemp("qat"))
    builders = Path(__file__).parents[3] / "builders"
    return ModelSource(
        entrypoint="qat:prepared",
        python_path=builders,
        weights=weights,
        inputs=(IMAGE,),
        outputs=("scores",),
    )


@pytest.fixture(scope="module")
def exported(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    return export(
        source,
        PROFILES,
        ExportConfig(),
        ({"image": digits()[0][1000:1001]},),
        tmp_path_factory.mktemp("exported"),
    )


def test_fake_quantisers_stop_observing_and_keep_what_they_have_learnt(source: ModelSource) -> None:
    module, images = load_module(source), digits()[0]
    assert holds_fake_quantizers(module)
    first = run_module(module, source, {"image": images[:50]})["scores"]
    run_module(module, source, {"image": 100 * images[:50]})  # observers would widen their ranges
    assert np.array_equal(run_module(module, source, {"image": images[:50]})["scores"], first)
    before = prepared().eval()  # with the observers of torch.ao, told to stop
    from safetensors.torch import load_model

    assert source.weights is not None
    load_model(before, source.weights)
    for each in before.modules():
        if hasattr(each, "disable_observer"):
            each.disable_observer()
    with torch.no_grad():
        assert np.array_equal(before(torch.from_numpy(images[:50])).numpy(), first)


def test_the_export_holds_every_scale_and_answers_alike(
    source: ModelSource, exported: OnnxModel
) -> None:
    assert [note.text for note in exported.notes] == [
        "the model quantises 7 tensors, and the graph holds the scale of each"
    ]
    proto = read_proto(exported.path)
    assert given_precision(proto.graph) is Precision.INT8
    assert len(scales_of(proto.graph)[QDQ[1], "", b"", b""]) == 7
    learnt = {
        name: buffer
        for name, buffer in load_module(source).named_buffers()
        if name.endswith(".scale")
    }
    constants = [
        np.asarray(numpy_helper.to_array(tensor)).tobytes() for tensor in proto.graph.initializer
    ]
    assert [
        name for name, scale in learnt.items() if scale.numpy().tobytes() not in constants
    ] == []
    images, labels = digits()
    want = run_module(load_module(source), source, {"image": images[1000:1300]})["scores"]
    got = open_reference(exported.path)({"image": images[1000:1300]})["scores"]
    assert (want.argmax(axis=1) == labels[1000:1300]).mean() > 0.6  # it was trained
    assert (got.argmax(axis=1) == want.argmax(axis=1)).mean() > 0.99


def test_simplification_keeps_them_too(exported: OnnxModel, tmp_path: Path) -> None:
    simpler = simplify(exported, PROFILES, SimplifyConfig(), (), tmp_path, silent)
    assert "nodes became" in simpler.notes[0].text  # kept, not rolled back
    assert lost_scales(read_proto(exported.path).graph, read_proto(simpler.path).graph) == ""


def test_an_export_that_lost_a_scale_is_refused(
    source: ModelSource, exported: OnnxModel, tmp_path: Path
) -> None:
    proto = read_proto(exported.path)
    scale = next(
        tensor for tensor in proto.graph.initializer if tensor.name == "fc.weight_fake_quant.scale"
    )
    scale.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(scale), scale.name))
    write_proto(proto, tmp_path / "model.onnx")
    job = Job(
        source,
        load_module(source),
        ("scores",),
        20,
        {"image": digits()[0][:2]},
        tmp_path / "model.onnx",
    )
    with pytest.raises(Refused, match="1 of the 7 scales"):
        scale_notes(job)
    assert scale_notes(replace(job, path=exported.path))


class Learnt(torch.nn.Module):
    """Quantises by the bare operators, as trainable scales do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(0.05))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int32)
        half = torch.fake_quantize_per_tensor_affine(x, self.scale, zero, -128, 127)
        again = torch.fake_quantize_per_tensor_affine(x, self.scale, zero, -128, 127)
        return torch.relu(half + again)


def test_bare_operators_are_counted_once_per_tensor(tmp_path: Path) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 4), kind="dynamic")
    source = ModelSource(entrypoint="a:b", inputs=(x,), outputs=("y",))
    feeds = {"x": np.ones((3, 4), np.float32)}
    assert list(scales_run(Learnt(), source, feeds).values()) == [1]
    job = Job(source, Learnt(), ("y",), 20, feeds, tmp_path / "model.onnx")
    torchscript(job)
    assert len(scale_notes(job)) == 1
    assert (
        given_precision(read_proto(onnx_model(tmp_path, "model.onnx").path).graph) is Precision.INT8
    )


class SharedScale(torch.nn.Module):
    """Quantises two tensors with one scale, one of them to int8 and one to uint8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signed = torch.fake_quantize_per_tensor_affine(x, 0.05, 0, -128, 127)
        return torch.fake_quantize_per_tensor_affine(torch.relu(signed), 0.05, 0, 0, 255)


def test_one_scale_with_two_zero_points_is_counted_for_both_tensors(tmp_path: Path) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 4), kind="dynamic")
    source = ModelSource(entrypoint="a:b", inputs=(x,), outputs=("y",))
    feeds = {"x": np.ones((3, 4), np.float32)}
    job = Job(source, SharedScale(), ("y",), 20, feeds, tmp_path / "model.onnx")
    torchscript(job)
    (note,) = scale_notes(job)
    assert note.text.startswith("the model quantises 2 tensors")


def test_a_switched_off_fake_quantiser_does_nothing() -> None:
    net = prepared().eval()
    net.quant.activation_post_process.disable_fake_quant()
    assert isinstance(freeze_fake_quantizers(net).quant.activation_post_process, torch.nn.Identity)


def test_what_no_exporter_carries_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = torch.nn.Sequential(torch.ao.nn.quantized.ReLU6())
    with pytest.raises(
        ModelError, match=r"module '0' is a torch\.ao\.nn\.quantized\.\S+ReLU6"
    ) as error:
        freeze_fake_quantizers(converted)
    assert "before `convert`" in str(error.value.next_step)
    theirs = type(
        "FakeQuantizedLinear", (torch.nn.Linear,), {"__module__": "torchao.quantization.qat.linear"}
    )
    with pytest.raises(ModelError, match="FakeQuantizedLinear, which no exporter turns into Q/DQ"):
        freeze_fake_quantizers(torch.nn.Sequential(theirs(2, 2)))


class Decomposed(torch.nn.Module):
    def __init__(self, high: int) -> None:
        super().__init__()
        self.high = high

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        operators = torch.ops.quantized_decomposed
        integers = operators.quantize_per_tensor(x, 0.05, 0, 0, self.high, torch.uint8)
        floats: torch.Tensor = operators.dequantize_per_tensor(
            integers, 0.05, 0, 0, self.high, torch.uint8
        )
        return floats


@pytest.mark.parametrize("high", [255, 127])
def test_a_pt2_with_pairs_is_exported_unless_its_limits_would_be_dropped(
    tmp_path: Path, high: int
) -> None:
    import torch.ao.quantization.fx._decomposed

    x = torch.rand(3, 4)
    program = torch.export.export(
        Decomposed(high), (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(program, tmp_path / "m.pt2")
    (tmp_path / "out").mkdir()
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 4), kind="dynamic")
    source = ModelSource(path=tmp_path / "m.pt2", inputs=(spec,), outputs=("y",))
    profiles = (Profile.model_validate({"dims": {"batch": [1, 3, 5]}}),)
    if high == 127:
        with pytest.raises(ModelError, match="quantises to 0 to 127"):
            check_ranges(program)
        return
    model = export(source, profiles, ExportConfig(), (), tmp_path / "out")
    assert any("quantises 1 tensors" in note.text for note in model.notes)
