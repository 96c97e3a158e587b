"""PyTorch's profiler: its own trace, as operators, kernels and copies on the host's clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pipeline.backends.kineto import (
    MARK,
    NO_KERNELS,
    Recording,
    activity_from_kineto,
    on_free_rows,
    with_note,
)
from pipeline.errors import InternalError
from pipeline.measurement.clock import monotonic
from pipeline.results.timeline import OPERATORS, Span, TracedRun, Window
from tests.pipeline.benchmark.timeline import ends_of, run_from

AHEAD_S = 1000.0  # of the library's clock


def event(category: str, name: str, start_s: float, seconds: float, **arguments: Any) -> Any:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": (start_s + AHEAD_S) * 1e6,
        "dur": seconds * 1e6,
        "args": arguments,
    }


def trace(*events: Any) -> str:
    others = [{"ph": "M", "name": "process_name"}, event("Trace", "PyTorch Profiler", 0, 100)]
    return json.dumps({"traceEvents": [*others, *events]})


GPU_RUN = (
    event("user_annotation", MARK, 2, 10),  # exactly the call of `run_from(0)`
    event("cpu_op", "aten::linear", 3, 4),
    event("cpu_op", "aten::addmm", 4, 2),
    event("cuda_runtime", "cudaLaunchKernel", 4, 1),
    event("gpu_memcpy", "Memcpy HtoD", 0.5, 1.5, stream=7, bytes=4096),
    event("kernel", "sgemm", 5, 5, stream=7),
    event("kernel", "of another library", 50, 5, stream=9),
    event("gpu_memcpy", "Memcpy DtoH", 12.5, 0.25, stream=7, bytes=16),
)

OVERLAPPING = (("first", 0, 4), ("early", 2, 6), ("earlier", 3, 9), ("next", 4, 5))


def test_operators_kernels_and_copies_are_on_the_clock_of_the_host() -> None:
    activity = activity_from_kineto(trace(*GPU_RUN), [run_from(0.0)])
    assert activity.clock_error_s == pytest.approx(0.0, abs=1e-6)
    assert [(span.row, span.name) for span in activity.spans] == [
        (OPERATORS, "aten::linear"),
        (OPERATORS, "aten::addmm"),
        ("copies, stream 7", "Memcpy HtoD"),
        ("kernels, stream 7", "sgemm"),
        ("copies, stream 7", "Memcpy DtoH"),
    ], "the kernel outside of the run is not ours"
    assert [ends_of(span) for span in activity.spans] == [
        pytest.approx(ends) for ends in ([3, 7], [4, 6], [0.5, 2], [5, 10], [12.5, 12.75])
    ]
    assert [dict(span.detail) for span in activity.spans[2:]] == [
        {"bytes": 4096.0},
        {},
        {"bytes": 16.0},
    ]


def test_beside_an_engine_of_another_library_operators_are_left_out() -> None:
    activity = activity_from_kineto(trace(*GPU_RUN), [run_from(0.0)], operators=False)
    assert {span.row for span in activity.spans} == {"copies, stream 7", "kernels, stream 7"}


def test_kernels_that_overlap_on_a_stream_have_rows_of_their_own() -> None:
    """As with programmatic dependent launch."""
    kernels = [Span("stream", name, Window(*ends)) for name, *ends in OVERLAPPING]
    other = Span("another stream", "alone", Window(1, 3))
    rows = {span.name: span.row for span in on_free_rows([*reversed(kernels), other])}
    assert rows == {
        "first": "stream",
        "early": "stream (2)",
        "earlier": "stream (3)",
        "next": "stream",
        "alone": "another stream",
    }


def test_a_gpu_without_a_kernel_has_the_reason() -> None:
    activity = activity_from_kineto(trace(*GPU_RUN), [run_from(0.0)])
    assert with_note(activity) == activity
    of_host = activity_from_kineto(trace(*GPU_RUN[:2]), [run_from(0.0)])
    assert with_note(of_host).notes == (NO_KERNELS,)


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"traceEvents": 3}', trace()])
def test_what_is_no_trace_of_the_runs_is_our_bug(text: str) -> None:
    with pytest.raises(InternalError):
        activity_from_kineto(text, [run_from(0.0)])


def test_a_real_recording_holds_the_operators_of_its_runs() -> None:
    module = torch.nn.Linear(64, 64)
    recording = Recording(on_gpu=False)
    recording.start()
    module(torch.ones(4, 64))  # outside of the runs
    runs = []
    for _ in range(3):
        begin = monotonic()
        with recording.mark():
            module(torch.ones(4, 64))
        call, after = Window(begin, monotonic()), Window(monotonic(), monotonic())
        before = Window(begin, begin)
        runs.append(
            TracedRun({"upload": before, "execute": call, "download": after, "synchronize": after})
        )
    activity = recording.stop(runs)
    names = [span.name for span in activity.spans]
    assert names.count("aten::linear") == names.count("aten::addmm") == 3
    for span in activity.spans:
        (call,) = (
            run.calls["execute"]
            for run in runs
            if run.calls["execute"].start_s <= span.window.start_s < run.calls["execute"].end_s
        )
        assert span.window.end_s <= call.end_s
