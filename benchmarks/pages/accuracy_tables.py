"""The parts of docs/accuracy.md about calibration and about the speed of int8: tables and one
figure, from benchmarks/results/*.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import RESULTS
from benchmarks.pages.figures import Drawing
from pipeline.core import CalibrationMethod

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


def result(name: str) -> Document:
    document: Document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


# -- calibration -------------------------------------------------------------


def calibration_section(document: Document) -> list[str]:
    """Loss by samples and method, and by weight bits, as lines."""
    rows, usual = document["rows"], document["rows"][0]["weight_bits"]
    return [
        (
            f"Seen on the selection sets, with {usual}-bit weights as they suit that CPU: 1 minus"
            " the mean cosine to the reference's output, the mean"
        ),
        (
            "over the draws, and in brackets the best and the worst draw where there are several."
            " `passed`: draws within all limits of the plan."
        ),
        "",
        "![1 minus the mean cosine against the number of calibration samples](calibration.svg)",
        "",
        *_by_samples([row for row in rows if row["weight_bits"] == usual]),
        "",
        "With the most samples, by the bits of the weights:",
        "",
        *_by_bits(rows),
        "",
        _host(document, ("onnxruntime",)),
    ]


def _by_samples(rows: Sequence[Row]) -> list[str]:
    counts = sorted({row["samples"] for row in rows})
    head = ["model", "method", *(f"{count} samples" for count in counts), "largest drop", "passed"]
    cells = []
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["method"]) == (model, method)]
        worst = max(row["drop"] for row in mine)
        passed = f"{sum(row['passed'] for row in mine)} of {len(mine)}"
        figures = [
            _spread([_lost(row) for row in mine if row["samples"] == count]) for count in counts
        ]
        cells.append([model, method, *figures, f"{worst:+.4f} {mine[0]['metric']}", passed])
    return _table(head, cells)


def _by_bits(rows: Sequence[Row]) -> list[str]:
    most = [row for row in rows if row["samples"] == max(each["samples"] for each in rows)]
    found = {(row["model"], row["method"], row["weight_bits"]): row for row in most}
    bits = sorted({row["weight_bits"] for row in most})
    head = [
        "model",
        "method",
        *(text for each in bits for text in (f"{each} bits: 1 - cosine", "drop", "passed")),
    ]
    cells = []
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in most):
        mine = [found[model, method, each] for each in bits]
        figures = [
            text
            for row in mine
            for text in (
                f"{_lost(row):.2g}",
                f"{row['drop']:+.4f}",
                "yes" if row["passed"] else "no",
            )
        ]
        cells.append([model, method, *figures])
    return _table(head, cells)


def _lost(row: Row) -> float:
    return 1 - float(row["mean_cosine"])


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2g}" + (
        f" ({min(values):.2g} to {max(values):.2g})" if len(values) > 1 else ""
    )


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
        points = [(row["samples"], _lost(row)) for row in rows if row["method"] == method]
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
    def backend(self) -> str:
        return self.engine.split()[0]


def int8_section(documents: Mapping[str, Document]) -> list[str]:
    """Every int8 engine beside the fastest float engine of its backend on the same host, slowest in
    relation first.
    """
    times = [time for name, document in documents.items() for time in _times(name, document)]
    pairs = []
    for time in times:
        beside = [each for each in times if each[:3] == time[:3] and each.backend == time.backend]
        floats = [each for each in beside if any(name in each.engine.split() for name in FLOATS)]
        if "int8" in time.engine.split() and floats:
            best = min(floats, key=lambda each: each.ms)
            pairs.append((best.ms / time.ms, time, best))
    head = [
        "model",
        "host",
        "at",
        "int8 engine",
        "ms",
        "fastest float engine of the backend",
        "ms",
        "int8 is x times as fast",
    ]
    cells = [
        [
            time.model,
            time.host,
            time.at,
            time.engine,
            f"{time.ms:.3g}",
            best.engine,
            f"{best.ms:.3g}",
            f"{ratio:.2f}",
        ]
        for ratio, time, best in sorted(pairs)
    ]
    return _table(head, cells) if cells else []


# -- few bits ----------------------------------------------------------------


def few_bits_section(document: Document) -> list[str]:
    """Size and accuracy of each engine, as lines."""
    head = ["engine", "MB", "cosine", "drop (95 %)", "smallest cosine", "within the plan's limits"]
    cells = [
        [
            row["engine"],
            *_figures(row),
            "yes" if row["passed"] else f"no: {row['reason']}".replace("|", "\\|"),
        ]
        for row in document["rows"]
    ]
    return [*_table(head, cells), "", _host(document, ("onnxruntime", "openvino", "nncf"))]


def _figures(row: Row) -> list[str]:
    size = "-" if row["size_mb"] is None else f"{row['size_mb']:.1f}"
    if row["cosine"] is None:
        return [size, "-", "-", "-"]
    return [
        size,
        f"{row['cosine']:.4f}",
        f"{row['drop']:+.4f} ({row['drop_low']:+.4f} to {row['drop_high']:+.4f})",
        f"{row['smallest_cosine']:.4f}",
    ]


def _times(name: str, document: Document) -> list[Time]:
    """The rows of `resnet50.json` are one engine and shape each, those of `tensorrt_*.json` one
    engine with all its shapes.
    """
    if name == "gpu_models":
        return list(_gpu_models_times(document))
    model = name.removeprefix("tensorrt_")
    if "parts" in document:
        rows = {row["candidate"]: row for row in document["rows"] if row.get("latency")}.values()
        hosts = {part: str(made["target"]["device"]) for part, made in document["parts"].items()}
        return [
            Time(
                model,
                hosts[row["part"]],
                _words(at["sizes"]),
                row["candidate"],
                at["end_to_end_ms"],
            )
            for row in rows
            for at in row["latency"]
        ]
    host = f"{document['environment']['cpu']}, {document['environment']['cores']} cores"
    return [
        Time(
            model,
            host,
            row["sizes"].strip("{}").replace("'", "").replace(":", ""),
            row["engine"],
            row["median_ms"],
        )
        for row in document["rows"]
    ]


def _gpu_models_times(document: Document) -> Iterator[Time]:
    """`gpu_models.json` has rows of one shape with all engines, ours once more in bare loops; the
    row that only draws a curve has no batch.
    """
    for model, row in document["rows"].items():
        for engine, entry in row.get("entries", {}).items() if row.get("batch") else ():
            if "wall_median_ms" in entry and not engine.startswith(("bare ", "loop ")):
                yield Time(
                    model,
                    str(row["target"]["device"]),
                    f"batch {row['batch']}",
                    engine,
                    entry["wall_median_ms"],
                )


def _words(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _host(document: Document, names: Sequence[str]) -> str:
    host = document["environment"]
    packages = ", ".join(f"{name} {host['packages'][name]}" for name in names)
    return (
        f"{document['created'][:10]}, {host['cpu']}, flags {' '.join(host['cpu_flags'])}; Python"
        f" {host['python']}, {packages}."
    )
