"""What Prometheus reads of deployed models."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.serving.requests import Served, Statistics


class Models(Collector):
    """Counters begin again when a version is loaded again, as Prometheus expects of a process that was restarted."""

    def __init__(self, served: Callable[[], Iterable[Served]], statistics: Callable[[], Iterable[Statistics]]) -> None:
        self._served, self._statistics = served, statistics

    def collect(self) -> Iterable[Metric]:
        name = ("model", "version")
        state = GaugeMetricFamily("crucible_model_state", "Deployed models: 1 for the state they are in", labels=(*name, "device", "state"))
        instances = GaugeMetricFamily("crucible_model_instances", "Processes that serve a model", labels=name)
        requests = CounterMetricFamily("crucible_inference_requests", "Requests to models, by what became of them", labels=(*name, "outcome"))
        stages = CounterMetricFamily("crucible_inference_seconds", "Time of answered requests, by where it went", labels=(*name, "stage"))
        batches = CounterMetricFamily("crucible_inference_batches", "Batches, by their rows without padding", labels=(*name, "rows"))
        for each in self._served():
            labels = [each.model, str(each.version)]
            state.add_metric([*labels, each.device, each.state], 1)
            instances.add_metric(labels, each.instances)
        for done in self._statistics():
            labels = [done.model, str(done.version)]
            for outcome, count in (("succeeded", done.succeeded.count), ("failed", done.failed.count), ("dropped", done.dropped)):
                requests.add_metric([*labels, outcome], count)
            for stage in ("queue", "copy_in", "compute", "copy_out"):
                stages.add_metric([*labels, stage], getattr(done, stage).seconds)
            for rows, total in sorted(done.batches.items()):
                batches.add_metric([*labels, str(rows)], total.count)
        yield from (state, instances, requests, stages, batches)

    def describe(self) -> Iterable[Metric]:
        return ()
