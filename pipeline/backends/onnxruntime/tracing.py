"""The timeline of an ONNX Runtime session on a CPU: every kernel, from the library's profile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from pipeline.backends.base import Session
from pipeline.backends.onnxruntime import backend
from pipeline.backends.onnxruntime.layers import KERNEL, ProfiledRun, runs_of_profile
from pipeline.backends.tracing import HostOnly, Tracer, clock_offset, nest_spans, shift_window
from pipeline.core.artifacts import Engine
from pipeline.results.timeline import LAYERS, Activity, Span, TracedRun, Window


def open_tracer(engine: Engine, profile: int) -> Tracer:
    """Open an engine for tracing. On a GPU provider its profile shows launches, no kernels."""
    if engine.recipe.provider != "cpu":
        return HostOnly(backend.load(engine), profile)
    return OrtTracer(engine)


class OrtTracer:
    """A session with the library's profile."""

    def __init__(self, engine: Engine) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="crucible-trace-")
        try:
            self._profiled = backend.open_profiled(engine, Path(self._folder.name))
            self.session: Session = backend.OrtSession(engine, self._profiled.run)
        except BaseException:
            self._folder.cleanup()
            raise

    def start(self, warmup_runs: int) -> None:
        """Do nothing: the profile holds all runs."""

    def mark(self) -> AbstractContextManager[object]:
        return nullcontext()  # the profile marks its runs itself

    def stop(self, runs: Sequence[TracedRun]) -> Activity:
        profile = Path(self._profiled.end_profiling())
        return activity_from_profile(profile.read_text(encoding="utf-8"), runs)

    def close(self) -> None:
        self.session.close()
        self._folder.cleanup()


def activity_from_profile(profile: str, runs: Sequence[TracedRun]) -> Activity:
    """Return the kernels of the last runs in a profile, which are `runs`."""
    recorded = runs_of_profile(profile)[-len(runs) :]
    calls = [run.calls["execute"] for run in runs]
    inner = [Window(run.start_us * 1e-6, run.end_us * 1e-6) for run in recorded]
    offset_s, error_s = clock_offset(inner, calls)
    spans: list[Span] = []
    for run, call in zip(recorded, calls, strict=True):
        spans += nest_spans(_kernels(run, offset_s, call))
    return Activity(spans, clock_error_s=error_s)


def _kernels(run: ProfiledRun, offset_s: float, call: Window) -> Iterator[Span]:
    for event in run.kernels:
        start_us = float(event["ts"])
        window = Window(start_us * 1e-6, (start_us + float(event["dur"])) * 1e-6)
        name = str(event["name"]).removesuffix(KERNEL)
        yield Span(LAYERS, name, shift_window(window, offset_s, call), _detail(event["args"]))


def _detail(arguments: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the operator and the shapes of a kernel, as the profile has them."""
    shapes = (("inputs", "input_type_shape"), ("outputs", "output_type_shape"))
    detail: dict[str, str | float] = {"operator": str(arguments.get("op_name", ""))}
    for name, key in shapes:
        tensors = arguments.get(key, ())
        detail[name] = ", ".join(
            f"{dtype}{shape}" for tensor in tensors for dtype, shape in tensor.items()
        )
    return detail
