"""The Prometheus metrics at /metrics. docs/service.md lists their names and labels; a test checks
the dashboard's queries against it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.execution.stage_event import StageEvent
from service.devices.gpus import visible_gpus
from service.jobs.state import Job, JobEvent
from service.serving.stats import SECONDS

STAGES = frozenset(
    (
        "export",
        "simplify",
        "baseline",
        "torch.compile",
        "reference",
        "calibrate",
        "cover",
        "convert",
        "build",
        "preprocess",
        "prove",
        "validate",
        "rank",
        "throughput",
        "benchmark",
    )
)
STAGE_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)


class Metrics:
    """The metrics of one application, in their own registry, so that two applications in a process
    stay apart.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "crucible_http_requests_total",
            "Requests",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "crucible_http_request_seconds",
            "Time to the end of the answer",
            ("method", "route"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.calls = Counter(
            "crucible_grpc_requests_total",
            "gRPC calls",
            ("method", "status"),
            registry=self.registry,
        )
        self.call_seconds = Histogram(
            "crucible_grpc_request_seconds",
            "Time to the end of a gRPC call",
            ("method",),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.jobs_ended = Counter(
            "crucible_jobs_ended_total",
            "Jobs that ended, by how",
            ("state",),
            registry=self.registry,
        )
        self.stage_seconds = Histogram(
            "crucible_stage_seconds",
            "Time of finished stages of jobs",
            ("stage",),
            buckets=STAGE_SECONDS,
            registry=self.registry,
        )
        self.event_streams = Gauge(
            "crucible_event_streams", "Clients that follow a job's events", registry=self.registry
        )

    def observe_job(self, job: Job, event: JobEvent) -> None:
        """Count an event of a job. Unknown stage names count as `other`, so that a child cannot
        create labels without limit.
        """
        if isinstance(event, StageEvent):
            if event.state == "finished":
                stage = event.stage if event.stage in STAGES else "other"
                self.stage_seconds.labels(stage).observe(event.seconds)
        elif job.is_final:
            self.jobs_ended.labels(job.state).inc()

    def collect_jobs(self, count: Callable[[], Mapping[str, int]]) -> None:
        """Call `count` for the number of jobs by state at each scrape."""
        self.registry.register(_Jobs(count))

    def collect_devices(self, nvml: ModuleType | None = None) -> None:
        """Collect memory and busy share of every GPU of this server at each scrape.

        Values that NVML does not report are left out.
        """
        self.registry.register(_Devices(nvml))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Jobs(Collector):
    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self._count = count

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily("crucible_jobs", "Jobs by state", labels=["state"])
        for state, number in sorted(self._count().items()):
            family.add_metric([state], number)
        yield family

    def describe(self) -> Iterable[Metric]:
        return ()


class _Devices(Collector):
    def __init__(self, nvml: ModuleType | None) -> None:
        self._nvml = nvml

    def collect(self) -> Iterable[Metric]:
        used = GaugeMetricFamily(
            "crucible_device_memory_used_bytes",
            "Memory in use on a GPU, by anybody",
            labels=["device"],
        )
        total = GaugeMetricFamily(
            "crucible_device_memory_bytes", "Memory of a GPU", labels=["device"]
        )
        busy = GaugeMetricFamily(
            "crucible_device_busy_ratio",
            "Share of the last second in which some kernel ran",
            labels=["device"],
        )
        with visible_gpus(self._nvml) as gpus:
            for number, gpu in enumerate(gpus):
                name, memory, percent = [f"gpu:{number}"], gpu.memory(), gpu.busy_percent()
                if memory is not None:
                    used.add_metric(name, memory.used)
                    total.add_metric(name, memory.total)
                if percent is not None:
                    busy.add_metric(name, percent / 100)
        yield from (used, total, busy)

    def describe(self) -> Iterable[Metric]:
        return ()
