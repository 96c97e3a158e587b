"""What careless measuring costs on this host, each mistake beside what Crucible does instead.
ResNet-50, batch 1; takes about two minutes.

One process holds the same ONNX Runtime engine twice, and one of OpenVINO: nobody works unless this
benchmark says so.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.common import RESNET50, Row, beside, graph_of, publish, takes_no_arguments
from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.core.artifacts import BuildOptions, Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors
from pipeline.host.environment import usable_cores
from pipeline.measurement.clock import WarmUpOptions, measure_block, samples_from_blocks, warm_up
from pipeline.measurement.statistics import ratio_of_medians
from pipeline.onnx_graph.feeds import draw_feeds

COMPARISONS, BLOCKS, BLOCK_S = 10, 6, 0.25
ROUNDS, FEW_RUNS = 20, 10
HELD_MB = 400
ONE_AFTER_THE_OTHER, TWO_AT_ONCE, COLD_CACHES = "one after the other", "two at once", "cold caches"
MEDIANS = (TWO_AT_ONCE, COLD_CACHES)  # mistakes whose figures are medians of times
CHILD = (
    "import resource; from pipeline.host.environment import peak_memory_bytes as own;"
    " print(resource.getrusage(0).ru_maxrss * 1024, own())"
)
PARENT = (
    f"import subprocess, sys; held = b'1' * {HELD_MB}_000_000; subprocess.run([sys.executable,"
    f" '-c', {CHILD!r}], check=True)"
)

Run = Callable[[], object]


def main(words: Sequence[str]) -> None:
    takes_no_arguments("pitfalls", __doc__, words)
    with ExitStack() as stack:
        first, second, other = load(stack)
        rows = [
            one_after_the_other(first, second),
            two_at_once(first, other),
            cold_caches(first, other),
            peak_of_a_child(),
        ]
    publish("pitfalls", rows, targets_of(rows))


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    """Whether each mistake shows.

    Medians of times have to differ by more than one engine differs from itself on this host, else
    noise would do.
    """
    figures = {
        str(row["mistake"]): (float(row["careless"] or 0), float(row["careful"] or 0))
        for row in rows
    }
    noise = 1 + figures[ONE_AFTER_THE_OTHER][1] / 100
    return {
        f"{mistake}: seen on this host": careless > careful * (noise if mistake in MEDIANS else 1)
        for mistake, (careless, careful) in figures.items()
    }


def load(stack: ExitStack) -> list[Run]:
    """A run of ONNX Runtime's engine, of the same loaded again, and of OpenVINO's; all warmed
    up.
    """
    plan, model = graph_of(RESNET50)
    feeds = draw_feeds(model.inputs, plan.profiles[0].sizes("min"), seed=0)  # batch 1
    options = BuildOptions(profiles=plan.profiles, threads=usable_cores())
    engines = {}
    for name in ("onnxruntime", "openvino"):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines[name] = backends.backend(name).build(
            model, Recipe(backend=name, precision=Precision.FP32), options, folder, lambda *_: None
        )
    runs = [
        runner(stack, engines[name], feeds) for name in ("onnxruntime", "onnxruntime", "openvino")
    ]
    for run in runs:
        warm_up(run, WarmUpOptions())
    return runs


def runner(stack: ExitStack, engine: Engine, feeds: Tensors) -> Run:
    loaded = stack.enter_context(closing(backends.load(engine)))
    return partial(run_session, stack.enter_context(closing(loaded.session())), feeds)


def one_after_the_other(first: Run, second: Run) -> Row:
    """How far the ratio of one engine to itself lies from 1 at worst, of several comparisons of
    equal length.
    """
    far: dict[str, list[float]] = {"careless": [], "careful": []}
    for _ in range(COMPARISONS):
        whole = [measure_block(run, min_s=BLOCKS * BLOCK_S) for run in (first, second)]
        far["careless"].append(abs(float(np.median(whole[0]) / np.median(whole[1])) - 1))
        rounds = [
            [measure_block(run, min_s=BLOCK_S) for run in (first, second)] for _ in range(BLOCKS)
        ]
        taken = [samples_from_blocks([each[side] for each in rounds], ()) for side in (0, 1)]
        far["careful"].append(abs(ratio_of_medians(taken[0], taken[1]).value - 1))
    what = f"an engine against itself: how far the ratio lies from 1, the worst of {COMPARISONS}, %"
    times = {"careless": 100 * max(far["careless"]), "careful": 100 * max(far["careful"])}
    return {"mistake": ONE_AFTER_THE_OTHER, "figure": what, **times}


def two_at_once(run: Run, other: Run) -> Row:
    """The median while another engine runs beside it, and while that one waits; in turn, as a host
    changes.
    """
    together: list[float] = []
    alone: list[float] = []
    for _ in range(BLOCKS):
        alone += measure_block(run, min_s=BLOCK_S)
        with beside(other):  # libraries leave the interpreter to others while they compute
            together += measure_block(run, min_s=BLOCK_S)
    what = "a run while another engine runs, and while that one waits: medians, ms"
    return {
        "mistake": TWO_AT_ONCE,
        "figure": what,
        "careless": 1e3 * float(np.median(together)),
        "careful": 1e3 * float(np.median(alone)),
    }


def cold_caches(run: Run, other: Run) -> Row:
    """The first run after a block of another engine, and the runs behind it: medians over several
    rounds.
    """
    firsts, later = [], []
    for _ in range(ROUNDS):
        measure_block(other, min_s=BLOCK_S)
        first, *behind = measure_block(run, min_s=0, min_runs=FEW_RUNS)
        firsts.append(first)
        later += behind
    what = (
        f"the first run after another engine's block, and the {FEW_RUNS - 1} behind it: medians, ms"
    )
    return {
        "mistake": COLD_CACHES,
        "figure": what,
        "careless": 1e3 * float(np.median(firsts)),
        "careful": 1e3 * float(np.median(later)),
    }


def peak_of_a_child() -> Row:
    """What a small process says of its peak, started by one that holds much memory: ru_maxrss, and
    VmHWM.
    """
    printed = subprocess.run(
        [sys.executable, "-c", PARENT], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.split()
    inherited, own = (float(text) / 1e6 for text in printed)
    what = (
        f"peak of a Python that only imports numpy, started by one that holds {HELD_MB} MB:"
        " ru_maxrss, and VmHWM, MB"
    )
    return {
        "mistake": "peak memory of a child",
        "figure": what,
        "careless": inherited,
        "careful": own,
    }
