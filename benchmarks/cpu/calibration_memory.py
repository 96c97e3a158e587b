"""Peak memory of calibrating ResNet-50 with 64 and with 1,024 generated samples: it must not grow
with the set.

Every figure is the peak (VmHWM) of a fresh process that does nothing else. `--one METHOD SAMPLES`
is that process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import RESNET50, Row, graph_of, publish, takes_no_arguments
from pipeline.core.recipe import CalibrationMethod
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.host.environment import peak_memory_bytes
from pipeline.measurement.clock import monotonic
from pipeline.plan.schema import CalibrationConfig, GeneratedData
from pipeline.stages.calibrate import calibrate

FEW, MANY = 64, 1024
MAX_GROWTH = 1.2


def main(words: Sequence[str]) -> None:
    if words[:1] == ["--one"]:
        calibrate_once(CalibrationMethod(words[1]), int(words[2]))
        return
    takes_no_arguments("calibration_memory", __doc__, words)
    graph_of(RESNET50)  # exported now, so that the children find it in the store
    rows: list[Row] = []
    targets = {}
    for method in CalibrationMethod:
        few, many = measure(method, FEW), measure(method, MANY)
        growth = many[0] / few[0]
        rows.append(
            {
                "method": str(method),
                f"peak_mb_{FEW}": few[0] / 1e6,
                f"peak_mb_{MANY}": many[0] / 1e6,
                "growth": growth,
                f"seconds_{FEW}": few[1],
                f"seconds_{MANY}": many[1],
            }
        )
        targets[
            f"{method}: {MANY} samples take at most {MAX_GROWTH}x the memory of {FEW} (got"
            f" {growth:.3f}x)"
        ] = growth <= MAX_GROWTH
    publish("calibration_memory", rows, targets)


def measure(method: CalibrationMethod, samples: int) -> tuple[int, float]:
    """Peak bytes and seconds of one calibration, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "calibration_memory",
        "--one",
        str(method),
        str(samples),
    ]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return int(printed[-2]), float(printed[-1])


def calibrate_once(method: CalibrationMethod, samples: int) -> None:
    """Calibrate, and print peak bytes and seconds."""
    plan, model = graph_of(RESNET50)
    generated = GeneratedData(
        generate="random", samples=samples, because="memory is measured, not accuracy"
    )
    data = open_set(CalibrationSet, generated, model.inputs, plan.profiles)
    with tempfile.TemporaryDirectory() as folder:
        start = monotonic()
        calibrate(model, data, method, CalibrationConfig(), Path(folder))
        print(peak_memory_bytes(), monotonic() - start)
