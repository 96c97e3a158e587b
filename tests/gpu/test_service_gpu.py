"""One POST compiles ResNet-50 to TensorRT: weights and a plan go up, a report of a proven engine comes back, through a real server on a real GPU."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from pipeline.core import Precision
from pipeline.precision import time_by_precision
from service.client import Client, Upload
from tests.service.test_docs import served

pytestmark = pytest.mark.gpu

PLAN = """\
name: resnet50
architecture: resnet50
inputs: [{name: image, dtype: float32, shape: [1, 3, 224, 224]}]
outputs: [logits]
candidates: [{backend: tensorrt, precision: fp16}]
tensorrt: {optimization_level: 1}
benchmark: {duration_s: 0.5}
"""


def weights_of_resnet50(file: Path) -> Path:
    """Random, for what is proven here is the way and not the answers."""
    import torchvision
    from safetensors.torch import save_file

    save_file(dict(torchvision.models.resnet50(weights=None).state_dict()), file)
    return file


def test_one_post_compiles_resnet50(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    with served("crucible serve", tmp_path / "home") as url, Client(url) as client:
        job = client.submit(Upload(weights_of_resnet50(tmp_path / "weights.safetensors"), plan))
        events = list(client.events(job.id))
        log = (tmp_path / "home" / "server.log").read_text()
        assert events[-1].kind == "succeeded", (client.job(job.id), log)
        report = client.report(job.id)
        figures = httpx.get(f"{url}/metrics").text

    assert float(re.findall(r'crucible_device_memory_used_bytes\{device="gpu:0"\} (\S+)', figures)[0]) > 0
    stages = {event.data.get("stage") for event in events if event.kind == "stage"}
    assert {"export", "build", "prove", "validate", "benchmark"} <= stages, stages
    (candidate,) = report.candidates
    assert candidate.state == "measured", candidate.reason
    assert candidate.label == "tensorrt fp16"
    assert candidate.layers is not None
    assert time_by_precision(candidate.layers).get(Precision.FP16, 0.0) > 0.5
    assert report.environment.gpus
