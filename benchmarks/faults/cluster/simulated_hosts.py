"""How many hosts can share one PostgreSQL? Simulated hosts do what servers and nodes do to it.

    python -m benchmarks simulated_hosts [--hosts N ...] [--seconds S] [--into DIR]

Each host is an asyncio task that looks every POLL_S, as the runner does: its claim renewed, the
waiting requirements read, and a job claimed if it has none; every BEAT_S also a heartbeat, and the
jobs of dead hosts taken over. A job takes JOB_S and stores EVENTS stage events. The calls are those
of the service, in threads; at most CONNECTIONS connections are open. For each host one job is open
at any time: a job that ends is submitted again. At the end 10 % of the hosts die, and others take
over their jobs.

A host is late if it looks less often than it should: `look_p99_s` is the time between the begins of
two looks. Heartbeats are lost where it nears LEASE_S. Hosts and PostgreSQL share the cores, so the
benchmark gives the CPU time of PostgreSQL alone, too: that of a database server of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import sqlalchemy as sa
from rich.console import Console

from benchmarks.common import RESULTS, Row, argument_parser, publish
from benchmarks.serving.processes import descendants
from pipeline.errors import CrucibleError
from pipeline.execution.stage_event import StageEvent
from service.devices.leases import utc_now
from service.jobs.claims import LEASE_S, Claim, Claims
from service.jobs.nodes import BEAT_S, Nodes
from service.jobs.queue import MAX_INTERRUPTIONS, POLL_S
from service.jobs.state import Job, JobEvent, StaleEvent, Started, Succeeded, after_a_crash, new_id
from service.jobs.store import JobStore
from service.storage.database import Database
from service.storage.postgresql import MAX_OVERFLOW, POOL_SIZE
from service.storage.tables import events, jobs
from tests.service.builders.postgresql import DURABLE, Server, running_server

HOSTS = (10, 30, 100, 300, 1000)
CONNECTIONS = 80
JOB_S, EVENTS = 10.0, 20  # of a compile, which takes minutes: this is more load than real hosts are
DEAD_SHARE = 0.1
LABELS = {"cpu": {"name": "a CPU"}}
LATE_S = 2 * POLL_S  # between two looks, above which a host counts as late
RECOVERED_S = LEASE_S + 10.0

T = TypeVar("T")


class Pool:
    """Databases with CONNECTIONS connections together, each with a thread."""

    def __init__(self, url: str, stack: ExitStack) -> None:
        per_database = POOL_SIZE + MAX_OVERFLOW
        self.databases = [
            stack.enter_context(closing(Database(url)))
            for _ in range(-(-CONNECTIONS // per_database))
        ]
        self._threads = [
            stack.enter_context(ThreadPoolExecutor(CONNECTIONS // len(self.databases)))
            for _ in self.databases
        ]

    async def call(self, number: int, call: Callable[[], T]) -> T:
        """Call in a thread of the database of a host."""
        threads = self._threads[number % len(self._threads)]
        return await asyncio.get_running_loop().run_in_executor(threads, call)


@dataclass(slots=True)
class Counts:
    """What all hosts of a run did."""

    looks_s: list[float] = field(default_factory=list)  # between the begins of two
    heartbeats: int = 0
    claims: int = 0
    ended: int = 0
    lost: int = 0  # claims that another host took, although this one was alive
    errors: list[str] = field(default_factory=list)


class Host:
    """A server or a node, without its processes."""

    def __init__(self, number: int, pool: Pool, counts: Counts) -> None:
        self.number, self._pool, self._counts = number, pool, counts
        database = pool.databases[number % len(pool.databases)]
        name = f"host-{number}"
        self._claims, self._nodes = Claims(database, name), Nodes(database, name, "node")
        self._jobs = JobStore(database)
        self._claim: Claim | None = None
        self._next_event_s, self._beat_s = 0.0, -BEAT_S
        self._events = 0

    async def live(self) -> None:
        """Look every POLL_S, until cancelled."""
        await asyncio.sleep(random.uniform(0, POLL_S))
        last_s = time.monotonic()
        while True:
            try:
                await self._look()
            except CrucibleError as error:
                self._counts.errors.append(error.message)
            now_s = time.monotonic()
            await asyncio.sleep(max(0.0, last_s + POLL_S - now_s))
            self._counts.looks_s.append(time.monotonic() - last_s)
            last_s = time.monotonic()

    async def _look(self) -> None:
        """What the runner does between two pauses: see JobRunner._run_queue."""
        call = partial(self._pool.call, self.number)
        now_s = time.monotonic()
        is_due = now_s - self._beat_s >= BEAT_S
        if is_due:
            await call(partial(self._nodes.send_heartbeat, LABELS))
            self._counts.heartbeats += 1
            self._beat_s = now_s
        mine = [self._claim.job.id] if self._claim else []
        held = await call(partial(self._claims.renew, mine))
        if self._claim and self._claim.job.id not in held:
            self._counts.lost += 1
            self._claim = None
        if is_due:
            await self._take_over()
        queues = await call(self._claims.waiting)
        if self._claim is None and queues:
            await self._begin(queues)
        elif self._claim is not None:
            await self._go_on(self._claim)

    async def _take_over(self) -> None:
        """Queue the jobs of dead hosts again."""
        expired = partial(self._claims.expired, LEASE_S)
        for claim in await self._pool.call(self.number, expired):
            event = after_a_crash(claim.job, MAX_INTERRUPTIONS)
            await self._pool.call(self.number, partial(self._append, claim, event))

    async def _begin(self, queues: Sequence[str]) -> None:
        claim = await self._pool.call(self.number, partial(self._claims.claim, queues, None))
        if claim is None:
            return
        self._counts.claims += 1
        self._claim, self._events = claim, 0
        self._next_event_s = time.monotonic()
        await self._pool.call(self.number, partial(self._append, claim, Started(1, 1.0)))

    async def _go_on(self, claim: Claim) -> None:
        """Store the events that are due, and end the job after the last one."""
        while self._events < EVENTS and time.monotonic() >= self._next_event_s:
            event = StageEvent("build", state="progress", fraction=self._events / EVENTS)
            await self._pool.call(self.number, partial(self._append, claim, event))
            self._events += 1
            self._next_event_s += JOB_S / EVENTS
        if self._events == EVENTS:
            self._claim = None
            ending = Succeeded("accepted", None)
            await self._pool.call(self.number, partial(self._append, claim, ending))
            self._counts.ended += 1
            await self._pool.call(self.number, partial(self._jobs.add, new_job(), utc_now()))

    def _append(self, claim: Claim, event: JobEvent) -> None:
        try:
            self._jobs.append(claim.job.id, event, utc_now(), token=claim.token)
        except StaleEvent:
            self._counts.lost += 1
            self._claim = None


def new_job() -> Job:
    now = utc_now()
    job_id = new_id(now)
    return Job(
        id=job_id,
        owner=f"owner-{random.randrange(20)}",
        identity=job_id,
        name="simulated",
        device="cpu",
        created=now.isoformat(timespec="milliseconds"),
    )


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds: of PostgreSQL with all its connections, and of this process."""

    postgresql_s: float
    hosts_s: float


def cpu_of(server: Server) -> Cpu:
    process = psutil.Process(server.process_id)
    ended = process.cpu_times()  # of connections that have ended
    total_s = ended.children_user + ended.children_system
    for each in (process, *descendants(process)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    own = psutil.Process().cpu_times()
    return Cpu(total_s, own.user + own.system)


async def simulate(server: Server, url: str, number: int, seconds: float) -> Row:
    """Let so many hosts live for a time, kill some of them, and see when their jobs go on."""
    with ExitStack() as stack:
        pool, counts = Pool(url, stack), Counts()
        store = JobStore(pool.databases[0])
        for _ in range(number):
            store.add(new_job(), utc_now())
        tasks = [asyncio.create_task(Host(each, pool, counts).live()) for each in range(number)]
        await asyncio.sleep(seconds / 3)  # until each host has its job
        before, cpu, begun_s = snapshot(counts, pool), cpu_of(server), time.monotonic()
        await asyncio.sleep(seconds)
        after, used, lasted_s = snapshot(counts, pool), cpu_of(server), time.monotonic() - begun_s
        looks_s = counts.looks_s[before["looks"] :]
        lost = counts.lost
        recovery_s = await recovery(pool, tasks, counts)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    postgresql_s = used.postgresql_s - cpu.postgresql_s
    return {
        "hosts": number,
        "claims_per_s": (after["claims"] - before["claims"]) / lasted_s,
        "heartbeats_per_s": (after["heartbeats"] - before["heartbeats"]) / lasted_s,
        "events_per_s": (after["events"] - before["events"]) / lasted_s,
        "transactions_per_s": (after["transactions"] - before["transactions"]) / lasted_s,
        "look_median_s": statistics.median(looks_s) if looks_s else None,
        "look_p99_s": statistics.quantiles(looks_s, n=100)[98] if len(looks_s) > 1 else None,
        "claims_lost": lost,
        "recovery_s": recovery_s,
        "postgresql_cores": postgresql_s / lasted_s,
        "hosts_cores": (used.hosts_s - cpu.hosts_s) / lasted_s,
        "postgresql_ms_per_look": 1000 * postgresql_s / max(1, len(looks_s)),
        "errors": len(counts.errors),
    }


def snapshot(counts: Counts, pool: Pool) -> dict[str, int]:
    """What has been done so far."""
    of_database = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()"
    with pool.databases[0].read() as rows:
        stored = rows.scalar(sa.select(sa.func.count()).select_from(events)) or 0
        transactions = rows.exec_driver_sql(of_database).scalar_one()
    return {
        "looks": len(counts.looks_s),
        "heartbeats": counts.heartbeats,
        "claims": counts.claims,
        "events": stored,
        "transactions": transactions,
    }


async def recovery(pool: Pool, tasks: Sequence[asyncio.Task[None]], counts: Counts) -> float | None:
    """Let some hosts die, and return how long it takes until others have claimed their jobs. None:
    it takes longer than a minute more than a lease.
    """
    dead = range(max(1, int(DEAD_SHARE * len(tasks))))
    for each in dead:
        tasks[each].cancel()
    begun_s = time.monotonic()
    of_dead = sa.select(sa.func.count()).where(jobs.c.server.in_([f"host-{each}" for each in dead]))
    while time.monotonic() < begun_s + LEASE_S + 60:
        await asyncio.sleep(POLL_S / 4)
        with pool.databases[0].read() as rows:
            if not rows.scalar(of_dead):
                return time.monotonic() - begun_s
    return None


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    rows = []
    with Console(stderr=True).status("") as status, running_server(DURABLE) as server:
        for number in arguments.hosts:
            status.update(f"{number} hosts live for {arguments.seconds:g} s")
            with server.database() as url:
                rows.append(asyncio.run(simulate(server, url, number, arguments.seconds)))
    publish(
        "simulated_hosts",
        rows,
        targets_of(rows),
        arguments.into,
        run={
            "seconds": arguments.seconds,
            "connections": CONNECTIONS,
            "job_s": JOB_S,
            "events": EVENTS,
        },
    )


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("simulated_hosts", __doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=HOSTS, metavar="N")
    parser.add_argument("--seconds", type=float, default=30.0, help="measured, for each number")
    parser.add_argument(
        "--into", type=Path, default=RESULTS, metavar="DIR", help="where the result goes"
    )
    return parser.parse_args(words)


def targets_of(rows: Sequence[Row]) -> dict[str, bool]:
    """Up to how many hosts each host looks in time, and whether nothing was lost."""

    def number(row: Row, name: str) -> float:
        value = row[name]
        return float(value) if isinstance(value, int | float) else float("inf")

    in_time = [number(row, "hosts") for row in rows if number(row, "look_p99_s") <= LATE_S]
    lost = sum(number(row, "claims_lost") for row in rows)
    slowest_s = max((number(row, "recovery_s") for row in rows), default=0.0)
    most = max((number(row, "hosts") for row in rows), default=0.0)
    return {
        f"{most:g} hosts look within {LATE_S:g} s (got {max(in_time, default=0):g} hosts)": (
            most in in_time
        ),
        f"no live host loses a claim (got {lost:g})": not lost,
        f"jobs of dead hosts are taken over in {RECOVERED_S:g} s (got {slowest_s:.3g} s)": (
            slowest_s <= RECOVERED_S
        ),
    }
