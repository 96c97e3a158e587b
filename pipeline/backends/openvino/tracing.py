"""The timeline of an OpenVINO model: every layer, from the library's counters.

The counters have no starts, and the mean of all runs so far in whole microseconds. So each run of
the timeline shows the same mean, of the traced runs alone, and the layers one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from pipeline.backends.base import Session
from pipeline.backends.openvino import backend
from pipeline.backends.openvino.layers import means_of, runtime_layers
from pipeline.backends.tracing import Tracer, spans_in_order
from pipeline.core.artifacts import Engine
from pipeline.results.timeline import Activity, Span, TracedRun

MEANS = "OpenVINO counts the mean of all runs: each run shows the same, one layer after the other"


def open_tracer(engine: Engine, profile: int) -> Tracer:
    """Open an engine for tracing."""
    return OpenVinoTracer(engine)


class OpenVinoTracer:
    """A model with the library's counters."""

    def __init__(self, engine: Engine) -> None:
        self._counting = backend.open_counting(engine)
        self._request = self._counting.session.request
        self._warmup_runs = 0
        self._before: Mapping[str, int] = {}
        self.session: Session = self._counting.session

    def start(self, warmup_runs: int) -> None:
        self._warmup_runs, self._before = warmup_runs, means_of(self._request)

    def mark(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stop(self, runs: Sequence[TracedRun]) -> Activity:
        seconds = mean_seconds(self._before, self._warmup_runs, means_of(self._request), len(runs))
        order = [layer.name for layer in runtime_layers(self._counting.compiled)]
        return activity_from_means(seconds, order, runs)

    def close(self) -> None:
        self.session.close()


def mean_seconds(
    before: Mapping[str, int], runs_before: int, after: Mapping[str, int], runs: int
) -> dict[str, float]:
    """Return the mean seconds of each layer in `runs`, from the means of all runs until then.

    `before` and `after` are microseconds, of `runs_before` and of `runs_before + runs` runs.
    """
    seconds = {}
    for name, mean in after.items():
        micros = mean * (runs_before + runs) - before.get(name, 0) * runs_before
        seconds[name] = max(0.0, micros / runs) * 1e-6
    return seconds


def activity_from_means(
    seconds: Mapping[str, float], order: Sequence[str], runs: Sequence[TracedRun]
) -> Activity:
    """Return the layers of each run in their order. A time without a known layer comes last."""
    names = [name for name in order if name in seconds]
    names += [name for name in seconds if name not in names]
    layers = [(name, seconds[name]) for name in names]
    spans: list[Span] = []
    for run in runs:
        spans += spans_in_order(layers, run.calls["execute"])
    return Activity(spans, starts="in order", notes=(MEANS,))
