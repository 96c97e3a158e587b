"""What a GPU does while something else runs: clocks, power, temperature and busy share, asked of
NVML a few times a second.

NVML's busy share says only that some kernel ran during the sample, not how much of the GPU it
filled.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core import Frozen
from pipeline.host.gpu import NvmlDevice, open_nvml

EVERY_S = 0.25


class Span(Frozen):
    """Smallest, middle and largest of what was seen."""

    least: float
    median: float
    most: float


class GpuUse(Frozen):
    """One GPU during one benchmark. None: NVML does not tell."""

    uuid: str
    samples: int
    sm_clock_mhz: Span | None = None
    memory_clock_mhz: Span | None = None
    power_w: Span | None = None
    temperature_c: Span | None = None
    busy_percent: Span | None = None  # share of the time in which any kernel ran
    other_processes: tuple[int, ...] = ()  # that had the GPU open for computing, before or after


@dataclass(frozen=True, slots=True)
class Moment:
    """One look at the GPU; None: no answer."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    busy_percent: float | None


class Watch:
    """The moments seen so far."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.moments: list[Moment] = []

    def use(self, others: Sequence[int] = ()) -> GpuUse | None:
        """All of it in figures; None where there was nothing to ask."""
        if not self.moments:
            return None
        spans = {
            name: _span([getattr(moment, name) for moment in self.moments])
            for name in Moment.__slots__
        }
        return GpuUse(
            uuid=self.uuid,
            samples=len(self.moments),
            other_processes=tuple(sorted(set(others))),
            **spans,
        )


@contextlib.contextmanager
def watching(uuid: str, nvml: Any = None, every_s: float = EVERY_S) -> Iterator[Watch]:
    """Look at the GPU of this UUID now, every `every_s`, and at the end (`nvml`: pynvml, or a
    double). Without NVML nothing is seen.
    """
    watch = Watch(uuid)
    if not uuid:
        yield watch
        return
    with open_nvml(nvml) as opened:
        device = opened.device(uuid)
        if device is None:
            yield watch
            return
        with _watching(device, watch, every_s):
            yield watch


@contextlib.contextmanager
def _watching(device: NvmlDevice, watch: Watch, every_s: float) -> Iterator[None]:
    left = threading.Event()

    def look() -> None:
        watch.moments.append(_moment(device))
        while not left.wait(every_s):
            watch.moments.append(_moment(device))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
        watch.moments.append(_moment(device))


def _span(values: Sequence[float | None]) -> Span | None:
    known = [value for value in values if value is not None]
    return (
        Span(least=min(known), median=statistics.median(known), most=max(known)) if known else None
    )


def _moment(device: NvmlDevice) -> Moment:
    return Moment(
        sm_clock_mhz=device.sm_clock_mhz(),
        memory_clock_mhz=device.memory_clock_mhz(),
        power_w=device.power_w(),
        temperature_c=device.temperature_c(),
        busy_percent=device.busy_percent(),
    )
