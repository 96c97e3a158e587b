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
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pydantic import ValidationError

from pipeline.core import CandidateFigures
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
    Requeued,
    StaleEvent,
    Started,
    State,
    Succeeded,
    step,
)
from service.limits import raised_by
from service.storage.audit import SERVICE, Actor, Audit, Details, Entry
from service.storage.database import Database

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


@dataclass(frozen=True, slots=True)
class Once:
    """An Idempotency-Key and the digest of its request."""

    key: str
    digest: str


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
        self._database, self.audit = database, Audit(database)

    def add(
        self,
        job: Job,
        now: dt.datetime,
        once: Once | None = None,
        most_queued: int | None = None,
        entry: Entry | None = None,
    ) -> tuple[Job, bool]:
        """Add a queued job, and `entry` to the audit. Returns it and True, or the job of an earlier
        equal request and False.

        Conflict if the Idempotency-Key came with another request within 24 h; TooMany if the owner
        has `most_queued` jobs waiting.
        """
        with self._database.write() as rows:
            known = self._of_key(rows, job.owner, once, now) or self._of_identity(
                rows, job.owner, job.identity
            )
            if known is None:
                queued = rows.execute(
                    "SELECT count(*) FROM jobs WHERE owner = ? AND state = 'queued'", (job.owner,)
                ).fetchone()[0]
                if most_queued is not None and queued >= most_queued:
                    raise TooMany(
                        f"{queued} of your jobs are waiting, expected at most {most_queued}"
                        " (`max_queued`)",
                        f"wait for some, or cancel them; {raised_by('max_queued')}",
                        60,
                    )
                values = (
                    job.id,
                    job.owner,
                    job.identity,
                    job.state,
                    job.created,
                    job.model_dump_json(),
                )
                rows.execute(
                    "INSERT INTO jobs (id, owner, identity, state, created, job) VALUES (?, ?, ?,"
                    " ?, ?, ?)",
                    values,
                )
                _insert_event(rows, job.id, job.created, "queued", {})
                if entry is not None:
                    self.audit.add(rows, entry)
            chosen = known or job
            if once is not None:
                rows.execute(
                    "INSERT OR IGNORE INTO requests VALUES (?, ?, ?, ?, ?)",
                    (job.owner, once.key, once.digest, chosen.id, _text(now)),
                )
        return chosen, known is None

    def get(self, job_id: str, owner: str | None = None) -> Job:
        """Return the job. NotFound if there is none, or if it has another owner. `owner` None: any
        owner.
        """
        with self._database.read() as rows:
            return _job(_row(rows, job_id, owner))

    def of_identity(self, owner: str, identity: str) -> Job | None:
        """Return the job that an equal request would get; None if it would make a new one."""
        with self._database.read() as rows:
            return self._of_identity(rows, owner, identity)

    def forget_identity(self, job_id: str) -> None:
        """Exclude this job from the answers to equal requests."""
        with self._database.write() as rows:
            rows.execute("UPDATE jobs SET identity = id WHERE id = ?", (job_id,))

    def usual_s(self, owner: str, name: str, device: str, measures: bool = False) -> float | None:
        """Return how long this owner's jobs of this name and kind take on a device: the median of
        the last few that succeeded. None if none has.
        """
        query = (
            "SELECT * FROM jobs WHERE owner = ? AND state = 'succeeded' ORDER BY id DESC LIMIT ?"
        )
        with self._database.read() as rows:
            recent = rows.execute(query, (owner, RECENT_JOBS)).fetchall()
        criteria = (name, device, measures, 1)
        times_s = [
            job.took_s
            for job in _readable(recent)
            if (job.name, job.device, job.measures is not None, job.attempt) == criteria
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
        condition = (
            "(?1 IS NULL OR owner = ?1) AND (?2 IS NULL OR state = ?2) AND (?3 IS NULL OR id < ?3)"
        )
        query = f"SELECT * FROM jobs WHERE {condition} ORDER BY id DESC LIMIT ?4"
        with self._database.read() as rows:
            matches = rows.execute(query, (owner, state, after, limit + 1)).fetchall()
        return Page(
            tuple(_readable(matches[:limit])),
            matches[limit - 1]["id"] if len(matches) > limit else None,
        )

    def append(
        self, job_id: str, event: JobEvent, now: dt.datetime, entry: Entry | None = None
    ) -> tuple[Job, int]:
        """Store an event, the resulting job, and `entry` in the audit, all or none. StaleEvent if
        the event does not fit the job's state.
        """
        with self._database.write() as rows:
            before = _job(_row(rows, job_id, None))
            job = step(before, event, now)
            rows.execute(
                "UPDATE jobs SET state = ?, job = ? WHERE id = ?",
                (job.state, job.model_dump_json(), job_id),
            )
            kind, data = client_event(event, job)
            if entry is not None:
                self.audit.add(rows, entry)
            return job, _insert_event(rows, job_id, _text(now), kind, data)

    def events(self, job_id: str, after: int = 0, limit: int = 1000) -> tuple[StoredEvent, ...]:
        """Return the events of a job with a number above `after`, in order."""
        with self._database.read() as rows:
            matches = rows.execute(
                "SELECT * FROM events WHERE job_id = ? AND seq > ? ORDER BY seq LIMIT ?",
                (job_id, after, limit),
            ).fetchall()
        return tuple(_events(matches))

    def newest_of_stages(self, job_id: str) -> tuple[StoredEvent, ...]:
        """Return the newest event of each stage and subject of the last attempt, in the order in
        which they began.
        """
        with self._database.read() as rows:
            matches = rows.execute(
                "SELECT events.* FROM events JOIN (SELECT min(seq) AS first, max(seq) AS last FROM"
                " events WHERE job_id = ?1 AND kind = 'stage' AND json_valid(data)"
                " AND seq > coalesce((SELECT max(seq)"
                " FROM events WHERE job_id = ?1 AND kind = 'running'), 0) GROUP BY"
                " json_extract(data, '$.stage'), json_extract(data, '$.subject')) ON seq = last"
                " ORDER BY first",
                (job_id,),
            ).fetchall()
        return tuple(_events(matches))

    def figures(self, job_id: str) -> tuple[CandidateFigures, ...]:
        """Return what the last attempt has measured of each candidate so far."""
        with self._database.read() as rows:
            matches = rows.execute(
                "SELECT * FROM events WHERE job_id = ?1 AND kind = ?2"
                " AND seq > coalesce((SELECT max(seq)"
                " FROM events WHERE job_id = ?1 AND kind = 'running'), 0) ORDER BY seq LIMIT ?3",
                (job_id, FIGURES_KIND, MAX_FIGURES),
            ).fetchall()
        return joined_figures(event.data for event in _events(matches))

    def unfinished(self) -> tuple[Job, ...]:
        """Return all jobs that have not ended, oldest first."""
        with self._database.read() as rows:
            matches = rows.execute(
                f"SELECT * FROM jobs WHERE state NOT IN {_marks(FINAL)} ORDER BY id", sorted(FINAL)
            ).fetchall()
        return tuple(_readable(matches))

    def last_starts(self) -> dict[tuple[str, str], str]:
        """Return when the last job of each device and owner started, in UTC. Pairs without a job
        that has started are left out.
        """
        query = (
            "SELECT json_extract(job, '$.device') AS device, owner,"
            " max(json_extract(job, '$.started')) AS started"
            " FROM jobs WHERE json_valid(job) GROUP BY 1, 2 HAVING started IS NOT NULL"
        )
        with self._database.read() as rows:
            return {(device, owner): started for device, owner, started in rows.execute(query)}

    def counts(self, owner: str | None = None) -> dict[str, int]:
        """Return the number of jobs in each state. `owner` None: of all owners."""
        query = "SELECT state, count(*) FROM jobs WHERE ?1 IS NULL OR owner = ?1 GROUP BY state"
        with self._database.read() as rows:
            return dict(rows.execute(query, (owner,)).fetchall())

    def ended(self) -> tuple[Job, ...]:
        """Return all jobs that have ended, oldest first."""
        with self._database.read() as rows:
            matches = rows.execute(
                f"SELECT * FROM jobs WHERE state IN {_marks(FINAL)} ORDER BY id", sorted(FINAL)
            ).fetchall()
        return tuple(_readable(matches))

    def ids(self, owner: str | None = None) -> frozenset[str]:
        """Return the ids of all jobs, including those with damaged rows. `owner` None: of all
        owners.
        """
        query = "SELECT id FROM jobs WHERE ?1 IS NULL OR owner = ?1"
        with self._database.read() as rows:
            return frozenset(row["id"] for row in rows.execute(query, (owner,)))

    def remove(self, job_id: str, actor: Actor = SERVICE) -> None:
        """Delete a job that has ended, with its events. Conflict if it has not ended."""
        with self._database.write() as rows:
            row = _row(rows, job_id, None)
            if row["state"] not in FINAL:
                raise Conflict(f"job {job_id} has not ended", "cancel it first")
            rows.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            details: Details = {"owner": row["owner"]}
            self.audit.add(rows, Entry(actor, "job.removed", f"job/{job_id}", details))

    def close(self) -> None:
        """Close the calling thread's connection."""
        self._database.close()

    def _of_key(
        self, rows: sqlite3.Connection, owner: str, once: Once | None, now: dt.datetime
    ) -> Job | None:
        """Return the job of an earlier request with the same Idempotency-Key. Keys older than
        ONCE_FOR are deleted first.
        """
        rows.execute("DELETE FROM requests WHERE created <= ?", (_text(now - ONCE_FOR),))
        if once is None:
            return None
        row = rows.execute(
            "SELECT * FROM requests WHERE owner = ? AND idempotency_key = ?", (owner, once.key)
        ).fetchone()
        if row is None:
            return None
        if row["digest"] != once.digest:
            raise Conflict(
                f"the Idempotency-Key '{once.key}' came with another request before",
                "use a new key for a new request",
            )
        return _job(_row(rows, row["job_id"], owner))

    def _of_identity(self, rows: sqlite3.Connection, owner: str, identity: str) -> Job | None:
        query = (
            f"SELECT * FROM jobs WHERE owner = ? AND identity = ? AND state IN {_marks(REUSED)}"
            " ORDER BY id DESC"
        )
        return next(
            iter(_readable(rows.execute(query, (owner, identity, *REUSED)).fetchall())), None
        )


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
        case Requeued() if job.state == "queued":
            return job.state, {"why": event.why}
        case Died() if job.state == "failed":
            return job.state, event.failure.model_dump()
        case Succeeded() if job.state == "succeeded":
            return job.state, {"verdict": event.verdict, "winner": event.winner}
        case CancelAsked() | Requeued() | Died() | Succeeded():
            return job.state, {}
    raise StaleEvent(f"job {job.id}: {event}")


def _row(rows: sqlite3.Connection, job_id: str, owner: str | None) -> sqlite3.Row:
    row: sqlite3.Row | None = rows.execute("SELECT * FROM jobs WHERE id = ?", (job_id,)).fetchone()
    if row is None or owner not in (None, row["owner"]):
        refusal = NotFound if row is None else NotOwned
        raise refusal(f"no job '{job_id}'", "GET /jobs lists yours")
    return row


def _job(row: sqlite3.Row) -> Job:
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


def _readable(rows: Iterable[sqlite3.Row]) -> Iterable[Job]:
    for row in rows:
        try:
            yield _job(row)
        except DamagedRow as error:
            log.error("job.damaged", job=row["id"], error=error.message)


def _events(rows: Iterable[sqlite3.Row]) -> Iterable[StoredEvent]:
    for row in rows:
        try:
            yield StoredEvent(row["seq"], row["at"], row["kind"], json.loads(row["data"]))
        except ValueError as error:
            log.error("event.damaged", job=row["job_id"], seq=row["seq"], error=str(error))


def _insert_event(
    rows: sqlite3.Connection, job_id: str, at: str, kind: str, data: dict[str, Any]
) -> int:
    cursor = rows.execute(
        "INSERT INTO events (job_id, at, kind, data) VALUES (?, ?, ?, ?)",
        (job_id, at, kind, json.dumps(data)),
    )
    return int(cursor.lastrowid or 0)


def _marks(values: Iterable[object]) -> str:
    return f"({', '.join('?' for _ in values)})"


def _text(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")
