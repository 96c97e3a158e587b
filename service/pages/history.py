"""/ui/models/NAME/history: one model over the libraries and devices that compiled it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from pipeline.errors import DamagedError
from pipeline.formatting import interval, shape_text, time_text
from pipeline.host.environment import Environment, environment
from pipeline.llm.results import AnyReport, LanguageReport
from pipeline.results.report import Report
from service.auth import Caller
from service.context import Service
from service.errors import ServiceError
from service.http.routers.dependencies import CurrentService
from service.http.routers.models import Name
from service.http.routers.reports import report_of
from service.pages.access import Author, Visitor
from service.pages.rendering import page
from service.registry.models import RecompileRequest, Version
from service.submission.recompile import submit_recompile

router = APIRouter(include_in_schema=False)
MAX_VERSIONS = 20  # the newest; each is a report to read
LIBRARIES = ("tensorrt", "tensorrt-cu12", "tensorrt-rtx", "onnxruntime", "openvino", "torch")


@dataclass(frozen=True, slots=True)
class Row:
    """A version, and what its report says of its engine. Its texts are empty without a report."""

    version: Version
    fault: str  # why its report cannot be shown
    libraries: str = ""
    device: str = ""
    shape: str = ""
    median: str = ""
    ratio: str = ""
    before: str = ""  # the job of the version before, to compare with


@router.get("/ui/models/{name}/history")
async def history_page(
    request: Request, name: Name, caller: Visitor, service: CurrentService
) -> Response:
    model = await service.models.view(caller, name)
    versions = sorted(model.versions, key=lambda each: -each.version)[:MAX_VERSIONS]
    now = await asyncio.to_thread(environment)
    rows = [await _row(service, caller, version) for version in versions]
    return page(
        request,
        "history.html",
        model=model,
        rows=_with_neighbours(rows),
        libraries=_libraries(now),
        device=_device(now),
        most=MAX_VERSIONS,
    )


@router.post("/ui/models/{name}/recompile")
async def compile_again(name: Name, caller: Author, service: CurrentService) -> Response:
    """Compile the plan of a model again, with what is installed now."""
    caller.require("compile")
    request = RecompileRequest(profiles="same")
    result = await submit_recompile(service, caller, name, request, None)
    assert result.job is not None
    return RedirectResponse(f"/ui/jobs/{result.job.id}", 303)


async def _row(service: Service, caller: Caller, version: Version) -> Row:
    try:
        report = await report_of(service, version.job, caller)
    except (ServiceError, DamagedError) as error:
        return Row(version, error.message)
    return _row_of(version, report)


def _row_of(version: Version, report: AnyReport) -> Row:
    if not isinstance(report, Report):
        return _row_of_language(version, report)
    benchmark = report.benchmark_delivered
    first = benchmark.rows[0] if benchmark and benchmark.rows else None
    return Row(
        version,
        "",
        _libraries(report.environment),
        _device(report.environment),
        shape_text(first.sizes) if first else "",
        time_text(first.end_to_end.median_s) if first else "not measured",
        (interval(first.ratio, 2) if first.ratio else first.ratio_missing or "") if first else "",
    )


def _row_of_language(version: Version, report: LanguageReport) -> Row:
    result, benchmark = report.result(report.winner), report.plan.benchmark
    times = result.times if result else None
    return Row(
        version,
        "",
        _libraries(report.environment),
        _device(report.environment),
        f"{benchmark.prompt_tokens} tokens in, {benchmark.output_tokens} out" if times else "",
        time_text(times.median_s) if times and times.answer else "not measured",
        (interval(times.ratio, 2) if times.ratio else times.ratio_missing) if times else "",
    )


def _with_neighbours(rows: Sequence[Row]) -> list[Row]:
    """Name the version before each, if both have a report."""
    named = [
        row if row.fault or before.fault else replace(row, before=before.version.job)
        for row, before in pairwise(rows)
    ]
    return [*named, *rows[-1:]]


def _libraries(host: Environment) -> str:
    """Return the libraries that engines run in, as `onnxruntime 1.24.1, openvino 2026.1.0`."""
    found = [f"{name} {host.packages[name]}" for name in LIBRARIES if name in host.packages]
    return ", ".join(found)


def _device(host: Environment) -> str:
    if not host.gpus:
        return host.cpu
    return f"{', '.join(dict.fromkeys(host.gpus))}, driver {host.gpu_driver}"
