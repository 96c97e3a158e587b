"""Models: which there are, how they are served, and what changes that."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi import Path as InPath

from service.http.routers.dependencies import REFUSALS, AskedBy, AskedOf
from service.http.routers.jobs import accepted
from service.http.schemas import JobView
from service.registry.models import (
    NAME,
    BenchmarkRequest,
    DeploymentOptions,
    ModelPage,
    ModelView,
    PromoteRequest,
    ShapesView,
)
from service.submission.submit import submit_benchmark

router = APIRouter(prefix="/models", tags=["models"], responses=REFUSALS)
Name = Annotated[str, InPath(pattern=NAME, description="The model's name")]


@router.get("")
async def list_models(caller: AskedBy, service: AskedOf) -> ModelPage:
    """All models, by name."""
    return await service.models.views(caller)


@router.get("/{name}")
async def get_model(name: Name, caller: AskedBy, service: AskedOf) -> ModelView:
    """A model's versions with their inputs and outputs, which requests may run together and why,
    and how it is served.
    """
    return await service.models.view(caller, name)


@router.get("/{name}/shapes")
async def get_shapes(name: Name, caller: AskedBy, service: AskedOf) -> ShapesView:
    """The shapes of requests since the model was loaded, and the profile they suggest."""
    return service.models.shapes(caller, name)


@router.post("/{name}/promote")
async def promote(
    name: Name, asked: PromoteRequest, caller: AskedBy, service: AskedOf
) -> ModelView:
    """Make a report's engine the model's current version. If the model is deployed, the new version
    answers when this does.
    """
    service.host()  # or Unavailable
    return await service.models.promote(caller, name, asked)


@router.post("/{name}/rollback")
async def roll_back(name: Name, caller: AskedBy, service: AskedOf) -> ModelView:
    """Make the version current again that was before this one."""
    service.host()
    return await service.models.rollback(caller, name)


@router.post(
    "/{name}/benchmark",
    status_code=202,
    response_model=JobView,
    responses={
        200: {
            "model": JobView,
            "description": "The Idempotency-Key came before: its job, which has ended",
        }
    },
)
async def benchmark(
    name: Name,
    response: Response,
    caller: AskedBy,
    service: AskedOf,
    asked: BenchmarkRequest | None = None,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> JobView:
    """Measure the engine that is loaded again, beside the baselines of its compile: a job, whose
    report is that of the compile with the new figures.

    It waits for quiet as every measurement does, and the model answers all the while.
    """
    caller.require("compile")
    return accepted(
        await submit_benchmark(service, caller, name, asked or BenchmarkRequest(), idempotency_key),
        response,
    )


@router.put("/{name}/deployment")
async def deploy(
    name: Name, asked: DeploymentOptions, caller: AskedBy, service: AskedOf
) -> ModelView:
    """Load a model, or serve it in another way; it answers when this does. Refused with both
    numbers if it does not fit into memory.
    """
    service.host()
    return await service.models.deploy(caller, name, asked)


@router.delete("/{name}/deployment", status_code=204, response_class=Response)
async def unload(name: Name, caller: AskedBy, service: AskedOf) -> None:
    """Answer what waits, then free the device."""
    service.host()
    await service.models.unload(caller, name)
