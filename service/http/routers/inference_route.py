"""The routes of inference requests, and a way to them that bypasses FastAPI. Its routing and its
parsing of parameters cost as much as the rest of the service's work for a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.utils import request_params_to_args
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.errors import CrucibleError


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
    """Middleware that answers the requests of these routes, and passes on all others.

    It runs between Guard and the router, so that all checks and metrics apply.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[InferenceRoute],
        answer: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._application, self._routes, self._answer = app, routes, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._route(scope)
        if route is None:
            await self._application(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await route.answer(request)
        except (CrucibleError, RequestValidationError) as error:
            response = await self._answer(request, error)
        await response(scope, receive, send)

    def _route(self, scope: Scope) -> InferenceRoute | None:
        """Return the route of a request, after it has put its parameters into the scope."""
        for route in self._routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL:
                scope.update(child_scope)
                return route
        return None
