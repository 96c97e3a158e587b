"""The database of the service: SQLite in a file, or PostgreSQL at an address. The same code uses
both, through SQLAlchemy.

    with database.write() as rows: rows.execute(...)      one transaction, durable when it returns,
                                                          or rolled back
    with database.read() as rows: rows.execute(...)       queries that see one moment
    database.lock(rows, "owner/me")                       other writers with the same subject wait

On SQLite, writers run one after another. On PostgreSQL they run at once, also those of other
servers: a transaction that decides by what it has read first locks that row (`with_for_update`), or
a subject if there may be no row. Opening migrates the database: see `migrations`.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import sqlalchemy as sa

from pipeline.errors import StoreError
from service.settings import Settings
from service.storage.migrations import Schema, check_revision, revision_of, upgrade
from service.storage.postgresql import PostgreSQL, url_from
from service.storage.sqlite import SQLite

CURRENT = Schema()
POSTGRESQL_MARK = "uses-postgresql"  # in the home of servers with `database_url`


class Database:
    """The service's state. Thread-safe: each block has a connection for itself."""

    def __init__(self, location: Path | str, schema: Schema = CURRENT) -> None:
        """Open the file of this path, or the PostgreSQL of this address, and migrate it."""
        self._backend = (
            SQLite(location) if isinstance(location, Path) else PostgreSQL(url_from(location))
        )
        self.path = location if isinstance(location, Path) else None
        self._local = threading.local()
        self._lock, self._blocks = threading.Lock(), 0  # blocks that have a connection now
        with self.translated_errors():
            self._engine = self._backend.open()
            self._reading = self._backend.reading(self._engine)
            self._writing = self._backend.writing(self._engine)
            try:
                self._migrate(schema)
            except BaseException:
                self._engine.dispose()
                raise

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """One transaction, committed at the end, rolled back on any exception."""
        self._local.used, self._local.after_commit = True, []
        with self._backend.turn(), self._block(), self._writing.begin() as rows:
            yield rows
        for call in self._local.after_commit:
            call()

    def after_commit(self, call: Callable[[], None]) -> None:
        """Call a function once the transaction of this thread is committed, not if it fails."""
        self._local.after_commit.append(call)

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Yield a connection for queries."""
        self._local.used = True
        with self._block(), self._reading.connect() as rows:
            yield rows

    def session(self) -> sa.Connection:
        """Return a connection for locks that outlast a transaction. The caller closes it."""
        return self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")

    def lock(self, rows: sa.Connection, subject: str) -> None:
        """Let other transactions that lock the same subject wait until this one has ended."""
        self._backend.lock(rows, subject)

    @property
    def is_open_here(self) -> bool:
        """Whether the calling thread has used the database since it last closed it."""
        return getattr(self._local, "used", False)

    def close(self) -> None:
        """Close all connections, unless another thread uses one now: then they stay open, and
        that thread closes them. The next use opens new ones.
        """
        self._local.used = False
        with self._lock:
            if self._blocks == 0:
                self._engine.dispose()

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        with self._lock:
            self._blocks += 1
        try:
            with self.translated_errors():
                yield
        finally:
            with self._lock:
                self._blocks -= 1

    def _migrate(self, schema: Schema) -> None:
        with self._reading.connect() as rows:
            self._backend.check(rows)
            revision = revision_of(rows)
            check_revision(revision, schema, self._backend.name)
        if revision == schema.revision:
            return
        with self._writing.begin() as rows:
            self._backend.lock(rows, "schema")  # another server may do the same
            upgrade(rows, schema)

    @contextlib.contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Translate the driver's errors to Crucible's."""
        try:
            yield
        except (sa.exc.IntegrityError, sa.exc.ProgrammingError, sa.exc.DataError) as error:
            if not self._backend.is_of_operator(error.orig):  # a bug
                raise
            raise self._backend.crucible_error(error.orig or error) from error
        except sa.exc.DBAPIError as error:
            raise self._backend.crucible_error(error.orig or error) from error
        except (sa.exc.TimeoutError, sqlite3.DatabaseError) as error:
            raise self._backend.crucible_error(error) from error


def delete_unlocked(table: sa.Table, condition: sa.ColumnElement[bool]) -> sa.Delete:
    """Delete rows, except those that another transaction deletes or changes now. So two servers
    that delete what has expired never wait for each other, and so never forever.
    """
    key = sa.tuple_(*table.primary_key.columns)
    expired = sa.select(*table.primary_key.columns).where(condition)
    return sa.delete(table).where(key.in_(expired.with_for_update(skip_locked=True)))


def database_from(settings: Settings) -> Database:
    """Open the database that the settings name. StoreError for SQLite in a home of PostgreSQL: it
    knows none of the uploads and models there, which would be deleted as left over.
    """
    mark = settings.home / POSTGRESQL_MARK
    if settings.database_url is None and mark.exists():
        raise StoreError(
            f"the home '{settings.home}' belongs to a PostgreSQL database",
            "set CRUCIBLE_SERVICE_DATABASE_URL as before, or give another home",
        )
    return Database(settings.database_url or settings.database)
