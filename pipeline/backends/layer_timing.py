"""Time on a CPU: the timer of sessions, and the runs in which layers are timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipeline.backends.base import Session
from pipeline.core.shapes import Tensors, TensorSpec, sizes_from_shapes
from pipeline.errors import DataError
from pipeline.measurement.clock import monotonic

LAYER_WARMUP_RUNS = 2
LAYER_RUNS = 10
MIN_LAYER_RUNS = 3
# The limit on timed runs beyond MIN_LAYER_RUNS. A large model is timed well enough by few runs.
MAX_LAYER_SECONDS = 2.0


class HostTimer:
    """The monotonic clock. On a CPU all work is done when a call returns."""

    def __init__(self) -> None:
        self._start = self._stop = 0.0

    def start(self) -> None:
        self._start = monotonic()

    def stop(self) -> None:
        self._stop = monotonic()

    def elapsed_s(self) -> float:
        return self._stop - self._start


class TakesInputs(Protocol):
    """The part of a session that takes inputs."""

    @property
    def inputs(self) -> tuple[TensorSpec, ...]: ...
    def bind(self, feeds: Tensors) -> None: ...
    def upload(self) -> None: ...


def bound_sizes(session: TakesInputs, feeds: Tensors) -> dict[str, int]:
    """Bind and upload the feeds, and return their sizes.

    DataError unless they fit the session.
    """
    sizes = sizes_from_shapes(
        session.inputs, {spec.name: feeds[spec.name].shape for spec in session.inputs}
    )
    if isinstance(sizes, str):
        raise DataError(f"cannot time the layers: {sizes}", "give feeds of the engine's own shapes")
    session.bind(feeds)
    session.upload()
    return sizes


def run_for_layers(session: Session, after_run: Callable[[], None] = lambda: None) -> int:
    """Warm up, then run as often as layers are timed on a CPU. Return the number of timed runs.

    `after_run` is called after every run, warmup included.
    """
    for _ in range(LAYER_WARMUP_RUNS):
        session.execute()
        after_run()
    started, runs = monotonic(), 0
    while runs < MIN_LAYER_RUNS or (
        runs < LAYER_RUNS and monotonic() - started < MAX_LAYER_SECONDS
    ):
        session.execute()
        after_run()
        runs += 1
    return runs
