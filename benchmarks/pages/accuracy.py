"""Losses of calibration with their figure, and the speed of int8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.pages.figures import Drawing
from benchmarks.pages.tensorrt_rows import documents as tensorrt_documents
from pipeline.core.recipe import CalibrationMethod

COLOURS = {
    CalibrationMethod.ENTROPY: "#2f6fb5",
    CalibrationMethod.MINMAX: "#0b7a4b",
    CalibrationMethod.PERCENTILE: "#b8860b",
}
MARKERS = {
    CalibrationMethod.ENTROPY: "o",
    CalibrationMethod.MINMAX: "s",
    CalibrationMethod.PERCENTILE: "^",
}
FLOATS = ("fp32", "tf32", "bf16", "fp16")

Document = Mapping[str, Any]
Row = Mapping[str, Any]


# -- calibration -------------------------------------------------------------


def by_method(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by model and method."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["method"]), []).append(row)
    return groups


def loss(row: Row) -> float:
    return 1 - float(row["mean_cosine"])


def losses(rows: Iterable[Row]) -> list[float]:
    return [loss(row) for row in rows]


# -- the figure --------------------------------------------------------------


def calibration_drawing(document: Document) -> Drawing:
    """Loss against samples: one panel per model, a dot per draw, a line through the means."""
    return Drawing("calibration.svg", document["rows"], _draw)


def _draw(figure: Figure, rows: Sequence[Row]) -> None:
    usual = [row for row in rows if row["weight_bits"] == rows[0]["weight_bits"]]
    models = list(dict.fromkeys(row["model"] for row in usual))
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        _panel(axes, [row for row in usual if row["model"] == model], f"configs/{model}.yaml")
    axes.legend(frameon=False)


def _panel(axes: Any, rows: Sequence[Row], title: str) -> None:
    counts = sorted({row["samples"] for row in rows})
    for method in CalibrationMethod:
        points = [(row["samples"], loss(row)) for row in rows if row["method"] == method]
        means = [np.mean([lost for count, lost in points if count == each]) for each in counts]
        axes.plot(
            counts,
            means,
            color=COLOURS[method],
            linewidth=1.2,
            marker=MARKERS[method],
            markersize=5,
            label=str(method),
        )
        axes.plot(*zip(*points, strict=True), ".", color=COLOURS[method], alpha=0.4, markersize=5)
    limit = rows[0]["max_drop"]
    if rows[0]["metric"] == "cosine":  # else the limit is on another metric
        axes.axhline(limit, color="#b42318", linestyle="--", linewidth=1)
        axes.text(counts[0], limit, " the plan's limit", color="#b42318", va="bottom")
    axes.set(
        xscale="log",
        yscale="log",
        title=title,
        xlabel="calibration samples",
        ylabel="1 - mean cosine (lower is better)",
    )
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()


# -- int8 against floats -----------------------------------------------------


class Time(NamedTuple):
    """The median of one engine at one shape."""

    model: str
    host: str
    at: str
    engine: str
    ms: float

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Times are compared with those of the same model, host, shape and backend."""
        return (self.model, self.host, self.at, self.engine.split()[0])

    @property
    def is_float(self) -> bool:
        return any(name in self.engine.split() for name in FLOATS)


def int8_pairs(results: Mapping[str, Document]) -> list[tuple[float, Time, Time]]:
    """Every int8 engine with the fastest float engine of its backend at the same shape on the same
    host: how many times as fast int8 is, the slowest in relation first.
    """
    times = _times(results)
    pairs = []
    for time in times:
        floats = [each for each in times if each.group == time.group and each.is_float]
        if "int8" in time.engine.split() and floats:
            best = min(floats, key=lambda each: each.ms)
            pairs.append((best.ms / time.ms, time, best))
    return sorted(pairs)


def _times(results: Mapping[str, Document]) -> list[Time]:
    """Of all results that time int8 engines."""
    times = [*_cpu_times("resnet50", results["resnet50"])]
    times += _gpu_models_times(results["gpu_models"])
    for model, document in tensorrt_documents(results).items():
        times += _tensorrt_times(model, document)
    return times


def _cpu_times(model: str, document: Document) -> Iterator[Time]:
    """A row is one engine at one shape."""
    host = f"{document['environment']['cpu']}, {document['environment']['cores']} cores"
    for row in document["rows"]:
        at = row["sizes"].strip("{}").replace("'", "").replace(":", "")
        yield Time(model, host, at, row["engine"], row["median_ms"])


def _tensorrt_times(model: str, document: Document) -> Iterator[Time]:
    """A row is one engine with all its shapes. The last one of a candidate counts."""
    rows = {row["candidate"]: row for row in document["rows"] if row.get("latency")}
    for candidate, row in rows.items():
        host = str(document["parts"][row["part"]]["target"]["device"])
        for latency in row["latency"]:
            at = ", ".join(f"{name} {size}" for name, size in latency["sizes"].items())
            yield Time(model, host, at, candidate, latency["end_to_end_ms"])


def _gpu_models_times(document: Document) -> Iterator[Time]:
    """A row is one shape with all engines, ours once more in bare loops.

    The row that only draws a curve has no batch.
    """
    for model, row in document["rows"].items():
        if not row.get("batch"):
            continue
        host, at = str(row["target"]["device"]), f"batch {row['batch']}"
        for engine, entry in row.get("entries", {}).items():
            if "wall_median_ms" in entry and not engine.startswith(("bare ", "loop ")):
                yield Time(model, host, at, engine, entry["wall_median_ms"])
