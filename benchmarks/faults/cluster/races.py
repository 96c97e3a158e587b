"""Two processes after one job, build or publication at the same moment: one of them must win.

Each kind of race prepares its subject in the database, sends both processes their order for the
same moment, and compares what they say with the database and with the content of the files.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa

from benchmarks.faults.cluster.cluster import BUCKET, FILES_URL, RACERS, Cluster
from benchmarks.faults.cluster.racer import Kind, Order, Outcome
from benchmarks.serving.processes import end_of
from pipeline.report.bundle import load_engine
from service.devices.leases import utc_now
from service.jobs.state import Job, StaleEvent, Started, new_id
from service.jobs.store import JobStore
from service.storage.tables import files, jobs, versions
from tests.service.registry.test_repository import version

SOON_S = 0.004  # until both processes have read their orders
APART_S = 0.004  # at most, between the two moments
DEAD = "a dead server"


class Racer:
    """A process of racer.py."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self.name, home = name, cluster.folder / name
        home.mkdir()
        self._log = cluster.folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.faults.cluster.racer", str(home)],
                env=cluster.environment_of(name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._answer()  # that it is ready

    def send(self, order: Order) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order.model_dump_json() + "\n")
        self._process.stdin.flush()

    def outcome(self) -> Outcome:
        return Outcome.model_validate_json(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the process '{self.name}' has ended: {end_of(self._log)}")
        return line

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@dataclass(slots=True)
class Races:
    """The races of a cluster, and what went wrong in them."""

    cluster: Cluster
    racers: Sequence[Racer]
    seed: int
    run: Counter[Kind] = field(default_factory=Counter)
    won: Counter[str] = field(default_factory=Counter)  # by the winner: neither always wins
    faults: list[str] = field(default_factory=list)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def race(self, kind: Kind) -> None:
        """Prepare a race, run it, and check its end."""
        self.run[kind] += 1
        job = self._job(f"{kind} {self.run.total()}")
        fault = KINDS[kind](self, kind, job)
        if fault:
            self.faults.append(f"race {self.run.total()} ({kind}): {fault}")

    # -- kinds --------------------------------------------------------------------------------

    def submit(self, kind: Kind, job: Job) -> str:
        other = job.model_copy(update={"id": new_id(utc_now())})
        orders = [Order(kind=kind, at_s=0, job=each) for each in (job, other)]
        outcomes = self._start(orders)
        with self.cluster.database.read() as rows:
            query = sa.select(jobs.c.id).where(jobs.c.identity == job.identity)
            stored = set(rows.scalars(query))
        if stored != {outcome.detail for outcome in outcomes}:
            return f"the jobs {stored} are stored, the processes were told of {outcomes}"
        return self._one_winner(outcomes)

    def claim(self, kind: Kind, job: Job) -> str:
        self._jobs.add(job, utc_now())
        outcomes = self._start([Order(kind=kind, at_s=0, job=job)] * 2)
        fault = self._one_winner(outcomes)
        fault = fault or self._events(job, ["queued", "running"])
        winner = self._winner(outcomes)
        found = self._row(job)
        if not fault and (found["server"], found["fencing_token"]) != (winner, 1):
            fault = f"'{winner}' won, and the database says {dict(found)}"
        self._end(job)
        return fault

    def take_over(self, kind: Kind, job: Job) -> str:
        token = self._run_on(DEAD, job)
        outcomes = self._start([Order(kind=kind, at_s=0, job=job)] * 2)
        fault = self._one_winner(outcomes)
        fault = fault or self._events(job, ["queued", "running", "queued"])
        with contextlib.suppress(StaleEvent):
            self._jobs.append(job.id, Started(1, 1.0), utc_now(), token=token)
            fault = "the dead server's claim is still good"
        self._end(job)
        return fault

    def publish(self, kind: Kind, job: Job) -> str:
        """One process publishes although its claim has expired, the other one takes over."""
        late, other = self._random.sample(range(2), 2)
        token = self._run_on(self.racers[late].name, job)
        orders = {
            late: Order(kind=kind, at_s=0, job=job, token=token),
            other: Order(kind=kind, at_s=0, job=job),
        }
        outcomes = self._start([orders[0], orders[1]])
        kinds = ["queued", "running", "succeeded"]
        if outcomes[other].won:
            kinds = ["queued", "running", *kinds]
        fault = self._one_winner(outcomes) or self._events(job, kinds)
        content = self._content(f"reports/{job.id}")
        if not fault and content != {"report.md": self._winner(outcomes)}:
            fault = f"'{self._winner(outcomes)}' has published, and the files are {content}"
        self._end(job)
        return fault

    def build(self, kind: Kind, job: Job) -> str:
        outcomes = self._start([Order(kind=kind, at_s=0, job=job)] * 2)
        makers = {outcome.detail for outcome in outcomes}
        fault = self._one_winner(outcomes)
        if not fault and makers != {self._winner(outcomes)}:
            fault = f"'{self._winner(outcomes)}' has made it, and the processes read {makers}"
        return fault

    def promote(self, kind: Kind, job: Job) -> str:
        """Both promote one report, or each one of its own."""
        same = self._random.random() < 0.5
        model = f"model-{job.id}"
        orders = [
            Order(
                kind=kind,
                at_s=0,
                job=job,
                version=version(model).model_copy(update={"job": "same" if same else name}),
                engine=load_engine(self.cluster.template).root,
            )
            for name in RACERS
        ]
        outcomes = self._start(orders)
        with self.cluster.database.read() as rows:
            query = sa.select(versions.c.version).where(versions.c.model == model)
            stored = sorted(rows.scalars(query))
        told = sorted(int(outcome.detail) for outcome in outcomes)
        expected = [1] if same else [1, 2]
        if stored != expected or sorted(set(told)) != expected:
            return f"versions {stored}, and the processes were told of {told}; expected {expected}"
        for number in stored:
            if not self._content(f"models/{model}/{number}"):
                return f"version {number} has no files"
        return ""

    # -- preparation and checks ----------------------------------------------------------------

    @property
    def _jobs(self) -> JobStore:
        return self.cluster.jobs

    def _job(self, name: str) -> Job:
        """A job with a queue of its own, for which no host of the cluster looks."""
        now = utc_now()
        return Job(
            id=new_id(now),
            owner=f"owner of {name}",
            identity=name,
            name=name,
            device="cpu",
            target=f"cpu, race=={self.run.total()}",
            wait_for_node_s=3600.0,
            created=now.isoformat(timespec="milliseconds"),
        )

    def _run_on(self, server: str, job: Job) -> int:
        """Let the job run on a server that has sent no heartbeat for long; the token of its
        claim.
        """
        self._jobs.add(job, utc_now())
        claim = {"server": server, "fencing_token": 1, "heartbeat_at": 0.0}
        change = sa.update(jobs).where(jobs.c.id == job.id).values(claim)
        self._jobs.append(job.id, Started(1, 1.0), utc_now())
        with self.cluster.database.write() as rows:
            rows.execute(change)
        return 1

    def _start(self, orders: Sequence[Order]) -> list[Outcome]:
        """Send the orders for nearly the same moment."""
        at_s = time.monotonic() + SOON_S
        for racer, order in zip(self.racers, orders, strict=True):
            moment_s = at_s + self._random.uniform(0, APART_S)
            racer.send(order.model_copy(update={"at_s": moment_s}))
        outcomes = [racer.outcome() for racer in self.racers]
        self.won.update(
            racer.name for racer, outcome in zip(self.racers, outcomes, strict=True) if outcome.won
        )
        return outcomes

    def _one_winner(self, outcomes: Sequence[Outcome]) -> str:
        won = [outcome.won for outcome in outcomes]
        return "" if sum(won) == 1 else f"{sum(won)} processes won, expected 1"

    def _winner(self, outcomes: Sequence[Outcome]) -> str:
        won = [each.name for each, of in zip(self.racers, outcomes, strict=True) if of.won]
        return won[0] if won else ""

    def _events(self, job: Job, expected: Sequence[str]) -> str:
        kinds = [event.kind for event in self._jobs.events(job.id)]
        return "" if kinds == list(expected) else f"the events are {kinds}, expected {expected}"

    def _row(self, job: Job) -> sa.RowMapping:
        columns = (jobs.c.server, jobs.c.fencing_token)
        with self.cluster.database.read() as rows:
            query = sa.select(*columns).where(jobs.c.id == job.id)
            return rows.execute(query).mappings().one()

    def _content(self, folder: str) -> dict[str, str]:
        """What S3 has for the rows of a folder."""
        prefix = FILES_URL.removeprefix(f"s3://{BUCKET}/")
        with self.cluster.database.read() as rows:
            query = sa.select(files.c.path, files.c.object).where(files.c.folder == folder)
            stored = dict(rows.execute(query).tuples().all())
        return {
            path: self.cluster.s3.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["Body"]
            .read()
            .decode(errors="replace")
            for path, name in stored.items()
        }

    def _end(self, job: Job) -> None:
        """Leave nothing that a server would take over."""
        with self.cluster.database.write() as rows:
            rows.execute(sa.delete(jobs).where(jobs.c.id == job.id))


KINDS: dict[Kind, Callable[[Races, Kind, Job], str]] = {
    "submit": Races.submit,
    "claim": Races.claim,
    "claim of few": Races.claim,
    "take over": Races.take_over,
    "publish": Races.publish,
    "build": Races.build,
    "promote": Races.promote,
}


@contextlib.contextmanager
def racing(cluster: Cluster, seed: int) -> Iterator[Races]:
    """Start the two processes, and end them."""
    with contextlib.ExitStack() as stack:
        racers = []
        for name in RACERS:
            racers.append(Racer(name, cluster))
            stack.callback(racers[-1].close)
        yield Races(cluster, racers, seed)


def run_races(races: Races, number: int, told: Callable[[str], object]) -> None:
    """Run so many races, of all kinds in turn."""
    for done, kind in enumerate(itertools.islice(itertools.cycle(KINDS), number)):
        if done % 50 == 0:
            told(f"{done} of {number} races are run; {len(races.faults)} faults")
        races.race(kind)
