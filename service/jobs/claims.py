"""Claims: each job is run by one server at a time, of all that use the database.

    claims.waiting()                      the requirements for which jobs wait: each has a queue
    claim = claims.claim(["cpu"], None)   the next job of these queues, now this server's
    store.append(..., token=claim.token)  each write of the job says by which claim it is made
    claims.renew(running)                 a heartbeat for the jobs that this server runs
    claims.expired(LEASE_S)               jobs whose server has sent none for so long: now this
                                          server's, to end or queue again

`fencing_token` rises with every claim. So a server that was cut off, and comes back after another
one took its job, can write nothing more of it: ClaimLost. All times are those of the database.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from service import logs
from service.jobs.state import Job, State
from service.jobs.store import DamagedRow, job_from_row
from service.storage.database import Database
from service.storage.tables import database_clock_s, jobs

LEASE_S = 20.0  # without a heartbeat for so long, a server is taken for dead

_IS_WAITING = (jobs.c.state == "queued") & jobs.c.server.is_(None)

log = logs.get("service.claims")


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to run a job, and to write of it."""

    job: Job
    token: int


@dataclass(frozen=True, slots=True)
class Held:
    """A job of this server, as the database has it."""

    token: int
    state: State


class Claims:
    """The claims of one server. Safe for threads."""

    def __init__(self, database: Database, server: str) -> None:
        self._database, self._server = database, server

    def waiting(self) -> tuple[str, ...]:
        """Return what the waiting jobs require of a device, each text once."""
        query = sa.select(jobs.c.device).where(_IS_WAITING).distinct().order_by(jobs.c.device)
        with self._database.read() as rows:
            return tuple(rows.scalars(query))

    def count_waiting(self) -> dict[str, int]:
        """Return how many jobs wait, by what they require of a device."""
        query = sa.select(jobs.c.device, sa.func.count().label("number")).where(_IS_WAITING)
        grouped = query.group_by(jobs.c.device).order_by(jobs.c.device)
        with self._database.read() as rows:
            return {row.device: row.number for row in rows.execute(grouped)}

    def waiting_for(self, queue: str) -> tuple[tuple[Job, float], ...]:
        """Return the jobs that wait with this requirement, oldest first, and for how many seconds.
        Damaged rows are left out.
        """
        now_s = database_clock_s()
        waited_s = now_s - sa.func.coalesce(jobs.c.added_at, now_s)
        query = sa.select(jobs, waited_s.label("waited_s")).where(
            _IS_WAITING, jobs.c.device == queue
        )
        with self._database.read() as rows:
            found = rows.execute(query).mappings().all()
        waited = {row["id"]: row["waited_s"] for row in found}
        return tuple((claim.job, waited[claim.job.id]) for claim in _claims(found))

    def claim_waiting(self, job_id: str) -> Claim | None:
        """Claim this job, to end it; None if it does not wait any more."""
        waiting = sa.select(jobs.c.id).where(_IS_WAITING, jobs.c.id == job_id)
        return next(iter(_claims(self._take(jobs.c.id.in_(_unlocked(waiting))))), None)

    def claim(self, queues: Collection[str], most_running: int | None) -> Claim | None:
        """Claim the next job of these queues; None if no job waits. Owners that run
        `most_running` jobs, on all servers together, are left out.

        Interrupted jobs come first, then the oldest job of the owner whose last job of these queues
        started longest ago, or never. A job with a damaged row is claimed and logged, and the next
        one is returned: a repair needs it as it is.
        """
        following = _unlocked(self._next(queues, most_running))
        condition = jobs.c.id == following.scalar_subquery()  # IN might claim more than one
        while taken := self._take(condition, most_running is not None):
            if claims := _claims(taken):
                return claims[0]
        return None

    def release(self, claim: Claim) -> None:
        """Let other servers claim a job that has not started. No effect if it is not held."""
        held = (jobs.c.id == claim.job.id) & (jobs.c.fencing_token == claim.token)
        waiting = sa.update(jobs).where(held, jobs.c.state == "queued")
        with self._database.write() as rows:
            rows.execute(waiting.values(server=None))

    def renew(self, running: Collection[str]) -> dict[str, Held]:
        """Send a heartbeat for the jobs that run here, and return those of them that are still
        claimed by this server, by their id.

        A job that was claimed but does not run, because the database failed in between, gets none:
        so it is claimed again later.
        """
        if not running:
            return {}
        heartbeat = (
            sa.update(jobs)
            .where(jobs.c.server == self._server, jobs.c.id.in_(running))
            .values(heartbeat_at=database_clock_s())
            .returning(jobs.c.id, jobs.c.fencing_token, jobs.c.state)
        )
        with self._database.write() as rows:
            found = rows.execute(heartbeat)
            return {row.id: Held(row.fencing_token, row.state) for row in found}

    def expired(self, after_s: float | None) -> tuple[Claim, ...]:
        """Claim the jobs that no server runs, although one should: it has sent no heartbeat for
        `after_s`. None: whatever it has sent, because it is known to have ended.
        """
        orphaned = jobs.c.server.is_(None) & jobs.c.state.in_(("running", "cancelling"))
        late = jobs.c.heartbeat_at < database_clock_s() - (after_s or 0.0)
        dead = jobs.c.server.is_not(None) & (late if after_s is not None else sa.true())
        query = sa.select(jobs.c.id).where(orphaned | dead)
        return _claims(self._take(jobs.c.id.in_(_unlocked(query))))

    def _next(self, queues: Collection[str], most_running: int | None) -> sa.Select[tuple[str]]:
        """Return the query for the id of the next job of these queues."""
        waiting, other = jobs.alias("waiting"), jobs.alias("other")
        last_start = (
            sa.select(sa.func.max(other.c.started))
            .where(other.c.device.in_(queues), other.c.owner == waiting.c.owner)
            .scalar_subquery()
        )
        query = sa.select(waiting.c.id).where(
            waiting.c.state == "queued",
            waiting.c.server.is_(None),
            waiting.c.device.in_(queues),
        )
        if most_running is not None:
            busy = (  # not per waiting job: an owner may have thousands of old jobs
                sa.select(other.c.owner)
                .where(other.c.server.is_not(None))
                .group_by(other.c.owner)
                .having(sa.func.count() >= most_running)
            )
            query = query.where(waiting.c.owner.not_in(busy))
        interrupted_first = sa.case((waiting.c.attempt > 0, 0), else_=1)
        turn = (interrupted_first, sa.func.coalesce(last_start, ""), waiting.c.created)
        return query.order_by(*turn, waiting.c.id).limit(1)

    def _take(
        self, condition: sa.ColumnElement[bool], counts: bool = False
    ) -> Sequence[sa.RowMapping]:
        """Claim the jobs of a condition. `counts`: it counts running jobs, so that it must not be
        used on two servers at once.
        """
        claim = {
            "server": self._server,
            "fencing_token": jobs.c.fencing_token + 1,
            "heartbeat_at": database_clock_s(),
        }
        change = sa.update(jobs).where(condition).values(claim).returning(jobs)
        with self._database.write() as rows:
            if counts:
                self._database.lock(rows, "running jobs")
            return rows.execute(change).mappings().all()


def _unlocked(query: sa.Select[tuple[str]]) -> sa.Select[tuple[str]]:
    """Leave out, and do not wait for, the jobs that another server claims now."""
    return query.with_for_update(skip_locked=True, of=query.columns_clause_froms[0])


def _claims(taken: Sequence[sa.RowMapping]) -> tuple[Claim, ...]:
    """Return the claims of these rows, by the age of their jobs. Damaged rows are logged."""
    claims = list[Claim]()
    for row in sorted(taken, key=lambda row: str(row["id"])):
        try:
            claims.append(Claim(job_from_row(row), row["fencing_token"]))
        except DamagedRow as error:
            log.error("job.damaged", job=row["id"], error=error.message)
    return tuple(claims)
