"""API keys: 256 random bits, shown once. The database stores their SHA-256 under a public prefix.

cru_3f9a0c1d7b_Zk4…      prefix, then the secret

A verified key is cached for KNOWN_FOR_S, so that a request need not wait for the database. Each
revocation, by any process, adds a line to a file beside the database and invalidates the cache. A
database without a file, which several hosts use, has no such line: the other processes may accept a
revoked key for KNOWN_FOR_S, counted from before they read its row. New keys are accepted at once:
what is no key is not cached. Without the database a server accepts no key after KNOWN_FOR_S.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from pipeline.errors import PlanError, UserError
from service.errors import NotFound, Unauthorized
from service.storage.audit import Audit
from service.storage.audit_entry import SERVICE, Actor, Details, Entry
from service.storage.database import Database
from service.storage.key import FORM, SCOPES, Key
from service.storage.sqlite import FILE_MODE
from service.storage.tables import keys

SECRET_BYTES = 32
KNOWN_FOR_S = 5.0
MAX_KNOWN = 1000  # cached keys; at more, the cache is cleared
REFUSED = "this key is not known, or was revoked"
NEXT = (
    "send `Authorization: Bearer KEY` with a key from `crucible keys create` on the server;"
    " the command line reads the key from CRUCIBLE_KEY"
)


@dataclass(frozen=True, slots=True)
class _CachedKey:
    """A verified key."""

    key: Key
    until_s: float  # by the clock
    revocations: int  # their number before the verification


class Keys:
    """The API keys of one server."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._clock = database, clock
        self._audit = Audit(database)
        self._revoked = _file_beside(database.path)
        self._known: dict[str, _CachedKey] = {}  # by digest

    def create(
        self, name: str, scopes: Iterable[str], owner: str = "", actor: Actor = SERVICE
    ) -> tuple[Key, str]:
        """Create a key. Returns it with its text, which is not stored and cannot be recovered. The
        owner is the key itself unless `owner` names another.
        """
        text = f"cru_{secrets.token_hex(5)}_{secrets.token_urlsafe(SECRET_BYTES)}"
        return self.add(text, name, scopes, owner, actor), text

    def add(
        self,
        text: str,
        name: str,
        scopes: Iterable[str],
        owner: str = "",
        actor: Actor = SERVICE,
    ) -> Key:
        """Add a key that was created elsewhere, such as the first admin key of a container."""
        match = FORM.fullmatch(text)
        if match is None:
            raise UserError(
                "not a Crucible key: expected cru_, 10 hexadecimal digits, _, 43 characters",
                "create one with `crucible keys create`",
            )
        valid = tuple(scope for scope in SCOPES if scope in set(scopes))
        if unknown := sorted(set(scopes) - set(valid)):
            raise PlanError(f"no scope '{unknown[0]}'", f"give some of {', '.join(SCOPES)}")
        key = Key(
            prefix=match[1],
            name=name,
            owner=owner or f"key:{match[1]}",
            scopes=valid,
            created=_now(),
        )
        row = {
            "prefix": key.prefix,
            "sha256": _digest(text),
            "name": key.name,
            "owner": key.owner,
            "scopes": " ".join(key.scopes),
            "created": key.created,
        }
        with self._database.write() as rows:
            rows.execute(sa.insert(keys).values(row))
            details: Details = {"name": name, "owner": key.owner, "scopes": " ".join(key.scopes)}
            self._audit.add(rows, Entry(actor, "key.created", f"key/{key.prefix}", details))
        return key

    def add_from_file(self, file: Path) -> Key | None:
        """Add the admin key from a container's file. Returns None if it exists already."""
        try:
            text = file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read the admin key from '{file}': {error}",
                "give a readable file that holds one key",
            ) from error
        match = FORM.fullmatch(text)
        if match and self._row(match[1]) is not None:
            return None
        return self.add(text, "admin key from a file", SCOPES)

    def known(self, text: str) -> Key | None:
        """Return the cached key of this text, without the database; None if it is not cached."""
        cached = self._known.get(_digest(text))
        if cached is None or cached.until_s < self._clock():
            return None
        return cached.key if cached.revocations == self._count_revocations() else None

    def verify(self, text: str) -> Key:
        """Return the key of this text. Unauthorized with the same message and timing for every
        cause.
        """
        # before the row is read, so that a revocation in between counts
        revocations, until_s = self._count_revocations(), self._clock() + KNOWN_FOR_S
        match = FORM.fullmatch(text)
        row = self._row(match[1]) if match else None
        same = hmac.compare_digest(_digest(text), row["sha256"] if row else _digest(""))
        if row is None or not same or row["revoked"]:
            raise Unauthorized(REFUSED, NEXT)
        key = key_from_row(row)
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[_digest(text)] = _CachedKey(key, until_s, revocations)
        return key

    def is_valid(self, prefix: str) -> bool:
        """Return whether a key that was verified before is still valid, by the database."""
        row = self._row(prefix)
        return row is not None and row["revoked"] is None

    def list(self) -> tuple[Key, ...]:
        """Return all keys, oldest first, including revoked ones."""
        query = sa.select(keys).order_by(keys.c.created, keys.c.prefix)
        with self._database.read() as rows:
            return tuple(map(key_from_row, rows.execute(query).mappings()))

    def revoke(self, prefix: str, actor: Actor = SERVICE) -> Key:
        """Revoke a key from now on. NotFound if there is no valid key with this prefix."""
        valid = (keys.c.prefix == prefix) & keys.c.revoked.is_(None)
        with self._database.write() as rows:
            changed = rows.execute(sa.update(keys).where(valid).values(revoked=_now())).rowcount
            if changed:
                self._audit.add(rows, Entry(actor, "key.revoked", f"key/{prefix}"))
        self._known.clear()
        self._tell_processes(prefix)
        row = self._row(prefix)
        if row is None or not changed:
            raise NotFound(f"no valid key '{prefix}'", "`crucible keys list` names them by prefix")
        return key_from_row(row)

    def _tell_processes(self, prefix: str) -> None:
        """Add a line to the file that invalidates the caches of this host's processes."""
        if self._revoked is not None:
            self._revoked.touch(FILE_MODE)
            with self._revoked.open("a", encoding="ascii") as file:
                file.write(f"{prefix}\n")

    def _count_revocations(self) -> int:
        """Return a number that each revocation raises: the size of the file. 0 without a file."""
        if self._revoked is None:
            return 0
        try:
            return self._revoked.stat().st_size
        except FileNotFoundError:
            return 0

    def _row(self, prefix: str) -> sa.RowMapping | None:
        query = sa.select(keys).where(keys.c.prefix == prefix)
        with self._database.read() as rows:
            return rows.execute(query).mappings().first()


def key_from_row(row: sa.RowMapping) -> Key:
    columns = ("prefix", "name", "owner", "created", "revoked")
    values = {name: row[name] for name in columns}
    return Key.model_validate(values | {"scopes": tuple(row["scopes"].split())})


def _file_beside(path: Path | None) -> Path | None:
    return None if path is None else path.with_name(f"{path.name}-revoked")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
