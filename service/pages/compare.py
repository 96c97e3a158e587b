"""/ui/compare: two results side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from pipeline.formatting import interval, shape_text, time_text
from pipeline.measurement.comparison import NotMeasurable, compare_apart
from pipeline.results.layer_table import LayerTable
from pipeline.results.report import BenchmarkReport, LatencyRow, Report
from service.http.routers.dependencies import CurrentService
from service.http.routers.reports import report_of_engines
from service.pages.access import Visitor
from service.pages.rendering import page

router = APIRouter(include_in_schema=False)
CHOICES = 100
MAX_LAYERS = 40  # that are shown one by one
HOST_FIELDS = ("cpu", "cpu_flags", "cores", "gpus", "gpu_driver")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two results differ, or a measured value of both."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of two engines that compute the same nodes, and the time of all others."""

    rows: tuple[Difference, ...] = ()
    missing: str = ""  # why there is no comparison
    shape: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    same_host: bool
    plan: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    latency: tuple[Difference, ...]
    ratios: tuple[Difference, ...]  # A's time over B's at each shape, and why one is missing
    layers: Layers
    accuracy: tuple[Difference, ...]


@router.get("/ui/compare")
async def compare_page(
    request: Request, caller: Visitor, service: CurrentService, a: str = "", b: str = ""
) -> Response:
    listed = await service.read(lambda: service.jobs.list(caller.sees, "succeeded", CHOICES, None))
    values: dict[str, Any] = {"choices": listed.jobs, "a": a, "b": b, "both": (), "found": None}
    if a and b:
        both = [await report_of_engines(service, job_id, caller) for job_id in (a, b)]
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
        tuple(_ratios(first, second)),
        layers_of(_layer_table(first), _layer_table(second)),
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


def _ratios(first: Report, second: Report) -> Iterator[Difference]:
    rows = [_rows(report.benchmark_delivered) for report in (first, second)]
    for shape, before in rows[0].items():
        after = rows[1].get(shape)
        if after is None:
            continue
        try:
            ratio = compare_apart(before.end_to_end, after.end_to_end)
        except NotMeasurable as error:
            yield Difference(shape, "-", error.text)
        else:
            yield Difference(shape, interval(ratio, 2), "")


def _layer_table(report: Report) -> LayerTable | None:
    winner = next((each for each in report.candidates if each.label == report.winner), None)
    return winner.layers if winner else None


def layers_of(first: LayerTable | None, second: LayerTable | None) -> Layers:
    """Compare the layers that compute the same nodes, those with the largest difference first."""
    if first is None or second is None:
        return Layers(missing="One engine has no table of its layers.")
    if first.sizes != second.sizes:
        sizes = [shape_text(each.sizes) for each in (first, second)]
        return Layers(missing=f"The layers were timed at {sizes[0]} and at {sizes[1]}.")
    both = [_seconds(first), _seconds(second)]
    shared = both[0].keys() & both[1].keys()
    if not shared:
        return Layers(missing="No layer of one engine computes the same nodes as one of the other.")
    order = sorted(shared, key=lambda key: -abs(both[0][key] - both[1][key]))
    rows = [
        Difference(", ".join(sorted(key)), *(time_text(each[key]) for each in both))
        for key in order[:MAX_LAYERS]
    ]
    rest = order[MAX_LAYERS:]
    sums = [
        (f"{len(rest)} more of the same nodes", rest, rest),
        ("fused otherwise", both[0].keys() - shared, both[1].keys() - shared),
    ]
    for name, *keys in sums:
        if any(keys):
            times = [sum(each[key] for key in of) for each, of in zip(both, keys, strict=True)]
            rows.append(Difference(name, *(time_text(each) if each else "-" for each in times)))
    return Layers(tuple(rows), shape=shape_text(first.sizes))


def _seconds(table: LayerTable) -> dict[frozenset[str], float]:
    """Return the time of the layers by the nodes that each computes, or by its name."""
    found = dict[frozenset[str], float]()
    for layer in table.layers:
        if layer.seconds is not None:
            key = frozenset(layer.nodes or (layer.name,))
            found[key] = found.get(key, 0.0) + layer.seconds
    return found


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
