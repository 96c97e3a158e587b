"""Whether the server lives, whether it takes work, and its figures."""

from __future__ import annotations

from fastapi import APIRouter, Response

from service.http.routers.dependencies import REFUSALS, AskedOf
from service.http.schemas import Health, Refusal

router = APIRouter(tags=["operations"], responses=REFUSALS)
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/healthz")
async def healthz() -> Health:
    """The server answers."""
    return Health(status="ok")


@router.get(
    "/readyz", responses={503: {"model": Refusal, "description": "The server starts or stops"}}
)
async def readyz(service: AskedOf) -> Health:
    """Jobs are taken. 503 while the server starts or stops."""
    service.host()  # or Unavailable
    return Health(status="ready")


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "In Prometheus' text format"}},
)
async def metrics(service: AskedOf) -> Response:
    """Figures for Prometheus."""
    return Response(await service.read(service.metrics.text), media_type=PROMETHEUS)
