"""The application: the parts put together, what its life begins and ends with, and how every error
is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Match
from starlette.types import Scope

from pipeline import distribution
from pipeline.errors import CrucibleError
from service.context import Probe, opened, probe
from service.errors import MethodNotAllowed
from service.http.access_log import Observed
from service.http.error_responses import answer_error
from service.http.guard import Guard
from service.http.routers import docs, health, infer, jobs, models, oip, reports
from service.http.routers.fast import FastInference
from service.inference import Serving
from service.jobs.queue import WORKER
from service.jobs.traces import JobSpans, provider_from, telemetry_of
from service.observability.prometheus import Metrics
from service.settings import Settings
from service.storage.keys import Key
from service.storage.layout import Folders

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ROUTERS = (
    oip.router,
    infer.router,
    jobs.router,
    reports.router,
    models.router,
    health.router,
    docs.router,
)
ABOUT = (
    "Send a trained model, follow its compilation, read what was measured and proved, and take the"
    " engine."
)


def create_app(
    settings: Settings,
    worker: Sequence[str] = WORKER,
    probe: Probe = probe,
    serving: Serving | None = None,
    traces: TracerProvider | None = None,
) -> FastAPI:
    """The service on `settings.home`, as an ASGI application. Nothing is opened before its lifespan
    begins.

    A request passes Observed (one log line and one set of figures, whatever happens), then Guard
    (key, host, size), then its router, or FastInference in its place.
    """
    metrics, folders, traces = Metrics(), Folders(settings.home), traces or provider_from(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened(settings, metrics, worker, probe, JobSpans(traces)) as service:
            app.state.service = service
            service.serving = serving or service.models
            yield
        if traces is not None:
            await asyncio.to_thread(traces.shutdown)  # sends what is left

    async def verify(key: str) -> Key:
        found: Key = await app.state.service.verify(key)
        return found

    async def answer(request: Request, error: Exception) -> Response:
        found = answer_error(error, request.state.request_id, folders)
        return Response(found.json, found.status, found.headers, "application/json")

    async def answer_method(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        allowed = ", ".join(
            sorted(methods_at(request.scope) | set((error.headers or {})["Allow"].split(", ")))
        )
        return await answer(
            request,
            MethodNotAllowed(
                f"this path takes {allowed}", "GET /docs lists what there is", {"Allow": allowed}
            ),
        )

    app = FastAPI(
        title="Crucible",
        description=ABOUT,
        version=distribution.version(),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; routers/docs.py needs nothing
        redoc_url=None,
        redirect_slashes=False,
        telemetry=telemetry_of(traces),
        middleware=[
            Middleware(Observed, metrics=metrics, folders=folders),
            Middleware(Guard, settings=settings, verify=verify),
            *(
                [Middleware(FastInference, answer=answer)] if traces is None else []
            ),  # FastAPI makes the spans
        ],
        exception_handlers={
            HTTPException: answer,
            RequestValidationError: answer,
            CrucibleError: answer,
            405: answer_method,
        },
    )
    for router in ROUTERS:
        app.include_router(router)
    return app


def methods_at(scope: Scope) -> set[str]:
    """All methods that a path takes; of a refused one the framework names those of the first route
    only.
    """
    fitting = [
        route
        for router in ROUTERS
        for route in router.routes
        if route.matches(scope)[0] is not Match.NONE
    ]
    return {
        method for route in fitting if isinstance(route, APIRoute) for method in route.methods or ()
    }
