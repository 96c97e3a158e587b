"""A shortcut for inference requests: FastAPI's routing and parameter parsing cost as much as the
rest of the service's work for one.

It calls the same functions as FastAPI's routes; requests with a query take FastAPI's way. It runs
between Guard and the router, so that all checks and metrics apply.
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
    """The attribute of a route that AccessLog reads."""

    path: str


class FastInference:
    """Answers inference requests without a query, and passes on all others."""

    def __init__(
        self, app: Application, answer: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        self._application, self._answer = app, answer

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        match = None
        if (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and not scope["query_string"]
            and scope["path"].endswith(INFER)
        ):
            request = Request(scope, receive)
            match = _match(request)
        if match is None:
            await self._application(scope, receive, send)
            return
        scope["route"], answer = match
        try:
            response = await answer
        except CrucibleError as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)


def _match(request: Request) -> tuple[Route, Awaitable[Response]] | None:
    path = request.scope["path"]
    if match := OIP.fullmatch(path):
        name, version = match.groups()
        versions = "/versions/{version}" if version else ""
        route = Route(f"/v2/models/{{name}}{versions}/infer")
        return route, oip.answer(request, name, version or "")
    if match := PLAIN.fullmatch(path):
        (name,) = match.groups()
        route = Route("/models/{name}/infer" if name else INFER)
        return route, infer.answer(request, name, infer.NO_OPTIONS)
    return None
