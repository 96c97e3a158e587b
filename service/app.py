"""The ASGI application: its assembly, its lifespan, and the handlers of all errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from pipeline import distribution
from pipeline.errors import CrucibleError
from service.auth import Caller, Source
from service.bytes_in_flight import BytesInFlight
from service.context import Probe, open_service, probe
from service.errors import Answer, MethodNotAllowed
from service.http.access_log import AccessLog
from service.http.error_responses import answer_error
from service.http.guard import Application, Guard, is_page, json_response
from service.http.openai import embeddings as openai_embeddings
from service.http.openai import errors as openai
from service.http.openai import models as openai_models
from service.http.openai import routes as openai_routes
from service.http.routers import (
    docs,
    documentation,
    health,
    infer,
    jobs,
    limits,
    models,
    nodes,
    oip,
    reports,
    shared_memory,
)
from service.http.routers.documentation import open_site
from service.http.routers.inference_route import InferenceRoute, InferenceRoutes
from service.inference import Serving
from service.jobs.queue import WORKER
from service.jobs.traces import JobSpans, provider_from, telemetry_of
from service.language.generation import Generating
from service.observability.prometheus import Metrics
from service.pages import PAGE_ROUTERS
from service.pages.rendering import error_page
from service.settings import Settings
from service.storage.key import Key
from service.storage.layout import Folders

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ROUTERS = (
    oip.router,
    oip.infer_router,
    shared_memory.router,
    infer.router,
    openai_models.router,
    openai_routes.router,
    openai_embeddings.router,
    jobs.router,
    limits.router,
    nodes.router,
    reports.router,
    models.router,
    health.router,
    docs.router,
    documentation.router,
    *PAGE_ROUTERS,
)
ROUTES = tuple(chain.from_iterable(router.routes for router in ROUTERS))
INFERENCE = tuple(route for route in ROUTES if isinstance(route, InferenceRoute))
ABOUT = (
    "Send a trained model, follow its compilation, read the report of speed and accuracy, and"
    " download the engine."
)


class ServiceApp(FastAPI):
    """FastAPI, which leaves inference requests to `inference`."""

    inference: InferenceRoutes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.inference is not None and self.inference.takes(scope):
            scope["app"] = self
            await self.inference(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def create_app(
    settings: Settings,
    worker: Sequence[str] = WORKER,
    probe: Probe = probe,
    serving: Serving | None = None,
    traces: TracerProvider | None = None,
    generating: Generating | None = None,
) -> FastAPI:
    """Build the service on `settings.home` as an ASGI application. It opens nothing before its
    lifespan begins.

    A request passes AccessLog (one log line and one set of metrics, even after an error), then
    Guard (key, host, size, bytes in flight), then InferenceRoutes or FastAPI's router.
    """
    metrics, folders, traces = Metrics(), Folders(settings.home), traces or provider_from(settings)
    bytes_in_flight = BytesInFlight(settings.bytes_in_flight, metrics.bytes_refused.inc)
    metrics.bytes_in_flight.set_function(lambda: bytes_in_flight.held)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_service(settings, metrics, worker, probe, JobSpans(traces)) as service:
            app.state.service = service
            app.state.site = open_site(settings.docs)
            service.serving = serving or service.models
            service.generating = generating or service.models
            service.bytes_in_flight = bytes_in_flight
            yield
        await send_spans(traces)

    async def verify(key: str, source: Source) -> Key:
        verified: Key = await app.state.service.verify(key, source)
        return verified

    async def session_key(token: str, source: Source) -> Key | None:
        key: Key | None = await app.state.service.key_of_session(token, source)
        return key

    def refused(caller: Caller, request: str, status: int, error: Exception | None) -> None:
        app.state.service.refusals.of_request(caller, request, status, error)

    async def answer(request: Request, error: Exception) -> Response:
        request.state.refusal = error
        refusal = answer_error(error, request.state.request_id, folders)
        return refusal_response(request, refusal)

    async def answer_method(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        first_route = (error.headers or {})["Allow"].split(", ")
        allowed = ", ".join(sorted(methods_at(request.scope) | set(first_route)))
        message, next_step = f"this path takes {allowed}", "GET /docs lists all paths"
        return await answer(request, MethodNotAllowed(message, next_step, {"Allow": allowed}))

    def guarded(application: Application) -> Application:
        guard = Guard(
            application,
            settings=settings,
            verify=verify,
            session_key=session_key,
            bytes_in_flight=bytes_in_flight,
            respond=refusal_response,
        )
        return AccessLog(
            guard, metrics=metrics, folders=folders, refused=refused, respond=refusal_response
        )

    app = ServiceApp(
        title="Crucible",
        description=ABOUT,
        version=distribution.version(),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's page loads scripts from a CDN; routers/docs.py does not
        redoc_url=None,
        redirect_slashes=False,
        telemetry=telemetry_of(traces),
        middleware=[Middleware(guarded)],
        exception_handlers={
            HTTPException: answer,
            RequestValidationError: answer,
            CrucibleError: answer,
            405: answer_method,
        },
    )
    for router in ROUTERS:
        app.include_router(router)
    if traces is None:  # with traces, FastAPI's routing creates the spans
        app.inference = InferenceRoutes(INFERENCE, answer, guarded)
    return app


async def send_spans(traces: TracerProvider | None) -> None:
    """Send the remaining spans at the end of the application."""
    if traces is not None:
        await asyncio.to_thread(traces.shutdown)


def refusal_response(request: Request, refusal: Answer) -> Response:
    """Send a refusal as JSON, in the form of the path, or as a page to a reader of pages."""
    if is_page(request.url.path):
        return error_page(request, refusal)
    if openai.is_openai(request.url.path):
        return openai.refusal_response(request, refusal)
    return json_response(request, refusal)


def methods_at(scope: Scope) -> set[str]:
    """Return all methods that a path takes. The framework names only those of the path's first
    route.
    """
    methods: set[str] = set()
    for route in ROUTES:
        if isinstance(route, APIRoute) and route.matches(scope)[0] is not Match.NONE:
            methods.update(route.methods or ())
    return methods
