"""Sessions of browsers: somebody who signed in with a key need not send it again.

A session is a random token. The database stores its SHA-256 with the prefix of its key. It ends
after SESSION_S, when its owner signs out, or when its key is revoked.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
from collections.abc import Callable

from service.storage.audit import Actor, Audit, Entry
from service.storage.database import Database
from service.storage.keys import Key, key_from_row

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
            rows.execute("DELETE FROM sessions WHERE expires <= ?", (now.isoformat(),))
            rows.execute(
                "INSERT INTO sessions (sha256, key, expires) VALUES (?, ?, ?)",
                (_digest(token), key.prefix, expires.isoformat()),
            )
            self._audit.add(rows, Entry(actor, "session.begun", f"key/{key.prefix}"))
        return token

    def key_of(self, token: str) -> Key | None:
        """Return the key of a session; None if it has ended or never began."""
        with self._database.read() as rows:
            row = rows.execute(
                "SELECT keys.* FROM sessions JOIN keys ON keys.prefix = sessions.key"
                " WHERE sessions.sha256 = ? AND expires > ? AND revoked IS NULL",
                (_digest(token), self._clock().isoformat()),
            ).fetchone()
        return key_from_row(row) if row is not None else None

    def end(self, token: str, actor: Actor) -> None:
        """End a session. No effect if it has ended."""
        with self._database.write() as rows:
            ended = rows.execute("DELETE FROM sessions WHERE sha256 = ?", (_digest(token),))
            if ended.rowcount:
                self._audit.add(rows, Entry(actor, "session.ended", f"key/{actor.key}"))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
