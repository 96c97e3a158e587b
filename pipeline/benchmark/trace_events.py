"""A timeline as a file in the Trace Event format, which ui.perfetto.dev and chrome://tracing open.

Each engine is a process of the file, and each of its rows a thread. All engines begin at 0, so that
their runs lie below each other; the start by the host's clock is in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.distribution import version
from pipeline.formatting import shape_text
from pipeline.report.files import write_file
from pipeline.results.timeline import EngineTrace, Span, Window

HOST = "host calls"
NAMES = {
    "bind": "bind",
    "upload": "copy in",
    "execute": "execute",
    "download": "copy out",
    "synchronize": "wait",
    "fetch": "fetch",
}
"""The calls of a session in words. On a GPU `execute` only starts the work."""

Event = dict[str, object]


def write_trace(traces: Sequence[EngineTrace], command: str, file: Path) -> None:
    """Write the timelines of engines into one file, in one step."""
    write_file(file, json.dumps(trace_document(traces, command)))


def trace_document(traces: Sequence[EngineTrace], command: str) -> dict[str, object]:
    """Return the timelines of engines as a document of the Trace Event format."""
    events: list[Event] = []
    for number, trace in enumerate(traces, 1):
        events += _events(trace, number)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "command": command,
            "crucible": version(),
            "clock": "CLOCK_MONOTONIC; ts is in us since the `began_s` of each engine",
            "engines": [_metadata(trace) for trace in traces],
        },
    }


def _metadata(trace: EngineTrace) -> dict[str, object]:
    return {
        "engine": trace.label,
        "device": trace.device,
        "shape": trace.sizes,
        "began_s": trace.runs[0].window.start_s,
        "runs": len(trace.runs),
        "untraced_ms": trace.untraced_s * 1e3,
        "traced_ms": trace.traced_s * 1e3,
        "traced_over_untraced": trace.slowdown,
        "starts_of_layers": trace.activity.starts,
        "clock_error_us": trace.activity.clock_error_s * 1e6,
        "nvtx": trace.nvtx,
        "notes": list(trace.activity.notes),
    }


def _events(trace: EngineTrace, process: int) -> Iterator[Event]:
    """Yield the names of the process and of its rows, then the spans."""
    began_s = trace.runs[0].window.start_s
    spans = [*_host_spans(trace), *trace.activity.spans]
    rows = {row: number for number, row in enumerate(dict.fromkeys(span.row for span in spans), 1)}
    title = f"{trace.label}, {shape_text(trace.sizes)}"
    slower = f"traced runs take {trace.slowdown:.2f} times as long"
    yield _name("process_name", process, 0, name=title)
    yield _name("process_labels", process, 0, labels=f"{trace.device}, {slower}")
    yield _name("process_sort_index", process, 0, sort_index=process)
    for row, thread in rows.items():
        yield _name("thread_name", process, thread, name=row)
        yield _name("thread_sort_index", process, thread, sort_index=thread)
    for span in spans:
        yield {
            "ph": "X",
            "cat": span.row,
            "name": span.name,
            "pid": process,
            "tid": rows[span.row],
            "ts": _us(span.window.start_s - began_s),
            "dur": _duration_us(span.window, began_s),
            "args": dict(span.detail),
        }


def _host_spans(trace: EngineTrace) -> Iterator[Span]:
    for number, run in enumerate(trace.runs, 1):
        yield Span(HOST, f"run {number}", run.window, {"shape": shape_text(trace.sizes)})
        for step, window in run.calls.items():
            name = "enqueue" if trace.on_gpu and step == "execute" else NAMES[step]
            yield Span(HOST, name, window)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _duration_us(window: Window, began_s: float) -> float:
    """Return the difference of the rounded ends, so that no event passes the one that holds it."""
    return round(_us(window.end_s - began_s) - _us(window.start_s - began_s), 3)


def _name(kind: str, process: int, thread: int, **arguments: object) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}
