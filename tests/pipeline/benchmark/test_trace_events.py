"""The file of a timeline: rows, clock, and what a reader must know about it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.benchmark.trace_events import trace_document, write_trace
from pipeline.results.timeline import Activity, Span, TracedRun, Window
from tests.pipeline.benchmark.timeline import STEPS, check_events, names_of_row, run_from, trace_of


def test_all_engines_begin_at_zero_each_as_a_process_with_its_rows() -> None:
    first = trace_of(
        run_from(100.0), run_from(200.0), spans=[Span("layers", "a", Window(103, 104))]
    )
    second = trace_of(run_from(5000.0), on_gpu=True)
    document = trace_document([first, second], "crucible bench")
    events = json.loads(json.dumps(document["traceEvents"]))
    check_events(events)
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]
        for event in events
        if event["ph"] == "M"
    }
    assert names["process_name", 1, 0] == {"name": "double fp32, batch 2"}
    assert names["process_labels", 2, 0] == {
        "labels": "a double, traced runs take 3.00 times as long"
    }
    assert names["thread_name", 1, 1] == {"name": "host calls"}
    assert names["thread_name", 1, 2] == {"name": "layers"}
    assert ("thread_name", 2, 2) not in names
    starts = [event["ts"] for event in events if event["ph"] == "X" and event["name"] == "run 1"]
    assert starts == [0, 0]
    (layer,) = (event for event in events if event.get("cat") == "layers")
    assert (layer["ts"], layer["dur"]) == (3e6, 1e6)
    assert "execute" in names_of_row(document, "host calls", 1)
    assert "enqueue" in names_of_row(document, "host calls", 2), "on a GPU it only starts the work"


def test_the_metadata_say_what_tracing_cost_and_how_good_the_clock_is() -> None:
    trace = trace_of(run_from(100.0))
    activity = Activity((), "in order", 2e-6, ("a note",))
    document = trace_document([replace(trace, activity=activity)], "the command")
    other = document["otherData"]
    assert isinstance(other, dict)
    assert other["command"] == "the command"
    (engine,) = other["engines"]
    assert engine["traced_over_untraced"] == 3.0
    assert engine["starts_of_layers"] == "in order"
    assert engine["clock_error_us"] == pytest.approx(2.0)
    assert engine["began_s"] == 100.0
    assert engine["notes"] == ["a note"]


@given(
    st.floats(0, 1e6),
    st.lists(st.floats(0, 1e-3), min_size=6, max_size=6),
    st.lists(st.floats(0, 1.0), min_size=2, max_size=2),
)
def test_rounding_moves_no_event_out_of_the_one_that_holds_it(
    start_s: float, seconds: list[float], parts: list[float]
) -> None:
    calls = {}
    for step, duration_s in zip(STEPS, seconds, strict=True):
        calls[step] = Window(start_s, start_s + duration_s)
        start_s += duration_s
    run = TracedRun(calls)
    call = calls["execute"]
    low, high = sorted(parts)
    inner = Window(
        min(call.start_s + low * call.seconds, call.end_s),
        min(call.start_s + high * call.seconds, call.end_s),
    )
    spans = [Span("layers", "outer", call), Span("layers", "inner", inner)]
    document = trace_document([trace_of(run, spans=spans)], "")
    check_events(document["traceEvents"])  # type: ignore[arg-type]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_trace([trace_of(run_from(0.0))], "first", file)
    before = file.read_text()
    detail: Any = {"x": {1}}  # JSON has no sets
    unwritable = trace_of(run_from(0.0), spans=[Span("layers", "a", Window(0, 1), detail)])
    with pytest.raises(TypeError):
        write_trace([unwritable], "second", file)
    assert file.read_text() == before
    assert before.startswith('{"traceEvents"')
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
