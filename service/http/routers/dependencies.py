"""What every route asks of a request: who it comes from, and the service it comes to."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from service.auth import Caller
from service.context import Service


def asked_by(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller


def asked_of(request: Request) -> Service:
    service: Service = request.scope["app"].state.service
    return service


# Async, because FastAPI runs what is not in a thread, which costs more than all they do.
async def _asked_by(request: Request) -> Caller:
    return asked_by(request)


async def _asked_of(request: Request) -> Service:
    return asked_of(request)


AskedBy = Annotated[Caller, Depends(_asked_by)]
AskedOf = Annotated[Service, Depends(_asked_of)]
# By reference and not as `model`, which FastAPI would document in the form of each route's
# successes, such as text/plain.
_REFUSAL = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "content": _REFUSAL,
        "description": "Refused: what was expected, what came, and what to do next",
    },
    "5XX": {"content": _REFUSAL, "description": "It cannot be done now, or a fault of the service"},
}
