"""NVML and sessions are doubles; the window of energy is a real one."""

from __future__ import annotations

import os
import time

import pytest

from pipeline.benchmark.gpu_cost import FEW_STEPS, NO_COUNTER, NO_DEVICE, NO_MEMORY, NO_PROCESS
from pipeline.benchmark.gpu_cost import measure_gpu_cost as measure
from pipeline.results.gpu_cost import GpuCost
from tests.builders.interleaved import Host, TimedSession
from tests.builders.nvml import Device, Nvml

UUID = "GPU-6d5a129b"
MEMORY = GpuCost(weights_bytes=50, activation_bytes=7)


class GpuTimedSession(TimedSession):
    def gpu_memory(self) -> GpuCost:
        return MEMORY


def gpu_cost(device: Device, session: TimedSession) -> tuple[GpuCost, int]:
    """The cost, and the number of runs."""
    runs: list[int] = []

    def run() -> None:
        time.sleep(0.002)
        runs.append(1)

    return measure(session, run, UUID, Nvml(device)), len(runs)


def test_memory_and_energy_of_a_session() -> None:
    device = Device("H200", UUID, watts=300, pids=(1, os.getpid()), pid_bytes=900)
    cost, runs = gpu_cost(device, GpuTimedSession(Host(), 0.001))
    assert (cost.weights_bytes, cost.activation_bytes) == (50, 7)
    assert (cost.peak_bytes, cost.peak_source, cost.missing) == (900, "process", {})
    assert cost.energy_per_1000_requests_j is not None
    assert cost.energy_window_s is not None
    assert cost.energy_per_1000_requests_j / 1000 * runs > 300 * cost.energy_window_s / 2
    assert GpuCost.model_validate_json(cost.model_dump_json()) == cost


@pytest.mark.parametrize(
    ("device", "reasons"),
    [
        (Device("H200", UUID), {"GPU memory": NO_PROCESS, "energy": NO_COUNTER}),
        (
            Device("H200", UUID, pids=(os.getpid(),)),
            {"GPU memory": NO_PROCESS, "energy": NO_COUNTER},
        ),
        (
            Device("H200", UUID, watts=0),
            {"GPU memory": NO_PROCESS, "energy": FEW_STEPS},
        ),
        (Device("H200", "another"), {"GPU memory": NO_DEVICE, "energy": NO_DEVICE}),
    ],
    ids=["not listed", "no memory told", "no steps", "another GPU"],
)
def test_what_is_not_known_is_none_with_the_reason(device: Device, reasons: dict[str, str]) -> None:
    cost, _ = gpu_cost(device, TimedSession(Host(), 0.001))
    assert cost == GpuCost(missing={**reasons, "weights": NO_MEMORY, "activations": NO_MEMORY})
