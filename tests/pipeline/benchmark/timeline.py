"""Timelines whose answers are known, and what holds of every file of a timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.results.timeline import Activity, EngineTrace, Span, TracedRun, Window

STEPS = ("bind", "upload", "execute", "download", "synchronize", "fetch")
Event = Mapping[str, Any]


def run_from(start_s: float, execute_s: float = 10.0) -> TracedRun:
    """A run whose calls take a second each, and `execute` so long."""
    calls = {}
    for step in STEPS:
        end_s = start_s + (execute_s if step == "execute" else 1.0)
        calls[step] = Window(start_s, end_s)
        start_s = end_s
    return TracedRun(calls)


def trace_of(*runs: TracedRun, spans: Iterable[Span] = (), on_gpu: bool = False) -> EngineTrace:
    return EngineTrace(
        label="double fp32",
        device="a double",
        sizes={"batch": 2},
        runs=runs,
        activity=Activity(tuple(spans)),
        untraced_s=5.0,
        traced_s=15.0,
        on_gpu=on_gpu,
    )


def read_trace(file: Path) -> dict[str, Any]:
    """Read a file of timelines, and assert that its events are well-formed and nested."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    check_events(document["traceEvents"])
    return document


def check_events(events: Iterable[Event]) -> None:
    """Assert that no event has a negative time, and that on each row, of two events one holds the
    other or neither overlaps; and that what happens on other rows is within a run.
    """
    rows: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            assert event["ts"] >= 0, event
            assert event["name"], event
            rows[event["pid"], event["tid"]].append(event)
        else:
            assert event["ph"] == "M", event
    for (process, thread), row in rows.items():
        check_nesting(row)
        runs = [event for event in rows[process, 1] if event["name"].startswith("run ")]
        assert runs
        for event in row if thread != 1 else ():
            assert any(holds(run, event) for run in runs), event


def check_nesting(row: Iterable[Event]) -> None:
    holders: list[Event] = []
    for event in sorted(row, key=lambda event: (event["ts"], -event["dur"])):
        while holders and end_of(holders[-1]) <= event["ts"]:
            holders.pop()
        assert not holders or holds(holders[-1], event), (holders[-1], event)
        holders.append(event)


def end_of(event: Event) -> float:
    return round(float(event["ts"] + event["dur"]), 3)


def holds(outer: Event, inner: Event) -> bool:
    return bool(outer["ts"] <= inner["ts"] and end_of(inner) <= end_of(outer))


def names_of_row(document: Mapping[str, Any], row: str, process: int = 1) -> list[str]:
    """The events of a row of one engine, by name, in their order."""
    return [
        event["name"]
        for event in document["traceEvents"]
        if event["ph"] == "X" and event["cat"] == row and event["pid"] == process
    ]


def micros_of_row(document: Mapping[str, Any], row: str, process: int = 1) -> dict[str, float]:
    """The sum of the times of each name on a row of one engine."""
    sums: dict[str, float] = defaultdict(float)
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == row and event["pid"] == process:
            sums[event["name"]] += event["dur"]
    return dict(sums)


def ends_of(span: Span) -> list[float]:
    return [span.window.start_s, span.window.end_s]
