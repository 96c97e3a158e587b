"""One server's turn: started alone, warmed up, asked on one connection and on sixteen, and
ended.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import ROOT
from benchmarks.serving.client import Fault, ask_once, http_request
from benchmarks.serving.crucible import MODEL, serving
from benchmarks.serving.models import image, oip_body
from benchmarks.serving.peers_list import HERE, Peer
from benchmarks.serving.processes import (
    Cpu,
    NotStarted,
    clean_environment,
    cpu_of,
    free_port,
    running,
    wait_until,
)

MANY, WARM_UP_S = 16, 1.0
# of the largest value that is expected: kernels of other devices add up in other orders, and a
# wrong answer is further off
TOLERANCE = 5e-3


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of every server."""

    name: str
    model: str  # what a peer is given: `echo`, or the path of an ONNX file
    side: int
    expected: bytes  # float32
    tolerance: float


@dataclass(frozen=True, slots=True)
class Up:
    """A server that runs."""

    process: psutil.Process
    port: int
    path: str
    oip: bool

    def request(self, load: Load) -> bytes:
        body, headers = oip_body(image(load.side)) if self.oip else (image(load.side).tobytes(), {})
        return http_request(self.port, self.path, body, headers)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn gave. CPU seconds and requests are those of the time with many connections."""

    single_s: tuple[float, ...]  # latencies on one connection
    stages_ms: Mapping[str, float]  # of those: where the server says that the time went
    stages_of_many_ms: Mapping[str, float]
    per_s: float
    requests: int
    client_s: float
    client_share: float  # of one core
    cpu: Cpu
    faults: tuple[str, ...]


Start = Callable[[Load, Path], contextlib.AbstractContextManager[Up]]


def peer_starter(peer: Peer, python: Path) -> Start:
    """Starts a peer, in a folder for its log."""

    @contextlib.contextmanager
    def start(load: Load, folder: Path) -> Iterator[Up]:
        port, log = free_port(), folder / f"{peer.script}.log"
        environ = clean_environment(python.parent, **peer.environ)
        with running(
            [python, HERE / "peers" / peer.script, load.model, str(port)], log, environ, cwd=folder
        ) as process:
            up = Up(process, port, peer.path, peer.oip)
            wait_until(lambda: answers(up, load), process, log)
            yield up

    return start


def crucible_starter(homes: dict[str, Path]) -> Start:
    """Starts `crucible serve` on the home where the load's model is deployed."""

    @contextlib.contextmanager
    def start(load: Load, folder: Path) -> Iterator[Up]:
        with serving(homes[load.name]) as served:
            up = Up(served.process, served.port, f"/v2/models/{MODEL}/infer", oip=True)
            wait_until(lambda: answers(up, load), served.process, served.log)
            yield up

    return start


def answers(up: Up, load: Load) -> bool:
    try:
        return ask_once(up.port, up.request(load))[0] == 200
    except (OSError, Fault):
        return False


def turn(start: Start, load: Load, seconds: float, folder: Path) -> Turn:
    """One turn; NotStarted if the server does not come up, or gives no right answer."""
    with start(load, folder) as up:
        request, expected = folder / "request", folder / "expected"
        request.write_bytes(up.request(load))
        expected.write_bytes(load.expected)

        def asked(connections: int, for_s: float) -> dict[str, Any]:
            words = [
                str(request),
                str(expected),
                str(load.tolerance),
                str(up.port),
                str(connections),
                str(for_s),
            ]
            done = subprocess.run(
                [sys.executable, str(HERE / "client.py"), *words],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            return dict(json.loads(done.stdout))

        asked(MANY, WARM_UP_S)
        single = asked(1, seconds)
        before = cpu_of(up.process, up.port)
        many = asked(MANY, seconds)
        cpu = cpu_of(up.process, up.port) - before
    answered = len(many["latencies_s"])
    faults = (*single["first_faults"], *many["first_faults"])
    if not single["latencies_s"] or not answered:
        raise NotStarted(f"no right answer: {'; '.join(faults)}")
    share = many["cpu_s"] / many["wall_s"]
    latencies_s, stages = tuple(single["latencies_s"]), (single["stages_ms"], many["stages_ms"])
    return Turn(
        latencies_s, *stages, answered / many["wall_s"], answered, many["cpu_s"], share, cpu, faults
    )


def engine_turn(engine: Path, side: int, most_rows: int, seconds: float) -> dict[str, Any]:
    """The engine in a direct Session: latencies of single rows, and rows per second by batch."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.serving.engine",
        str(engine),
        str(side),
        str(most_rows),
        str(seconds),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def expected_of(model: Path, side: int) -> bytes:
    """What ONNX Runtime gives for the image that is sent."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: image(side)})
    return np.asarray(found).tobytes()


def tolerance_of(expected: bytes) -> float:
    """How far an answer may be from the expected one."""
    return float(TOLERANCE * np.abs(np.frombuffer(expected, np.float32)).max())


__all__ = [
    "Load",
    "NotStarted",
    "Start",
    "Turn",
    "Up",
    "crucible_starter",
    "engine_turn",
    "expected_of",
    "peer_starter",
    "tolerance_of",
    "turn",
]
