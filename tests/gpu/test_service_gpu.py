"""One POST compiles on a real GPU, through a real server: ResNet-50 to a proven engine, and small
models in all layers of the sandbox, by a server of root and of another user.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.recipe import Precision
from pipeline.results.precision_audit import time_by_precision
from service.client import Client, Upload
from service.sandbox.layers import find_layers
from tests.builders.cli import environment, write_model
from tests.gpu.fixtures.serving import RESNET, RESNET_PLAN, SMALL_PLAN, Site, weights_of
from tests.service.integration.test_docs import served_by

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

USER = 10001  # as in the images


def test_one_post_compiles_resnet50(site: Site) -> None:
    with site.client() as client:
        report = client.report(site.jobs[RESNET])
    assert (
        float(
            re.findall(
                r'crucible_device_memory_used_bytes\{device="gpu:0"\} (\S+)', site.figures()
            )[0]
        )
        > 0
    )
    stages = {event.data.get("stage") for event in site.events[RESNET] if event.kind == "stage"}
    assert {"export", "build", "prove", "validate", "benchmark"} <= stages, stages
    (candidate,) = report.candidates
    assert candidate.state == "measured", candidate.reason
    assert candidate.label == "tensorrt fp16"
    assert candidate.layers is not None
    assert time_by_precision(candidate.layers).get(Precision.FP16, 0.0) > 0.5
    assert report.environment.gpus


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may pass through, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="crucible-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def may_run(user: int) -> bool:
    try:
        command = [sys.executable, "-c", "import service"]
        return subprocess.run(command, user=user, group=user, env=environment()).returncode == 0
    except PermissionError:
        return False


@pytest.mark.parametrize("user", [0, USER])
@pytest.mark.parametrize("backend", ["tensorrt", "torch"])
def test_a_compile_on_a_gpu_runs_in_all_layers(folder: Path, user: int, backend: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root starts a server as another user")
    expected = {layer.name for layer in find_layers()[0] if layer.held} | {"GPU"}
    if not {"Landlock", "seccomp"} <= expected:
        pytest.skip(f"this host holds only {', '.join(expected)}")
    if user:
        if not may_run(user):
            pytest.skip(f"user {user} may not run '{sys.executable}'")
        expected -= {"own user", "control groups"}  # what only root can do
    if backend == "tensorrt":
        model = folder / "model.onnx"
        write_model(model)
        plan = SMALL_PLAN.format(candidate="backend: tensorrt, precision: fp16")
    else:
        model = weights_of("resnet18", folder / "weights.safetensors")
        candidate = "backend: torch, form: compile, precision: fp16"
        plan = RESNET_PLAN.format(candidate=candidate, architecture="resnet18")
    home = folder / "home"
    home.mkdir()
    os.chown(home, user, user)
    with served_by(user, "crucible serve", home, HOME=str(home)) as url, Client(url) as client:
        job = client.submit(Upload(model, plan))
        last = list(client.events(job.id))[-1]
        ended = client.job(job.id)
        assert last.kind == "succeeded", (ended, (home / "server.log").read_text()[-4000:])
        assert expected <= set(ended.sandbox), ended.sandbox
        states = {candidate.state for candidate in client.report(job.id).candidates}
        assert "measured" in states, client.report(job.id).candidates
