"""Statistics of deployments: the Prometheus metrics of all, and the totals and shapes of one since
its load.

docs/reference/metrics.md lists the metrics. A request that ran is `executed`, even if its client
had left. A request is `dropped` if its client left before it ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from service.devices.leases import utc_now
from service.inference import Statistics, Timing, Total
from service.registry.models import Version
from service.registry.traffic import (
    MAX_SHAPES,
    SeenBatch,
    SeenShape,
    ShapesView,
    SymbolSizes,
    suggestion_from_runs,
)

State = Literal["executed", "dropped", "timed_out", "refused", "failed"]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STAGE_SECONDS = (0.0001, 0.00025, 0.0005, *SECONDS)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STATES: tuple[State, ...] = ("executed", "dropped", "timed_out", "refused", "failed")
STAGES = ("queue", "copy_in", "compute", "copy_out")
LABELS = ("model", "version")


@dataclass(frozen=True, slots=True)
class InputValues:
    """Numbers of input values in batches that ran."""

    sent: int = 0  # by clients
    run: int = 0  # by the engine, with padding
    at_max: int = 0  # if the padded axes had their largest length, with the same rows

    def __add__(self, other: InputValues) -> InputValues:
        return InputValues(self.sent + other.sent, self.run + other.run, self.at_max + other.at_max)

    @property
    def padding(self) -> float:
        """The share of padding in what the engine ran; 0 without a batch."""
        return (self.run - self.sent) / max(self.run, 1)

    @property
    def padding_at_max(self) -> float:
        """The same share at the largest length."""
        return (self.at_max - self.sent) / max(self.at_max, 1)


class Figures:
    """The Prometheus metrics of all deployments of one server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "crucible_inference_requests_total",
            "Requests by result: executed, also if the client had gone by then; dropped, if the"
            " client went before; timed_out; refused, if the queue was full; failed",
            (*LABELS, "state"),
            registry=registry,
        )
        self.stages = Histogram(
            "crucible_inference_stage_seconds",
            "Time of each answered request in the queue; of each batch in copy_in, compute (by the"
            " device's clock) and copy_out",
            (*LABELS, "stage"),
            buckets=STAGE_SECONDS,
            registry=registry,
        )
        self.rows = Histogram(
            "crucible_inference_batch_rows",
            "Rows that ran together on a device",
            (*LABELS, "device"),
            buckets=ROWS,
            registry=registry,
        )
        self.padding = Gauge(
            "crucible_inference_padding_ratio",
            "Share of all input values so far that was padding",
            LABELS,
            registry=registry,
        )
        self.values_sent = Counter(
            "crucible_inference_values_sent_total",
            "Input values of the requests in all batches that ran; shared ones count once",
            LABELS,
            registry=registry,
        )
        self.values_run = Counter(
            "crucible_inference_values_run_total",
            "Input values that the engine ran, with padding",
            LABELS,
            registry=registry,
        )
        self.values_at_max = Counter(
            "crucible_inference_values_at_max_total",
            "Input values of the same batches if padded axes had the largest length of a profile",
            LABELS,
            registry=registry,
        )
        self.waiting = Gauge(
            "crucible_inference_queue", "Requests that wait now", LABELS, registry=registry
        )
        # A reloaded version has two tallies for a moment.
        self.newest: dict[tuple[str, str], Tally] = {}


class Tally:
    """The statistics of one deployed version."""

    def __init__(
        self,
        figures: Figures,
        model: str,
        version: int,
        devices: Iterable[str],
        waiting: Callable[[], int],
    ) -> None:
        self._model, self._version, self._figures = model, version, figures
        labels = (model, str(version))
        self._requests = {state: figures.requests.labels(*labels, state) for state in STATES}
        self._stages = tuple(figures.stages.labels(*labels, stage) for stage in STAGES)
        self._sent = figures.values_sent.labels(*labels)
        self._run = figures.values_run.labels(*labels)
        self._at_max = figures.values_at_max.labels(*labels)
        self._rows = {each: figures.rows.labels(*labels, each) for each in devices}
        self._padding = figures.padding.labels(*labels)
        self._waiting = waiting
        self._succeeded, self._failed = _Sum(), _Sum()
        self._sums = tuple(_Sum() for _ in STAGES)
        self._batches: dict[int, _Sum] = {}
        self._values = InputValues()
        self._dropped = self._last_ms = 0

    def show(self) -> None:
        """Show the queue and the padding of this deployment in the metrics.

        They replace those of an earlier deployment of the same version.
        """
        labels = (self._model, str(self._version))
        self._figures.waiting.labels(*labels).set_function(self._waiting)
        self._padding = self._figures.padding.labels(*labels)
        self._padding.set(0)
        self._figures.newest[labels] = self

    def ran(self, device: str, requests: int, timing: Timing, values: InputValues) -> None:
        """Count a batch of a device, with the values of its inputs."""
        self._requests["executed"].inc(requests)
        self._rows[device].observe(timing.batch_size)
        times_s = (timing.copy_in_s, timing.compute_s, timing.copy_out_s)
        for histogram, seconds in zip(self._stages[1:], times_s, strict=True):
            histogram.observe(seconds)
        self._batches.setdefault(timing.batch_size, _Sum()).add(timing.compute_s)
        self._values += values
        self._sent.inc(values.sent)
        self._run.inc(values.run)
        self._at_max.inc(values.at_max)
        self._padding.set(self._values.padding)

    def answered(self, timing: Timing, total_s: float) -> None:
        """Count an answered request."""
        self._succeeded.add(total_s)
        self._last_ms = time.time_ns() // 1_000_000
        self._stages[0].observe(timing.queue_s)
        times_s = (timing.queue_s, timing.copy_in_s, timing.compute_s, timing.copy_out_s)
        for total, seconds in zip(self._sums, times_s, strict=True):
            total.add(seconds)

    def dropped(self) -> None:
        """Count a request whose client left before it ran."""
        self._requests["dropped"].inc()
        self._dropped += 1

    def failed(self, state: Literal["timed_out", "refused", "failed"], total_s: float) -> None:
        """Count a request that got an error."""
        self._requests[state].inc()
        self._failed.add(total_s)
        self._last_ms = time.time_ns() // 1_000_000

    @property
    def seconds_per_batch(self) -> float:
        """The average compute time of a batch; 0 without batches."""
        batches = sum(total.count for total in self._batches.values())
        if not batches:
            return 0.0
        return sum(total.seconds for total in self._batches.values()) / batches

    def statistics(self) -> Statistics:
        queue, copy_in, compute, copy_out = (stage.total() for stage in self._sums)
        return Statistics(
            model=self._model,
            version=self._version,
            succeeded=self._succeeded.total(),
            failed=self._failed.total(),
            queue=queue,
            copy_in=copy_in,
            compute=compute,
            copy_out=copy_out,
            executions=sum(total.count for total in self._batches.values()),
            rows=sum(rows * total.count for rows, total in self._batches.items()),
            dropped=self._dropped,
            batches={rows: total.total() for rows, total in sorted(self._batches.items())},
            last_request_ms=self._last_ms,
        )

    def close(self) -> None:
        """Remove the queue and the padding from the metrics. The counters stay."""
        labels = (self._model, str(self._version))
        if self._figures.newest.get(labels) is self:
            del self._figures.newest[labels]
            for gauge in (self._figures.waiting, self._figures.padding):
                gauge.remove(*labels)


@dataclass(slots=True)
class _Runs:
    """The runs of an engine, and the values of their inputs."""

    runs: int = 0
    requests: int = 0
    values: InputValues = InputValues()

    def add(self, requests: int, values: InputValues) -> None:
        self.runs += 1
        self.requests += requests
        self.values += values


class Traffic:
    """The shapes of the requests to one deployed version, and of the batches that ran.

    After MAX_SHAPES different shapes, all further ones are counted together.
    """

    def __init__(self) -> None:
        self._since = utc_now().isoformat(timespec="milliseconds")
        self._requests: dict[SymbolSizes, int] = {}
        self._batches: dict[SymbolSizes, _Runs] = {}
        self._all = _Runs()
        self._other_requests = 0

    def requested(self, shape: SymbolSizes) -> None:
        """Count a request, by the sizes of all symbols."""
        if shape in self._requests or len(self._requests) < MAX_SHAPES:
            self._requests[shape] = self._requests.get(shape, 0) + 1
        else:
            self._other_requests += 1

    def ran(self, shape: SymbolSizes, requests: int, values: InputValues) -> None:
        """Count a batch by its sizes without padding, with the values of its inputs."""
        self._all.add(requests, values)
        if shape in self._batches or len(self._batches) < MAX_SHAPES:
            self._batches.setdefault(shape, _Runs()).add(requests, values)

    def view(self, version: Version) -> ShapesView:
        """Return the counts, and the profiles that they suggest. It may run in another thread."""
        requests = sorted(self._requests.copy().items(), key=lambda item: (-item[1], item[0]))
        batches = sorted(self._batches.copy().items(), key=lambda item: (-item[1].runs, item[0]))
        runs = {shape: batch.runs for shape, batch in batches}
        return ShapesView(
            version=version.version,
            since=self._since,
            shapes=tuple(SeenShape(sizes=dict(shape), requests=n) for shape, n in requests),
            other_requests=self._other_requests,
            batches=tuple(
                SeenBatch(
                    sizes=dict(shape),
                    runs=batch.runs,
                    requests=batch.requests,
                    padding=batch.values.padding,
                )
                for shape, batch in batches
            ),
            other_runs=self._all.runs - sum(runs.values()),
            answered=self._all.requests,
            padding=self._all.values.padding,
            padding_at_max=self._all.values.padding_at_max,
            suggestion=suggestion_from_runs(runs, version.profiles),
        )


class _Sum:
    """A Total that grows."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds

    def total(self) -> Total:
        return Total(self.count, self.seconds)
