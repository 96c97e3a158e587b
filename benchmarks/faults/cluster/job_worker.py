"""The process of a job: `python job_worker.py RUNS TEMPLATE FD`. It writes down when it ran.

A job named `compile...` is compiled by the service's own worker. For any other, a double works for
WORK_S and delivers a copy of the report in TEMPLATE, with the name of this run in it. It imports
nothing of ours, so that it starts at once.

Each run appends the time to RUNS/<job>/<run> every STAMP_S: two runs of a job whose times overlap
ran at once. The time is that of the kernel since its start, which libfaketime does not change.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import struct
import sys
import threading
import time
from pathlib import Path

LENGTHS = struct.Struct("<QQ")
STAMP_S, WORK_S, STAGES = 0.05, 1.0, 4
LONG = "long"  # a job whose name begins so works for LONG_S
LONG_S = 20.0
COMPILE = "compile"
JOB = "CRUCIBLE_JOB"  # as service.sandbox.process_tree.MARK


def uptime_s() -> float:
    return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])


def stamp(file: Path) -> None:
    with file.open("a", encoding="ascii", buffering=1) as times:
        while True:
            times.write(f"{uptime_s()}\n")
            time.sleep(STAMP_S)


class Server:
    """The server's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._stream = socket.socket(fileno=descriptor).makefile("rwb")

    def receive(self) -> dict[str, str]:
        length, _ = LENGTHS.unpack(self._stream.read(LENGTHS.size))
        message: dict[str, str] = json.loads(self._stream.read(length))
        return message

    def send(self, **message: object) -> None:
        data = json.dumps(message).encode()
        self._stream.write(LENGTHS.pack(len(data), 0) + data)
        self._stream.flush()


def work(server: Server, run: str, template: Path) -> None:
    start = server.receive()
    name = json.loads(Path(start["plan"]).read_text(encoding="utf-8"))["name"]
    work_s = LONG_S if name.startswith(LONG) else WORK_S
    out = Path(start["work"]) / "out"
    server.send(kind="stage", event={"stage": "build", "state": "started"})
    for number in range(STAGES):
        time.sleep(work_s / STAGES)
        progress = {"stage": "build", "state": "progress", "fraction": (number + 1) / STAGES}
        server.send(kind="stage", event=progress)
    shutil.copytree(template, out)
    (out / "report.md").write_text(f"run {run}\n", encoding="utf-8")
    server.send(kind="stage", event={"stage": "build", "state": "finished", "seconds": work_s})
    server.send(kind="finished")


def main(runs: str, template: str, descriptor: str) -> None:
    job, run = os.environ[JOB], secrets.token_hex(8)
    folder = Path(runs) / job
    folder.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=stamp, args=(folder / run,), daemon=True).start()
    plan = Path(os.environ["CRUCIBLE_HOME"]).parents[2] / "uploads" / job / "plan.json"
    if json.loads(plan.read_text(encoding="utf-8"))["name"].startswith(COMPILE):
        from service.jobs import worker

        worker.main(int(descriptor))
    work(Server(int(descriptor)), run, Path(template))


if __name__ == "__main__":
    main(*sys.argv[1:])
