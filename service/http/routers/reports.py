"""Reports of jobs that have succeeded, by the job's id: whole, in parts, and with the engine."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import orjson
from fastapi import APIRouter, Header, Response
from fastapi.responses import FileResponse, StreamingResponse

from pipeline.results.report import Report
from service.auth import Caller
from service.context import Service
from service.errors import NotFound
from service.http.routers.dependencies import REFUSALS, AskedBy, AskedOf
from service.http.schemas import (
    FORMS,
    AccuracyView,
    LatencyView,
    accuracy_of_report,
    latency_of_report,
    samples_of_report,
)
from service.jobs.publish import ENGINE, check_form, published_engine, published_report
from service.submission.tar import size_of_tar, tar

router = APIRouter(prefix="/reports/{job_id}", tags=["reports"], responses=REFUSALS)
T = TypeVar("T")

# The page was written from a stranger's model, in that model's own job: it is shown in an origin of
# its own, and loads nothing.
PAGE_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
    " script-src 'unsafe-inline'"
)
SAFELY = {
    "Content-Security-Policy": PAGE_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Vary": "Accept",
}
_FORMS_SHOWN = {
    form: {"schema": {"type": "object" if form.endswith("json") else "string"}} for form in FORMS
}


@router.get(
    "",
    response_class=FileResponse,
    responses={200: {"content": _FORMS_SHOWN, "description": "In the form that Accept asks for"}},
)
async def get_report(
    job_id: str, caller: AskedBy, service: AskedOf, accept: Annotated[str, Header()] = "*/*"
) -> FileResponse:
    """The report: `Accept: application/json` (docs/report.schema.json is its schema),
    `text/markdown` or `text/html`.
    """
    folder = await _folder(job_id, caller, service)
    form = preferred(accept, tuple(FORMS))
    await asyncio.to_thread(check_form, folder, FORMS[form])
    return FileResponse(folder / FORMS[form], media_type=form, headers=SAFELY)


@router.get("/latency")
async def get_latency(job_id: str, caller: AskedBy, service: AskedOf) -> LatencyView:
    """How fast each engine is, beside the baseline."""
    return await _part(latency_of_report, job_id, caller, service)


@router.get("/accuracy")
async def get_accuracy(job_id: str, caller: AskedBy, service: AskedOf) -> AccuracyView:
    """Whether each engine still gives the right answers."""
    return await _part(accuracy_of_report, job_id, caller, service)


@router.get(
    "/samples",
    response_class=Response,
    responses={200: {"content": {"application/gzip": {}}, "description": "JSON, packed with gzip"}},
)
async def get_samples(job_id: str, caller: AskedBy, service: AskedOf) -> Response:
    """Every raw time that was measured, by engine and shape."""
    packed = await _part(
        lambda report: gzip.compress(orjson.dumps(samples_of_report(report)), 6, mtime=0),
        job_id,
        caller,
        service,
    )
    return Response(
        packed, media_type="application/gzip", headers=_download(f"{job_id}-samples.json.gz")
    )


@router.get(
    "/engine.tar",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {}}, "description": "A tar"}},
)
async def get_engine(job_id: str, caller: AskedBy, service: AskedOf) -> StreamingResponse:
    """The winning engine, with its manifest."""
    folder = await _folder(job_id, caller, service)
    engine = folder / ENGINE
    if not engine.is_dir() and not await _part(
        lambda report: report.has_engine, job_id, caller, service
    ):
        raise NotFound(f"job {job_id} found no engine to give", f"GET /reports/{job_id} says why")
    await asyncio.to_thread(published_engine, folder)
    headers = {**_download(f"{job_id}-engine.tar"), "Content-Length": str(size_of_tar(engine))}
    return StreamingResponse(tar(engine), media_type="application/x-tar", headers=headers)


def preferred(accept: str, offered: tuple[str, ...]) -> str:
    """Which of the forms a client likes best; the first if it likes all the same, or none."""
    weights = {}
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        weights[kind] = float(quality) if quality.replace(".", "", 1).isdecimal() else 0.0

    def weight(form: str) -> float:
        return next(
            (
                weights[kind]
                for kind in (form, f"{form.partition('/')[0]}/*", "*/*")
                if kind in weights
            ),
            0.0,
        )

    return max(offered, key=weight)


async def _folder(job_id: str, caller: Caller, service: Service) -> Path:
    """Where the report lies; NotFound if there is none, or if it is not this caller's to see."""
    job = await service.read(lambda: service.jobs.get(job_id, caller.sees))
    folder = service.folders.report(job.id)
    if job.state != "succeeded":
        raise NotFound(
            f"job {job_id} is {job.state}: there is no report",
            f"GET /jobs/{job_id} tells how far it is",
        )
    return folder


async def _part(view: Callable[[Report], T], job_id: str, caller: Caller, service: Service) -> T:
    folder = await _folder(job_id, caller, service)
    return await asyncio.to_thread(lambda: view(published_report(folder)))


def _download(name: str) -> dict[str, str]:
    return {
        "Content-Disposition": f'attachment; filename="{name}"',
        "X-Content-Type-Options": "nosniff",
    }
