"""/ui/compare: two results side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response

from pipeline.formatting import interval, shape_text, time_text
from pipeline.llm.gate import Judged, percent_text
from pipeline.llm.results import AnyReport, LanguageReport
from pipeline.llm.speed.times import AnswerTimes
from pipeline.measurement.clock import Samples
from pipeline.measurement.comparison import NotMeasurable, compare_apart
from pipeline.results.benchmarks import BenchmarkReport, LatencyRow
from pipeline.results.layer_table import LayerTable
from pipeline.results.report import Report
from service.errors import Unprocessable
from service.http.routers.dependencies import CurrentService
from service.http.routers.reports import report_of
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
    latency: tuple[Difference, ...] = ()
    ratios: tuple[Difference, ...] = ()  # A's time over B's at each shape, or why it is missing
    layers: Layers = Layers()
    accuracy: tuple[Difference, ...] = ()


@router.get("/ui/compare")
async def compare_page(
    request: Request, caller: Visitor, service: CurrentService, a: str = "", b: str = ""
) -> Response:
    listed = await service.read(lambda: service.jobs.list(caller.sees, "succeeded", CHOICES, None))
    values: dict[str, Any] = {"choices": listed.jobs, "a": a, "b": b, "both": (), "found": None}
    if a and b:
        both = [await report_of(service, job_id, caller) for job_id in (a, b)]
        engines = [_engine_of(report) for report in both]
        found = any_comparison_of(both[0], both[1])
        values |= {"both": both, "engines": engines, "found": found}
    return page(request, "compare.html", **values)


def any_comparison_of(first: AnyReport, second: AnyReport) -> Comparison:
    """Compare two reports of engines, or two of language models. Unprocessable for one of each."""
    if isinstance(first, Report) and isinstance(second, Report):
        return comparison_of(first, second)
    if isinstance(first, Report) or isinstance(second, Report):
        raise Unprocessable(
            "one job compiled engines and the other a language model, expected two of one kind",
            "choose another job",
        )
    return replace(
        _comparison_of_hosts(first, second),
        latency=tuple(_answer_times(first, second)),
        ratios=tuple(_ratios_of(_answers(first), _answers(second))),
        layers=Layers(missing="Reports of language models have no table of layers."),
        accuracy=tuple(_perplexity(first, second)),
    )


def comparison_of(first: Report, second: Report) -> Comparison:
    """Compare the plans, the hosts, and what was measured of the delivered engines."""
    samples = (
        {shape: row.end_to_end for shape, row in _rows(report.benchmark_delivered).items()}
        for report in (first, second)
    )
    return replace(
        _comparison_of_hosts(first, second),
        latency=tuple(_latency(first, second)),
        ratios=tuple(_ratios_of(*samples)),
        layers=layers_of(_layer_table(first), _layer_table(second)),
        accuracy=tuple(_accuracy(first, second)),
    )


def _comparison_of_hosts(first: AnyReport, second: AnyReport) -> Comparison:
    """Compare the plans and the hosts."""
    hosts = [report.environment.model_dump() for report in (first, second)]
    packages = [host.pop("packages") for host in hosts]
    environment = (*_differences(*hosts), *_differences(*packages))
    return Comparison(
        all(hosts[0][name] == hosts[1][name] for name in HOST_FIELDS),
        _differences(*(flat(report.plan.model_dump(mode="json")) for report in (first, second))),
        tuple(each for each in environment if each.name != "load_1min"),
    )


def _engine_of(report: AnyReport) -> str:
    if not report.winner:
        return "-"
    return report.title_of(report.winner) if isinstance(report, Report) else report.winner


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


def _ratios_of(first: Mapping[str, Samples], second: Mapping[str, Samples]) -> Iterator[Difference]:
    """Yield the ratio of the medians at each shape that both have."""
    for shape in first:
        if shape not in second:
            continue
        try:
            ratio = compare_apart(first[shape], second[shape])
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


# -- language models ---------------------------------------------------------


def _times_delivered(report: LanguageReport) -> AnswerTimes | None:
    result = report.result(report.winner)
    return result.times if result else None


def _answers(report: LanguageReport) -> dict[str, Samples]:
    """Return the times of the delivered engine's answers, by the lengths of prompt and answer."""
    times = _times_delivered(report)
    if times is None or times.answer is None:
        return {}
    benchmark = report.plan.benchmark
    return {f"{benchmark.prompt_tokens} tokens in, {benchmark.output_tokens} out": times.answer}


def _answer_times(first: LanguageReport, second: LanguageReport) -> Iterator[Difference]:
    answers = [_answers(report) for report in (first, second)]
    for shape in answers[0] | answers[1]:
        medians = (time_text(each[shape].median_s) if shape in each else "-" for each in answers)
        yield Difference(f"median answer at {shape}", *medians)
    both = [_times_delivered(report) for report in (first, second)]
    if any(both):
        yield Difference(
            "first token", *(time_text(each.first_token_s) if each else "-" for each in both)
        )
        yield Difference(
            "next token", *(time_text(each.next_token_s) if each else "-" for each in both)
        )
        ratios = [each.ratio if each else None for each in both]
        yield Difference(
            "times the baseline's speed", *(interval(each, 2) if each else "-" for each in ratios)
        )


def _perplexity(first: LanguageReport, second: LanguageReport) -> Iterator[Difference]:
    found = [report.validation for report in (first, second)]
    if not any(found):
        return
    names = (
        "tokens",
        "increase of perplexity",
        "read one by one",
        "divergence, nats per token",
        "likeliest tokens that agree",
    )
    cells = [_judged_cells(each) if each else ["-"] * len(names) for each in found]
    for name, *both in zip(names, *cells, strict=True):
        yield Difference(name, *both)


def _judged_cells(judged: Judged) -> list[str]:
    return [
        f"{judged.tokens:,}",
        percent_text(judged.perplexity_increase),
        percent_text(judged.cached_perplexity_increase),
        interval(judged.divergence, 4),
        interval(judged.agreement, 3),
    ]
