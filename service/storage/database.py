"""The database: one SQLite file with many readers and one writer at a time, migrated step by step.

    with database.write() as rows: rows.execute(...)      one transaction, durable on the disk when
                                                          it returns, or rolled back
    with database.read() as rows: rows.execute(...)

Times are stored as UTC in ISO 8601. `MIGRATIONS[n]` migrates version n to n + 1; the version is in
`PRAGMA user_version`.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import DiskFull, StoreError

BUSY_S = 10.0  # how long a write waits for another process, such as `crucible keys`

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE keys (
        prefix TEXT PRIMARY KEY, sha256 TEXT NOT NULL, name TEXT NOT NULL, owner TEXT NOT NULL,
        scopes TEXT NOT NULL, created TEXT NOT NULL, revoked TEXT
    ) STRICT;
    CREATE TABLE jobs (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, identity TEXT NOT NULL, state TEXT NOT NULL,
        created TEXT NOT NULL, job TEXT NOT NULL
    ) STRICT;
    CREATE INDEX jobs_by_identity ON jobs (owner, identity);
    CREATE INDEX jobs_by_state ON jobs (state, id);
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        at TEXT NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL
    ) STRICT;
    CREATE INDEX events_by_job ON events (job_id, seq);
    CREATE TABLE requests (
        owner TEXT NOT NULL, idempotency_key TEXT NOT NULL, digest TEXT NOT NULL,
        job_id TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
        created TEXT NOT NULL, PRIMARY KEY (owner, idempotency_key)
    ) STRICT;
    """,
    """
    CREATE TABLE models (
        name TEXT PRIMARY KEY, owner TEXT NOT NULL, current INTEGER NOT NULL,
        latest INTEGER NOT NULL, deployed INTEGER NOT NULL DEFAULT 0, deployment TEXT
    ) STRICT;
    CREATE TABLE versions (
        model TEXT NOT NULL REFERENCES models (name) ON DELETE CASCADE, version INTEGER NOT NULL,
        job_id TEXT NOT NULL, before INTEGER, about TEXT NOT NULL, PRIMARY KEY (model, version)
    ) STRICT;
    """,
    "ALTER TABLE versions ADD COLUMN memory_bytes INTEGER",
)


class Database:
    """The service's state on disk. Thread-safe; each thread has its own connection."""

    def __init__(self, path: Path, migrations: Sequence[str] = MIGRATIONS) -> None:
        self.path = path
        self._local = threading.local()
        self._writer = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._translated_errors(), contextlib.closing(self._open()) as rows:
            self._migrate(rows, migrations)

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction, committed at the end, rolled back on any exception."""
        rows = self._connection()
        with self._writer, self._translated_errors():
            rows.execute("BEGIN IMMEDIATE")
            try:
                yield rows
                rows.execute("COMMIT")
            except BaseException:
                if rows.in_transaction:  # a full disk has ended it already
                    rows.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for queries."""
        with self._translated_errors():
            yield self._connection()

    def close(self) -> None:
        """Close this thread's connection."""
        rows = getattr(self._local, "rows", None)
        if rows is not None:
            rows.close()
            del self._local.rows

    def _connection(self) -> sqlite3.Connection:
        if not hasattr(self._local, "rows"):
            self._local.rows = self._open()
        rows: sqlite3.Connection = self._local.rows
        return rows

    def _open(self) -> sqlite3.Connection:
        rows = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        rows.row_factory = sqlite3.Row
        # FULL: a committed change survives a power cut
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            rows.execute(f"PRAGMA {pragma}")
        return rows

    def _migrate(self, rows: sqlite3.Connection, migrations: Sequence[str]) -> None:
        damage = rows.execute("PRAGMA quick_check").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        version = rows.execute("PRAGMA user_version").fetchone()[0]
        if version > len(migrations):
            message = (
                f"'{self.path}' is of schema version {version}, this Crucible knows up to"
                f" {len(migrations)}"
            )
            raise StoreError(message, "start the newer version of Crucible, or give another home")
        for number in range(version, len(migrations)):
            rows.executescript(
                f"BEGIN IMMEDIATE;\n{migrations[number]};\nPRAGMA user_version ="
                f" {number + 1};\nCOMMIT;"
            )

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Translate SQLite's errors to Crucible's."""
        try:
            yield
        except (sqlite3.IntegrityError, sqlite3.ProgrammingError):  # bugs
            raise
        except sqlite3.Error as error:
            raise self._crucible_error(error) from error

    def _crucible_error(self, error: sqlite3.Error) -> DiskFull | StoreError:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            return DiskFull(
                f"the disk is full while writing '{self.path}'",
                "free some space, or move the service's home to a larger disk",
            )
        if isinstance(error, sqlite3.OperationalError):
            return StoreError(
                f"cannot use '{self.path}': {error}",
                "check the disk, its permissions, and that no other server uses this home",
            )
        advice = (
            "restore it from a backup, or move it away: this loses its jobs and keys, but not the"
            " reports beside it"
        )
        return StoreError(f"'{self.path}' is damaged: {error}", advice)
