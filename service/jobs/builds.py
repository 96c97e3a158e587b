"""What the stages of jobs make, shared by servers through `files_url`: each is made once.

A job's child asks before it makes an artifact: `seek`. The server brings the artifact into the
store of its home, which the child reads, or grants the right to make it, or lets the child wait
while another job makes it, on any server. `made` copies the artifact out of the child's work while
that goes on, checks it, uploads it and lets the next one go on.

The right is an advisory lock of PostgreSQL. If its connection is lost, two may make the same
artifact: either is right.

`collect` removes the artifacts that no job has used for a time, by the database's clock. It holds a
lock for itself that every upload of every server shares: so no file is removed of which an upload
makes use. A job that reads an artifact meanwhile may miss a file of it, and makes it again.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from pipeline.errors import StoreError
from pipeline.execution.remote_store import RemoteStore
from pipeline.execution.store import Store, damage
from service import logs
from service.settings import PREFIX, Settings
from service.storage.database import Database
from service.storage.files import WAIT_S
from service.storage.tables import builds as table
from service.storage.tables import database_clock_s

log = logs.get("service.builds")

Answer = Literal["there", "make", "wait"]
FOLDER = "builds"  # below `files_url`
PATIENCE_S, POLL_S = 60.0, 0.2  # for those who upload or remove artifacts


class Builds:
    """The artifacts of one server's jobs. Safe for threads."""

    def __init__(self, home: Path, remote: RemoteStore, database: Database) -> None:
        self._home, self._remote, self._database = home, remote, database
        self._locks = BuildLocks(database)

    @property
    def store(self) -> Store:
        """The store of the home, which uploads what it adopts."""
        return Store(self._home, remote=self._remote)

    def seek(self, job_id: str, stage: str, digest: str, is_exclusive: bool) -> Answer:
        """Bring an artifact to the store of the home, or say whether the job may make it.

        `is_exclusive`: only one job makes it at a time.
        """
        try:
            if self._bring(stage, digest):
                return "there"
            if not is_exclusive:
                return "make"
            if not self._locks.take(digest, job_id):
                return "wait"
            if self._bring(stage, digest):  # made before the lock was free
                self._locks.give_back(digest, job_id)
                return "there"
        except StoreError as error:  # neither S3 nor the lock is needed to make it
            log.error("build.not_shared", stage=stage, key=digest, error=error.message)
        return "make"

    def made(self, job_id: str, work_home: Path, stage: str, digest: str) -> None:
        """Copy what a job has made from its store, upload it, and let other jobs go on."""
        folder = work_home / "artifacts" / stage / digest
        try:
            if folder.is_dir():  # else it is of use for this job only
                with self._locks.shared_with_uploads():
                    self.store.adopt_copy(folder)
        except (OSError, ValueError) as error:
            log.warning("artifact.refused", job=job_id, why=f"{stage}: {damage(error)}")
        except StoreError as error:  # it is here, and uploaded later
            log.error("build.not_shared", stage=stage, key=digest, error=error.message)
        finally:
            self._locks.give_back(digest, job_id)

    def push(self) -> None:
        """Upload what is not uploaded yet. What cannot be now is uploaded the next time."""
        try:
            with self._locks.shared_with_uploads():
                self.store.push_pending()
        except StoreError as error:
            log.error("builds.not_shared", error=error.message)

    def collect(self, unused_s: float, dry_run: bool = False) -> tuple[int, int]:
        """Remove the artifacts that no job has made or used for `unused_s`. Returns their number
        and bytes. StoreError if uploads of other servers leave no time for it.
        """
        with self._locks.without_uploads():
            with self._database.read() as rows:
                before_s = float(rows.scalar(sa.select(database_clock_s())) or 0.0) - unused_s
                is_used = table.c.used_at >= before_s
                query = sa.select(table.c.stage, table.c.key).where(is_used)
                used = {(row.stage, row.key) for row in rows.execute(query)}
            before = dt.datetime.fromtimestamp(before_s, dt.UTC)
            removed = self._remote.collect(before, used, dry_run)
            if not dry_run:
                with self._database.write() as rows:
                    rows.execute(sa.delete(table).where(~is_used))
        return removed

    def _bring(self, stage: str, digest: str) -> bool:
        """Return whether an artifact is here now, and note its use."""
        if not self.store.bring(stage, digest):
            return False
        row = {"stage": stage, "key": digest, "used_at": database_clock_s()}
        use = insert(table).values(row)
        now = {"used_at": use.excluded.used_at}
        try:
            with self._database.write() as rows:
                rows.execute(use.on_conflict_do_update(index_elements=["stage", "key"], set_=now))
        except StoreError as error:  # in doubt it is made again, later
            log.warning("build.use_not_stored", stage=stage, key=digest, error=error.message)
        return True

    def release(self, job_id: str) -> None:
        """Let other jobs make what this job has not finished."""
        self._locks.release(job_id)

    def close(self) -> None:
        """Give all locks back."""
        self._locks.close()


class BuildLocks:
    """Locks of one server, which last until they are given back or its connection ends."""

    def __init__(self, database: Database) -> None:
        self._database, self._lock = database, threading.Lock()
        self._rows: sa.Connection | None = None
        self._holders: dict[str, str] = {}  # job by digest

    def take(self, digest: str, job_id: str) -> bool:
        """Take the lock of an artifact for a job, unless another job has it."""
        with self._lock:
            if holder := self._holders.get(digest):
                return holder == job_id
            is_free = self._call(sa.func.pg_try_advisory_lock, digest)
            if is_free:
                self._holders[digest] = job_id
            return is_free

    def give_back(self, digest: str, job_id: str) -> None:
        """Give a lock back. No effect if the job has it not."""
        with self._lock:
            if self._holders.get(digest) == job_id:
                del self._holders[digest]
                try:
                    self._call(sa.func.pg_advisory_unlock, digest)
                except StoreError as error:  # the lock has ended with its connection
                    log.warning("build.lock_lost", error=error.message)

    def release(self, job_id: str) -> None:
        """Give back all locks of a job."""
        for digest in [each for each, holder in self._holders.copy().items() if holder == job_id]:
            self.give_back(digest, job_id)

    def close(self) -> None:
        """Give all locks back: at once, not when the database sees that the connection ended."""
        with self._lock:
            try:
                if self._rows is not None:
                    self._rows.execute(sa.select(sa.func.pg_advisory_unlock_all()))
            except sa.exc.DBAPIError as error:
                log.warning("build.lock_lost", error=str(error.orig))
            finally:
                self._drop()

    @contextlib.contextmanager
    def shared_with_uploads(self) -> Iterator[None]:
        """Let nobody remove artifacts meanwhile."""
        with self._waited_for(sa.func.pg_try_advisory_lock_shared):
            yield

    @contextlib.contextmanager
    def without_uploads(self) -> Iterator[None]:
        """Let nobody upload or remove artifacts meanwhile."""
        with self._waited_for(sa.func.pg_try_advisory_lock):
            yield

    @contextlib.contextmanager
    def _waited_for(self, function: Callable[..., sa.ColumnElement[bool]]) -> Iterator[None]:
        """Hold a lock on a connection of its own, as one connection never waits for itself.

        StoreError after PATIENCE_S. No waiting in the database: a server that waits to remove
        artifacts would hold back all uploads.
        """
        end_s = time.monotonic() + PATIENCE_S
        with self._database.translated_errors():
            rows = self._database.session()
            try:
                while not rows.scalar(sa.select(function(_number("uploads")))):
                    if time.monotonic() > end_s:
                        raise StoreError(
                            "another server uploads or removes artifacts of the shared store for"
                            f" more than {PATIENCE_S:g} s",
                            "nothing: it is tried again later",
                        )
                    time.sleep(POLL_S)
                yield
            finally:
                rows.invalidate()  # the lock ends with the connection
                rows.close()

    def _call(self, function: Callable[..., sa.ColumnElement[bool]], digest: str) -> bool:
        try:
            with self._database.translated_errors():
                if self._rows is None:
                    self._rows = self._database.session()
                return bool(self._rows.scalar(sa.select(function(_number(digest)))))
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        self._holders.clear()
        if self._rows is not None:
            self._rows.invalidate()
            self._rows.close()
            self._rows = None


def _number(subject: str) -> sa.ColumnElement[int]:
    """Return the number of a lock."""
    return sa.func.hashtextextended(f"crucible build {subject}", 0)


def builds_from(settings: Settings, database: Database) -> Builds | None:
    """Return the builds of a server with these settings; None if it shares no files."""
    if settings.files_url is None:
        return None
    url = f"{settings.files_url.rstrip('/')}/{FOLDER}"
    remote = RemoteStore(url, WAIT_S, f"{PREFIX}FILES_URL")
    return Builds(settings.home, remote, database)
