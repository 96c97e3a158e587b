"""/ui/models: promoted models. /ui/models/NAME: one model, its versions and live figures."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Form, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.sse import format_sse_event
from pydantic import ValidationError

from service.auth import Caller
from service.context import Service
from service.errors import ServiceError, Unprocessable
from service.http.routers.dependencies import CurrentService
from service.http.routers.models import Name
from service.http.sse import EventStream
from service.observability.live_figures import Counts, counts_of, figures_between
from service.pages.access import Author, Visitor, session_of
from service.pages.forms.deployment import fields, options_from, values_of
from service.pages.rendering import fragment, page
from service.registry.models import DeploymentOptions, PromoteRequest

router = APIRouter(include_in_schema=False)
UPDATE_S = 2.0
WINDOW = 6  # updates of which the figures are taken: ten seconds


@router.get("/ui/models")
async def models_page(request: Request, caller: Visitor, service: CurrentService) -> Response:
    found = await service.models.views(caller)
    return page(request, "models.html", models=found.models)


@router.get("/ui/models/{name}")
async def model_page(
    request: Request, name: Name, caller: Visitor, service: CurrentService
) -> Response:
    return await _model_page(request, name, caller, service)


@router.get("/ui/models/{name}/live")
async def follow_model(
    request: Request, name: Name, caller: Visitor, service: CurrentService
) -> Response:
    """Send the figures of a model every two seconds."""
    await service.models.view(caller, name)
    return EventStream(
        live(service, name, caller, session_of(request)), partial(service.limits.stream, caller.key)
    )


async def live(
    service: Service, name: str, caller: Caller, session: str, update_s: float = UPDATE_S
) -> AsyncIterator[bytes]:
    """Yield the fragment of the figures until the model is unloaded, or the session or the
    server ends.
    """
    counts = deque([_counts(service, name)], maxlen=WINDOW)
    while not service.stopping:
        await asyncio.sleep(update_s)
        if not await service.has_session(session):
            yield format_sse_event(event="ended", data_str="")
            return
        counts.append(_counts(service, name))
        values = await _values(service, name, caller, counts[0], counts[-1])
        yield format_sse_event(data_str=fragment("model_figures.html", **values))
        if values["model"].deployment.state == "unloaded":
            yield format_sse_event(event="ended", data_str="")
            return


@router.post("/ui/jobs/{job_id}/promote")
async def promote(
    job_id: str,
    caller: Author,
    service: CurrentService,
    name: Annotated[Name, Form()],
    override: Annotated[bool, Form()] = False,
) -> Response:
    service.host()
    await service.models.promote(caller, name, PromoteRequest(report=job_id, override=override))
    return RedirectResponse(f"/ui/models/{name}", 303)


@router.post("/ui/models/{name}/rollback")
async def roll_back(name: Name, caller: Author, service: CurrentService) -> Response:
    service.host()
    await service.models.rollback(caller, name)
    return RedirectResponse(f"/ui/models/{name}", 303)


@router.post("/ui/models/{name}/load")
async def load(name: Name, caller: Author, service: CurrentService) -> Response:
    """Load a model with its last options; it is ready when the page comes."""
    service.host()
    await service.models.load(caller, name)
    return RedirectResponse(f"/ui/models/{name}", 303)


@router.post("/ui/models/{name}/unload")
async def unload(name: Name, caller: Author, service: CurrentService) -> Response:
    service.host()
    await service.models.unload(caller, name)
    return RedirectResponse(f"/ui/models/{name}", 303)


@router.post("/ui/models/{name}/deployment")
async def deploy(request: Request, name: Name, caller: Author, service: CurrentService) -> Response:
    """Load a model with these options; a wrong one is shown at its field."""
    caller.require("admin")
    service.host()
    async with request.form() as form:
        values = {field: str(value).strip() for field, value in form.items()}
    try:
        await service.models.deploy(caller, name, options_from(values))
    except ValidationError as error:
        faults = {str(fault["loc"][0]): fault["msg"] for fault in error.errors()}
        return await _model_page(request, name, caller, service, values, faults)
    except Unprocessable as error:
        return await _model_page(request, name, caller, service, values, refusal=error)
    return RedirectResponse(f"/ui/models/{name}", 303)


async def _model_page(
    request: Request,
    name: str,
    caller: Caller,
    service: Service,
    given: Mapping[str, str] | None = None,
    faults: Mapping[str, str] | None = None,
    refusal: ServiceError | None = None,
) -> Response:
    """Show a model; with `given`, the form of its deployment as it was sent, and what is wrong."""
    now = _counts(service, name)
    values = await _values(service, name, caller, Counts(now.at_s), now)
    options = values["model"].deployment.options or DeploymentOptions()
    return page(
        request,
        "model.html",
        200 if given is None else 422,
        fields=fields(values_of(options) if given is None else given, faults or {}),
        refusal=refusal,
        is_open=given is not None,
        **values,
    )


async def _values(
    service: Service, name: str, caller: Caller, before: Counts, after: Counts
) -> dict[str, Any]:
    """Return what the templates of a model need."""
    model = await service.models.view(caller, name)
    served = [each for each in service.serving.served(caller) if each.model == name]
    return {
        "model": model,
        "instances": served[0].instances * len(served[0].devices) if served else 0,
        "figures": figures_between(before, after),
    }


def _counts(service: Service, name: str) -> Counts:
    return counts_of(service.metrics.of_models, name, time.monotonic())
