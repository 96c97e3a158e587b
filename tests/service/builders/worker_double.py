"""A child that speaks the messages as job_worker does, and does what the job's name says: `python
worker_double.py FD`.

Imports nothing of ours, so that it starts at once; the lines are written by hand, as a stranger's
child could.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def main(descriptor: int) -> None:
    server = socket.socket(fileno=descriptor)
    reader, writer = server.makefile("r"), server.makefile("w")

    def say(**message: object) -> None:
        writer.write(json.dumps(message) + "\n")
        writer.flush()

    start = json.loads(reader.readline())
    work = Path(start["work"])
    name = json.loads(Path(start["plan"]).read_text())["name"]
    print(f"I am {name}", flush=True)
    say(kind="stage", stage="build", state="started")
    Faults(work, say, reader.readline).do(name)


class Faults:
    """One method per name; a name may carry seconds: `succeed-0.3`."""

    def __init__(self, work, say, hear) -> None:  # type: ignore[no-untyped-def]
        self.work, self.say, self.hear = work, say, hear

    def do(self, name: str) -> None:
        what, _, seconds = name.partition("-")
        time.sleep(float(seconds or 0))
        getattr(self, what)()

    def succeed(self) -> None:
        """Copies the report that the test laid beside the plan."""
        self.say(kind="stage", stage="build", state="finished", seconds=0.1)
        template = self.work.parents[1] / "template"
        subprocess.run(["cp", "-r", str(template), str(self.work / "out")], check=True)
        self.say(kind="finished")

    def measure(self) -> None:
        self.say(kind="wants")
        granted = json.loads(self.hear())
        self.say(kind="stage", stage="benchmark", state="finished", text=json.dumps(granted))
        self.say(kind="returns")
        self.say(kind="stage", stage="validate", state="finished", text=self.hear())
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
        self.say(kind="stage", stage="grandchild", state="started")
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

    def rubbish(self) -> None:
        self.say(kind="stage", stage="x" * 200_000, state="started")
        time.sleep(600)

    def lie(self) -> None:
        """Says that it has finished, and there is nothing."""
        self.say(kind="finished")

    def chatter(self) -> None:
        """Progress without end, for a while."""
        for number in range(500):
            self.say(kind="stage", stage="build", state="progress", fraction=number / 500)
        self.succeed()

    def flood(self) -> None:
        """What counts, without end."""
        while True:
            self.say(kind="returns")


if __name__ == "__main__":
    main(int(sys.argv[1]))
