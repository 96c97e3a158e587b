"""Run every benchmark here, one after another; the last line is one JSON document with all
results.
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.common import takes_no_arguments

SCRIPTS = (
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
OF_THE_SERVICE = ("service_memory", "json_beside_binary", "serving")


def main() -> None:
    results = {}
    for name in SCRIPTS:
        print(f"== {name}", flush=True)
        folder = "serving" if name in OF_THE_SERVICE else "cpu"
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{folder}.{name}"],
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


if __name__ == "__main__":
    takes_no_arguments(__doc__)
    main()
