"""Reports of jobs that have succeeded, by the job's id: complete, in parts, and with the engine."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import orjson
from fastapi import APIRouter, Header, Response
from fastapi.responses import FileResponse, StreamingResponse

from pipeline.llm.results import AnyReport, LanguageReport
from pipeline.report.files import JSON_NAME
from pipeline.report.graph.view import script_source
from pipeline.results.report import Report
from service.auth import Caller
from service.context import Service
from service.errors import NotFound
from service.http.language_views import (
    LanguageAccuracyView,
    LanguageLatencyView,
    accuracy_of_language_report,
    latency_of_language_report,
    samples_of_language_report,
)
from service.http.routers.dependencies import REFUSALS, CurrentCaller, CurrentService
from service.http.schemas import (
    FORMS,
    AccuracyView,
    LatencyView,
    accuracy_of_report,
    latency_of_report,
    samples_of_report,
)
from service.jobs.publish import (
    DIGESTS,
    ENGINE,
    check_form,
    published_any_report,
    published_engine,
)
from service.storage.audit_entry import Entry
from service.submission.tar import size_of_tar, tar

router = APIRouter(prefix="/reports/{job_id}", tags=["reports"], responses=REFUSALS)
T = TypeVar("T")
L = TypeVar("L")

# The job of an untrusted model wrote the page: it gets its own origin, loads nothing, and runs
# only the script that this version writes.
PAGE_POLICY = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
    f" script-src {script_source()}"
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
    responses={200: {"content": _FORMS_SHOWN, "description": "In the form of Accept"}},
)
async def get_report(
    job_id: str,
    caller: CurrentCaller,
    service: CurrentService,
    accept: Annotated[str, Header()] = "*/*",
) -> FileResponse:
    """Return the report as `application/json` (schema: docs/reference/report.schema.json or, of a
    language model, language-report.schema.json), `text/markdown` or `text/html`, by Accept.
    """
    form = preferred(accept, tuple(FORMS))
    folder = await report_folder(job_id, caller, service, (FORMS[form], DIGESTS))
    await asyncio.to_thread(check_form, folder, FORMS[form])
    return FileResponse(folder / FORMS[form], media_type=form, headers=SAFELY)


@router.get("/latency")
async def get_latency(
    job_id: str, caller: CurrentCaller, service: CurrentService
) -> LatencyView | LanguageLatencyView:
    """Return the latency of each engine, beside the baseline."""
    return await _part(latency_of_report, latency_of_language_report, job_id, caller, service)


@router.get("/accuracy")
async def get_accuracy(
    job_id: str, caller: CurrentCaller, service: CurrentService
) -> AccuracyView | LanguageAccuracyView:
    """Return the accuracy of each engine."""
    return await _part(accuracy_of_report, accuracy_of_language_report, job_id, caller, service)


@router.get(
    "/samples",
    response_class=Response,
    responses={
        200: {"content": {"application/gzip": {}}, "description": "JSON, compressed with gzip"}
    },
)
async def get_samples(job_id: str, caller: CurrentCaller, service: CurrentService) -> Response:
    """Return all raw times, by engine and shape."""
    samples = await _part(samples_of_report, samples_of_language_report, job_id, caller, service)
    packed = await asyncio.to_thread(lambda: gzip.compress(orjson.dumps(samples), 6, mtime=0))
    return Response(
        packed, media_type="application/gzip", headers=_download(f"{job_id}-samples.json.gz")
    )


@router.get(
    "/engine.tar",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-tar": {}}, "description": "A tar"}},
)
async def get_engine(
    job_id: str, caller: CurrentCaller, service: CurrentService
) -> StreamingResponse:
    """Return the winning engine with its manifest."""
    folder = await report_folder(job_id, caller, service)
    engine = folder / ENGINE
    if not engine.is_dir() and not (await report_of(service, job_id, caller)).has_engine:
        raise NotFound(f"job {job_id} has no engine", f"GET /reports/{job_id} gives the reason")
    await asyncio.to_thread(published_engine, folder)
    headers = {**_download(f"{job_id}-engine.tar"), "Content-Length": str(size_of_tar(engine))}

    def held() -> Iterator[bytes]:
        with service.files.hold(folder):
            yield from tar(engine)

    return StreamingResponse(held(), media_type="application/x-tar", headers=headers)


def preferred(accept: str, offered: tuple[str, ...]) -> str:
    """Choose the preferred form of an Accept header; the first offered form if several are equal or
    none matches.
    """
    weights = {}
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        quality = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        weights[kind] = float(quality) if quality.replace(".", "", 1).isdecimal() else 0.0

    def weight(form: str) -> float:
        kinds = (form, f"{form.partition('/')[0]}/*", "*/*")
        return next((weights[kind] for kind in kinds if kind in weights), 0.0)

    return max(offered, key=weight)


async def report_folder(
    job_id: str, caller: Caller, service: Service, paths: Collection[str] | None = None
) -> Path:
    """Return the folder of the report, or of these files of it. NotFound if there is none, or if
    this caller may not see it.
    """
    job = await service.read(lambda: service.jobs.get(job_id, caller.sees))
    folder = service.folders.report(job.id)
    if job.owner != caller.owner:  # an administrator reads it: stored before the answer
        entry = Entry(caller.actor, "report.read", f"job/{job.id}", {"owner": job.owner})
        await service.read(partial(service.jobs.audit.record, entry))
    if job.state != "succeeded":
        raise NotFound(
            f"job {job_id} is {job.state}: there is no report",
            f"GET /jobs/{job_id} shows its progress",
        )
    await asyncio.to_thread(service.files.fetch, folder, paths)
    return folder


async def report_of(service: Service, job_id: str, caller: Caller) -> AnyReport:
    """Return the report of a job. NotFound if there is none, or if this caller may not see it;
    DamagedError if it has changed.
    """
    folder = await report_folder(job_id, caller, service, (JSON_NAME, DIGESTS))
    return await asyncio.to_thread(published_any_report, folder)


async def _part(
    view: Callable[[Report], T],
    view_of_language: Callable[[LanguageReport], L],
    job_id: str,
    caller: Caller,
    service: Service,
) -> T | L:
    report = await report_of(service, job_id, caller)
    if isinstance(report, Report):
        return await asyncio.to_thread(view, report)
    return await asyncio.to_thread(view_of_language, report)


def _download(name: str) -> dict[str, str]:
    return {
        "Content-Disposition": f'attachment; filename="{name}"',
        "X-Content-Type-Options": "nosniff",
    }
