"""Sessions of browsers: somebody who signed in with a key need not send it again.

A session is a random token. The database stores its SHA-256 with the prefix of its key. It ends
after SESSION_S, when its owner signs out, or when its key is revoked.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
from collections.abc import Callable

import sqlalchemy as sa

from service.storage.audit import Audit
from service.storage.audit_entry import Actor, Entry
from service.storage.database import Database, delete_unlocked
from service.storage.key import Key
from service.storage.keys import key_from_row
from service.storage.tables import keys, sessions

SESSION_S = 12 * 3600
TOKEN_BYTES = 32


def _utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Sessions:
    """The sessions of one server."""

    def __init__(self, database: Database, clock: Callable[[], dt.datetime] = _utc_now) -> None:
        self._database, self._clock = database, clock
        self._audit = Audit(database)

    def begin(self, key: Key, actor: Actor) -> str:
        """Return the token of a new session. Forgets those that have expired."""
        token, now = secrets.token_urlsafe(TOKEN_BYTES), self._clock()
        expires = now + dt.timedelta(seconds=SESSION_S)
        with self._database.write() as rows:
            rows.execute(delete_unlocked(sessions, sessions.c.expires <= now.isoformat()))
            rows.execute(
                sa.insert(sessions).values(
                    sha256=_digest(token), key=key.prefix, expires=expires.isoformat()
                )
            )
            self._audit.add(rows, Entry(actor, "session.begun", f"key/{key.prefix}"))
        return token

    def key_of(self, token: str) -> Key | None:
        """Return the key of a session; None if it has ended or never began."""
        query = (
            sa.select(keys)
            .join(sessions)
            .where(
                sessions.c.sha256 == _digest(token),
                sessions.c.expires > self._clock().isoformat(),
                keys.c.revoked.is_(None),
            )
        )
        with self._database.read() as rows:
            row = rows.execute(query).mappings().first()
        return key_from_row(row) if row is not None else None

    def end(self, token: str, actor: Actor) -> None:
        """End a session. No effect if it has ended."""
        with self._database.write() as rows:
            ended = rows.execute(sa.delete(sessions).where(sessions.c.sha256 == _digest(token)))
            if ended.rowcount:
                self._audit.add(rows, Entry(actor, "session.ended", f"key/{actor.key}"))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
