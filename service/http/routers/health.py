"""Liveness, readiness and metrics of the server."""

from __future__ import annotations

from fastapi import APIRouter, Response

from service.http.routers.dependencies import REFUSALS, CurrentService
from service.http.schemas import Health, Refusal

router = APIRouter(tags=["operations"], responses=REFUSALS)
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/healthz")
async def healthz() -> Health:
    """The server is alive."""
    return Health(status="ok")


@router.get(
    "/readyz",
    responses={503: {"model": Refusal, "description": "The server is starting or stopping"}},
)
async def readyz(service: CurrentService) -> Health:
    """The server accepts jobs. 503 while it starts or stops."""
    service.host()  # raises Unavailable
    return Health(status="ready")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "In Prometheus' text format"}},
)
async def metrics(service: CurrentService) -> Response:
    """Metrics for Prometheus."""
    return Response(await service.read(service.metrics.text), media_type=PROMETHEUS)
