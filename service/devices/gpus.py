"""This host's NVIDIA GPUs as the service numbers them, asked of NVML.

`gpu:1` is the second GPU that CUDA_VISIBLE_DEVICES leaves, as in leases and in every child; NVML
itself counts all GPUs of the machine. NVML does not tell everything of every GPU: not the busy
share where the GPU is split into MIG slices, not the memory where it is the machine's own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pynvml

from pipeline.host.gpu import VISIBLE, visible_places


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one GPU, in bytes."""

    used: int
    free: int
    total: int


class VisibleGpu:
    """One GPU that this server may use, while NVML is open."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def memory(self) -> Memory | None:
        """What is in use, by anybody; None: NVML does not tell."""
        found = _answer(self._nvml, self._nvml.nvmlDeviceGetMemoryInfo, self._handle)
        return None if found is None else Memory(found.used, found.free, found.total)

    def busy_ratio(self) -> float | None:
        """Share of the last second in which some kernel ran; None: NVML does not tell."""
        found = _answer(self._nvml, self._nvml.nvmlDeviceGetUtilizationRates, self._handle)
        return None if found is None else found.gpu / 100


@contextlib.contextmanager
def visible_gpus(nvml: ModuleType = pynvml) -> Iterator[tuple[VisibleGpu, ...]]:
    """The GPUs of this server: the first is gpu:0. None where there is no driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield ()
        return
    try:
        count = _answer(nvml, nvml.nvmlDeviceGetCount) or 0
        handles = [_answer(nvml, nvml.nvmlDeviceGetHandleByIndex, place) for place in range(count)]
        uuids = [_uuid(nvml, handle) for handle in handles]
        places = visible_places(uuids, os.environ.get(VISIBLE))
        yield tuple(VisibleGpu(nvml, handles[place]) for place in places)
    finally:
        nvml.nvmlShutdown()


def _uuid(nvml: ModuleType, handle: Any) -> str:
    """As nvidia-smi writes it; empty: NVML does not tell."""
    found = _answer(nvml, nvml.nvmlDeviceGetUUID, handle)
    return found.decode() if isinstance(found, bytes) else found or ""


def _answer(nvml: ModuleType, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of NVML returns; None if it does not tell, or there is no handle."""
    if None in arguments:
        return None
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
