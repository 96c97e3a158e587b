"""What every route asks of a request: who it comes from, and the service it comes to."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from service.guard import Caller
from service.service import Service


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


AskedBy = Annotated[Caller, Depends(_caller)]
AskedOf = Annotated[Service, Depends(_service)]
# By reference and not as `model`, which FastAPI would document in the form of each route's successes, such as text/plain.
_REFUSAL = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"content": _REFUSAL, "description": "Refused: what was expected, what came, and what to do next"},
    "5XX": {"content": _REFUSAL, "description": "It cannot be done now, or a fault of the service"},
}
