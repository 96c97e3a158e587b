"""From turns to rows and targets. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.serving.peers_list import FASTAPI

if TYPE_CHECKING:
    from benchmarks.serving.rounds import Turn

Row = dict[str, str | float | int | None]

CRUCIBLE, DIRECT = "Crucible", "direct Session"
WIRE, CNN = "wire", "CNN"
TO_BEAT = ("LitServe", "BentoML", "Ray Serve", "PyTriton")
P99_SAMPLES = 1000
FAULTS = "faults: "  # so begins the note of a row that had some
STAGES = ("queue", "copy_in", "compute", "copy_out")  # of Server-Timing
COLUMNS = (
    "load",
    "server",
    "version",
    "p50_ms",
    "p99_ms",
    "p50_ratio",
    "per_s",
    "per_s_low",
    "per_s_high",
    "per_s_ratio",
    "client_cpu_ms",
    "api_cpu_ms",
    "worker_cpu_ms",
    "api_full_at_per_s",
    *(f"{stage}_ms" for stage in STAGES),
    *(f"{stage}_of_many_ms" for stage in STAGES),
    "batch_of_many",
    "ran_on",
    "note",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the second table asks for: two CPU cores, and a large host."""

    share: float  # of the engine's best throughput
    extra_s: float  # p99 over the engine's

    @staticmethod
    def on(cores: int) -> Wanted:
        return Wanted(0.95, 0.001) if cores >= 16 else Wanted(0.75, 0.0025)


def row_of(
    load: str, server: str, version: str, turns: Sequence[Turn], base: Sequence[tuple[float, float]]
) -> Row:
    """One server's figures: medians over the rounds. `base`: p50 and requests per second of what it
    is held against, round by round.

    CPU is milliseconds per request; `api_full_at_per_s` is the rate at which the process that
    listens would take a whole core. The stages are those of one connection, and those of many,
    where the server tells them.
    """
    p50s, rates = (
        [statistics.median(turn.single_s) for turn in turns],
        [turn.per_s for turn in turns],
    )
    requests = sum(turn.requests for turn in turns)
    api_s = sum(turn.cpu.api_s for turn in turns)
    faults = [fault for turn in turns for fault in turn.faults]
    busy = max(turn.client_share for turn in turns)
    notes = [
        *([f"{FAULTS}{faults[0][:100]}"] if faults else []),
        *([f"the client took {busy:.0%} of a core"] if busy > 0.9 else []),
    ]
    return {
        "load": load,
        "server": server,
        "version": version,
        "p50_ms": statistics.median(p50s) * 1e3,
        "p99_ms": _ms(percentile_99([value for turn in turns for value in turn.single_s])),
        "p50_ratio": (
            statistics.median(p50 / of[0] for p50, of in zip(p50s, base, strict=False))
            if base
            else None
        ),
        "per_s": statistics.median(rates),
        "per_s_low": min(rates),
        "per_s_high": max(rates),
        "per_s_ratio": (
            statistics.median(rate / of[1] for rate, of in zip(rates, base, strict=False))
            if base
            else None
        ),
        "client_cpu_ms": sum(turn.client_s for turn in turns) / requests * 1e3,
        "api_cpu_ms": api_s / requests * 1e3,
        "worker_cpu_ms": sum(turn.cpu.rest_s for turn in turns) / requests * 1e3,
        "api_full_at_per_s": requests / api_s if api_s else None,
        **{
            f"{stage}_ms": _median(
                [turn.stages_ms[stage] for turn in turns if stage in turn.stages_ms]
            )
            for stage in STAGES
        },
        **{
            f"{stage}_of_many_ms": _median(
                [turn.stages_of_many_ms[stage] for turn in turns if stage in turn.stages_of_many_ms]
            )
            for stage in STAGES
        },
        "batch_of_many": _median(
            [turn.stages_of_many_ms["batch"] for turn in turns if "batch" in turn.stages_of_many_ms]
        ),
        "ran_on": None,
        "note": "; ".join(notes),
    }


def engine_row(load: str, turns: Sequence[Mapping[str, Any]]) -> Row:
    """The engine without a server, at the batch that is best over all rounds."""
    best, rates = best_batch(turns)
    singles = [value for turn in turns for value in turn["latencies_s"]]
    return dict.fromkeys(COLUMNS) | {
        "load": load,
        "server": DIRECT,
        "version": f"batch {best}",
        "p50_ms": statistics.median(statistics.median(turn["latencies_s"]) for turn in turns) * 1e3,
        "p99_ms": _ms(percentile_99(singles)),
        "per_s": statistics.median(rates),
        "per_s_low": min(rates),
        "per_s_high": max(rates),
        "note": "",
    }


def turns_base(turns: Sequence[Turn]) -> list[tuple[float, float]]:
    """p50 and requests per second, round by round."""
    return [(statistics.median(turn.single_s), turn.per_s) for turn in turns]


def engine_base(turns: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """The same of the engine alone, at its best batch."""
    return (
        [
            (statistics.median(turn["latencies_s"]), rate)
            for turn, rate in zip(turns, best_batch(turns)[1], strict=True)
        ]
        if turns
        else []
    )


def best_batch(turns: Sequence[Mapping[str, Any]]) -> tuple[str, list[float]]:
    """The batch with the highest median rate, and its rates round by round."""
    by_batch = {
        batch: [float(turn["per_s"][batch]) for turn in turns] for batch in turns[0]["per_s"]
    }
    return max(by_batch.items(), key=lambda item: statistics.median(item[1]))


def missing_row(load: str, server: str, version: str, why: str) -> Row:
    message = " ".join(why.split())
    return dict.fromkeys(COLUMNS) | {
        "load": load,
        "server": server,
        "version": version,
        "note": f"not measured: {message[-160:]}",
    }


def percentile_99(values: Sequence[float]) -> float | None:
    """None with fewer values than a p99 needs."""
    return statistics.quantiles(values, n=100)[98] if len(values) >= P99_SAMPLES else None


def targets_of(rows: Sequence[Row], wanted: Wanted) -> dict[str, bool]:
    """What serving has to reach against those that were asked for.

    A target whose figures are missing, or against a peer that had faults, is missed, and says so.
    """
    found = {(row["load"], row["server"]): row for row in rows}

    def figure(load: str, server: str, name: str) -> float:
        value = found.get((load, server), {}).get(name)
        return float("nan") if value is None else float(value)

    p50, rate = figure(WIRE, CRUCIBLE, "p50_ratio"), figure(WIRE, CRUCIBLE, "per_s_ratio")
    share = figure(CNN, CRUCIBLE, "per_s_ratio")
    extra_ms = figure(CNN, CRUCIBLE, "p99_ms") - figure(CNN, DIRECT, "p99_ms")
    extra = (
        "no p99 of fewer than 1,000 requests" if math.isnan(extra_ms) else f"got {extra_ms:+.2f} ms"
    )
    wire = {
        f"wire, 1 connection: p50 at most 1.5x {FASTAPI}'s (got {p50:.2f}x)": p50 <= 1.5,
        f"wire, 16 connections: at least 0.6x {FASTAPI}'s requests/s (got {rate:.2f}x)": (
            rate >= 0.6
        ),
    }
    targets = (wire if (WIRE, FASTAPI) in found else {}) | {
        (
            f"CNN, 16 connections: at least {wanted.share:.0%} of the engine's best"
            f" (got {share:.0%})"
        ): share >= wanted.share,
        f"CNN, 1 connection: p99 at most {wanted.extra_s * 1e3:g} ms over the engine's ({extra})": (
            extra_ms <= wanted.extra_s * 1e3
        ),
    }
    for load, peers in ((WIRE, TO_BEAT), (CNN, (FASTAPI, *TO_BEAT, "mosec"))):
        for peer in (each for each in peers if (load, each) in found):
            ours, theirs = figure(load, CRUCIBLE, "per_s"), figure(load, peer, "per_s")
            faulty = str(found[load, peer]["note"]).startswith(FAULTS)
            message = (
                f"{ours:,.0f} against {theirs:,.0f}"
                f" requests/s{', but it had faults: no comparison' if faulty else ''}"
            )
            targets[f"{load}, 16 connections: above {peer} ({message})"] = (
                ours > theirs and not faulty
            )
    return targets


def engine_target(rows: Sequence[Row], most_per_s: float) -> dict[str, bool]:
    """Whether the engine alone is as slow as the targets on its share and its p99 suppose."""
    rate = next(
        (
            float(row["per_s"] or "nan")
            for row in rows
            if (row["load"], row["server"]) == (CNN, DIRECT)
        ),
        float("nan"),
    )
    return {
        f"CNN: an engine of at most {most_per_s:,.0f} rows/s (got {rate:,.0f})": rate <= most_per_s
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
