"""Measure GPU memory and energy of one engine at one shape, in the engine's process.

NVML's counter of energy moves in steps that are longer than many blocks. So the engine runs for a
window of its own after its blocks, while a thread reads the counter. No latency comes from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pipeline.backends.base import GpuSession, Session
from pipeline.host.gpu import open_nvml
from pipeline.host.gpu_monitor import MIN_ENERGY_S, mean_power, reading_energy
from pipeline.measurement.clock import Clock, measure_block, monotonic
from pipeline.results.gpu_cost import CostFigure, GpuCost

ENERGY_WINDOW_S = 0.6
"""Time of the runs whose energy is read: an H100's counter moves five or six times meanwhile."""

REWARM_S = 0.05
"""Short warm-up before it: the GPU's clocks and caches are those of the last engine's runs."""

NO_MEMORY = "its backend does not tell"
NO_DEVICE = "NVML does not find the GPU"
NO_PROCESS = (
    "NVML does not list this process with its memory; in a container it may have another number"
    " (docker: --pid=host)"
)
NO_COUNTER = "the GPU has no counter of energy"
FEW_STEPS = (
    f"in {ENERGY_WINDOW_S:g} s or more of runs, the steps of the GPU's counter of energy span less"
    f" than {MIN_ENERGY_S:g} s"
)


def measure_gpu_cost(
    session: Session,
    run: Callable[[], object],
    gpu: str,
    nvml: Any = None,
    clock: Clock = monotonic,
) -> GpuCost:
    """Run a session for ENERGY_WINDOW_S, and return its memory and energy.

    `gpu` is a UUID, `nvml` is pynvml or a double. A figure that cannot be had is None with the
    reason.
    """
    with open_nvml(nvml) as opened:
        device = opened.device(gpu)
        measure_block(run, clock, REWARM_S)
        if device is None:
            cost = GpuCost(missing={"GPU memory": NO_DEVICE, "energy": NO_DEVICE})
        else:
            with reading_energy(device, clock) as readings:
                times = measure_block(run, clock, ENERGY_WINDOW_S)
                power = mean_power(tuple(readings))  # a later one would be of an idle GPU
            peak = device.process_bytes(os.getpid())
            missing: dict[CostFigure, str] = {}
            if peak is None:
                missing["GPU memory"] = NO_PROCESS
            if power is None:
                missing["energy"] = FEW_STEPS if readings else NO_COUNTER
            cost = GpuCost(
                peak_bytes=peak,
                peak_source=None if peak is None else "process",
                energy_per_1000_requests_j=(
                    power.watts * sum(times) / len(times) * 1000 if power else None
                ),
                energy_window_s=power.window_s if power else None,
                missing=missing,
            )
    return _with_memory(cost, session)


def _with_memory(cost: GpuCost, session: Session) -> GpuCost:
    """Add what the session tells of its memory, which may take more memory for a moment."""
    if not isinstance(session, GpuSession):
        missing: dict[CostFigure, str] = {"weights": NO_MEMORY, "activations": NO_MEMORY}
        return cost.model_copy(update={"missing": cost.missing | missing})
    memory = session.gpu_memory()
    return cost.model_copy(
        update={
            "weights_bytes": memory.weights_bytes,
            "activation_bytes": memory.activation_bytes,
            "missing": cost.missing | memory.missing,
        }
    )
