"""A child that speaks the messages as job_worker does, and does what the job's name says: `python
worker_double.py FD`.

Imports nothing of ours, so that it starts at once; the frames are written by hand, as a stranger's
child could.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

LENGTHS = struct.Struct("<QQ")


def main(descriptor: int) -> None:
    server = socket.socket(fileno=descriptor)
    stream = server.makefile("rwb")

    def write(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    def hear() -> str:
        length, _ = LENGTHS.unpack(stream.read(LENGTHS.size))
        return stream.read(length).decode()

    start = json.loads(hear())
    work = Path(start["work"])
    name = json.loads(Path(start["plan"]).read_text())["name"]
    print(f"I am {name}", flush=True)
    faults = Faults(work, write, hear)
    faults.stage("build", "started")
    faults.do(name)


class Faults:
    """One method per name; a name may carry seconds: `succeed-0.3`."""

    def __init__(self, work, write, hear) -> None:  # type: ignore[no-untyped-def]
        self.work, self.write, self.hear = work, write, hear

    def do(self, name: str) -> None:
        what, _, seconds = name.partition("-")
        time.sleep(float(seconds or 0))
        getattr(self, what)()

    def say(self, **message: object) -> None:
        head = json.dumps(message).encode()
        self.write(LENGTHS.pack(len(head), 0) + head)

    def stage(self, stage: str, state: str, **details: object) -> None:
        self.say(kind="stage", event={"stage": stage, "state": state, **details})

    def succeed(self) -> None:
        """Copies the report that the test laid beside the plan."""
        self.stage("build", "finished", seconds=0.1)
        template = self.work.parents[1] / "template"
        subprocess.run(["cp", "-r", str(template), str(self.work / "out")], check=True)
        self.say(kind="finished")

    def gated(self) -> None:
        """Succeeds once the file `go` is in the home."""
        while not (self.work.parents[1] / "go").exists():
            time.sleep(0.05)
        self.succeed()

    def share(self) -> None:
        """Makes the artifact of the template, unless another job has made it. Says which. Makes it
        once the file `go` is in the home.
        """
        (made,) = (self.work.parents[1] / "template-store" / "artifacts" / "build").iterdir()
        answer = "wait"
        while answer == "wait":
            self.say(kind="seeks", stage="build", key=made.name)
            answer = json.loads(self.hear())["answer"]
            time.sleep(0.05)
        self.stage("share", "finished", text=answer)
        if answer == "make":
            while not (self.work.parents[1] / "go").exists():
                time.sleep(0.05)
            own = self.work / "home" / "artifacts" / "build"
            own.mkdir(parents=True)
            subprocess.run(["cp", "-r", str(made), str(own)], check=True)
            self.say(kind="made", stage="build", key=made.name)
        else:
            assert (self.work.parents[1] / "artifacts" / "build" / made.name).is_dir()
        self.succeed()

    def figures(self, label: str, **figures: object) -> None:
        figures = {"label": label, "precision": "int8", **figures}
        self.stage("benchmark", "progress", fraction=0.5, figures=figures)

    def race(self) -> None:
        """Measures two engines, the second once the file `second` is in the home; never ends."""
        shown = {"shape": "batch 8"}
        times = {"median_s": 0.004, "low_s": 0.003, "high_s": 0.005, **shown}
        self.figures("eager <b>", is_baseline=True, latency=times)
        drop = {"measure": "top1", "drop": 0.01, "low": 0.0, "high": 0.02, "passed": True}
        self.figures("fast <b>", accuracy=drop)
        while not (self.work.parents[1] / "second").exists():
            time.sleep(0.05)
        times = {"median_s": 0.002, "low_s": 0.001, "high_s": 0.003, **shown}
        self.figures("fast <b>", latency=times)
        time.sleep(600)

    def invent(self) -> None:
        """Sends figures that no engine has."""
        self.figures("fast", latency={"median_s": -1, "low_s": 1, "high_s": 1, "shape": ""})
        time.sleep(600)

    def measure(self) -> None:
        self.say(kind="wants")
        granted = json.loads(self.hear())
        self.stage("benchmark", "finished", text=json.dumps(granted))
        self.say(kind="returns")
        self.stage("validate", "finished", text=self.hear())
        self.succeed()

    def fail(self) -> None:
        self.say(
            kind="failed", code="model.invalid", message="no such model", next_step="send another"
        )

    def hang(self) -> None:
        time.sleep(600)

    def deaf(self) -> None:
        """Ignores SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)

    def grandchild(self) -> None:
        """One that has left the session, and one whose parent has gone."""
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        subprocess.run(["sh", "-c", "setsid sleep 600 & "], check=True)
        self.stage("grandchild", "started")
        time.sleep(600)

    def eat(self) -> None:
        """1 GB/s."""
        blocks = []
        while True:
            blocks.append(b"x" * 100_000_000)
            time.sleep(0.1)

    def fill(self) -> None:
        with (self.work / "tmp" / "large").open("wb") as file:
            while True:
                file.write(b"x" * 1_000_000)
                file.flush()
                time.sleep(0.001)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self) -> None:
        sys.exit(3)

    def huge(self) -> None:
        """A length that no memory holds."""
        self.write(LENGTHS.pack(2**63, 0))
        time.sleep(600)

    def body(self) -> None:
        """A body, which no message has."""
        self.write(LENGTHS.pack(2, 1) + b"{}x")
        time.sleep(600)

    def half(self) -> None:
        """Half a frame, and then nothing."""
        self.write(LENGTHS.pack(100, 0) + b'{"kind": ')

    def babble(self) -> None:
        self.write(LENGTHS.pack(5, 0) + b"hello")
        time.sleep(600)

    def rubbish(self) -> None:
        self.stage("x" * 200_000, "started")
        time.sleep(600)

    def lie(self) -> None:
        """Says that it has finished, and there is nothing."""
        self.say(kind="finished")

    def chatter(self) -> None:
        """Progress without end, for a while."""
        for number in range(500):
            self.stage("build", "progress", fraction=number / 500)
        self.succeed()

    def flood(self) -> None:
        """What counts, without end."""
        while True:
            self.say(kind="returns")


if __name__ == "__main__":
    main(int(sys.argv[1]))
