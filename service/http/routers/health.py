"""Liveness, readiness and metrics of the server."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from service.errors import Unavailable
from service.http.routers.dependencies import REFUSALS, CurrentCaller, CurrentService
from service.http.schemas import Health, Readiness, Refusal

router = APIRouter(tags=["operations"], responses=REFUSALS)
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
NODE_COMMANDS = {"agent": "crucible node start", "ray": "crucible ray start"}
DISK_SHORT = "less of the disk is free than disk_reserve_bytes"


@router.get("/healthz")
async def healthz() -> Health:
    """The server is alive."""
    return Health(status="ok")


@router.get(
    "/readyz",
    responses={
        503: {
            "model": Refusal,
            "description": "The server is starting or stopping, or accepts no job",
        }
    },
)
async def readyz(
    service: CurrentService,
    purpose: Annotated[
        Literal["jobs"] | None,
        Query(alias="for", description="503 also while no job is accepted"),
    ] = None,
) -> Readiness:
    """The server answers requests. 503 while it starts or stops. `jobs` says whether it accepts
    jobs too: a full disk ends that, and deployed models still answer. `for=jobs` asks the database,
    too, whether a node is live where only nodes run jobs (`executor`).
    """
    service.host()  # raises Unavailable
    reason, step = "", ""
    if not service.has_disk_reserve():
        reason, step = DISK_SHORT, "the operator can free space"
    elif purpose == "jobs" and not await service.job_devices():
        reason = f"no node is live, and executor is '{service.settings.executor}'"
        step = f"the operator can start one with `{NODE_COMMANDS[service.settings.executor]}`"
    if reason and purpose == "jobs":
        raise Unavailable(reason, step, 60)
    return Readiness(status="ready", jobs=f"not ready: {reason}" if reason else "ready")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "In Prometheus' text format"}},
)
async def metrics(caller: CurrentCaller, service: CurrentService) -> Response:
    """Metrics for Prometheus. Those of models, which name the models of all owners, need the scope
    `metrics` or `admin`.
    """
    text = await service.read(lambda: service.metrics.text(with_models=caller.may("metrics")))
    return Response(text, media_type=PROMETHEUS)
