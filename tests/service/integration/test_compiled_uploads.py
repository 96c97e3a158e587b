"""What clients may send, through /compile and the real worker: the report is that of what was
sent.
"""

import asyncio
import html
import io
import tarfile
import zipfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

from pipeline.report.files import load_report
from pipeline.results.module_findings import ModuleFindings
from pipeline.results.report import Report
from service.http.routers.reports import PAGE_POLICY
from service.jobs.queue import WORKER
from tests.builders.cli import CLASSES, FEATURES, HIDDEN, crucible, write_task
from tests.builders.lstm import COUNTS, tagger_plan, write_tagger_task
from tests.builders.report import without_graph
from tests.service.builders.app import Desk, opened_desk
from tests.service.integration.test_benchmark import ended

FP32 = [{"backend": "onnxruntime", "precision": "fp32"}]
SHORT = {
    "duration_s": 0.05,
    "warmup_s": 0.0,
    "budget_s": 0.01,
}  # one process of each: nobody can tell which is faster
SCRIPT = "<script>alert(1)</script>"
Parts = dict[str, tuple[str, bytes]]


def task(folder: Path) -> Parts:
    """A model of one file, with labelled data that it answers rightly."""
    plan = yaml.safe_load(
        write_task(
            folder, candidates=FP32, benchmark=SHORT, simplify={"enabled": False}
        ).read_text()
    )
    sent = {key: value for key, value in plan.items() if key not in ("model", "data")}
    data = {
        role: (f"{role}.npz", (folder / f"{role}.npz").read_bytes())
        for role in ("selection", "validation")
    }
    return {
        "model": ("model.onnx", (folder / "model.onnx").read_bytes()),
        "plan": ("plan.yaml", yaml.safe_dump(sent).encode()),
        **data,
    }


def external(model: Path) -> dict[str, bytes]:
    """The files of the same model with all weights beside it."""
    folder = model.with_name("external")
    folder.mkdir()
    onnx.save_model(
        onnx.load(model),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def npz(**arrays: Any) -> bytes:
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    return packed.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"net/{name}", content)
    return packed.getvalue()


def tarred(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


async def compiled(desk: Desk, parts: Parts) -> Report:
    job = await ended(desk, await desk.client.post("/compile", files=parts))
    return load_report(desk.service.folders.report(job["id"]))


def top1_of(report: Report) -> tuple[float, float]:
    """Of the reference and of the winner, on the validation set."""
    assert report.validation is not None
    assert report.validation.metric is not None
    assert report.validation.metric.name == "top1"
    return report.validation.metric.reference, report.validation.metric.candidate


def at_real_desk(home: Path, story: Callable[[Desk], Awaitable[None]]) -> None:
    async def run() -> None:
        async with opened_desk(home, worker=WORKER) as desk:
            await story(desk)

    asyncio.run(run())


@pytest.mark.slow
def test_a_model_with_external_data_is_compiled_out_of_either_archive(tmp_path: Path) -> None:
    """The second finds what the first made: both unpack to the same model."""
    parts, files = task(tmp_path), external(tmp_path / "model.onnx")
    assert len(files["weights.bin"]) == 4 * HIDDEN * (FEATURES + CLASSES)

    async def story(desk: Desk) -> None:
        first, second = [
            await compiled(desk, {**parts, "model": (filename, packed)})
            for filename, packed in (("net.zip", zipped(files)), ("net.tar", tarred(files)))
        ]
        for report, inner in ((first, "unpacked/net/model.onnx"), (second, "unpacked/model.onnx")):
            assert report.plan.model.path == Path(inner)
            assert (report.verdict, report.winner) == ("unproven", "onnxruntime fp32")
            assert top1_of(report) == (1.0, 1.0)
        assert {step.reused for step in first.steps} == {False}
        assert first.source_digest == second.source_digest

    at_real_desk(tmp_path / "home", story)


@pytest.mark.slow
def test_a_model_without_a_batch_axis_in_front_is_judged_on_numbered_samples(
    tmp_path: Path,
) -> None:
    exported = crucible(
        "onnx",
        write_tagger_task(tmp_path),
        "--out",
        tmp_path / "model.onnx",
        env={"CRUCIBLE_HOME": str(tmp_path / "home")},
    )
    assert exported.code == 0, exported.err
    data = {role: (f"{role}.npz", (tmp_path / f"{role}.npz").read_bytes()) for role in COUNTS}
    plan = yaml.safe_dump(tagger_plan(benchmark=SHORT)).encode()
    model = ("model.onnx", (tmp_path / "model.onnx").read_bytes())

    async def story(desk: Desk) -> None:
        report = await compiled(desk, {"model": model, "plan": ("plan.yaml", plan), **data})
        assert report.verdict in ("accepted", "keep", "unproven"), report.reasons
        assert {candidate.state for candidate in report.candidates} == {"measured"}
        for candidate in report.candidates:
            assert candidate.selection is not None
            assert candidate.selection.samples == COUNTS["selection"]
            assert candidate.selection.metric is not None
            assert candidate.selection.metric.reference == 1.0

    at_real_desk(tmp_path / "home", story)


@pytest.mark.slow
def test_a_node_and_an_output_named_as_scripts_do_nothing_in_the_report(tmp_path: Path) -> None:
    parts = task(tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    for node in model.graph.node:
        node.name = f"{SCRIPT}{node.name}"
    model.graph.node[-1].output[0] = model.graph.output[0].name = SCRIPT

    async def story(desk: Desk) -> None:
        report = await compiled(desk, {**parts, "model": ("model.onnx", model.SerializeToString())})
        assert report.validation
        assert [output.output for output in report.validation.outputs] == [SCRIPT]
        (job,) = (await desk.client.get("/jobs")).json()["jobs"]
        answer = await desk.client.get(job["links"]["report"], headers={"Accept": "text/html"})
        for shown in (
            f"<td>{html.escape(SCRIPT)}</td>",
            f"<td>{html.escape(SCRIPT)}classifier</td>",
        ):  # the output, a node
            assert shown in answer.text
        assert "<script" not in without_graph(answer.text)
        assert answer.headers["content-security-policy"] == PAGE_POLICY

    at_real_desk(tmp_path / "home", story)


@pytest.mark.slow
def test_weights_are_compiled_in_their_architecture(tmp_path: Path) -> None:
    torch, torchvision, safetensors = (
        pytest.importorskip(name) for name in ("torch", "torchvision", "safetensors.torch")
    )
    torch.manual_seed(7)  # the weights of a plan without any are drawn from another seed
    net = torchvision.models.mobilenet_v2(num_classes=5).eval()
    images = torch.randn(40, 3, 32, 32)
    with torch.inference_mode():
        labels = net(images).argmax(1)
    halves = {"selection": slice(20), "validation": slice(20, None)}
    sets = {
        role: (f"{role}.npz", npz(image=images[half].numpy(), labels=labels[half].numpy()))
        for role, half in halves.items()
    }
    plan = {
        "architecture": "mobilenet_v2",
        "classes": 5,
        "inputs": [{"name": "image", "dtype": "float32", "shape": ["batch", 3, 32, 32]}],
        "outputs": ["scores"],
        "profiles": [{"batch": [1, 1, 8]}],
        "accuracy": {"metric": "top1", "max_drop": 0.2},
        "candidates": FP32,
        "simplify": {"enabled": False},
        "benchmark": {**SHORT, "baselines": []},  # each would import torch in processes of its own
    }
    weights = safetensors.save(dict(net.state_dict()))

    async def story(desk: Desk) -> None:
        parts = {
            "model": ("w.safetensors", weights),
            "plan": ("plan.yaml", yaml.safe_dump(plan).encode()),
            **sets,
        }
        report = await compiled(desk, parts)
        assert (report.verdict, report.winner, top1_of(report)) == (
            "unproven",
            "onnxruntime fp32",
            (1.0, 1.0),
        )
        assert report.plan.model.entrypoint == "service.architectures:mobilenet_v2_of_5"
        assert report.module == ModuleFindings(), "it was examined in the sandbox"

    at_real_desk(tmp_path / "home", story)
