"""The timeline of a TensorRT engine: its layers from the layer profiler, and where PyTorch is
installed with CUDA also every kernel and copy, from CUPTI.

With the layer profiler no CUDA graph runs, and each enqueue waits for its layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from pipeline.backends.kineto import Recording
from pipeline.backends.tensorrt import library
from pipeline.backends.tensorrt.backend import load_here
from pipeline.backends.tensorrt.layers import profiler
from pipeline.backends.tensorrt.session import TrtLoaded
from pipeline.backends.tracing import Tracer, spans_in_order
from pipeline.core.artifacts import Engine
from pipeline.measurement.clock import monotonic
from pipeline.results.timeline import Activity, Span, TracedRun

WAITS = (
    "with TensorRT's layer profiler no CUDA graph runs, and each enqueue waits for its layers;"
    " their starts are not known, so they follow each other"
)
NO_KERNELS = "there are no rows of kernels and copies: they need PyTorch with CUDA"


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One report of the layer profiler."""

    name: str
    seconds: float
    reported_s: float  # when it came, by the host's clock


def open_tracer(engine: Engine, profile: int) -> Tracer:
    """Open an engine for tracing."""
    recording = Recording(on_gpu=True, operators=False) if sees_kernels() else None
    return TrtTracer(library.import_library(), load_here(engine), profile, recording)


def sees_kernels() -> bool:
    """Return True if PyTorch's profiler can record the kernels of this process."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


class TrtTracer:
    """A session without graphs, with the layer profiler."""

    def __init__(
        self, trt: Any, loaded: TrtLoaded, profile: int, recording: Recording | None
    ) -> None:
        self._trt, self._loaded, self._recording = trt, loaded, recording
        self.session = loaded.session(profile, graphs=False)
        self._times: list[LayerTime] = []
        self._profiler: Any = None  # lives as long as the context that calls it

    def start(self, warmup_runs: int) -> None:
        def report(name: str, seconds: float) -> None:
            self._times.append(LayerTime(name, seconds, monotonic()))

        self._profiler = profiler(self._trt, report)
        self.session.context.profiler = self._profiler
        if self._recording:
            self._recording.start()

    def mark(self) -> AbstractContextManager[object]:
        return self._recording.mark() if self._recording else nullcontext()

    def stop(self, runs: Sequence[TracedRun]) -> Activity:
        recorded = self._recording.stop(runs) if self._recording else Activity(notes=(NO_KERNELS,))
        spans = (*layer_spans(self._times, runs), *recorded.spans)
        return replace(recorded, spans=spans, starts="in order", notes=(WAITS, *recorded.notes))

    def close(self) -> None:
        self.session.close()
        self._loaded.close()


def layer_spans(times: Sequence[LayerTime], runs: Sequence[TracedRun]) -> list[Span]:
    """Return the layers of each run, which were reported before it was over."""
    spans: list[Span] = []
    for run in runs:
        device = run.device
        layers = [
            (time.name, time.seconds)
            for time in times
            if device.start_s <= time.reported_s <= device.end_s
        ]
        spans += spans_in_order(layers, run.calls["execute"])
    return spans
