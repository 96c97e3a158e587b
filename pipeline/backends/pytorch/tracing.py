"""The timeline of a PyTorch module or program: its operators, and kernels and copies on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from pipeline.backends.base import Loaded, Session
from pipeline.backends.kineto import Recording
from pipeline.backends.pytorch import backend, programs
from pipeline.backends.tracing import Tracer
from pipeline.core.artifacts import Engine
from pipeline.results.timeline import Activity, TracedRun


def open_tracer(engine: Engine, profile: int) -> Tracer:
    """Open a baseline, or a program, for tracing."""
    load = backend.load if engine.target.backend == "pytorch" else programs.load
    return TorchTracer(load(engine), profile, engine.is_on_gpu)


class TorchTracer:
    """A session with PyTorch's own profiler."""

    def __init__(self, loaded: Loaded, profile: int, on_gpu: bool) -> None:
        self._loaded = loaded
        self.session: Session = loaded.session(profile)
        self._recording = Recording(on_gpu)

    def start(self, warmup_runs: int) -> None:
        self._recording.start()

    def mark(self) -> AbstractContextManager[object]:
        return self._recording.mark()

    def stop(self, runs: Sequence[TracedRun]) -> Activity:
        return self._recording.stop(runs)

    def close(self) -> None:
        self.session.close()
        self._loaded.close()
