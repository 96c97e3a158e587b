"""`crucible bench --trace`: the file, and what is printed about it."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pipeline.errors import HostError, PlanError
from pipeline.formatting import time_text
from pipeline.report.bundle import check_folder
from pipeline.results.timeline import LAYERS, OPERATORS, EngineTrace, TraceFailure

BEGINNING = '{"traceEvents"'
VIEWER = "https://ui.perfetto.dev"

Found = Sequence[EngineTrace | TraceFailure]


def check_trace_file(file: Path, sweeps: bool) -> None:
    """PlanError unless `file` can be written, and is no other document. Before any work is done."""
    if sweeps:
        raise PlanError(
            "--trace is for one shape, and --batch measures several",
            "give the shape with --set 'benchmark.sizes=[{batch: 8}]' instead of --batch",
        )
    if file.suffix != ".json" or file.is_dir():
        raise PlanError(
            f"expected --trace as a file that ends in .json, got '{file}'",
            "for example --trace trace.json",
        )
    if file.exists() and not _is_trace(file):
        raise PlanError(f"--trace would overwrite '{file}', which is no trace", "name another file")
    check_folder(file.parent)


def _is_trace(file: Path) -> bool:
    if not file.is_file():  # a pipe would never answer
        return False
    try:
        with file.open("rb") as stream:
            return stream.read(len(BEGINNING)) == BEGINNING.encode()
    except OSError:
        return False


def save_traces(found: Found, command: str, file: Path) -> None:
    """Write the timelines. HostError if there are none, or if the file cannot be written."""
    from pipeline.benchmark.trace_events import write_trace

    traces = [trace for trace in found if isinstance(trace, EngineTrace)]
    if not traces:
        reasons = [trace.reason for trace in found if isinstance(trace, TraceFailure)]
        raise HostError(
            f"no engine could be traced: {reasons[0]}",
            "measure without --trace, or see `crucible doctor`",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_trace(traces, command, file)
    except OSError as error:
        raise HostError(f"cannot write '{file}': {error.strerror}", "name another file") from error


def trace_lines(found: Found, file: Path) -> list[str]:
    """Return what the tracing cost, the longest row of each engine, and where the file is."""
    lines = []
    for trace in found:
        if isinstance(trace, TraceFailure):
            lines.append(f"{trace.label} cannot be traced: {trace.reason}")
            continue
        lines.append(
            f"{trace.label}: a traced run takes {time_text(trace.traced_s)},"
            f" {trace.slowdown:.2f} times as long as without tracing{_longest(trace)}"
        )
    return [*lines, f"trace: {file} (open it in {VIEWER})"]


def _longest(trace: EngineTrace) -> str:
    """Return the layer or operator with the most time, as the end of a sentence."""
    found = longest_layer(trace)
    if found is None:
        return ""
    name, seconds = found
    return f"; longest: {name}, {time_text(seconds)} per run"


def longest_layer(trace: EngineTrace) -> tuple[str, float] | None:
    """Return the name of the layer or operator with the most time, and its time in one run, the
    median of all. None without layers.

    An operator that another one holds counts for both.
    """
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(trace.runs))
    for span in trace.activity.spans:
        if span.row in (LAYERS, OPERATORS):
            run = bisect(trace.starts_s, span.window.start_s) - 1
            seconds[span.name][run] += span.window.seconds
    medians = {name: median(of_runs) for name, of_runs in seconds.items()}
    name = max(medians, key=medians.__getitem__, default=None)
    return None if name is None else (name, medians[name])


def trace_summary(found: Found, file: Path) -> dict[str, object]:
    """Return the file and, for each engine, its cost of tracing or the reason of the failure."""
    return {
        "file": str(file),
        "engines": [
            {"engine": trace.label, "failure": trace.reason}
            if isinstance(trace, TraceFailure)
            else {
                "engine": trace.label,
                "traced_ms": trace.traced_s * 1e3,
                "untraced_ms": trace.untraced_s * 1e3,
                "traced_over_untraced": trace.slowdown,
            }
            for trace in found
        ],
    }
