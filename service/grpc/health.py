"""gRPC's health checking protocol, for Kubernetes' probes and grpc_health_probe.

It reports the same state as /readyz.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from service.context import Service
from service.errors import NotFound, Unavailable
from service.grpc.descriptors import SERVICE
from service.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse

CHECK_S = 0.5  # between two checks of a watched status
NAMES = ("", SERVICE.full_name)


def check(service: Service, message: HealthCheckRequest) -> HealthCheckResponse:
    """Report whether the service is ready; NotFound for an unknown service."""
    if message.service not in NAMES:
        raise NotFound(
            f"no service '{message.service[:80]}'", f"leave it out, or ask for {SERVICE.full_name}"
        )
    return _status(service, message)


async def watch(
    service: Service,
    message: HealthCheckRequest,
    write: Callable[[HealthCheckResponse], Awaitable[None]],
    stopping: asyncio.Event,
) -> None:
    """Send the status now and after each change, until the port closes."""
    last = None
    while True:
        status = _status(service, message)
        if status != last:
            await write(status)
            last = status
        if stopping.is_set():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), CHECK_S)


def _status(service: Service, message: HealthCheckRequest) -> HealthCheckResponse:
    if message.service not in NAMES:
        return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
    try:
        service.host()
    except Unavailable:
        return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
    return HealthCheckResponse(status=HealthCheckResponse.SERVING)
