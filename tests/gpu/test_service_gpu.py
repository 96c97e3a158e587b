"""One POST compiles ResNet-50 to TensorRT: weights and a plan go up, a report of a proven engine
comes back, through a real server on a real GPU.
"""

from __future__ import annotations

import re

import pytest

from pipeline.core import Precision
from pipeline.results.precision_audit import time_by_precision
from tests.gpu.fixtures_serving_gpu import RESNET, Site

pytestmark = pytest.mark.gpu


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
