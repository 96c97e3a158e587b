"""SQLite: one file, many readers and one writer at a time. The default, which needs no server.

Only the user of the service may read the file: it holds the digests of all keys. SQLite gives the
files beside it (-wal, -shm) the same mode.
"""

from __future__ import annotations

import contextlib
import sqlite3
import stat
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from pipeline.errors import DiskFull, StoreError
from service.storage.layout import HOME_MODE

FILE_MODE = 0o600
BUSY_S = 10.0  # how long a write waits for another process, such as `crucible keys`
# FULL: a committed change survives a power cut
PRAGMAS = ("synchronous = FULL", "foreign_keys = ON")


@dataclass(frozen=True, slots=True)
class SQLite:
    """A database in a file."""

    path: Path
    _writer: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def name(self) -> str:
        return f"'{self.path}'"

    def open(self) -> sa.Engine:
        """Create the file for its user alone, and return its engine."""
        self.path.parent.mkdir(mode=HOME_MODE, parents=True, exist_ok=True)
        self._secure_files()
        engine = sa.create_engine(
            sa.URL.create("sqlite", database=str(self.path)),
            connect_args={"timeout": BUSY_S},
            max_overflow=-1,  # as many connections as threads
        )
        sa.event.listen(engine, "connect", _configure)
        sa.event.listen(engine, "begin", _begin)
        return engine

    def reading(self, engine: sa.Engine) -> sa.Engine:
        """Return the engine for queries: each sees the database at one moment."""
        return engine

    def writing(self, engine: sa.Engine) -> sa.Engine:
        """Return the engine for changes: IMMEDIATE locks the file before the first query."""
        return engine.execution_options(sqlite_begin="BEGIN IMMEDIATE")

    def turn(self) -> contextlib.AbstractContextManager[object]:
        """Hold back the other threads that write: SQLite would make them poll."""
        return self._writer

    def lock(self, rows: sa.Connection, subject: str) -> None:
        """Nothing to do: a transaction that writes has the file for itself."""

    def check(self, rows: sa.Connection) -> None:
        """Raise an error if the file is damaged."""
        if (damage := rows.exec_driver_sql("PRAGMA quick_check").scalar_one()) != "ok":
            raise sqlite3.DatabaseError(damage)

    def is_of_operator(self, error: BaseException | None) -> bool:
        """Never: what SQLite calls an error of the program is one."""
        return False

    def crucible_error(self, error: BaseException) -> DiskFull | StoreError:
        """Translate an error of SQLite."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            return DiskFull(
                f"the disk is full while writing {self.name}",
                "free some space, or move the service's home to a larger disk",
            )
        if isinstance(error, sqlite3.OperationalError):
            return StoreError(
                f"cannot use {self.name}: {error}",
                "check the disk, its permissions, and that no other server uses this home",
            )
        advice = (
            "restore it from a backup, or move it away: this loses its jobs and keys, but not the"
            " reports beside it"
        )
        return StoreError(f"{self.name} is damaged: {error}", advice)

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
                f"cannot use {self.name}: {error.strerror}",
                "run this command as the user to whom the service's home belongs",
            ) from error


def _configure(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # `_begin` begins transactions, not the driver
    end_s = time.monotonic() + BUSY_S
    while True:  # SQLite does not wait where two processes set the journal of a new file
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end_s:
                raise
            time.sleep(0.01)
    for pragma in PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin(rows: sa.Connection) -> None:
    rows.exec_driver_sql(rows.get_execution_options().get("sqlite_begin", "BEGIN"))
