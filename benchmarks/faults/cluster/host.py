"""A host of the cluster:

    python -m benchmarks.faults.cluster.host KIND NAME HOME PORT RUNS TEMPLATE

KIND is `server`, which is `crucible serve`, or `node`, which is `crucible node start`. Both have
job_worker.py for their jobs, and the labels `host` and `kind` on their CPU.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import SupportsIndex

from service.cli.node_process import run_node
from service.jobs.messages import HostIdentity
from service.jobs.nodes import Kind
from service.server import serve
from service.settings import settings_from

JOB_WORKER = Path(__file__).with_name("job_worker.py")
REAL_MONOTONIC = "FAKETIME_DONT_FAKE_MONOTONIC"  # set where the clock is wrong
CANDIDATES = {"onnxruntime fp32": ""}


def main(kind: Kind, name: str, home: str, port: str, runs: str, template: str) -> None:
    worker = (sys.executable, str(JOB_WORKER), runs, template)
    labels = {"cpu": {"host": name, "kind": kind}}

    async def known_host() -> HostIdentity:
        return HostIdentity(
            devices={"cpu": "a CPU"}, digest="h", candidates=CANDIDATES, labels=labels
        )

    # the double writes outside of the folders that a sandbox would leave it
    settings = settings_from(
        os.environ, home=Path(home), port=int(port), grpc=False, sandbox="off", log_format="text"
    )
    if kind == "server":
        serve(settings, worker, known_host)
    else:
        run_node(settings, worker=worker, probe=known_host)


def sleep(seconds: float | SupportsIndex) -> None:
    """Sleep without clock_nanosleep, which fails with EINVAL in libfaketime 0.9.10 where it leaves
    monotonic clocks as they are.
    """
    threading.Event().wait(float(seconds))


if __name__ == "__main__":
    if REAL_MONOTONIC in os.environ:
        time.sleep = sleep
    kind, *words = sys.argv[1:]
    main("server" if kind == "server" else "node", *words)
