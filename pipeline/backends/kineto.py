"""PyTorch's profiler as an event source.

It records PyTorch's operators and, by CUPTI, every kernel and copy of this process on the GPU,
whoever started it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.backends.tracing import clock_offset, nest_spans, shift_window
from pipeline.errors import InternalError
from pipeline.results.timeline import OPERATORS, Activity, Span, TracedRun, Window

MARK = "crucible execute"
QUIET = ("KINETO_LOG_LEVEL", "5")  # it writes errors on a host without a GPU
NO_KERNELS = (
    "CUPTI recorded no kernel: it may need the rights of NVIDIA's RmProfilingAdminOnly, or another"
    " profiler holds it"
)
ON_GPU = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "copies"}
"""Rows by the category of an event."""


class Recording:
    """A recording by PyTorch's profiler. `operators`: of PyTorch too, not of the GPU alone."""

    def __init__(self, on_gpu: bool, operators: bool = True) -> None:
        os.environ.setdefault(*QUIET)
        from torch.profiler import ProfilerActivity, profile

        self._on_gpu, self._operators = on_gpu, operators
        # the marks are activities of the CPU
        activities = [ProfilerActivity.CPU, *((ProfilerActivity.CUDA,) if on_gpu else ())]
        self._profile = profile(activities=activities)

    def start(self) -> None:
        self._profile.start()

    def mark(self) -> AbstractContextManager[object]:
        from torch.profiler import record_function

        mark: AbstractContextManager[object] = record_function(MARK)
        return mark

    def stop(self, runs: Sequence[TracedRun]) -> Activity:
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="crucible-trace-") as folder:
            file = Path(folder) / "kineto.json"
            self._profile.export_chrome_trace(str(file))
            text = file.read_text(encoding="utf-8", errors="replace")
        activity = activity_from_kineto(text, runs, self._operators)
        return with_note(activity) if self._on_gpu else activity


def activity_from_kineto(text: str, runs: Sequence[TracedRun], operators: bool = True) -> Activity:
    """Return the operators, kernels and copies of the profiler's own trace.

    Events outside the runs are left out. InternalError if it is no trace, or has other runs.
    """
    try:
        document = json.loads(text)
        events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    except (ValueError, KeyError, TypeError) as error:
        raise InternalError(f"PyTorch's trace is no JSON of events: {error}") from error
    marks = sorted(
        (_window(event) for event in events if _is(event, "user_annotation", MARK)),
        key=lambda window: window.start_s,
    )
    calls = [run.calls["execute"] for run in runs]
    offset_s, error_s = clock_offset(marks, calls)
    spans: list[Span] = []
    for run, mark in zip(runs, marks, strict=True):
        if operators:
            spans += nest_spans(_operators(events, mark, offset_s, run.calls["execute"]))
        spans += on_free_rows(_device_spans(events, offset_s, run.device))
    return Activity(spans, clock_error_s=error_s)


def with_note(activity: Activity) -> Activity:
    """Return the activity of a GPU, with a note if there is no kernel in it."""
    has_kernels = any(span.row.startswith("kernels") for span in activity.spans)
    return activity if has_kernels else replace(activity, notes=(*activity.notes, NO_KERNELS))


def on_free_rows(spans: Iterable[Span]) -> list[Span]:
    """Return spans of which none overlap on a row: a kernel that begins before the last one of its
    stream has ended gets a row beside it.
    """
    ends: dict[str, list[float]] = defaultdict(list)  # of each row of a stream
    result = []
    for span in sorted(spans, key=lambda span: span.window.start_s):
        of_stream = ends[span.row]
        free = (i for i, end_s in enumerate(of_stream) if end_s <= span.window.start_s)
        number = next(free, len(of_stream))
        of_stream[number : number + 1] = [span.window.end_s]
        result.append(replace(span, row=f"{span.row} ({number + 1})") if number else span)
    return result


def _is(event: Mapping[str, Any], category: str, name: str) -> bool:
    return bool(event.get("cat") == category and event["name"] == name)


def _window(event: Mapping[str, Any]) -> Window:
    start_s = float(event["ts"]) * 1e-6
    return Window(start_s, start_s + float(event["dur"]) * 1e-6)


def _operators(
    events: Iterable[Mapping[str, Any]], mark: Window, offset_s: float, call: Window
) -> Iterator[Span]:
    """Yield the operators of one run, which its mark holds."""
    for event in events:
        if event.get("cat") == "cpu_op":
            window = _window(event)
            if mark.start_s <= window.start_s < mark.end_s:
                yield Span(OPERATORS, str(event["name"]), shift_window(window, offset_s, call))


def _device_spans(
    events: Iterable[Mapping[str, Any]], offset_s: float, device: Window
) -> Iterator[Span]:
    """Yield the kernels and copies that began within one run."""
    for event in events:
        row = ON_GPU.get(str(event.get("cat")))
        if row:
            window = _window(event)
            if device.start_s <= window.start_s + offset_s < device.end_s:
                arguments = event.get("args", {})
                row = f"{row}, stream {arguments.get('stream', '?')}"
                size = arguments.get("bytes")
                detail: dict[str, str | float] = {} if size is None else {"bytes": float(size)}
                yield Span(row, str(event["name"]), shift_window(window, offset_s, device), detail)
