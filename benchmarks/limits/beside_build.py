"""One engine's time on the first GPU, alone and while another process compiles on the second.

Stretches of `alone` lie before and after those of `beside`, so that a drift of the clock shows.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from numpy.typing import NDArray

from benchmarks.common import ROOT, Row
from benchmarks.serving.crucible import own_environment
from benchmarks.serving.models import INPUT
from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.core.progress import Progress, silent
from pipeline.execution.child_process import TimeLimit, call_in_child
from pipeline.measurement.clock import WarmUpOptions, measure_block, warm_up
from pipeline.report.bundle import load_engine

ALONE, BESIDE = "alone", "beside"
STRETCHES = 4  # alone, before and again after
LONGEST_S = 60.0  # of the compile
LIMIT_S = 240.0


def rows_beside(
    engine: Path, array: NDArray[Any], seconds: float, command: Sequence[str], log: Path, gpu: str
) -> list[Row]:
    """The rows `alone` and `beside`; the command sees only that GPU."""
    environment = {**own_environment(), "CUDA_VISIBLE_DEVICES": visible(gpu, os.environ)}
    taken: dict[str, list[float]] = call_in_child(
        stretches,
        engine,
        array,
        seconds,
        tuple(command),
        environment,
        log,
        name="beside a build",
        limit=TimeLimit(LIMIT_S),
    )
    alone = statistics.median(taken[ALONE])
    return [
        {
            "way": way,
            "p50_ms": statistics.median(medians) * 1e3,
            "lowest_ms": min(medians) * 1e3,
            "highest_ms": max(medians) * 1e3,
            "stretches": len(medians),
            "of_alone": statistics.median(medians) / alone,
        }
        for way, medians in taken.items()
    ]


def compile_command(model: Path, folder: Path) -> list[str]:
    """A compile that builds two engines, from nothing."""
    plan = {
        "name": "beside",
        "model": {"path": str(model)},
        "profiles": [{"batch": [1, 32, 64]}],
        "candidates": [
            {"backend": "tensorrt", "precision": "fp16"},
            {"backend": "tensorrt", "precision": "fp32"},
        ],
        "fallback": False,
        "benchmark": {"sizes": [{"batch": 1}], "duration_s": 0.3, "budget_s": 10},
    }
    file = folder / "beside.yaml"
    file.write_text(yaml.safe_dump(plan), encoding="utf-8")
    words = ["env", f"CRUCIBLE_HOME={folder / 'home'}", sys.executable, "-m", "pipeline.cli"]
    return [*words, "compile", str(file), f"--out={folder / 'out'}"]


def visible(gpu: str, variables: Mapping[str, str]) -> str:
    """What CUDA_VISIBLE_DEVICES names this GPU of ours in another process."""
    number = int(gpu.removeprefix("gpu:"))
    names = variables.get("CUDA_VISIBLE_DEVICES", "")
    return names.split(",")[number] if names else str(number)


def stretches(
    engine: Path,
    array: NDArray[Any],
    seconds: float,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    progress: Progress = silent,
) -> dict[str, list[float]]:
    """The median seconds of a run in each stretch, with the other process and without it. Runs in a
    child, which owns the GPU's context.
    """
    with (
        closing(backends.load(load_engine(engine))) as loaded,
        closing(loaded.session()) as session,
    ):
        run = partial(run_session, session, {INPUT: array})
        warm_up(run, WarmUpOptions(min_s=seconds))
        before = [median_of(run, seconds) for _ in range(STRETCHES)]
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command, cwd=ROOT, env=dict(environment), stdout=output, stderr=output
            ) as other,
        ):
            beside, end = [], time.monotonic() + LONGEST_S
            while other.poll() is None and time.monotonic() < end:
                beside.append(median_of(run, seconds))
            is_running = other.poll() is None
            other.terminate()
        if not is_running and other.returncode:
            raise RuntimeError(
                f"the other compile failed:\n{log.read_text(errors='replace')[-900:]}"
            )
        after = [median_of(run, seconds) for _ in range(STRETCHES)]
    return {ALONE: before + after, BESIDE: beside}


def median_of(run: Callable[[], object], seconds: float) -> float:
    return statistics.median(measure_block(run, min_s=seconds))
