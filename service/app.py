"""The application: the parts put together, what its life begins and ends with, and how every error is answered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from pipeline.errors import CrucibleError
from pipeline.runner import installed
from service.answers import answer_error
from service.guard import Guard
from service.keys import Key
from service.metrics import Metrics
from service.observe import Observed
from service.routers import docs, health, jobs, reports
from service.runner import WORKER
from service.service import Probe, opened, probe
from service.settings import Settings

ABOUT = "Send a trained model, follow its compilation, read what was measured and proved, and take the engine."


def create_app(settings: Settings, worker: Sequence[str] = WORKER, probe: Probe = probe) -> FastAPI:
    """The service on `settings.home`, as an ASGI application. Nothing is opened before its lifespan begins.

    A request passes Observed (one log line and one set of figures, whatever happens), then Guard (key, host, size), then its router.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened(settings, metrics, worker, probe) as service:
            app.state.service = service
            yield

    def verify(key: str) -> Key:
        found: Key = app.state.service.keys.verify(key)
        return found

    app = FastAPI(
        title="Crucible",
        description=ABOUT,
        version=installed("crucible"),
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere; routers/docs.py needs nothing
        redoc_url=None,
        redirect_slashes=False,
        middleware=[Middleware(Observed, metrics=metrics), Middleware(Guard, settings=settings, verify=verify)],
        exception_handlers=dict.fromkeys((HTTPException, RequestValidationError, CrucibleError), _answer),
    )
    for router in (jobs.router, reports.router, health.router, docs.router):
        app.include_router(router)
    return app


async def _answer(request: Request, error: Exception) -> Response:
    answer = answer_error(error, request.state.request_id)
    return Response(answer.json, answer.status, answer.headers, "application/json")
