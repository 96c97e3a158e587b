"""Run every benchmark of a CPU, one after another. The last line is one JSON document with all
results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.common import takes_no_arguments

NAMES = (
    "peak",  # first: the shares of the rows are of these peaks
    "compile_time",
    "verdicts",
    "resnet50",
    "session_overhead",
    "same_engine",
    "synthetic_clock",
    "pitfalls",
    "calibration_memory",
    "calibration",
    "few_bits",
    "plain_attention",
    "service_memory",
    "json_beside_binary",
    "serving",
)


def main(words: Sequence[str]) -> None:
    takes_no_arguments("run_all", __doc__, words)
    results = {}
    for name in NAMES:
        print(f"== {name}", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", name],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        *shown, last = done.stdout.splitlines() or [""]
        print("\n".join(shown), flush=True)
        results[name] = (
            json.loads(last) if done.returncode == 0 else {"failed": f"exit code {done.returncode}"}
        )
    print(json.dumps(results))
    sys.exit(any("failed" in result for result in results.values()))
