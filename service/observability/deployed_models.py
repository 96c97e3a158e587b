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
            "Deployed models: 1 for the state they are in on a device",
            labels=(*labels, "state"),
        )
        instances = GaugeMetricFamily(
            "crucible_model_instances",
            "Batches of a model that run at the same time on a device",
            labels=labels,
        )
        for model in self._served():
            for device in model.devices:
                values = [model.model, str(model.version), device.device]
                state.add_metric([*values, device.state], 1)
                instances.add_metric(values, model.instances)
        yield from (state, instances)

    def describe(self) -> Iterable[Metric]:
        return ()
