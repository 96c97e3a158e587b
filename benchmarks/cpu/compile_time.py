"""Wall time of the demo's `crucible compile configs/digits.yaml`, whole process: with an empty
store, and with everything in it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.common import DIGITS, Row, publish, takes_no_arguments
from pipeline.measurement.clock import measure_block

COLD_S, WARM_S = 60.0, 2.0
WARM_RUNS = 5


def main(words: Sequence[str]) -> None:
    takes_no_arguments("compile_time", __doc__, words)
    with tempfile.TemporaryDirectory() as home:
        command = [
            sys.executable,
            "-m",
            "pipeline.cli",
            "compile",
            str(DIGITS),
            "--out",
            f"{home}/out",
            "--json",
        ]

        kept = {
            name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
        }  # Python keeps bytecode unless told not to

        def run() -> None:
            subprocess.run(
                command,
                check=True,
                stdout=subprocess.DEVNULL,
                env={**kept, "CRUCIBLE_HOME": f"{home}/store"},
            )

        (cold_s,) = measure_block(run, min_s=0)
        warm_s = sorted(measure_block(run, min_s=0, min_runs=WARM_RUNS))
    median_s = warm_s[WARM_RUNS // 2]
    rows: list[Row] = [
        {"store": "empty", "runs": 1, "seconds": cold_s},
        {"store": "full", "runs": WARM_RUNS, "seconds": median_s},
    ]
    targets = {
        f"cold at most {COLD_S:g} s (got {cold_s:.1f})": cold_s <= COLD_S,
        f"warm at most {WARM_S:g} s (got {median_s:.2f})": median_s <= WARM_S,
    }
    publish("compile_time", rows, targets)
