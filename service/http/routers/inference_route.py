"""The routes of inference requests, and a way to them that bypasses FastAPI. Its layers, its
routing and its parsing of parameters cost as much as the rest of the service's work for a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.utils import request_params_to_args
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.errors import CrucibleError
from service.http.guard import INFER

FOUND = "crucible.inference"  # in a scope: the route, and the texts that it found in the path


class InferenceRoute(APIRoute):
    """A route that FastAPI documents by the signature of its endpoint, and that calls the endpoint
    itself.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.answer

    async def answer(self, request: Request) -> Response:
        """Call the endpoint. Its parameters are texts from the path, and the query's options, which
        are parsed only if there is a query.
        """
        options: dict[str, Any] = {}
        if request.scope["query_string"]:
            options, faults = request_params_to_args(
                self.dependant.query_params, request.query_params
            )
            if faults:
                raise RequestValidationError(faults)
        response: Response = await self.endpoint(request=request, **request.path_params, **options)
        return response


class InferenceRoutes:
    """Application that answers the requests of these routes, before FastAPI sees them.

    `guarded` wraps it in the layers that FastAPI's own requests pass, so that all checks, figures
    and log lines apply.
    """

    def __init__(
        self,
        routes: Sequence[InferenceRoute],
        answer: Callable[[Request, Exception], Awaitable[Response]],
        guarded: Callable[[ASGIApp], ASGIApp],
    ) -> None:
        self._routes, self._answer = routes, answer
        self._guarded = guarded(self._answered)

    def takes(self, scope: Scope) -> bool:
        """Return True for a request of one of the routes. The route is then in its scope."""
        if scope["type"] != "http" or not scope["path"].endswith(INFER):
            return False
        for route in self._routes:  # FastAPI's `matches` would look for routers within, too
            found = route.path_regex.match(scope["path"])
            if found and scope["method"] in (route.methods or ()):
                scope[FOUND] = {"route": route, "path_params": found.groupdict()}
                return True
        return False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that `takes` has accepted."""
        await self._guarded(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.update(scope.pop(FOUND))  # only now: refused requests count without a route
        request = Request(scope, receive)
        try:
            response = await scope["route"].answer(request)
        except (CrucibleError, RequestValidationError) as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)
