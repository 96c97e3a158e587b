"""A delivered engine in a direct Session, without any server.

    python -m benchmarks.serving.engine ENGINE_FOLDER SIDE MAX_ROWS SECONDS

prints one line of JSON. What serving is held against: the latency of single rows, and the best rows
per second over batch sizes.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.measurement.clock import WarmUpOptions, measure_block, monotonic, warm_up
from pipeline.report.bundle import load_engine


def main(folder: str, side: str, most_rows: str, seconds: str) -> None:
    engine = load_engine(Path(folder))
    row = np.random.default_rng(0).random((1, 3, int(side), int(side)), np.float32)
    sizes = [2**power for power in range(int(most_rows).bit_length()) if 2**power <= int(most_rows)]
    with closing(backends.load(engine)) as loaded, closing(loaded.session()) as session:

        def measured(rows: int, for_s: float) -> list[float]:
            feeds = {engine.inputs[0].name: np.repeat(row, rows, axis=0)}
            warm_up(lambda: run_session(session, feeds), WarmUpOptions())
            return list(measure_block(lambda: run_session(session, feeds), min_s=for_s))

        start = monotonic()
        single = measured(1, float(seconds))
        per_s = {
            rows: rows / float(np.median(measured(rows, float(seconds) / len(sizes))))
            for rows in sizes
        }
    print(json.dumps({"latencies_s": single, "per_s": per_s, "wall_s": monotonic() - start}))


if __name__ == "__main__":
    main(*sys.argv[1:])
