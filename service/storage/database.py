"""The database: one SQLite file with many readers and one writer at a time, migrated step by step.

    with database.write() as rows: rows.execute(...)      one transaction, durable on the disk when
                                                          it returns, or rolled back
    with database.read() as rows: rows.execute(...)

Only the user of the service may read the file: it holds the digests of all keys. SQLite gives the
files beside it (-wal, -shm) the same mode.

Times are stored as UTC in ISO 8601. `MIGRATIONS[n]` migrates version n to n + 1; the version is in
`PRAGMA user_version`.
"""

from __future__ import annotations

import contextlib
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipeline.errors import DiskFull, StoreError
from service.storage.layout import HOME_MODE

FILE_MODE = 0o600
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
    # An entry is never changed. It is deleted only after an entry `audit.expired` has announced, as
    # its object, the time before which entries are deleted. So every deletion leaves an entry.
    """
    CREATE TABLE audit (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, action TEXT NOT NULL,
        object TEXT NOT NULL, key TEXT NOT NULL, owner TEXT NOT NULL, address TEXT NOT NULL,
        request TEXT NOT NULL, details TEXT NOT NULL,
        CHECK (action != 'audit.expired' OR object < at)
    ) STRICT;
    CREATE INDEX audit_by_action ON audit (action, object);
    CREATE TRIGGER audit_replace BEFORE INSERT ON audit
        WHEN EXISTS (SELECT 1 FROM audit WHERE seq = NEW.seq)
        BEGIN SELECT RAISE(ABORT, 'an audit entry cannot be changed'); END;
    CREATE TRIGGER audit_update BEFORE UPDATE ON audit
        BEGIN SELECT RAISE(ABORT, 'an audit entry cannot be changed'); END;
    CREATE TRIGGER audit_delete BEFORE DELETE ON audit
        WHEN OLD.at >= coalesce(
            (SELECT max(object) FROM audit WHERE action = 'audit.expired'), ''
        )
        BEGIN SELECT RAISE(ABORT, 'an audit entry has not expired'); END;
    """,
    """
    CREATE TABLE sessions (
        sha256 TEXT PRIMARY KEY, key TEXT NOT NULL REFERENCES keys (prefix), expires TEXT NOT NULL
    ) STRICT;
    """,
)


class Database:
    """The service's state on disk. Thread-safe; each thread has its own connection."""

    def __init__(self, path: Path, migrations: Sequence[str] = MIGRATIONS) -> None:
        self.path = path
        self._local = threading.local()
        self._writer = threading.Lock()
        path.parent.mkdir(mode=HOME_MODE, parents=True, exist_ok=True)
        self._secure_files()
        with self._translated_errors(), contextlib.closing(self._open()) as rows:
            self._migrate(rows, migrations)

    @contextlib.contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction, committed at the end, rolled back on any exception."""
        rows = self._connection()
        self._local.after_commit = []
        with self._writer, self._translated_errors():
            rows.execute("BEGIN IMMEDIATE")
            try:
                yield rows
                rows.execute("COMMIT")
            except BaseException:
                if rows.in_transaction:  # a full disk has ended it already
                    rows.execute("ROLLBACK")
                raise
        for call in self._local.after_commit:
            call()

    def after_commit(self, call: Callable[[], None]) -> None:
        """Call a function once the transaction of this thread is committed, not if it fails."""
        self._local.after_commit.append(call)

    @contextlib.contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for queries."""
        with self._translated_errors():
            yield self._connection()

    @property
    def is_open_here(self) -> bool:
        """Whether the calling thread has used the database, and not closed its connection."""
        return hasattr(self._local, "rows")

    def close(self) -> None:
        """Close this thread's connection."""
        rows = getattr(self._local, "rows", None)
        if rows is not None:
            rows.close()
            del self._local.rows

    def _connection(self) -> sqlite3.Connection:
        if not self.is_open_here:
            self._local.rows = self._open()
        rows: sqlite3.Connection = self._local.rows
        return rows

    def _secure_files(self) -> None:
        """Create the file for its user alone, or remove the rights of others from existing files.
        StoreError if they belong to another user.
        """
        try:
            self.path.touch(FILE_MODE)
            for suffix in ("", "-wal", "-shm"):
                file = self.path.with_name(f"{self.path.name}{suffix}")
                if file.exists() and stat.S_IMODE(file.stat().st_mode) & ~FILE_MODE:
                    file.chmod(FILE_MODE)
        except OSError as error:
            raise StoreError(
                f"cannot use '{self.path}': {error.strerror}",
                "run this command as the user to whom the service's home belongs",
            ) from error

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
