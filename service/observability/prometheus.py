"""The Prometheus metrics at /metrics. docs/reference/metrics.md lists their names and labels; a
test checks the dashboard's queries against it.
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
        "module",
        "torch.compile",
        "reference",
        "calibrate",
        "cover",
        "convert",
        "build",
        "preprocess",
        "postprocess",
        "prove",
        "validate",
        "rank",
        "throughput",
        "width",
        "benchmark",
        "packing",
    )
)
STAGE_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)


class Metrics:
    """The metrics of one application, in their own registry, so that two applications in a process
    stay apart.

    `of_models` holds what names models, and with them their owners' affairs.
    """

    def __init__(self) -> None:
        self.registry, self.of_models = CollectorRegistry(), CollectorRegistry()
        self.requests = Counter(
            "crucible_http_requests_total",
            "Requests of HTTP",
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
            "gRPC calls; a stream is one",
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
        self.failed_authentications = Counter(
            "crucible_failed_authentications_total",
            "Requests and gRPC calls without a valid key: 401, or 429 after too many",
            ("status",),
            registry=self.registry,
        )
        self.bytes_in_flight = Gauge(
            "crucible_bytes_in_flight",
            "Bytes of the bodies of unfinished requests, of HTTP and gRPC",
            registry=self.registry,
        )
        self.bytes_refused = Counter(
            "crucible_bytes_in_flight_refused_total",
            "Requests that did not fit beside the unfinished ones",
            registry=self.registry,
        )
        self.connections_refused = Counter(
            "crucible_http_connections_refused_total",
            "HTTP connections beyond a limit: all, or address",
            ("limit",),
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

    def refuse_connection(self, limit: str) -> None:
        """Count an HTTP connection beyond a limit."""
        self.connections_refused.labels(limit).inc()

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

    def text(self, with_models: bool = True) -> bytes:
        """Return the metrics in Prometheus' text format."""
        text = generate_latest(self.registry)
        return text + generate_latest(self.of_models) if with_models else text


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
