"""A service under load for long, with jobs that compile beside it: nothing may be lost, wrong, or
grow.

    python -m benchmarks soak [--minutes M] [--requests N] [--into DIR]

Until both are reached, sixteen connections ask one small model, each request with a number and an
input of its own, while models with other weights are compiled one after another. Each answer is
held against what the same engine gave in a direct Session before: bit for bit, for its input in a
batch of as many rows as ran together, at any place of it; what differs must stay within TOLERANCE.
Memory and descriptors of the server and of its worker at the end are held against those after the
first 10,000 requests.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import RESULTS, Row, argument_parser, beside, publish
from benchmarks.serving.client import drive, http_request
from benchmarks.serving.crucible import (
    MODEL,
    deploy,
    engine_folder,
    finished,
    plan_of,
    serving,
    submitted,
)
from benchmarks.serving.models import OUTPUT, image, oip_body, write_small
from benchmarks.serving.processes import descendants
from pipeline import backends
from pipeline.backends.base import run_session
from pipeline.report.bundle import load_engine
from service.client import Client

CONNECTIONS, MAX_ROWS, INPUTS, SIDE = 16, 16, 16, 16
SETTLED = 10_000  # requests after which memory is held to be what it will be
MAX_GROWTH, MIN_MEAN_BATCH, TOLERANCE = 0.05, 2.0, 1e-5
NUMBER = "{:012d}"  # of a request: always as long
HEAD_LENGTH = b"inference-header-content-length:"

Answers = Mapping[
    tuple[int, int], frozenset[bytes]
]  # by input and rows: what a direct Session gives, at each place of the batch


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    with tempfile.TemporaryDirectory(prefix="crucible-soak-") as text:
        folder = Path(text)
        home = folder / "home"
        with serving(home) as served, Client(served.url) as client:
            job = deploy(
                client, write_small(folder / "model.onnx", seed=0), plan_of("soak", MAX_ROWS)
            )
            soak = Soak(
                served.port,
                direct_answers(engine_folder(home, job)),
                arguments.minutes * 60,
                arguments.requests,
            )
            soak.watch = Watch(served.process)
            jobs: Counter[str] = Counter()
            with compiling(served.url, folder, jobs):
                drive(served.port, CONNECTIONS, soak)
    publish(
        "soak",
        [row_of(soak, jobs)],
        targets_of(soak, jobs, arguments.minutes, arguments.requests),
        arguments.into,
    )
    if soak.faults:
        sys.exit("\n".join(soak.faults[:10]))


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where the result goes"
    )
    return parser.parse_args(words)


# -- what is right -----------------------------------------------------------


def direct_answers(engine_root: Path) -> Answers:
    """What the engine gives for every input in a batch of every size, at every place in it."""
    engine = load_engine(engine_root)
    images = np.concatenate([image(SIDE, seed) for seed in range(INPUTS)])
    found: dict[tuple[int, int], set[bytes]] = {}
    with closing(backends.load(engine)) as loaded, closing(loaded.session()) as session:
        for rows in range(1, MAX_ROWS + 1):
            for first in range(INPUTS):
                chosen = [(first + place) % INPUTS for place in range(rows)]
                out = run_session(session, {engine.inputs[0].name: images[chosen]})[OUTPUT]
                for row, number in enumerate(chosen):
                    found.setdefault((number, rows), set()).add(out[row].tobytes())
    return {key: frozenset(values) for key, values in found.items()}


# -- the load ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """What the server and its workers hold."""

    server_bytes: int
    worker_bytes: int
    descriptors: int


NOTHING = Held(0, 0, 0)


@dataclass(slots=True)
class Watch:
    """The processes that serve: the server, and those that run the model. Jobs come and go, and are
    no part of it.
    """

    server: psutil.Process
    workers: list[psutil.Process] = field(init=False)

    def __post_init__(self) -> None:
        self.workers = [
            each for each in descendants(self.server) if "service.serving.worker" in each.cmdline()
        ]

    def now(self) -> Held:
        """NoSuchProcess if one of them is gone."""
        descriptors = sum(each.num_fds() for each in (self.server, *self.workers))
        return Held(
            self.server.memory_info().rss,
            sum(each.memory_info().rss for each in self.workers),
            descriptors,
        )


@dataclass(slots=True)
class Soak:
    """Requests with numbers, and what came of each."""

    port: int
    right: Answers
    seconds: float
    requests: int
    watch: Watch | None = None
    asked: int = 0
    got: int = 0  # answers
    identical: int = 0
    rows: Counter[int] = field(default_factory=Counter)  # answers by the rows that ran together
    largest: float = 0.0  # difference from the direct answer
    latencies_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    settled: Held | None = None
    end: Held | None = None
    begun: float = field(default_factory=time.monotonic)
    bodies: list[tuple[bytes, dict[str, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = [
            oip_body(image(SIDE, seed), request_id=NUMBER.format(0)) for seed in range(INPUTS)
        ]

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun

    def next(self) -> tuple[int, bytes] | None:
        if (self.elapsed_s >= self.seconds and self.asked >= self.requests) or len(
            self.faults
        ) > 100:
            if self.end is None and self.watch is not None:
                self.end = (
                    self.watch.now()
                )  # the connections are still open, as they were at `settled`
            return None
        self.asked += 1
        body, headers = self.bodies[self.asked % INPUTS]
        named = body.replace(NUMBER.format(0).encode(), NUMBER.format(self.asked).encode(), 1)
        return self.asked, http_request(self.port, f"/v2/models/{MODEL}/infer", named, headers)

    def check(self, number: int, head: bytes, body: memoryview) -> None:
        """Hold one answer against the direct one."""
        lowered = head.lower()
        begin = lowered.index(HEAD_LENGTH) + len(HEAD_LENGTH)
        length = int(lowered[begin : lowered.index(b"\r\n", begin)])
        told = json.loads(bytes(body[:length]))
        if told["id"] != NUMBER.format(number):
            raise ValueError(f"request {number} got the answer of {told['id']}")
        rows, values = int(told["parameters"]["batch_size"]), bytes(body[length:])
        self.rows[rows] += 1
        right = self.right[number % INPUTS, rows]
        if values in right:
            self.identical += 1
            return
        difference = min(
            float(np.abs(np.frombuffer(values, np.float32) - np.frombuffer(each, np.float32)).max())
            for each in right
        )
        self.largest = max(self.largest, difference)
        if rows == 1 or not difference <= TOLERANCE:
            raise ValueError(
                f"request {number}, {rows} rows: {difference:g} from what a direct Session gives"
            )

    def answered(
        self, number: int, status: int, head: bytes, body: memoryview, seconds: float
    ) -> None:
        self.got += 1
        self.latencies_s.append(seconds)
        try:
            if status != 200:
                raise ValueError(
                    f"request {number}: {status} {bytes(body[:200]).decode(errors='replace')}"
                )
            self.check(number, head, body)
        except (ValueError, KeyError) as error:
            self.faults.append(str(error))
        if self.got == self.settled_after and self.watch is not None:
            self.settled = self.watch.now()

    @property
    def settled_after(self) -> int:
        return min(SETTLED, max(1, self.requests // 2))

    def lost(self, number: int, why: str) -> None:
        self.faults.append(f"request {number} is lost: {why}")


# -- jobs beside it ----------------------------------------------------------


@contextlib.contextmanager
def compiling(url: str, folder: Path, ended: Counter[str]) -> Iterator[None]:
    """One job after another, each of a model of its own, until the block ends and the last one with
    it; `ended` counts their states.
    """
    seeds = itertools.count(1)
    with Client(url) as client:

        def one() -> None:
            name = f"beside{(seed := next(seeds))}"
            ended[
                finished(
                    client,
                    submitted(
                        client, write_small(folder / f"{name}.onnx", seed), plan_of(name, MAX_ROWS)
                    ),
                )
            ] += 1

        with beside(one):
            yield


# -- what came of it ---------------------------------------------------------


def mean_batch(rows: Mapping[int, int]) -> float:
    """Rows per run of the engine, from how many answers came of runs with so many rows."""
    return sum(rows.values()) / sum(count / size for size, count in rows.items()) if rows else 0.0


def growth(now: int, settled: int) -> float:
    """Not a number where nothing was measured, which meets no target."""
    return now / settled - 1 if now and settled else math.nan


def row_of(soak: Soak, jobs: Mapping[str, int]) -> Row:
    settled, end, cuts = (
        soak.settled or NOTHING,
        soak.end or NOTHING,
        statistics.quantiles(soak.latencies_s, n=100),
    )
    return {
        "requests": soak.got,
        "minutes": soak.elapsed_s / 60,
        "per_s": soak.got / soak.elapsed_s,
        "p50_ms": cuts[49] * 1e3,
        "p99_ms": cuts[98] * 1e3,
        "mean_batch": mean_batch(soak.rows),
        "identical": soak.identical / soak.got,
        "largest_difference": soak.largest,
        "server_mb_settled": settled.server_bytes / 1e6,
        "server_mb": end.server_bytes / 1e6,
        "worker_mb_settled": settled.worker_bytes / 1e6,
        "worker_mb": end.worker_bytes / 1e6,
        "descriptors_settled": settled.descriptors,
        "descriptors": end.descriptors,
        "jobs": told(jobs),
    }


def targets_of(
    soak: Soak, jobs: Mapping[str, int], minutes: float, requests: int
) -> dict[str, bool]:
    settled, end, batch = soak.settled or NOTHING, soak.end or NOTHING, mean_batch(soak.rows)
    alone, lost = soak.rows.get(1, 0), soak.asked - soak.got
    targets = {
        (
            f"{minutes:g} minutes and {requests:,} requests (got {soak.elapsed_s / 60:.1f} and"
            f" {soak.got:,})"
        ): soak.elapsed_s >= minutes * 60 and soak.got >= requests,
        (
            "no error, none lost: each request has its own answer"
            f" (got {len(soak.faults)} faults, {lost} lost)"
        ): not soak.faults and lost == 0,
        (
            f"as in a direct Session: bit for bit where a request ran alone ({alone:,}), else"
            f" within {TOLERANCE:g} (got {soak.largest:.3g})"
        ): soak.largest <= TOLERANCE and not soak.faults,
        f"more than {MIN_MEAN_BATCH:g} rows run together in the mean (got {batch:.2f})": (
            batch > MIN_MEAN_BATCH
        ),
        f"jobs compiled beside it, none failed ({told(jobs)})": (
            jobs.get("succeeded", 0) > 0 and not jobs.get("failed", 0)
        ),
    }
    for name, now, before in (
        ("the server's memory", end.server_bytes, settled.server_bytes),
        ("the worker's memory", end.worker_bytes, settled.worker_bytes),
        ("descriptors", end.descriptors, settled.descriptors),
    ):
        grown = growth(now, before)
        targets[
            f"{name}: at most {MAX_GROWTH:.0%} more than after {soak.settled_after:,} requests"
            f" (got {grown:+.1%})"
        ] = grown <= MAX_GROWTH
    return targets


def told(jobs: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(jobs.items())) or "none"
