"""What /metrics says of a server that has a GPU and has answered something over each protocol."""

from typing import Any

from pipeline.serving_inputs import BatchSpec
from service.inference import Served, ServedDevice, Timing
from service.observability.deployed_models import Models
from service.observability.prometheus import Metrics
from service.serving.language.stats import LanguageFigures, LanguageTally
from service.serving.stats import Figures, InputValues, Tally
from tests.builders.nvml import Device, Nvml


def metrics_text() -> str:
    """Every metric, with a value for each of its labels."""
    metrics = Metrics()
    nvml: Any = Nvml(Device("a GPU", "GPU-1"))
    metrics.collect_devices(nvml)
    metrics.collect_jobs(lambda: {"queued": 1})
    tally = Tally(Figures(metrics.registry), "net", 1, ("cpu",), lambda: 0)
    tally.show()
    timing = Timing(queue_s=0.001, copy_in_s=0.001, compute_s=0.001, copy_out_s=0.001, batch_size=2)
    tally.ran("cpu", 1, timing, InputValues(sent=6, run=8, at_max=8))
    tally.answered(timing, 0.004)
    answers = LanguageTally(LanguageFigures(metrics.registry), "language", 1)
    answers.show(lambda: 1, lambda: 0, lambda: 0.1)
    answers.accepted(10)
    answers.generated(2, 0.2, 0.2)
    answers.ended("stop", 0.3, 0.1)
    cpu = (ServedDevice(device="cpu", state="ready"),)
    served = Served("net", 1, "me", cpu, "onnxruntime", (), (), BatchSpec(axes={}), "ready")
    metrics.registry.register(Models(lambda: (served,)))
    metrics.requests.labels("GET", "/healthz", "200").inc()
    metrics.request_seconds.labels("GET", "/healthz").observe(0.004)
    metrics.calls.labels("ModelInfer", "OK").inc()
    metrics.call_seconds.labels("ModelInfer").observe(0.004)
    metrics.failed_authentications.labels("401").inc()
    metrics.refuse_connection("all")
    metrics.jobs_ended.labels("succeeded").inc()
    metrics.stage_seconds.labels("build").observe(1)
    return metrics.text().decode()
