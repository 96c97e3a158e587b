"""What our Session costs over calling the library itself: the same graph, the same threads, block
by block in one process.

A process of its own per library, so that two thread pools never meet; inside it our session and the
library's own call take turns in random order, each from host arrays to host arrays. `--one BACKEND
PLAN` is that process.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from benchmarks.common import DIGITS, RESNET50, Row, graph_of, publish, takes_no_arguments
from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.host.environment import usable_cores
from pipeline.measurement.clock import (
    Samples,
    WarmUpOptions,
    measure_block,
    samples_from_blocks,
    thinned,
    warm_up,
)
from pipeline.measurement.statistics import ratio_of_medians
from pipeline.onnx_graph.feeds import draw_feeds

ROUNDS, BLOCK_S = 16, 0.5
MAX_RATIO, MAX_EXTRA_US = 1.03, 20.0


def main(words: Sequence[str]) -> None:
    if words[:1] == ["--one"]:
        print(json.dumps(compare(words[1], Path(words[2]))))
        return
    takes_no_arguments("session_overhead", __doc__, words)
    rows = [
        measure(backend, plan)
        for plan in (RESNET50, DIGITS)
        for backend in ("onnxruntime", "openvino")
    ]
    targets = {}
    for row in rows:
        name = f"{row['backend']} on {row['model']}"
        if row["model"] == RESNET50.stem:
            targets[f"{name}: at most {MAX_RATIO}x (got {row['ratio']:.4f}x)"] = (
                float(row["ratio"] or 0) <= MAX_RATIO
            )
        else:
            targets[f"{name}: at most {MAX_EXTRA_US:g} us more (got {row['extra_us']:.2f} us)"] = (
                float(row["extra_us"] or 0) <= MAX_EXTRA_US
            )
    publish("session_overhead", rows, targets)


def measure(backend: str, plan: Path) -> Row:
    """One backend and model, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "session_overhead", "--one", backend, str(plan)]
    row: Row = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[
            -1
        ]
    )
    return row


def compare(backend: str, plan_path: Path) -> Row:
    """Our session against the library's own call, interleaved."""
    plan, model = graph_of(plan_path)
    threads = usable_cores()
    feeds = draw_feeds(model.inputs, plan.profiles[0].sizes("min"), seed=0)  # batch 1
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(backend=backend, precision=Precision.FP32)
        engine = backends.backend(backend).build(
            model,
            recipe,
            BuildOptions(profiles=plan.profiles, threads=threads),
            Path(folder),
            lambda *_: None,
        )
        assert isinstance(engine, Engine)
        with closing(backends.load(engine)) as loaded, closing(loaded.session()) as session:
            contestants = (
                partial(run_session, session, feeds),
                DIRECT[backend](model.path, threads, feeds),
            )
            ours, direct = race(contestants)
    ratio = ratio_of_medians(ours, direct)
    return {
        "model": plan_path.stem,
        "backend": backend,
        "ours_us": ours.median_s * 1e6,
        "direct_us": direct.median_s * 1e6,
        "extra_us": (ours.median_s - direct.median_s) * 1e6,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }


def race(contestants: Sequence[Callable[[], object]]) -> list[Samples]:
    """A block of each per round, in random order; samples of each."""
    for run in contestants:
        warm_up(run, WarmUpOptions())
    order = random.Random(0)
    blocks: list[list[tuple[float, ...]]] = [[] for _ in contestants]
    for _ in range(ROUNDS):
        for index in order.sample(range(len(contestants)), len(contestants)):
            blocks[index].append(thinned(measure_block(contestants[index], min_s=BLOCK_S), 2000))
    return [samples_from_blocks(taken, ()) for taken in blocks]


def direct_onnxruntime(model: Path, threads: int, feeds: Tensors) -> Callable[[], None]:
    """The call as ONNX Runtime's documentation shows it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, feeds)


def direct_openvino(model: Path, threads: int, feeds: Tensors) -> Callable[[], None]:
    """The call as OpenVINO's documentation shows it, in true fp32 as ours is."""
    import openvino

    config = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = openvino.Core().compile_model(str(model), "CPU", config)
    return lambda: compiled(feeds)


DIRECT = {"onnxruntime": direct_onnxruntime, "openvino": direct_openvino}
