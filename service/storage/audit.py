"""The audit: who did what to which object, in a table to which entries are only added.

    audit.add(rows, Entry(actor, "job.cancelled", "job/..."))   within the transaction of the action
    audit.record(Entry(actor, "access.refused", "GET /jobs"))   in a transaction of its own

So an action and its entry are stored both or not at all. Each stored entry is also one line of the
log, after the commit. The numbers of entries have no gaps, except those that a deletion leaves.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from functools import partial

import sqlalchemy as sa
import structlog

from service.storage.audit_entry import SERVICE, Entry, Filter, StoredEntry
from service.storage.database import Database
from service.storage.tables import audit

log = structlog.get_logger("service.audit")  # service.logs configures it, and imports this folder


class Audit:
    """The audit table of one database. Thread-safe."""

    def __init__(
        self, database: Database, clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)
    ) -> None:
        self._database, self._clock = database, clock

    def add(self, rows: sa.Connection, entry: Entry) -> None:
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
        rows.execute(sa.insert(audit).values(**values, details=json.dumps(entry.details)))
        self._database.after_commit(partial(log.info, "audit", **values, details=entry.details))

    def record(self, entry: Entry) -> None:
        """Store an entry by itself."""
        with self._database.write() as rows:
            self.add(rows, entry)

    def entries(self, which: Filter, limit: int) -> tuple[StoredEntry, ...]:
        """Return the newest entries, oldest first."""
        query = sa.select(audit).order_by(audit.c.seq.desc()).limit(limit)
        if which.since is not None:
            query = query.where(audit.c.at >= _text(which.since))
        if which.action:
            group = f"{which.action}."
            in_group = sa.func.substr(audit.c.action, 1, len(group)) == group
            query = query.where((audit.c.action == which.action) | in_group)
        if which.owner:
            query = query.where(audit.c.owner == which.owner)
        if which.object:
            query = query.where(audit.c.object == which.object)
        with self._database.read() as rows:
            found = rows.execute(query).mappings().all()
        return tuple(_entry(row) for row in reversed(found))

    def expire(self, before: dt.datetime, dry_run: bool = False) -> int:
        """Delete the entries before a moment, and return their number. An entry says so first."""
        moment = _text(before)
        with self._database.write() as rows:
            self._database.lock(rows, "audit expiry")  # else two servers count the same entries
            count = rows.scalar(sa.select(sa.func.count()).where(audit.c.at < moment)) or 0
            if count and not dry_run:
                self.add(rows, Entry(SERVICE, "audit.expired", moment, {"entries": count}))
                rows.execute(sa.delete(audit).where(audit.c.at < moment))
        return count


def _entry(row: sa.RowMapping) -> StoredEntry:
    return StoredEntry.model_validate({**dict(row), "details": json.loads(row["details"])})


def _text(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="milliseconds")
