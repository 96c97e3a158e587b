"""Monitor a GPU by NVML, several times a second: clocks, power, temperature and busy share.

NVML's busy share tells that some kernel ran during the sample, not how much of the GPU it used.
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
    """Smallest, median and largest value of the samples."""

    least: float
    median: float
    most: float


class GpuUse(Frozen):
    """One GPU during one benchmark. None: NVML does not report the value."""

    uuid: str
    samples: int
    sm_clock_mhz: Span | None = None
    memory_clock_mhz: Span | None = None
    power_w: Span | None = None
    temperature_c: Span | None = None
    busy_percent: Span | None = None  # share of the time in which any kernel ran
    # Processes that used the GPU for computing, before or after the benchmark.
    other_processes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """One sample of a GPU; None: NVML does not report the value."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    busy_percent: float | None


class Watch:
    """The samples of a GPU so far."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.moments: list[Moment] = []

    def use(self, others: Sequence[int] = ()) -> GpuUse | None:
        """Summarise the samples; None if there are no samples."""
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
    """Sample the GPU of this UUID now, every `every_s` seconds, and at the end.

    `nvml` is pynvml or a double. Without NVML there are no samples.
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
    ended = threading.Event()

    def sample() -> None:
        watch.moments.append(_moment(device))
        while not ended.wait(every_s):
            watch.moments.append(_moment(device))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        watch.moments.append(_moment(device))


def _span(values: Sequence[float | None]) -> Span | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Span(least=min(known), median=statistics.median(known), most=max(known))


def _moment(device: NvmlDevice) -> Moment:
    return Moment(
        sm_clock_mhz=device.sm_clock_mhz(),
        memory_clock_mhz=device.memory_clock_mhz(),
        power_w=device.power_w(),
        temperature_c=device.temperature_c(),
        busy_percent=device.busy_percent(),
    )
