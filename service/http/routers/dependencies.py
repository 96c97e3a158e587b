"""The dependencies that all routes share: the caller of a request, and the service."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from service.auth import Caller
from service.context import Service
from service.regions import OwnRegions


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller


def service_of(request: Request) -> Service:
    service: Service = request.scope["app"].state.service
    return service


def regions_of(request: Request) -> OwnRegions:
    """The regions of the caller; Forbidden if this request may use none."""
    address = request.client.host if request.client else ""
    key = caller_of(request).key
    return service_of(request).regions.of(key, address, request.headers.keys())


# Async, because FastAPI runs other functions in a thread, which costs more than these calls.
async def _caller_dependency(request: Request) -> Caller:
    return caller_of(request)


async def _service_dependency(request: Request) -> Service:
    return service_of(request)


CurrentCaller = Annotated[Caller, Depends(_caller_dependency)]
CurrentService = Annotated[Service, Depends(_service_dependency)]
# A reference instead of `model`, which FastAPI would document with the media type of each route's
# successful answer, such as text/plain.
_REFUSAL = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "content": _REFUSAL,
        "description": "Refused: what was expected, what came, and what to do next",
    },
    "5XX": {"content": _REFUSAL, "description": "Not possible now, or an error of the service"},
}
