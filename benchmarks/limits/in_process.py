"""A deployment asked from Python, in the process of its server: without a wire."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serving.figures import percentile_99
from benchmarks.serving.models import INPUT
from pipeline.errors import CrucibleError
from service.app import create_app
from service.auth import LOCAL
from service.context import Service
from service.inference import InferAnswer, InferRequest, Timing
from service.settings import Settings

READY_S = 240.0
LOOK_S = 0.2
WARM_UP_S = 1.0


def asked_in_process(
    home: Path, names: Sequence[str], array: NDArray[Any], clients: int, seconds: float
) -> list[dict[str, Any]]:
    """A row for each name, in this order: so many clients ask that model for so many seconds."""
    return asyncio.run(_asked(home, names, array, clients, seconds))


async def _asked(
    home: Path, names: Sequence[str], array: NDArray[Any], clients: int, seconds: float
) -> list[dict[str, Any]]:
    app = create_app(Settings(home=home))
    async with app.router.lifespan_context(app):
        service: Service = app.state.service
        await service.started
        for name in dict.fromkeys(names):
            await _until_it_answers(service, name, array)
            await _row(service, name, array, clients, WARM_UP_S)
        return [await _row(service, name, array, clients, seconds) for name in names]


async def _until_it_answers(service: Service, name: str, array: NDArray[Any]) -> None:
    end = time.monotonic() + READY_S
    while True:
        try:
            await _ask(service, name, array)
        except CrucibleError:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(LOOK_S)
        else:
            return


async def _ask(service: Service, name: str, array: NDArray[Any]) -> InferAnswer:
    return await service.serving.infer(InferRequest(LOCAL, name, {INPUT: array}))


async def _row(
    service: Service, name: str, array: NDArray[Any], clients: int, seconds: float
) -> dict[str, Any]:
    latencies: list[float] = []
    devices: Counter[str] = Counter()
    timings: list[Timing] = []
    begin = time.monotonic()

    async def client() -> None:
        while (asked := time.monotonic()) < begin + seconds:
            answer = await _ask(service, name, array)
            latencies.append(time.monotonic() - asked)
            timings.append(answer.timing)
            devices[answer.device] += 1

    await asyncio.gather(*(client() for _ in range(clients)))
    wall_s = time.monotonic() - begin
    p99_s = percentile_99(latencies)
    return {
        "images_per_s": len(latencies) * len(array) / wall_s,
        "p50_ms": statistics.median(latencies) * 1e3,
        "p99_ms": None if p99_s is None else p99_s * 1e3,
        "queue_ms": float(np.median([each.queue_s for each in timings])) * 1e3,
        "compute_ms": float(np.median([each.compute_s for each in timings])) * 1e3,
        "batches": dict(devices),
    }
