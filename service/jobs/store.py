"""Jobs in the database. Each change is one transaction that writes the event and the resulting job,
so that one is never stored without the other.

    job, is_new = store.add(job, now, once)      adds the job, or returns the job of an earlier
                                                 equal request
    job, seq = store.append(job.id, event, now)  stores an event and the resulting job
    store.events(job.id, after=seq)              events for clients; `seq` rises over all jobs and
                                                 is never reused

Events carry a kind and data for clients: "stage", or the job's new state. A row with damaged JSON
is logged with the job's id and left out, so that the other jobs stay available.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import sqlalchemy as sa
from pydantic import ValidationError

from pipeline.core.progress import CandidateFigures
from pipeline.execution.stage_event import StageEvent
from service import logs
from service.errors import Conflict, NotFound, NotOwned, ServiceError, TooMany
from service.jobs.figures import joined_figures
from service.jobs.messages import MAX_FIGURES
from service.jobs.state import (
    FINAL,
    CancelAsked,
    Died,
    Job,
    JobEvent,
    NodeAwaited,
    Requeued,
    StaleEvent,
    Started,
    State,
    Succeeded,
    step,
)
from service.limits.key_limits import raised_by
from service.storage.audit import Audit
from service.storage.audit_entry import SERVICE, Actor, Details, Entry
from service.storage.database import Database, delete_unlocked
from service.storage.files import StoredFile, delete_files, insert_files
from service.storage.layout import FOLDERS_OF_JOB
from service.storage.tables import compile_targets, database_clock_s, events, jobs, requests

ONCE_FOR = dt.timedelta(hours=24)  # how long an Idempotency-Key is remembered
# states in which an equal request gets the same job; in all others it makes a new one
REUSED: tuple[State, ...] = ("queued", "running", "succeeded")

FIGURES_KIND = "figures"  # of an event with figures of a candidate
RECENT_JOBS, MEDIAN_JOBS = 200, 5  # jobs that an estimate reads, and jobs that it uses

log = logs.get("service.job_store")


class DamagedRow(ServiceError):
    """The database row of a job cannot be read.

    Next: the operator restores `crucible.db` from a backup, or removes the job.
    """

    code = "service.damaged_row"


class ClaimLost(StaleEvent):
    """Another server has taken over the job of an event."""


@dataclass(frozen=True, slots=True)
class Once:
    """An Idempotency-Key and the digest of its request."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class NewJob:
    """A queued job to add, and what is stored with it."""

    job: Job
    once: Once | None = None
    files: Sequence[StoredFile] = ()
    entry: Entry | None = None  # in the audit


@dataclass(frozen=True, slots=True)
class TargetJob:
    """The job of one target."""

    title: str  # of the target
    job: Job


@dataclass(frozen=True, slots=True)
class Compile:
    """A compile for several targets. Equal ones may share jobs."""

    id: str
    owner: str
    targets: tuple[TargetJob, ...]


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event as clients see it."""

    seq: int
    at: str  # UTC
    kind: str  # "stage", FIGURES_KIND, or a State
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """Some jobs, newest first."""

    jobs: tuple[Job, ...]
    after: str | None  # pass it to `list` for the next page; None: this page is the last


class JobStore:
    """All jobs of one home. Safe for threads."""

    def __init__(self, database: Database) -> None:
        self.database, self.audit = database, Audit(database)

    def add(
        self,
        job: Job,
        now: dt.datetime,
        once: Once | None = None,
        most_queued: int | None = None,
        entry: Entry | None = None,
        files: Sequence[StoredFile] = (),
    ) -> tuple[Job, bool]:
        """Add a queued job with its files, and `entry` to the audit. Returns it and True, or the
        job of an earlier equal request and False.

        Conflict if the Idempotency-Key came with another request within 24 h; TooMany if the owner
        has `most_queued` jobs waiting.
        """
        with self.database.write() as rows:
            return self._add(rows, NewJob(job, once, files, entry), now, most_queued)

    def add_compile(
        self,
        compile_id: str,
        new: Mapping[str, NewJob],
        now: dt.datetime,
        most_queued: int | None = None,
    ) -> Compile:
        """Add a compile with the jobs of its targets, by title, all or none. An equal earlier job
        takes the place of a new one. Errors as those of `add`.
        """
        with self.database.write() as rows:
            added = {
                title: self._add(rows, each, now, most_queued)[0] for title, each in new.items()
            }
            targets = [
                {
                    "compile": compile_id,
                    "position": position,
                    "owner": job.owner,
                    "title": title,
                    "job_id": job.id,
                }
                for position, (title, job) in enumerate(added.items())
            ]
            rows.execute(sa.insert(compile_targets), targets)
        owner = next(job.owner for job in added.values())
        return Compile(compile_id, owner, tuple(map(TargetJob, added.keys(), added.values())))

    def get(self, job_id: str, owner: str | None = None) -> Job:
        """Return the job. NotFound if there is none, or if it has another owner. `owner` None: any
        owner.
        """
        with self.database.read() as rows:
            return job_from_row(_row(rows, job_id, owner))

    def get_compile(self, compile_id: str, owner: str | None = None) -> Compile:
        """Return a compile with the jobs of its targets that are still stored. NotFound if there is
        none, or if it has another owner. `owner` None: any owner.
        """
        query = (
            sa.select(compile_targets.c.title, compile_targets.c.owner.label("of"), jobs)
            .join(jobs, jobs.c.id == compile_targets.c.job_id)
            .where(compile_targets.c.compile == compile_id)
            .order_by(compile_targets.c.position)
        )
        found = [row for row in self._rows(query) if owner in (None, row["of"])]
        if not found:
            raise NotFound(f"no compile '{compile_id}'", "GET /jobs lists your jobs")
        targets = tuple(TargetJob(row["title"], job_from_row(row)) for row in found)
        return Compile(compile_id, found[0]["of"], targets)

    def compiles_of(self, job_ids: Collection[str]) -> dict[str, str]:
        """Return the id of the newest compile for several targets of each job that has one."""
        newest = sa.func.max(compile_targets.c.compile).label("newest")
        query = sa.select(compile_targets.c.job_id, newest).group_by(compile_targets.c.job_id)
        with self.database.read() as rows:
            found = rows.execute(query.where(compile_targets.c.job_id.in_(job_ids)))
            return {row.job_id: row.newest for row in found}

    def of_identity(self, owner: str, identity: str) -> Job | None:
        """Return the job that an equal request would get; None if it would make a new one."""
        with self.database.read() as rows:
            return self._of_identity(rows, owner, identity)

    def forget_identity(self, job_id: str) -> None:
        """Exclude this job from the answers to equal requests."""
        with self.database.write() as rows:
            rows.execute(sa.update(jobs).where(jobs.c.id == job_id).values(identity=jobs.c.id))

    def usual_s(self, owner: str, name: str, device: str, measures: bool = False) -> float | None:
        """Return how long this owner's jobs of this name and kind take on a device: the median of
        the last few that succeeded. None if none has.
        """
        query = (
            sa.select(jobs)
            .where(jobs.c.owner == owner, jobs.c.state == "succeeded")
            .order_by(jobs.c.id.desc())
            .limit(RECENT_JOBS)
        )
        recent = self._rows(query)
        criteria = (name, device, measures, 1)
        times_s = [
            job.took_s
            for job in _readable(recent)
            if (job.name, job.queue, job.measures is not None, job.attempt) == criteria
        ]
        return median(times_s[:MEDIAN_JOBS]) if times_s else None

    def list(
        self,
        owner: str | None = None,
        state: State | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> Page:
        """List jobs, newest first. None stands for all owners and all states."""
        query = sa.select(jobs).where(*_of_owner(owner)).order_by(jobs.c.id.desc()).limit(limit + 1)
        if state is not None:
            query = query.where(jobs.c.state == state)
        if after is not None:
            query = query.where(jobs.c.id < after)
        matches = self._rows(query)
        return Page(
            tuple(_readable(matches[:limit])),
            matches[limit - 1]["id"] if len(matches) > limit else None,
        )

    def append(
        self,
        job_id: str,
        event: JobEvent,
        now: dt.datetime,
        entry: Entry | None = None,
        token: int | None = None,
        files: Sequence[StoredFile] = (),
    ) -> tuple[Job, int]:
        """Store an event, the resulting job, its `files`, and `entry` in the audit, all
        or none. StaleEvent if the event does not fit the job's state; ClaimLost if `token` is no
        more that of its claim.
        """
        with self.database.write() as rows:
            # Locked before the event gets its number: so the events of a job are committed in
            # order, and a client that has read one misses none before it.
            row = _row(rows, job_id, None, locked=True)
            if token not in (None, row["fencing_token"]):
                raise ClaimLost(f"job {job_id} belongs to another server now")
            job = step(job_from_row(row), event, now)
            rows.execute(sa.update(jobs).where(jobs.c.id == job_id).values(_columns(job)))
            kind, data = client_event(event, job)
            insert_files(rows, files)
            if entry is not None:
                self.audit.add(rows, entry)
            return job, _insert_event(rows, job_id, _text(now), kind, data)

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> tuple[StoredEvent, ...]:
        """Return the events of a job with a number above `after`, in order."""
        query = (
            sa.select(events)
            .where(events.c.job_id == job_id, events.c.seq > after)
            .order_by(events.c.seq)
            .limit(limit)
        )
        return tuple(_events(self._rows(query)))

    def newest_events(self, job_ids: Collection[str]) -> dict[str, int]:
        """Return the number of the newest event of each of these jobs."""
        if not job_ids:
            return {}
        newest = sa.func.max(events.c.seq).label("newest")
        query = sa.select(events.c.job_id, newest).where(events.c.job_id.in_(job_ids))
        with self.database.read() as rows:
            found = rows.execute(query.group_by(events.c.job_id))
            return {row.job_id: row.newest for row in found}

    def newest_of_stages(self, job_id: str) -> tuple[StoredEvent, ...]:
        """Return the newest event of each stage and subject of the last attempt, in the order in
        which they began.
        """
        stages = (
            sa.select(
                sa.func.min(events.c.seq).label("first"), sa.func.max(events.c.seq).label("last")
            )
            .where(events.c.job_id == job_id, events.c.stage.is_not(None))
            .where(events.c.seq > _last_start(job_id))
            .group_by(events.c.stage, events.c.subject)
            .subquery()
        )
        query = (
            sa.select(events).join(stages, events.c.seq == stages.c.last).order_by(stages.c.first)
        )
        return tuple(_events(self._rows(query)))

    def figures(self, job_id: str) -> tuple[CandidateFigures, ...]:
        """Return what the last attempt has measured of each candidate so far."""
        query = (
            sa.select(events)
            .where(events.c.job_id == job_id, events.c.kind == FIGURES_KIND)
            .where(events.c.seq > _last_start(job_id))
            .order_by(events.c.seq)
            .limit(MAX_FIGURES)
        )
        return joined_figures(event.data for event in _events(self._rows(query)))

    def unfinished(self) -> tuple[Job, ...]:
        """Return all jobs that have not ended, oldest first."""
        query = sa.select(jobs).where(jobs.c.state.not_in(FINAL)).order_by(jobs.c.id)
        return tuple(_readable(self._rows(query)))

    def counts(self, owner: str | None = None) -> dict[str, int]:
        """Return the number of jobs in each state. `owner` None: of all owners."""
        query = sa.select(jobs.c.state, sa.func.count().label("number")).where(*_of_owner(owner))
        with self.database.read() as rows:
            found = rows.execute(query.group_by(jobs.c.state))
            return {row.state: row.number for row in found}

    def ended(self) -> tuple[Job, ...]:
        """Return all jobs that have ended, oldest first."""
        query = sa.select(jobs).where(jobs.c.state.in_(FINAL)).order_by(jobs.c.id)
        return tuple(_readable(self._rows(query)))

    def ids(self, owner: str | None = None) -> frozenset[str]:
        """Return the ids of all jobs, including those with damaged rows. `owner` None: of all
        owners.
        """
        with self.database.read() as rows:
            return frozenset(rows.scalars(sa.select(jobs.c.id).where(*_of_owner(owner))))

    def remove(self, job_id: str, actor: Actor = SERVICE) -> None:
        """Delete a job that has ended, with its events. Conflict if it has not ended."""
        with self.database.write() as rows:
            row = _row(rows, job_id, None, locked=True)
            if row["state"] not in FINAL:
                raise Conflict(f"job {job_id} has not ended", "cancel it first")
            rows.execute(sa.delete(jobs).where(jobs.c.id == job_id))
            delete_files(rows, [f"{kind}/{job_id}" for kind in FOLDERS_OF_JOB])
            details: Details = {"owner": row["owner"]}
            self.audit.add(rows, Entry(actor, "job.removed", f"job/{job_id}", details))

    def close(self) -> None:
        """Close the calling thread's connection."""
        self.database.close()

    def _rows(self, query: sa.Select[Any]) -> Sequence[sa.RowMapping]:
        with self.database.read() as rows:
            return rows.execute(query).mappings().all()

    def _add(
        self, rows: sa.Connection, new: NewJob, now: dt.datetime, most_queued: int | None
    ) -> tuple[Job, bool]:
        job, once = new.job, new.once
        self.database.lock(rows, f"jobs of {job.owner}")  # else two requests count the same
        of_key = self._of_key(rows, job.owner, once, now)
        known = of_key or self._of_identity(rows, job.owner, job.identity)
        if known is None:
            _check_queued(rows, job.owner, most_queued)
            values = {
                "id": job.id,
                "owner": job.owner,
                "identity": job.identity,
                "created": job.created,
                "added_at": database_clock_s(),
                "device": job.queue,
            }
            rows.execute(sa.insert(jobs).values(values | _columns(job)))
            _insert_event(rows, job.id, job.created, "queued", {})
            insert_files(rows, new.files)
            if new.entry is not None:
                self.audit.add(rows, new.entry)
        chosen = known or job
        if once is not None and of_key is None:
            request = {
                "owner": job.owner,
                "idempotency_key": once.key,
                "digest": once.digest,
                "job_id": chosen.id,
                "created": _text(now),
            }
            rows.execute(sa.insert(requests).values(request))
        return chosen, known is None

    def _of_key(
        self, rows: sa.Connection, owner: str, once: Once | None, now: dt.datetime
    ) -> Job | None:
        """Return the job of an earlier request with the same Idempotency-Key. Keys older than
        ONCE_FOR are deleted first.
        """
        rows.execute(delete_unlocked(requests, requests.c.created <= _text(now - ONCE_FOR)))
        if once is None:
            return None
        this = (requests.c.owner == owner) & (requests.c.idempotency_key == once.key)
        row = rows.execute(sa.select(requests).where(this)).mappings().first()
        if row is None:
            return None
        if row["digest"] != once.digest:
            raise Conflict(
                f"the Idempotency-Key '{once.key}' came with another request before",
                "use a new key for a new request",
            )
        return job_from_row(_row(rows, row["job_id"], owner))

    def _of_identity(self, rows: sa.Connection, owner: str, identity: str) -> Job | None:
        query = (
            sa.select(jobs)
            .where(jobs.c.owner == owner, jobs.c.identity == identity, jobs.c.state.in_(REUSED))
            .order_by(jobs.c.id.desc())
        )
        return next(iter(_readable(rows.execute(query).mappings().all())), None)


def _check_queued(rows: sa.Connection, owner: str, most_queued: int | None) -> None:
    """Raise TooMany if an owner has so many jobs waiting."""
    waiting = (jobs.c.owner == owner) & (jobs.c.state == "queued")
    queued = rows.scalar(sa.select(sa.func.count()).where(waiting)) or 0
    if most_queued is not None and queued >= most_queued:
        raise TooMany(
            f"{queued} of your jobs are waiting, expected at most {most_queued} (`max_queued`)",
            f"wait for some, or cancel them; {raised_by('max_queued')}",
            60,
        )


def _last_start(job_id: str) -> sa.ColumnElement[int]:
    """The number of the event with which the last attempt began; 0 before the first."""
    starts = sa.select(sa.func.max(events.c.seq))
    starts = starts.where(events.c.job_id == job_id, events.c.kind == "running")
    return sa.func.coalesce(starts.scalar_subquery(), 0)


def client_event(event: JobEvent, job: Job) -> tuple[str, dict[str, Any]]:
    """Return an event's kind and data for clients, from the event and the resulting job. Process
    ids are left out.
    """
    match event:
        case StageEvent(figures=None):
            values = asdict(event)
            del values["figures"]
            return "stage", values
        case StageEvent(figures=CandidateFigures() as figures):
            return FIGURES_KIND, asdict(figures)
        case Started():
            return job.state, {"attempt": job.attempt}
        case NodeAwaited():
            return job.state, {"why": event.why}
        case Requeued() if job.state == "queued":
            return job.state, {"why": event.why}
        case Died() if job.state == "failed":
            return job.state, event.failure.model_dump()
        case Succeeded() if job.state == "succeeded":
            return job.state, {"verdict": event.verdict, "winner": event.winner}
        case CancelAsked() | Requeued() | Died() | Succeeded():
            return job.state, {}
    raise StaleEvent(f"job {job.id}: {event}")


def _of_owner(owner: str | None) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the condition that a job belongs to an owner; none for all owners."""
    return () if owner is None else (jobs.c.owner == owner,)


def _columns(job: Job) -> dict[str, str | int | None]:
    """Return the columns that change with the job. A job that does not run has no server."""
    columns: dict[str, str | int | None] = {
        "state": job.state,
        "started": job.started,
        "attempt": job.attempt,
        "job": job.model_dump_json(),
    }
    return columns if job.state in ("running", "cancelling") else columns | {"server": None}


def _row(
    rows: sa.Connection, job_id: str, owner: str | None, locked: bool = False
) -> sa.RowMapping:
    query = sa.select(jobs).where(jobs.c.id == job_id)
    row = rows.execute(query.with_for_update() if locked else query).mappings().first()
    if row is None or owner not in (None, row["owner"]):
        refusal = NotFound if row is None else NotOwned
        raise refusal(f"no job '{job_id}'", "GET /jobs lists yours")
    return row


def job_from_row(row: sa.RowMapping) -> Job:
    """Parse a row. DamagedRow names the job."""
    try:
        job = Job.model_validate_json(row["job"])
    except ValidationError as error:
        raise DamagedRow(
            f"the row of job {row['id']} in the database is damaged: {error}",
            "send the model again",
        ) from error
    if (job.id, job.state) != (row["id"], row["state"]):
        raise DamagedRow(
            f"the row of job {row['id']} in the database is inconsistent", "send the model again"
        )
    return job


def _readable(rows: Iterable[sa.RowMapping]) -> Iterable[Job]:
    for row in rows:
        try:
            yield job_from_row(row)
        except DamagedRow as error:
            log.error("job.damaged", job=row["id"], error=error.message)


def _events(rows: Iterable[sa.RowMapping]) -> Iterable[StoredEvent]:
    for row in rows:
        try:
            yield StoredEvent(row["seq"], row["at"], row["kind"], json.loads(row["data"]))
        except ValueError as error:
            log.error("event.damaged", job=row["job_id"], seq=row["seq"], error=str(error))


def _insert_event(
    rows: sa.Connection, job_id: str, at: str, kind: str, data: dict[str, Any]
) -> int:
    event = {"job_id": job_id, "at": at, "kind": kind, "data": json.dumps(data)}
    if kind == "stage":
        event |= {"stage": data["stage"], "subject": data["subject"]}
    inserted = rows.execute(sa.insert(events).values(event).returning(events.c.seq))
    seq: int = inserted.scalar_one()
    return seq


def _text(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")
