"""Prometheus metrics of deployed models, besides those that they count themselves
(serving/stats.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.inference import Served


class Models(Collector):
    """Collects the state of the deployed models at each scrape."""

    def __init__(self, served: Callable[[], Iterable[Served]]) -> None:
        self._served = served

    def collect(self) -> Iterable[Metric]:
        labels = ("model", "version", "device")
        state = GaugeMetricFamily(
            "crucible_model_state",
            "Deployed models: 1 for the state they are in",
            labels=(*labels, "state"),
        )
        instances = GaugeMetricFamily(
            "crucible_model_instances", "Processes that serve a model", labels=labels
        )
        for model in self._served():
            values = [model.model, str(model.version), model.device]
            state.add_metric([*values, model.state], 1)
            instances.add_metric(values, model.instances)
        yield from (state, instances)

    def describe(self) -> Iterable[Metric]:
        return ()
