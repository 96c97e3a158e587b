"""What pages and figures compute from the rows of results/gpu_models.json."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu.rows import Row, choice_from_heading, row_named
from pipeline.core.artifacts import TensorRTOptions
from pipeline.core.recipe import ITEM_BYTES, Precision

CURVE = "async_curve"
ENGINES = ("ours", "bare", "torch")
"""First words of the engines in the figures. `loop` runs our own engine, which is the same bar."""
FLEXIBILITY = "flexibility_"  # begins the names of rows with several shapes
AT = " at "  # separates engine and shape in the entries of such a row

TIMINGS = "tensorrt.timing_iterations="
USUAL_TIMINGS = TensorRTOptions().timing_iterations
DEFAULTS = (
    f"{TIMINGS}{USUAL_TIMINGS}",
    "simplify.rewrite_attention=true",
    "simplify.plain_attention=true",  # its old name, in results of that time
)
"""Overrides of results that give the default value."""

Document = Mapping[str, Any]
Entry = Mapping[str, Any]
Times = dict[str, dict[str, list[float]]]


def row_from_heading(heading: str) -> Row | None:
    return row_named(choice_from_heading(heading).name)


def special_overrides(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The overrides of a row that differ from the defaults."""
    return tuple(each for each in row.get("overrides") or () if each not in DEFAULTS)


def timings(overrides: Iterable[str]) -> int:
    """How often TensorRT timed each kernel."""
    times = (int(each.removeprefix(TIMINGS)) for each in overrides if each.startswith(TIMINGS))
    return next(times, USUAL_TIMINGS)


def rows_at_once(document: Document) -> dict[str, tuple[str, ...]]:
    """Return for each row the others that ran during its time. On one host they share its CPU."""
    spans = {name: _span(row) for name, row in document["rows"].items() if "seconds" in row}
    return {
        name: tuple(
            other
            for other, (first, last) in spans.items()
            if other != name and first < end and begin < last
        )
        for name, (begin, end) in spans.items()
    }


def _span(row: Mapping[str, Any]) -> tuple[dt.datetime, dt.datetime]:
    """When the row began and ended.

    Older results of a whole row are dated by their end. All others are dated by their beginning.
    """
    duration = dt.timedelta(seconds=row["seconds"])
    created = dt.datetime.fromisoformat(row["created"])
    if "began" in row:
        created = dt.datetime.fromisoformat(row["began"])
    elif "measured_s" in row:
        created -= duration
    return created, created + duration


def ratios_over_bare(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """GPU time over that of the bare build, by engine: the ratio and its 95 % interval."""
    ratios = row.get("ratios", ())
    return {each["over"]: each["device"] for each in ratios if each["under"].startswith("bare")}


def gbytes_per_s(entry: Entry) -> float | None:
    """Bytes of the graph in the engine's precision; None where that precision is not known.

    `bytes_per_s` counts fp32.
    """
    if not entry.get("bytes_per_s") or not entry.get("bound"):
        return None
    width = ITEM_BYTES[Precision(entry["bound"]["precision"])] / ITEM_BYTES[Precision.FP32]
    return float(entry["bytes_per_s"] * width / 1e9)


def detailed(row: Mapping[str, Any]) -> dict[str, Entry]:
    """The engines of which more is known than their times."""
    keys = ("layers", "sdpa_operators", "recompilations")
    return {
        name: entry
        for name, entry in row.get("entries", {}).items()
        if any(entry.get(key) is not None for key in keys)
        or (name.startswith("ours") and entry.get("bound"))
    }


# -- rows with several shapes ------------------------------------------------


def by_shape(row: Mapping[str, Any]) -> dict[str, dict[str, Entry]]:
    """The measured engines of a row by shape."""
    engines_by_shape: dict[str, dict[str, Entry]] = {}
    for name, entry in row.get("entries", {}).items():
        engine, at, label = name.partition(AT)
        if at and "device_median_ms" in entry:
            shapes = [text.replace(", ", "x") for text in re.findall(r"\[([^\]]*)\]", label)]
            shape = " and ".join(dict.fromkeys(shapes))
            engines_by_shape.setdefault(shape, {})[engine] = entry
    return engines_by_shape


def fixed_ms(engines: Mapping[str, Entry]) -> float | None:
    """GPU time of the engine that was built for this one shape with default settings."""
    fixed = (
        entry["device_median_ms"]
        for name, entry in engines.items()
        if name.startswith("fixed") and "," not in name
    )
    return next(fixed, None)


# -- figures -----------------------------------------------------------------


def times_by_picture(document: Document) -> dict[str, Times]:
    """Milliseconds end to end and of the GPU, by the model's picture, row and engine.

    The fastest engine comes first. Variants of flexibility keep their order.
    """
    models: dict[str, Times] = {}
    for name, row in document["rows"].items():
        times = _times(row) if name != CURVE and "inputs" in row else {}
        if times:
            fastest_first = dict(sorted(times.items(), key=lambda item: item[1]))
            models.setdefault(f"gpu_{name.partition('_')[0]}.svg", {})[name] = fastest_first
    for name, row in document["rows"].items():
        shapes = by_shape(row) if name.startswith(FLEXIBILITY) else {}
        for shape, engines in shapes.items():
            if len(engines) > 1:
                panel = f"{name.removeprefix(FLEXIBILITY)}{AT}{shape}"
                times = {engine: _both(entry) for engine, entry in engines.items()}
                models.setdefault("gpu_flexibility.svg", {})[panel] = times
    return models


def _times(row: Mapping[str, Any]) -> dict[str, list[float]]:
    return {
        engine: _both(entry)
        for engine, entry in row.get("entries", {}).items()
        if "device_median_ms" in entry and engine.split()[0] in ENGINES
    }


def _both(entry: Entry) -> list[float]:
    return [entry["wall_median_ms"], entry["device_median_ms"]]
