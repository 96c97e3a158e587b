"""The timeline of an engine's traced runs: what `crucible bench --trace` writes.

All times are seconds of the host's monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

LAYERS, OPERATORS = "layers", "operators"
"""Rows: the layers of an engine, and PyTorch's operators."""

Starts = Literal["measured", "in order"]
"""How the starts of layers are known. in order: only durations are, so each follows the last."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time."""

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Span:
    """One event on a row of the timeline. Of two events on a row, one holds the other, or neither
    overlaps.
    """

    row: str  # "host calls", "layers", "operators", "kernels, stream 7"
    name: str  # the library's own word for it
    window: Window
    detail: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedRun:
    """One run: the session's calls in their order."""

    calls: Mapping[str, Window]  # by the step of a session: bind, upload, ... fetch

    @property
    def window(self) -> Window:
        windows = list(self.calls.values())
        return Window(windows[0].start_s, windows[-1].end_s)

    @property
    def device(self) -> Window:
        """The time in which the device may work for this run.

        TensorRT's sessions begin to upload large inputs in `bind`.
        """
        return Window(self.window.start_s, self.calls["synchronize"].end_s)


@dataclass(frozen=True, slots=True)
class Activity:
    """What a backend recorded during the runs."""

    spans: Sequence[Span] = ()
    starts: Starts = "measured"
    # the clock of the library was moved to the host's; it may be off by this much in either way
    clock_error_s: float = 0.0
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """The traced runs of one engine at one shape."""

    label: str
    device: str
    sizes: dict[str, int]
    runs: Sequence[TracedRun]
    activity: Activity
    # the fastest from bind to fetch, of runs without and with the tracing, in one process
    untraced_s: float
    traced_s: float
    nvtx: bool = False  # ranges for Nsight were open around the calls
    on_gpu: bool = False

    @property
    def starts_s(self) -> list[float]:
        """When each run began."""
        return [run.window.start_s for run in self.runs]

    @property
    def slowdown(self) -> float:
        """How many times as long a traced run takes."""
        return self.traced_s / self.untraced_s


@dataclass(frozen=True, slots=True)
class TraceFailure:
    """Why an engine could not be traced."""

    label: str
    reason: str
