"""The timeline of a PyTorch baseline and of a program, for real."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import backends
from pipeline.benchmark.interleaved import Workload
from pipeline.benchmark.trace import RUNS, trace_engine
from pipeline.benchmark.trace_events import write_trace
from pipeline.core.progress import Progress
from pipeline.execution.child_process import call_in_child
from pipeline.results.timeline import OPERATORS, EngineTrace
from tests.pipeline.backends.pytorch.builders import (
    CLASSES,
    IMAGE,
    engine_of,
    source_of,
)
from tests.pipeline.benchmark.timeline import names_of_row, read_trace

ROWS = 3
WORKLOAD = Workload(
    sizes={"batch": ROWS, "sequence": 4},
    feeds={"image": np.ones((ROWS, 1, 8, 8), np.float32)},
    rows=ROWS,
)


def test_a_baseline_shows_its_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    engine = engine_of(source_of("residual_cnn", IMAGE), (CLASSES,), "eager", tmp_path)
    trace = trace_engine(engine, WORKLOAD)
    write_trace([trace], "", tmp_path / "trace.json")
    names = names_of_row(read_trace(tmp_path / "trace.json"), OPERATORS)
    assert names.count("aten::conv2d") % RUNS == 0
    assert names.count("aten::conv2d") >= RUNS
    assert trace.activity.starts == "measured"
    assert trace.activity.notes == ()


def built_and_traced(out: Path, progress: Progress) -> EngineTrace:
    engine = engine_of(source_of("residual_cnn", IMAGE), (CLASSES,), "eager", out)
    assert engine.is_on_gpu
    return trace_engine(engine, WORKLOAD)


@pytest.mark.gpu
def test_on_a_gpu_a_baseline_shows_kernels_and_copies(tmp_path: Path) -> None:
    trace = call_in_child(built_and_traced, tmp_path, name="trace")
    write_trace([trace], "", tmp_path / "trace.json")
    document = read_trace(tmp_path / "trace.json")
    rows = {event["cat"] for event in document["traceEvents"] if event["ph"] == "X"}
    assert {row.partition(",")[0] for row in rows} >= {"host calls", OPERATORS, "kernels", "copies"}
    copies: list[str] = []
    for row in rows:
        if row.startswith("copies"):
            copies += names_of_row(document, row)
    assert sum("HtoD" in name for name in copies) >= RUNS
    assert sum("DtoH" in name for name in copies) >= RUNS
    assert "enqueue" in names_of_row(document, "host calls")
    assert trace.nvtx


def test_every_backend_with_a_tracer_is_a_backend() -> None:
    assert set(backends.TRACERS) <= set(backends.BACKENDS)
    assert set(backends.BACKENDS) - set(backends.TRACERS) == {"tensorrt_rtx"}, "it runs no engine"
