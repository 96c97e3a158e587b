"""Inference requests on a short way: FastAPI's routing and its reading of parameters cost as much
as all else that the service does with one.

The functions are those that FastAPI's routes call; what has a query goes there. This stands between
Guard and the router, so every check and figure is the same.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from pipeline.errors import CrucibleError
from service.http.guard import INFER, Application, Receive, Send
from service.http.routers import infer, oip

OIP = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
PLAIN = re.compile(r"(?:/models/([^/]+))?/infer")


@dataclass(frozen=True, slots=True)
class Route:
    """What Observed asks of a route."""

    path: str


class FastInference:
    """Answers inference requests without a query; hands on all others."""

    def __init__(
        self, app: Application, answer: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._application, self._answer = app, answer

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        found = None
        if (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and not scope["query_string"]
            and scope["path"].endswith(INFER)
        ):
            request = Request(scope, receive)
            found = _found(request)
        if found is None:
            await self._application(scope, receive, send)
            return
        scope["route"], answering = found
        try:
            response = await answering
        except CrucibleError as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)


def _found(request: Request) -> tuple[Route, Awaitable[Response]] | None:
    path = request.scope["path"]
    if match := OIP.fullmatch(path):
        name, version = match.groups()
        return Route(
            f"/v2/models/{{name}}{'/versions/{version}' if version else ''}/infer"
        ), oip.answer(request, name, version or "")
    if match := PLAIN.fullmatch(path):
        (name,) = match.groups()
        return Route("/models/{name}/infer" if name else INFER), infer.answer(
            request, name, infer.NO_WISH
        )
    return None
