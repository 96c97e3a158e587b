"""Routes for models: list, promote, deploy, measure."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi import Path as InPath

from service.http.routers.dependencies import REFUSALS, CurrentCaller, CurrentService
from service.http.routers.jobs import accepted
from service.http.schemas import JobView, RecompileView
from service.registry.models import (
    NAME,
    BenchmarkRequest,
    DeploymentOptions,
    ModelPage,
    ModelView,
    PromoteRequest,
    RecompileRequest,
)
from service.registry.traffic import ShapesView
from service.submission.recompile import submit_recompile
from service.submission.submit import submit_benchmark

router = APIRouter(prefix="/models", tags=["models"], responses=REFUSALS)
Name = Annotated[str, InPath(pattern=NAME, description="The model's name")]


@router.get("")
async def list_models(caller: CurrentCaller, service: CurrentService) -> ModelPage:
    """List all models by name."""
    return await service.models.views(caller)


@router.get("/{name}")
async def get_model(name: Name, caller: CurrentCaller, service: CurrentService) -> ModelView:
    """Return a model's versions with their inputs and outputs, whether requests may share a batch
    and why, and its deployment.
    """
    return await service.models.view(caller, name)


@router.get("/{name}/shapes")
async def get_shapes(name: Name, caller: CurrentCaller, service: CurrentService) -> ShapesView:
    """Return the shapes of requests and batches since the model was loaded, and the profiles that
    they suggest.
    """
    return await service.models.shapes(caller, name)


@router.post("/{name}/promote")
async def promote(
    name: Name, options: PromoteRequest, caller: CurrentCaller, service: CurrentService
) -> ModelView:
    """Make a report's engine the model's current version. If the model is deployed, the new version
    answers when this request ends.
    """
    service.host()  # raises Unavailable
    return await service.models.promote(caller, name, options)


@router.post("/{name}/rollback")
async def roll_back(name: Name, caller: CurrentCaller, service: CurrentService) -> ModelView:
    """Make the previous version current again."""
    service.host()
    return await service.models.rollback(caller, name)


@router.post(
    "/{name}/benchmark",
    status_code=202,
    response_model=JobView,
    responses={
        200: {
            "model": JobView,
            "description": "The ended job of an earlier request with this Idempotency-Key",
        }
    },
)
async def benchmark(
    name: Name,
    response: Response,
    caller: CurrentCaller,
    service: CurrentService,
    options: BenchmarkRequest | None = None,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> JobView:
    """Measure the loaded engine again, beside the baselines of its compile. The job's report is the
    compile's report with the new figures.

    The measurement waits until the device is idle, like every measurement. The model answers
    meanwhile.
    """
    caller.require("compile")
    return accepted(
        await submit_benchmark(
            service, caller, name, options or BenchmarkRequest(), idempotency_key
        ),
        response,
    )


@router.post(
    "/{name}/recompile",
    status_code=202,
    response_model=RecompileView,
    responses={
        200: {
            "model": RecompileView,
            "description": (
                "A dry run, or the ended job of an earlier request with this Idempotency-Key"
            ),
        }
    },
)
async def recompile(
    name: Name,
    response: Response,
    caller: CurrentCaller,
    service: CurrentService,
    options: RecompileRequest | None = None,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> RecompileView:
    """Compile the model and data of the loaded version again, with the profiles that its traffic
    suggests, or with those of its plan. The version that answers stays until the new job's report
    is promoted.
    """
    caller.require("compile")
    options = options or RecompileRequest()
    result = await submit_recompile(service, caller, name, options, idempotency_key)
    response.status_code = 200  # `accepted` sets the status of a job
    return RecompileView(
        model=name,
        version=result.version.version,
        built_by=result.version.job,
        suggestion=result.suggestion,
        job=accepted(result.job, response) if result.job is not None else None,
    )


@router.put("/{name}/deployment")
async def deploy(
    name: Name, options: DeploymentOptions, caller: CurrentCaller, service: CurrentService
) -> ModelView:
    """Load a model, or change how it is served. It answers requests when this request ends. If it
    does not fit into memory, the refusal names both sizes.
    """
    service.host()
    return await service.models.deploy(caller, name, options)


@router.delete("/{name}/deployment", status_code=204, response_class=Response)
async def unload(name: Name, caller: CurrentCaller, service: CurrentService) -> None:
    """Answer the waiting requests, then free the device."""
    service.host()
    await service.models.unload(caller, name)
