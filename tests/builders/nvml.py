"""A double of pynvml: its functions, answered for GPUs that are written down here.

This file imports nothing of ours, since `install_nvml` also writes it where children import pynvml.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0  # as in nvml.h


class NVMLError(Exception):
    """What pynvml raises for every answer that is none."""


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801  the library's own name
    """No libnvidia-ml.so.1."""


@dataclass(frozen=True)
class Device:
    """What NVML tells of one GPU; None: Not Supported."""

    name: str | bytes
    uuid: str | bytes
    capability: tuple[int, int] = (9, 0)
    memory: int | None = 2**30
    sm_clock: int | None = 1000  # MHz, the highest and the present one
    memory_clock: int | None = 1000
    milliwatts: int | None = None
    pids: tuple[int, ...] | None = ()
    pid_bytes: int | None = None  # of each of them
    watts: int | None = None  # by the counter of energy


class Nvml:
    """The module; `open` counts nvmlInit less nvmlShutdown. `failure`: what nvmlInit raises."""

    NVMLError, NVMLError_LibraryNotFound = NVMLError, NVMLError_LibraryNotFound
    NVML_CLOCK_SM, NVML_CLOCK_MEM = NVML_CLOCK_SM, NVML_CLOCK_MEM
    NVML_TEMPERATURE_GPU = NVML_TEMPERATURE_GPU

    def __init__(
        self, *devices: Device, driver: str = "580.1", failure: Exception | None = None
    ) -> None:
        self.devices, self.driver, self.failure = devices, driver, failure
        self.open, self.degrees = 0, 40

    def nvmlInit(self) -> None:  # noqa: N802  the library's own names
        if self.failure is not None:
            raise self.failure
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self.driver

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        assert self.open
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:  # noqa: N802
        assert self.open
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:  # noqa: N802
        assert self.open
        for device in self.devices:
            if device.uuid == uuid:
                return device
        raise NVMLError("Not Found")

    def nvmlDeviceGetName(self, device: Device) -> str | bytes:  # noqa: N802
        return device.name

    def nvmlDeviceGetUUID(self, device: Device) -> str | bytes:  # noqa: N802
        return device.uuid

    def nvmlDeviceGetCudaComputeCapability(self, device: Device) -> tuple[int, int]:  # noqa: N802
        return device.capability

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> SimpleNamespace:  # noqa: N802
        total = known(device.memory)
        return SimpleNamespace(total=total, used=total // 4, free=total - total // 4)

    def nvmlDeviceGetMaxClockInfo(self, device: Device, clock: int) -> int:  # noqa: N802
        clocks = {NVML_CLOCK_SM: device.sm_clock, NVML_CLOCK_MEM: device.memory_clock}
        return int(known(clocks[clock]))

    nvmlDeviceGetClockInfo = nvmlDeviceGetMaxClockInfo  # noqa: N815

    def nvmlDeviceGetTemperature(self, device: Device, sensor: int) -> int:  # noqa: N802
        """One degree more at every look."""
        assert sensor == NVML_TEMPERATURE_GPU
        self.degrees += 1
        return self.degrees

    def nvmlDeviceGetPowerUsage(self, device: Device) -> int:  # noqa: N802
        return int(known(device.milliwatts))

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Device) -> int:  # noqa: N802
        """In millijoules; it moves every 10 ms."""
        return int(time.monotonic() * 100) * int(known(device.watts)) * 10

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=87, memory=12)

    def nvmlDeviceGetComputeRunningProcesses(  # noqa: N802
        self, device: Device
    ) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=device.pid_bytes) for pid in known(device.pids)
        ]


def known(answer: Any) -> Any:
    """The answer; NVMLError where there is none."""
    if answer is None:
        raise NVMLError("Not Supported")
    return answer


def write_nvml(folder: Path, nvml: Nvml) -> None:
    """Write a module pynvml that answers as `nvml`, for a process that has `folder` in its path."""
    folder.mkdir(parents=True, exist_ok=True)
    source = Path(__file__).read_text(encoding="utf-8")
    call = f"Nvml(*{nvml.devices!r}, driver={nvml.driver!r}, failure={nvml.failure!r})"
    answer = f"\n_nvml = {call}\n\n\ndef __getattr__(name):\n    return getattr(_nvml, name)\n"
    (folder / "pynvml.py").write_text(source + answer, encoding="utf-8")


def install_nvml(folder: Path, monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> None:
    """Let this process and its children use this double; `folder` is for the children."""
    write_nvml(folder, nvml)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    path = os.pathsep.join((str(folder), *filter(None, sys.path)))
    monkeypatch.setattr("pipeline.execution.child_process.IMPORT_PATH", path)
