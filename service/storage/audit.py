"""The audit: who did what to which object, in a table to which entries are only added.

    audit.add(rows, Entry(actor, "job.cancelled", "job/..."))   within the transaction of the action
    audit.record(Entry(actor, "access.refused", "GET /jobs"))   in a transaction of its own

So an action and its entry are stored both or not at all. Each stored entry is also one line of the
log, after the commit. The numbers of entries have no gaps, except those that a deletion leaves.
"""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import structlog

from pipeline.core import Frozen
from service.storage.database import Database

Action = Literal[
    "job.submitted",
    "job.retried",
    "job.cancelled",
    "job.removed",
    "model.promoted",
    "model.rolled_back",
    "model.deployed",
    "model.unloaded",
    "version.removed",
    "key.created",
    "session.begun",
    "session.ended",
    "key.revoked",
    "report.read",
    "upload.refused",
    "access.refused",
    "authentication.refused",
    "audit.expired",
]
ACTIONS: tuple[Action, ...] = get_args(Action)
Details = dict[str, str | int | bool]

log = structlog.get_logger("service.audit")  # service.logs configures it, and imports this folder


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts. Empty: not known, or not over the network."""

    owner: str
    key: str = ""  # the key's prefix
    address: str = ""
    request: str = ""  # id of the request


SERVICE = Actor("service")
"""The service itself, such as its daily garbage collection."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One action, or one refusal."""

    actor: Actor
    action: Action
    object: str  # `job/ID`, `model/NAME`, `key/PREFIX`, or the method and path of a request
    details: Details = field(default_factory=dict)


class StoredEntry(Frozen):
    """An entry as it is read."""

    seq: int
    at: str  # UTC
    action: str
    object: str
    owner: str
    key: str
    address: str
    request: str
    details: Details


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entries to read. Empty: all."""

    since: dt.datetime | None = None
    action: str = ""  # `job.cancelled`, or `job` for all of jobs
    owner: str = ""
    object: str = ""


class Audit:
    """The audit table of one database. Thread-safe."""

    def __init__(
        self, database: Database, clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)
    ) -> None:
        self._database, self._clock = database, clock

    def add(self, rows: sqlite3.Connection, entry: Entry) -> None:
        """Add an entry to the transaction of `rows`, and log it when that is committed."""
        actor = entry.actor
        values = {
            "at": _text(self._clock()),
            "action": entry.action,
            "object": entry.object,
            "owner": actor.owner,
            "key": actor.key,
            "address": actor.address,
            "request": actor.request,
        }
        rows.execute(
            "INSERT INTO audit (at, action, object, owner, key, address, request, details) VALUES"
            " (:at, :action, :object, :owner, :key, :address, :request, :details)",
            {**values, "details": json.dumps(entry.details)},
        )
        self._database.after_commit(partial(log.info, "audit", **values, details=entry.details))

    def record(self, entry: Entry) -> None:
        """Store an entry by itself."""
        with self._database.write() as rows:
            self.add(rows, entry)

    def entries(self, which: Filter, limit: int) -> tuple[StoredEntry, ...]:
        """Return the newest entries, oldest first."""
        query = (
            "SELECT * FROM audit WHERE (:since IS NULL OR at >= :since) AND (:action = '' OR action"
            " = :action OR substr(action, 1, length(:action) + 1) = :action || '.') AND (:owner ="
            " '' OR owner = :owner) AND (:object = '' OR object = :object) ORDER BY seq DESC LIMIT"
            " :limit"
        )
        values = {
            "since": which.since and _text(which.since),
            "action": which.action,
            "owner": which.owner,
            "object": which.object,
            "limit": limit,
        }
        with self._database.read() as rows:
            found = rows.execute(query, values).fetchall()
        return tuple(_entry(row) for row in reversed(found))

    def expire(self, before: dt.datetime, dry_run: bool = False) -> int:
        """Delete the entries before a moment, and return their number. An entry says so first."""
        moment = _text(before)
        with self._database.write() as rows:
            count = int(
                rows.execute("SELECT count(*) FROM audit WHERE at < ?", (moment,)).fetchone()[0]
            )
            if count and not dry_run:
                self.add(rows, Entry(SERVICE, "audit.expired", moment, {"entries": count}))
                rows.execute("DELETE FROM audit WHERE at < ?", (moment,))
        return count


def _entry(row: sqlite3.Row) -> StoredEntry:
    return StoredEntry.model_validate({**dict(row), "details": json.loads(row["details"])})


def _text(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")
