"""The timeline of a TensorRT engine: the reports of its layer profiler, each in its run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.backends.tensorrt.tracing import (
    NO_KERNELS,
    WAITS,
    LayerTime,
    TrtTracer,
    layer_spans,
    sees_kernels,
)
from pipeline.measurement.clock import monotonic
from pipeline.results.timeline import LAYERS, Activity, Span, TracedRun, Window
from tests.pipeline.benchmark.timeline import ends_of, run_from


class ProfilerDouble:
    """trt.IProfiler, which its children must initialise."""

    def __init__(self) -> None:
        self.ready = True


LIBRARY = SimpleNamespace(IProfiler=ProfilerDouble)


class SessionDouble:
    """Reports `convolution` twice and `gemm` once per run, from the moment a profiler is there."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(profiler=None)
        self.closed = False

    def execute(self) -> None:
        if self.context.profiler is not None:
            assert self.context.profiler.ready
            for name in ("convolution", "gemm", "convolution"):
                self.context.profiler.report_layer_time(name, 1e-6)

    def close(self) -> None:
        self.closed = True


class LoadedDouble:
    def __init__(self) -> None:
        self.opened: list[tuple[int, bool]] = []
        self.opened_session = SessionDouble()
        self.closed = False

    def session(self, profile: int, graphs: bool = True) -> SessionDouble:
        self.opened.append((profile, graphs))
        return self.opened_session

    def close(self) -> None:
        self.closed = True


class RecordingDouble:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def mark(self) -> Any:
        self.calls.append("mark")
        return SimpleNamespace()

    def stop(self, runs: list[TracedRun]) -> Activity:
        kernel = Span("kernels, stream 7", "sgemm", runs[0].calls["execute"])
        return Activity([kernel], clock_error_s=1e-6)


def executed(session: SessionDouble) -> TracedRun:
    begin = monotonic()
    session.execute()
    call, after = Window(begin, monotonic()), Window(monotonic(), monotonic())
    return TracedRun(
        {"upload": Window(begin, begin), "execute": call, "download": after, "synchronize": after}
    )


def test_layers_are_recorded_without_graphs_and_after_the_warm_up() -> None:
    loaded: Any = LoadedDouble()
    tracer = TrtTracer(LIBRARY, loaded, 1, recording=None)
    session = loaded.opened_session
    session.execute()  # the warm-up
    tracer.start(1)
    runs = [executed(session), executed(session)]
    activity = tracer.stop(runs)
    assert loaded.opened == [(1, False)]
    assert [(span.row, span.name) for span in activity.spans] == [
        (LAYERS, name) for name in ("convolution", "gemm", "convolution")
    ] * 2
    assert activity.starts == "in order"
    assert activity.notes == (WAITS, NO_KERNELS)
    for span, run in zip(activity.spans[::3], runs, strict=True):
        assert span.window.start_s == run.calls["execute"].start_s
    tracer.close()
    assert session.closed
    assert loaded.closed


def test_with_pytorch_there_are_kernels_too() -> None:
    loaded: Any = LoadedDouble()
    recording: Any = RecordingDouble()
    tracer = TrtTracer(LIBRARY, loaded, 0, recording)
    tracer.start(0)
    tracer.mark()
    activity = tracer.stop([executed(loaded.opened_session)])
    assert recording.calls == ["start", "mark"]
    assert [span.row for span in activity.spans] == [LAYERS] * 3 + ["kernels, stream 7"]
    assert activity.clock_error_s == 1e-6
    assert activity.notes == (WAITS,)


def test_each_report_belongs_to_the_run_in_which_it_came() -> None:
    runs = [run_from(0.0), run_from(100.0)]  # execute from 2 to 12, from 102 to 112
    times = [
        LayerTime("warm-up", 1.0, -5.0),
        LayerTime("a", 1.0, 12.0),
        LayerTime("b", 3.0, 12.0),
        LayerTime("a", 15.0, 112.0),
        LayerTime("b", 5.0, 112.0),
    ]
    spans = layer_spans(times, runs)
    assert [span.name for span in spans] == ["a", "b", "a", "b"]
    assert [ends_of(span) for span in spans] == [
        pytest.approx(ends) for ends in ([2, 3], [3, 6], [102, 109.5], [109.5, 112])
    ]


def test_a_pytorch_without_a_gpu_sees_no_kernels() -> None:
    torch = pytest.importorskip("torch")
    assert sees_kernels() == torch.cuda.is_available()
