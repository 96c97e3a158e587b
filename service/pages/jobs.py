"""/: the jobs. /ui/jobs/ID: one job, live while it runs, and its result. /ui/compiles/ID: the
targets of one compile side by side.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.sse import format_sse_event

from pipeline.core.progress import CandidateFigures
from pipeline.errors import CrucibleError
from pipeline.execution.stage_event import StageEvent
from pipeline.llm.render import sections as sections_of_language
from pipeline.llm.results import AnyReport
from pipeline.report.graph.view import graph_json
from pipeline.report.sections import headline, sections
from pipeline.results.report import Report
from service.auth import Caller
from service.context import Service
from service.devices.leases import utc_now
from service.errors import NotFound
from service.http.routers.dependencies import CurrentService
from service.http.routers.jobs import log_of
from service.http.routers.reports import get_engine, get_report, report_of
from service.http.schemas import JobView, view_of_compile, view_of_job
from service.http.sse import HEARTBEAT, HEARTBEAT_S, EventStream
from service.jobs.state import State
from service.pages.access import Author, Visitor, csrf_token, session_of
from service.pages.plot import (
    Histogram,
    Plot,
    histogram_of,
    measure_of,
    measured_so_far,
    plot_of,
    plot_of_language,
    plot_of_measured,
    title_of,
)
from service.pages.rendering import fragment, page
from service.registry.models import Version
from service.storage.layout import MAX_LOG_BYTES

router = APIRouter(include_in_schema=False)
PAGE_ROWS = 50


@router.get("/")
async def jobs_page(
    request: Request,
    caller: Visitor,
    service: CurrentService,
    state: State | None = None,
    after: Annotated[str | None, Query(max_length=100)] = None,
) -> Response:
    found = await service.read(lambda: service.jobs.list(caller.sees, state, PAGE_ROWS, after))
    now = utc_now()
    jobs = [view_of_job(job, now) for job in found.jobs]
    compiles = await service.read(lambda: service.jobs.compiles_of([job.id for job in jobs]))
    return page(request, "jobs.html", jobs=jobs, compiles=compiles, state=state, next=found.after)


@router.get("/ui/compiles/{compile_id}")
async def compile_page(
    request: Request, compile_id: str, caller: Visitor, service: CurrentService
) -> Response:
    found = await service.read(lambda: service.jobs.get_compile(compile_id, caller.sees))
    view = view_of_compile(found, utc_now())
    reports = [each for each in view.targets if each.job.state == "succeeded"]
    return page(request, "compile.html", compile=view, reports=reports)


@router.get("/ui/jobs/{job_id}")
async def job_page(
    request: Request, job_id: str, caller: Visitor, service: CurrentService
) -> Response:
    values = await _values(service, job_id, caller)
    return await asyncio.to_thread(page, request, "job.html", **values)


@router.get("/ui/jobs/{job_id}/live")
async def follow_job(
    request: Request, job_id: str, caller: Visitor, service: CurrentService
) -> Response:
    """Send the changing part of a job's page, again after every event."""
    await service.read(lambda: service.jobs.get(job_id, caller.sees))
    return EventStream(
        _live(service, job_id, caller, request),
        partial(service.limits.stream, caller.key),
    )


async def _live(
    service: Service, job_id: str, caller: Caller, request: Request
) -> AsyncIterator[bytes]:
    frame = {"may_change": caller.may("compile"), "csrf": csrf_token(request)}
    while await service.has_session(session_of(request)):
        changed = service.runner.changed(job_id)  # before reading, as in sse.py
        try:
            values = await _values(service, job_id, caller)
        except NotFound:  # the job was removed meanwhile
            break
        text = await asyncio.to_thread(fragment, "job_state.html", **frame, **values)
        yield format_sse_event(data_str=text)
        if values["job"].finished:
            break
        if service.stopping:
            return
        try:
            await asyncio.wait_for(changed.wait(), HEARTBEAT_S)
        except TimeoutError:
            yield HEARTBEAT
    yield format_sse_event(event="ended", data_str="")


@router.get("/ui/jobs/{job_id}/log")
async def log_page(
    request: Request, job_id: str, caller: Visitor, service: CurrentService
) -> Response:
    job = await service.read(lambda: service.jobs.get(job_id, caller.sees))
    return page(request, "log.html", job=job, log=await log_of(service, job, MAX_LOG_BYTES))


@router.get("/ui/jobs/{job_id}/report")
async def whole_report(job_id: str, caller: Visitor, service: CurrentService) -> Response:
    """The report as one file, which a job wrote: it gets its own policy."""
    return await get_report(job_id, caller, service, "text/html")


@router.get("/ui/jobs/{job_id}/engine")
async def engine(job_id: str, caller: Visitor, service: CurrentService) -> Response:
    return await get_engine(job_id, caller, service)


@router.post("/ui/jobs/{job_id}/cancel")
async def cancel_job(job_id: str, caller: Author, service: CurrentService) -> Response:
    caller.require("compile")
    await service.runner.cancel(job_id, caller.sees, caller.actor)
    return RedirectResponse(f"/ui/jobs/{job_id}", 303)


@router.post("/ui/jobs/{job_id}/retry")
async def retry_job(job_id: str, caller: Author, service: CurrentService) -> Response:
    caller.require("compile")
    service.host_for_job()
    job = await service.runner.retry(job_id, caller.sees, caller.actor)
    return RedirectResponse(f"/ui/jobs/{job.id}", 303)


async def _values(service: Service, job_id: str, caller: Caller) -> dict[str, Any]:
    """Return what the templates of a job's page need."""
    job = await service.read(lambda: service.jobs.get(job_id, caller.sees))
    events = await service.read(lambda: service.jobs.newest_of_stages(job_id))
    compiles = await service.read(lambda: service.jobs.compiles_of([job_id]))
    view = view_of_job(job, utc_now())
    report, damage = await _report(service, view, caller)
    figures = () if report else await service.read(lambda: service.jobs.figures(job_id))
    values = await asyncio.to_thread(_values_of_report, report)
    return (
        values
        | _values_of_figures(figures)
        | {
            "job": view,
            "compile": compiles.get(job_id),
            "stages": [StageEvent(**event.data) for event in events],
            "report": report,
            "damage": damage,
            "versions": await _versions(service, job_id, caller) if report else [],
            "may_promote": caller.may("admin") and bool(report and report.has_engine),
            "model_name": model_name(job.name),
        }
    )


def _values_of_report(report: AnyReport | None) -> dict[str, Any]:
    """Return the parts of a result; this may take a second for a large model."""
    if report is not None and not isinstance(report, Report):
        return {
            "headline": report.headline,
            "sections": [each for each in sections_of_language(report) if not each.is_empty],
            "graph": "",
            "plot": plot_of_language(report),
            "histogram": Histogram(),
        }
    if report is None:
        return {
            "headline": "",
            "sections": (),
            "graph": "",
            "plot": Plot(),
            "histogram": Histogram(),
        }
    return {
        "headline": headline(report),
        "sections": sections(report),
        "graph": graph_json(report),
        "plot": plot_of(report),
        "histogram": histogram_of(report),
    }


def _values_of_figures(figures: Sequence[CandidateFigures]) -> dict[str, Any]:
    """Return the plot and the table of what a job without a report has measured so far."""
    measured = measured_so_far(figures)
    measure = measure_of(measured)
    return {
        "measured": [(each, each.drop(measure)) for each in measured],
        "live_plot": plot_of_measured(measured),
        "drop_title": title_of(measure),
    }


async def _report(
    service: Service, job: JobView, caller: Caller
) -> tuple[AnyReport | None, CrucibleError | None]:
    if job.state != "succeeded":
        return None, None
    try:
        return await report_of(service, job.id, caller), None
    except CrucibleError as error:  # removed, damaged, or of another version
        return None, error


async def _versions(service: Service, job_id: str, caller: Caller) -> list[Version]:
    """Return the versions of models that this job has built."""
    found = await service.models.views(caller)
    return [each for model in found.models for each in model.versions if each.job == job_id]


def model_name(job: str) -> str:
    """Return a name that a model may have, from that of a job."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", job).lstrip(".")[:100] or "model"
