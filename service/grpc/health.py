"""gRPC's health checking protocol, as Kubernetes' probes and grpc_health_probe ask it: the same
that /readyz tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from service.context import Service
from service.errors import NotFound, Unavailable
from service.grpc.descriptors import SERVICE
from service.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse

LOOK_S = 0.5  # between two looks for whether a watched status has changed
NAMES = ("", SERVICE.full_name)


def check(service: Service, message: HealthCheckRequest) -> HealthCheckResponse:
    """Whether requests are taken; NotFound for a service that is not here."""
    if message.service not in NAMES:
        raise NotFound(
            f"no service '{message.service[:80]}'", f"leave it out, or ask for {SERVICE.full_name}"
        )
    return _told(service, message)


async def watch(
    service: Service,
    message: HealthCheckRequest,
    write: Callable[[HealthCheckResponse], Awaitable[None]],
    stopping: asyncio.Event,
) -> None:
    """The status now, and whenever it has changed, until the port closes."""
    last = None
    while True:
        told = _told(service, message)
        if told != last:
            await write(told)
            last = told
        if stopping.is_set():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), LOOK_S)


def _told(service: Service, message: HealthCheckRequest) -> HealthCheckResponse:
    if message.service not in NAMES:
        return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
    try:
        service.host()
    except Unavailable:
        return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
    return HealthCheckResponse(status=HealthCheckResponse.SERVING)
