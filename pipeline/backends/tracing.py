"""Engines that record what happens inside them, for `crucible bench --trace`.

Each backend has an event source of its own: a profile of ONNX Runtime, counters of OpenVINO, the
layer profiler of TensorRT, PyTorch's profiler. All have the form `Tracer`, and give spans on the
host's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

from pipeline.backends.base import Loaded, Session
from pipeline.errors import InternalError
from pipeline.results.timeline import LAYERS, Activity, Span, TracedRun, Window


class Tracer(Protocol):
    """An engine that is open for tracing."""

    @property
    def session(self) -> Session: ...

    def start(self, warmup_runs: int) -> None:
        """Begin to record. The session has run `warmup_runs` times until now."""
        ...

    def mark(self) -> AbstractContextManager[object]:
        """Return what `execute` runs in: a mark by which the library's clock is recognised."""
        ...

    def stop(self, runs: Sequence[TracedRun]) -> Activity:
        """End the recording, and return what happened in these runs, all since `start`."""
        ...

    def close(self) -> None: ...


class HostOnly:
    """An engine whose backend records nothing. The calls of the host are traced all the same."""

    def __init__(self, loaded: Loaded, profile: int) -> None:
        self._loaded = loaded
        self.session = loaded.session(profile)

    def start(self, warmup_runs: int) -> None:
        """Do nothing."""

    def mark(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stop(self, runs: Sequence[TracedRun]) -> Activity:
        return Activity(notes=("this backend does not tell what happens inside `execute`",))

    def close(self) -> None:
        self.session.close()
        self._loaded.close()


def clock_offset(inner: Sequence[Window], outer: Sequence[Window]) -> tuple[float, float]:
    """Return what to add to another clock to get the host's, and the error of that, in seconds.

    `inner[i]` is by the other clock, and happened within `outer[i]`, by the host's. So each pair
    limits the offset on both sides. A clock that drifts leaves no room between the limits: then
    the error is the width of the gap.
    """
    if not inner or len(inner) != len(outer):
        raise InternalError(f"expected {len(outer)} recorded runs, got {len(inner)}")
    low = max(out.start_s - own.start_s for own, out in zip(inner, outer, strict=True))
    high = min(out.end_s - own.end_s for own, out in zip(inner, outer, strict=True))
    return (low + high) / 2, abs(high - low) / 2


def shift_window(window: Window, offset_s: float, within: Window) -> Window:
    """Return a window moved by an offset, and cut off at the ends of the one that held it."""
    start_s = min(max(window.start_s + offset_s, within.start_s), within.end_s)
    end_s = max(min(window.end_s + offset_s, within.end_s), start_s)
    return Window(start_s, end_s)


def nest_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans of a row by their start, those that hold others first.

    An end behind that of the holder, by a microsecond of the library's rounding, is cut off.
    """
    ordered = sorted(spans, key=lambda span: (span.window.start_s, -span.window.end_s))
    result: list[Span] = []
    holders: list[float] = []  # ends
    for span in ordered:
        while holders and holders[-1] <= span.window.start_s:
            holders.pop()
        if holders and span.window.end_s > holders[-1]:
            span = replace(span, window=Window(span.window.start_s, holders[-1]))
        holders.append(span.window.end_s)
        result.append(span)
    return result


def spans_in_order(
    layers: Sequence[tuple[str, float]], within: Window, row: str = LAYERS
) -> Iterator[Span]:
    """Yield spans one behind the other from the start of a window, of layers with their seconds.

    They are shortened in proportion if together they are longer than the window: by rounding, or
    as means over runs.
    """
    total_s = sum(seconds for _, seconds in layers)
    scale = min(1.0, within.seconds / total_s) if total_s else 1.0
    start_s = within.start_s
    for name, seconds in layers:
        end_s = min(start_s + seconds * scale, within.end_s)
        detail = {"reported_us": seconds * 1e6}
        yield Span(row, name, Window(start_s, end_s), detail)
        start_s = end_s
