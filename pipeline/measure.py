"""The only clock: samples, warm-up, interleaving, bootstrap intervals, and the fingerprint of the environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from pipeline.core import Frozen

Clock = Callable[[], float]
"""Seconds from an arbitrary start, never going back."""

monotonic: Clock = time.perf_counter


class Interval(Frozen):
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def excludes(self, number: float) -> bool:
        return not self.low <= number <= self.high


class Samples(Frozen):
    """Raw times of one measured region, warm-up apart."""

    values_s: tuple[float, ...]
    warmup_s: tuple[float, ...] = ()
    clock: Literal["host", "device"] = "host"
    stable: bool = True  # False: the median still moved between blocks


class Environment(Frozen):
    """The host on which figures were taken; two reports compare only where these agree."""

    cpu: str
    cpu_flags: tuple[str, ...]  # avx2, avx512_vnni, amx_int8, ...: those that change the speed of inference
    cores: int
    memory_bytes: int
    os: str
    python: str
    packages: dict[str, str]
    gpus: tuple[str, ...] = ()
    governor: str | None = None
    load_1min: float = 0.0
