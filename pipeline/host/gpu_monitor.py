"""What a GPU does while something else runs: clocks, power, temperature and busy share, asked of
NVML a few times a second.

NVML's busy share says only that some kernel ran during the sample, not how much of the GPU it
filled.
"""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.core import Frozen

EVERY_S = 0.25
SM_CLOCK, MEMORY_CLOCK, CORE_TEMPERATURE = (
    1,
    2,
    0,
)  # nvmlClockType_t, nvmlTemperatureSensors_t of nvml.h


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
    """Look at the GPU of this UUID now, every `every_s`, and at the end (`nvml`: the loaded
    library, or a double). Without NVML nothing is seen.
    """
    watch: Watch = Watch(uuid)
    library: Any = nvml or (_library() if uuid else None)
    handle = _handle(library, uuid) if library else None
    if handle is None:
        yield watch
        return
    left = threading.Event()

    def look() -> None:
        watch.moments.append(_moment(library, handle))
        while not left.wait(every_s):
            watch.moments.append(_moment(library, handle))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        left.set()
        thread.join()
        watch.moments.append(_moment(library, handle))
        library.nvmlShutdown()


def _span(values: Sequence[float | None]) -> Span | None:
    known = [value for value in values if value is not None]
    return (
        Span(least=min(known), median=statistics.median(known), most=max(known)) if known else None
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def _moment(nvml: Any, handle: Any) -> Moment:
    use = _Utilization()
    busy = (
        float(use.gpu)
        if nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use)) == 0
        else None
    )
    milliwatts = _asked(nvml.nvmlDeviceGetPowerUsage, handle)
    return Moment(
        sm_clock_mhz=_asked(nvml.nvmlDeviceGetClockInfo, handle, SM_CLOCK),
        memory_clock_mhz=_asked(nvml.nvmlDeviceGetClockInfo, handle, MEMORY_CLOCK),
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=_asked(nvml.nvmlDeviceGetTemperature, handle, CORE_TEMPERATURE),
        busy_percent=busy,
    )


def _asked(function: Any, *arguments: object) -> float | None:
    """The unsigned int that a function of NVML writes to its last argument; None if it fails."""
    answer = ctypes.c_uint()
    return float(answer.value) if function(*arguments, ctypes.byref(answer)) == 0 else None


def _handle(nvml: Any, uuid: str) -> Any:
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != 0:
        return None
    if nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        nvml.nvmlShutdown()
        return None
    return handle


def _library() -> Any:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
