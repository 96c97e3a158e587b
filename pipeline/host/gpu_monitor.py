"""Monitor a GPU by NVML: clocks, power, temperature, busy share, and its counter of energy.

NVML's busy share tells that some kernel ran during the sample, not how much of the GPU it used. The
counter of energy moves in steps: every 100 ms on an H100. A value of it is exact only at a step.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeline.core.frozen import Frozen
from pipeline.host.gpu import NvmlDevice, open_nvml

EVERY_S = 0.25

ENERGY_EVERY_S = 0.02
"""Time between two readings of the counter of energy, which take 3 to 5 ms each on an H100."""

MIN_ENERGY_S = 0.35
"""Time between the first and the last step that a power needs.

Each step is seen up to one reading too late: on an H100 that is 25 ms, 7 % of this time.
"""


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
        with _repeating(lambda: watch.moments.append(_moment(device)), every_s):
            yield watch


@contextlib.contextmanager
def _repeating(sample: Callable[[], None], every_s: float) -> Iterator[None]:
    """Call `sample` in a thread now and every `every_s` seconds, and once more at the end."""
    ended = threading.Event()

    def repeat() -> None:
        sample()
        while not ended.wait(every_s):
            sample()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sample()


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


# -- energy ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The counter of energy at one time."""

    at_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class MeanPower:
    """The power of a GPU between two steps of its counter of energy."""

    watts: float
    window_s: float


@contextlib.contextmanager
def reading_energy(
    device: NvmlDevice,
    clock: Callable[[], float] = time.perf_counter,
    every_s: float = ENERGY_EVERY_S,
) -> Iterator[list[EnergyReading]]:
    """Read the GPU's counter of energy repeatedly, into the list. It stays empty without one."""
    readings: list[EnergyReading] = []

    def read() -> None:
        energy_j = device.energy_j()
        if energy_j is not None:
            readings.append(EnergyReading(clock(), energy_j))

    with _repeating(read, every_s):
        yield readings


def mean_power(readings: Sequence[EnergyReading]) -> MeanPower | None:
    """Return the mean power between the first and the last step of the counter.

    None if these are less than MIN_ENERGY_S apart.
    """
    steps = [after for before, after in pairwise(readings) if after.energy_j != before.energy_j]
    if not steps or steps[-1].at_s - steps[0].at_s < MIN_ENERGY_S:
        return None
    window_s = steps[-1].at_s - steps[0].at_s
    return MeanPower((steps[-1].energy_j - steps[0].energy_j) / window_s, window_s)
