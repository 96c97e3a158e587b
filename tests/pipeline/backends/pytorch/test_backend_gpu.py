"""The PyTorch baselines on the GPU, and where torch cannot use it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.backends.base import run_session
from pipeline.backends.pytorch import backend as pytorch_
from pipeline.backends.pytorch.cuda import why_not_cuda
from pipeline.backends.pytorch.module import load_module, run_module
from pipeline.core.artifacts import Engine, ModelSource
from pipeline.core.progress import Progress
from pipeline.core.shapes import TensorSpec
from pipeline.errors import HostError, ModelError
from pipeline.execution.child_process import call_in_child
from pipeline.plan.source import digest_of_source
from tests.builders.nvml import Device, Nvml, install_nvml
from tests.pipeline.backends.pytorch.builders import (
    CLASSES,
    COMPILE,
    EMBEDDING,
    IDS,
    IMAGE,
    MASK,
    TOKENS,
    engine_of,
    run,
    source_of,
)


def write_model(folder: Path, forward: str) -> str:
    """A module of one parameter, in a file of its own: its entrypoint."""
    name = f"written_{abs(hash(forward))}"
    text = f"""
        import torch
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(()))
            def forward(self, x):
                {forward}
        def make(): return Model()
    """
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return f"{name}:make"


def build_in_child(
    source: ModelSource,
    outputs: tuple[TensorSpec, ...],
    variant: str,
    out: Path,
    progress: Progress,
) -> Engine:
    return engine_of(source, outputs, variant, out)


def why_in_child(progress: Progress) -> str:
    return why_not_cuda()


def test_a_gpu_that_torch_cannot_use_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML lists a GPU, CUDA finds none of that name: as with a torch without code for this GPU, or
    a driver that is too old.
    """
    uuid = "GPU-00000000-0000-0000-0000-00000000c0de"
    gpu = Device("NVIDIA T0", uuid, capability=(7, 5))
    install_nvml(tmp_path / "nvml", monkeypatch, Nvml(gpu, driver="450.1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
    here = pytorch_.probe()
    assert (here.device, here.compute_capability, here.driver) == ("NVIDIA T0", "7.5", "450.1")
    engine = call_in_child(
        build_in_child,
        source_of("residual_cnn", IMAGE),
        (CLASSES,),
        "eager",
        tmp_path,
        name="build",
    )
    assert engine.target.compute_capability is None
    (note,) = engine.notes
    assert "PyTorch runs on the CPU, because it cannot use NVIDIA T0" in note.text
    image = np.ones((2, 1, 8, 8), np.float32)
    assert run(engine, {"image": image})["classes"].shape == (
        2,
        10,
    )  # and such an engine loads where it was built


def test_torch_without_a_gpu_says_why() -> None:
    assert call_in_child(why_in_child, name="why") != ""


def test_tensors_on_two_devices_and_a_full_gpu_are_told_apart(tmp_path: Path) -> None:
    message = (
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and"
        " cpu!"
    )
    x = TensorSpec(name="x", dtype="float32", shape=("batch",))
    feeds = {"x": np.zeros(2, np.float32)}
    source = source_of(
        write_model(tmp_path, f"raise RuntimeError('{message}')"), x, folder=tmp_path
    )
    with pytest.raises(ModelError, match="two devices") as error:
        run_module(load_module(source), source, feeds)
    assert "on the CPU" in error.value.next_step
    source = source_of(
        write_model(
            tmp_path, "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 TiB.')"
        ),
        x,
        folder=tmp_path,
    )
    with pytest.raises(HostError, match="GPU's memory ran out in PyTorch: CUDA out of memory"):
        run_module(load_module(source), source, feeds)


def answer_on_gpu(
    source: ModelSource,
    outputs: tuple[TensorSpec, ...],
    variant: str,
    out: Path,
    feeds: list[dict[str, np.ndarray]],
    progress: Progress,
) -> list[Any]:
    """Every answer in turn of one session, or the error in its place; the last holds the device
    time of a run, in seconds.
    """
    engine = engine_of(source, outputs, variant, out)
    assert engine.target.compute_capability, engine.notes
    loaded = pytorch_.load(engine)
    session = loaded.session()
    answers: list[Any] = []
    for feed in feeds:
        try:
            answers.append(dict(run_session(session, feed)))
        except HostError as error:
            answers.append(error.message)
    timer = session.timer()
    timer.start()
    session.execute()
    timer.stop()
    answers.append({"seconds": np.array(timer.elapsed_s())})
    session.close()
    loaded.close()
    return answers


def images(*batches: int) -> list[dict[str, np.ndarray]]:
    return [
        {"image": np.random.default_rng(index).standard_normal((batch, 1, 8, 8)).astype(np.float32)}
        for index, batch in enumerate(batches)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["eager", "traced", COMPILE])
def test_on_the_gpu_every_variant_answers_as_the_module_does(tmp_path: Path, variant: str) -> None:
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    feeds = images(2, 5, 2)
    *answers, time = call_in_child(
        answer_on_gpu, source, (CLASSES,), variant, tmp_path, feeds, name=variant
    )
    module = load_module(source)
    for got, feed in zip(answers, feeds, strict=True):
        np.testing.assert_allclose(
            got["classes"], run_module(module, source, feed)["classes"], rtol=1e-4, atol=1e-5
        )
    assert 0 < time["seconds"] < 1


@pytest.mark.gpu
def test_on_the_gpu_fp32_is_not_tf32(tmp_path: Path) -> None:
    """TF32 keeps 10 bits of a factor: the error of a product of a thousand terms is then about
    1e-3.
    """
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 1024, 1024))
    y = x.model_copy(update={"name": "output_0"})
    source = source_of(write_model(tmp_path, "return self.weight * (x @ x)"), x, folder=tmp_path)
    array = np.random.default_rng(0).standard_normal((1, 1024, 1024)).astype(np.float32)
    answer, _ = call_in_child(
        answer_on_gpu, source, (y,), "eager", tmp_path, [{"x": array}], name="matmul"
    )
    exact = array.astype(np.float64) @ array.astype(np.float64)
    assert np.abs(answer["output_0"] - exact).max() / np.abs(exact).max() < 1e-5


@pytest.mark.gpu
def test_on_the_gpu_several_inputs_dtypes_and_data_dependent_outputs(tmp_path: Path) -> None:
    ids = {"mask": np.ones((3, 5), np.int64), "ids": np.arange(15).reshape(3, 5)}
    encoder = source_of("encoder", IDS, MASK)
    answer, _ = call_in_child(
        answer_on_gpu, encoder, (EMBEDDING, TOKENS), "eager", tmp_path, [ids], name="encoder"
    )
    np.testing.assert_allclose(
        answer["tokens"],
        run_module(load_module(encoder), encoder, ids)["tokens"],
        rtol=1e-4,
        atol=1e-5,
    )
    x = TensorSpec(name="x", dtype="float32", shape=("batch",))
    spec = TensorSpec(name="output_0", dtype="int64", shape=("n", 1), kind="data-dependent")
    feeds = [
        {"x": np.array(values, np.float32)} for values in ([1, -1, 1], [1, 1, 1], [-1, -1, -1])
    ]
    *answers, _ = call_in_child(
        answer_on_gpu,
        source_of("positions", x),
        (spec,),
        "eager",
        tmp_path,
        feeds,
        name="positions",
    )
    assert [each["output_0"].ravel().tolist() for each in answers] == [[0, 2], [0, 1, 2], []]


@pytest.mark.gpu
def test_on_the_gpu_an_exported_program_is_moved_whole(tmp_path: Path) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
    source = source_of(
        write_model(tmp_path, "return self.weight * x + torch.arange(4)"), x, folder=tmp_path
    )
    program = torch.export.export(
        load_module(source), (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)
    )
    torch.export.save(program, tmp_path / "model.pt2")
    saved = ModelSource(path=tmp_path / "model.pt2", inputs=(x,))
    saved = saved.model_copy(update={"digest": digest_of_source(saved)})
    y = x.model_copy(update={"name": "output_0"})
    answer, _ = call_in_child(
        answer_on_gpu,
        saved,
        (y,),
        "eager",
        tmp_path,
        [{"x": np.ones((3, 4), np.float32)}],
        name="pt2",
    )
    assert answer["output_0"].tolist() == [[1, 2, 3, 4]] * 3


@pytest.mark.gpu
def test_on_the_gpu_code_that_stays_on_the_cpu_is_named(tmp_path: Path) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
    source = source_of(
        write_model(tmp_path, "return self.weight * x + torch.arange(4)"), x, folder=tmp_path
    )
    y = x.model_copy(update={"name": "output_0"})
    with pytest.raises(ModelError, match="same device") as error:
        call_in_child(
            answer_on_gpu,
            source,
            (y,),
            "eager",
            tmp_path,
            [{"x": np.ones((3, 4), np.float32)}],
            name="cpu code",
        )
    assert "CUDA_VISIBLE_DEVICES=" in error.value.next_step


@pytest.mark.gpu
def test_after_the_gpu_was_full_the_next_request_works(tmp_path: Path) -> None:
    x = TensorSpec(name="x", dtype="float32", shape=("batch",))
    forward = (
        "return self.weight * x + (torch.ones(2**43, device=x.device).sum() if x.shape[0] == 5"
        " else 0)"
    )
    source = source_of(write_model(tmp_path, forward), x, folder=tmp_path)
    y = x.model_copy(update={"name": "output_0"})
    feeds = [{"x": np.ones(size, np.float32)} for size in (2, 5, 2)]
    before, full, after, _ = call_in_child(
        answer_on_gpu, source, (y,), "eager", tmp_path, feeds, name="full"
    )
    assert "memory ran out" in full
    assert before["output_0"].tolist() == after["output_0"].tolist() == [1, 1]
