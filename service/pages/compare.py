"""/ui/compare: two results side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from pipeline.formatting import interval, shape_text, time_text
from pipeline.results.report import BenchmarkReport, LatencyRow, Report
from service.http.routers.dependencies import CurrentService
from service.http.routers.reports import report_of
from service.pages.access import Visitor
from service.pages.rendering import page

router = APIRouter(include_in_schema=False)
CHOICES = 100
HOST_FIELDS = ("cpu", "cpu_flags", "cores", "gpus", "gpu_driver")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two results differ, or a measured value of both."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Comparison:
    same_host: bool
    plan: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    latency: tuple[Difference, ...]
    accuracy: tuple[Difference, ...]


@router.get("/ui/compare")
async def compare_page(
    request: Request, caller: Visitor, service: CurrentService, a: str = "", b: str = ""
) -> Response:
    listed = await service.read(lambda: service.jobs.list(caller.sees, "succeeded", CHOICES, None))
    values: dict[str, Any] = {"choices": listed.jobs, "a": a, "b": b, "both": (), "found": None}
    if a and b:
        both = [await report_of(service, job_id, caller) for job_id in (a, b)]
        values |= {"both": both, "found": comparison_of(both[0], both[1])}
    return page(request, "compare.html", **values)


def comparison_of(first: Report, second: Report) -> Comparison:
    """Compare the plans, the hosts, and what was measured of the delivered engines."""
    hosts = [report.environment.model_dump() for report in (first, second)]
    packages = [host.pop("packages") for host in hosts]
    environment = (*_differences(*hosts), *_differences(*packages))
    return Comparison(
        all(hosts[0][name] == hosts[1][name] for name in HOST_FIELDS),
        _differences(*(flat(report.plan.model_dump(mode="json")) for report in (first, second))),
        tuple(each for each in environment if each.name != "load_1min"),
        tuple(_latency(first, second)),
        tuple(_accuracy(first, second)),
    )


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the leaves of nested values by their path: `benchmark.budget_s`."""
    if isinstance(value, dict):
        items = [(f"{name}.{key}" if name else str(key), each) for key, each in value.items()]
    elif isinstance(value, list):
        items = [(f"{name}[{index}]", each) for index, each in enumerate(value)]
    else:
        return {name: value}
    return {path: leaf for key, each in items for path, leaf in flat(each, key).items()}


def _differences(first: dict[str, Any], second: dict[str, Any]) -> tuple[Difference, ...]:
    names = [*first, *(name for name in second if name not in first)]
    return tuple(
        Difference(name, _text(first.get(name)), _text(second.get(name)))
        for name in names
        if first.get(name) != second.get(name)
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _latency(first: Report, second: Report) -> Iterator[Difference]:
    rows = [_rows(report.benchmark_delivered) for report in (first, second)]
    for shape in rows[0] | rows[1]:
        both = [each.get(shape) for each in rows]
        yield Difference(f"median at {shape}", *(_median(row) for row in both))
        yield Difference(f"times the baseline's speed at {shape}", *(_ratio(row) for row in both))


def _rows(benchmark: BenchmarkReport | None) -> dict[str, LatencyRow]:
    return {shape_text(row.sizes): row for row in benchmark.rows} if benchmark else {}


def _median(row: LatencyRow | None) -> str:
    return time_text(row.end_to_end.median_s) if row else "-"


def _ratio(row: LatencyRow | None) -> str:
    if row is None:
        return "-"
    return interval(row.ratio, 2) if row.ratio else row.ratio_missing or "-"


def _accuracy(first: Report, second: Report) -> Iterator[Difference]:
    found = [report.validation for report in (first, second)]
    metrics = [each.metric if each else None for each in found]
    yield Difference("samples", *(str(each.samples) if each else "-" for each in found))
    yield Difference("metric", *(each.name if each else "-" for each in metrics))
    yield Difference("score", *(f"{each.candidate:.4f}" if each else "-" for each in metrics))
    yield Difference("drop", *(interval(each.interval, 4) if each else "-" for each in metrics))
    cosines = [each.cosine if each else None for each in found]
    yield Difference("cosine", *("-" if each is None else f"{each:.5f}" for each in cosines))
