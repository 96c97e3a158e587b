"""What is written down of a race and of an engine: figures in ms, ratios with intervals, the layer
table in short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.contest import Outcome, cosine
from pipeline.benchmark.roofline import bound_of
from pipeline.core.recipe import Recipe
from pipeline.host.gpu import Peaks, find_gpus, peaks, with_hardware
from pipeline.measurement.clock import Samples
from pipeline.measurement.comparison import NotMeasurable, compare
from pipeline.results.benchmarks import BenchmarkFailure, LatencyRow
from pipeline.results.layer_table import LayerTable
from pipeline.results.precision_audit import (
    fusions,
    mislabelled,
    node_text,
    reformats,
    slowest,
    time_by_precision,
)

NAMED = 5  # slowest layers
REFERENCES = ("torch eager fp32", "ours fp32", "torch eager fp16", "torch graph fp16", "ours fp16")
"""Whose answers the others' are compared with: the first of these that is there."""


def device_peaks() -> Peaks | None:
    """What the GPU in use could reach; None without one."""
    devices = with_hardware(find_gpus()).devices
    return peaks(devices[0]) if devices else None


def entry_of(outcome: Outcome, known: Peaks | None = None) -> dict[str, Any]:
    """All figures of one engine in ms; p99 only of enough values. `known`: peaks of the GPU, for
    shares of them and for what binds.
    """
    loaded = outcome.loaded
    said = {"load_s": round(loaded.seconds, 2), **loaded.facts} if loaded else {}
    if isinstance(outcome.result, BenchmarkFailure):
        return {**said, "failed": outcome.result.reason}
    row: LatencyRow = outcome.result.rows[0]
    return {
        **said,
        **figures("device", row.compute),
        **figures("wall", row.end_to_end),
        **({} if outcome.entrant.way == "flow" else phases(row)),
        "throughput_per_s": row.throughput_per_s,
        "flops_per_s": row.flops_per_s,
        "bytes_per_s": row.bytes_per_s,
        "bound": bound_of(row, outcome.entrant.engine.recipe.precision, known).model_dump(
            mode="json"
        ),
        "processes": len(row.end_to_end.processes),
        "stable": row.end_to_end.stable and row.compute.stable,
    }


def phases(row: LatencyRow) -> dict[str, Any]:
    return {
        "upload_median_ms": row.upload.median_s * 1e3,
        "download_median_ms": row.download.median_s * 1e3,
    }


def figures(name: str, samples: Samples) -> dict[str, Any]:
    p99 = samples.percentile_or_absent(99)
    return {
        f"{name}_median_ms": samples.median_s * 1e3,
        f"{name}_mean_ms": float(np.mean(samples.values_s)) * 1e3,
        f"{name}_min_ms": min(samples.values_s) * 1e3,
        f"{name}_p99_ms": None if p99 is None else p99 * 1e3,
        f"{name}_runs": len(samples.values_s),
        f"{name}_of_processes_ms": [
            round(float(value) * 1e3, 6) for value in samples.process_medians_s()
        ],
    }


def add_answers(entries: dict[str, dict[str, Any]], outcomes: Sequence[Outcome]) -> None:
    """The cosine of each engine's answer to the widest: PyTorch or ours in fp32, else PyTorch in
    fp16.
    """
    answers = {
        outcome.entrant.name: outcome.loaded.outputs for outcome in outcomes if outcome.loaded
    }
    chosen = next((name for name in REFERENCES if name in answers), None)
    for name, found in answers.items():
        if chosen and name != chosen:
            entries[name] |= {"cosine": cosine(found, answers[chosen]), "cosine_to": chosen}


def layer_facts(table: LayerTable, recipe: Recipe) -> dict[str, Any]:
    """The layer table in short: what holds this engine back."""
    moving, whole = reformats(table), sum(layer.seconds or 0.0 for layer in table.layers)
    return {
        "count": len(table.layers),
        "sum_ms": whole * 1e3,
        "time_share": {name: round(share, 4) for name, share in time_by_precision(table).items()},
        "moving_layers": moving.count,
        "moving_share": round(moving.share, 4),
        "mislabelled": mislabelled(recipe.precision, table, recipe.keep_fp32),
        "fusions": list(fusions(table)),
        "slowest": [
            {
                "ms": (layer.seconds or 0.0) * 1e3,
                "share": round((layer.seconds or 0.0) / whole, 4) if whole else None,
                "precision": str(layer.precision),
                "nodes": node_text(layer),
                "kind": layer.kind,
                "tactic": layer.tactic[:120],
            }
            for layer in slowest(table.layers, NAMED)
        ],
    }


def ratios(outcomes: Sequence[Outcome], ways: Sequence[str]) -> list[dict[str, Any]]:
    """Each of ours over its bare twin and its loop, and each of PyTorch's over our fastest: of the
    GPU's time and of whole runs.
    """
    rows = {
        outcome.entrant.name: outcome.result.rows[0]
        for outcome in outcomes
        if not isinstance(outcome.result, BenchmarkFailure)
    }
    pairs = [(f"ours {way}", f"{other} {way}") for way in ways for other in ("bare", "loop")]
    ours = [name for name in rows if name.startswith("ours")]
    if ours:
        best = min(ours, key=lambda name: rows[name].compute.median_s)
        pairs += [(name, best) for name in rows if name.startswith("torch")]
    return [
        {
            "over": left,
            "under": right,
            "device": interval_of(rows[left].compute, rows[right].compute),
            "wall": _wall(rows[left], rows[right]),
        }
        for left, right in pairs
        if left in rows and right in rows
    ]


def _wall(left: LatencyRow, right: LatencyRow) -> list[float] | None:
    return interval_of(left.end_to_end, right.end_to_end)


def interval_of(left: Samples, right: Samples) -> list[float] | None:
    """The ratio of the medians and the bounds of its interval; None where it has none."""
    try:
        found = compare(left, right)
    except NotMeasurable:
        return None
    return [round(value, 5) for value in (found.value, found.low, found.high)]
