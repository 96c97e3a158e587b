"""Files that servers share through an object store: uploads, reports, logs and promoted versions.

    stored = files.upload(folder)                  all files of a folder of the home, as new objects
    with database.write() as rows:
        insert_files(rows, stored)                 now other servers see them, or not at all
    files.fetch(folder)                            the folder is here, with the digests of the rows
    with files.hold(folder): ...                   it stays here meanwhile

The database is the truth: an object that no row names is not read, and is removed after a while.
Objects never change. Each upload has a prefix of its own, so that a server which has lost its job
overwrites nothing of the next one, and its rows are refused with its last event (`ClaimLost`).

The folders of the home are the cache. Without `files_url` they are all there is, and nothing here
has an effect.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import sqlalchemy as sa

from pipeline.errors import DamagedError, StoreError
from pipeline.execution.object_store import ObjectStore
from pipeline.execution.store import bytes_of, digest_of
from service.settings import PREFIX, Settings
from service.storage.database import Database
from service.storage.layout import FOLDERS_OF_JOB
from service.storage.tables import files as table

WAIT_S = 5.0  # for a store that is away, while a client waits for its answer
UPLOADS_AT_ONCE = 8  # files; an archive may have thousands
RECENT_S = 3600.0  # a folder that was read so lately is not removed: its reader may go on
UNNAMED_FOR = dt.timedelta(days=1)  # an object without a row is of an unfinished upload for so long
MAX_NAMES = 500  # in one query
MARKS = "databases"  # folder of one object for each database
OURS = (*FOLDERS_OF_JOB, "models")  # folders whose objects are removed
EMPTY = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, and the object that holds it."""

    folder: str  # below the home
    path: str  # below the folder
    object: str  # below the URL
    sha256: str
    size_bytes: int
    is_shared: bool = False  # the object was stored with another folder


class Files:
    """The files of one server. Safe for threads."""

    def __init__(
        self,
        database: Database,
        home: Path,
        objects: ObjectStore | None = None,
        cache_bytes: int = 0,
    ) -> None:
        self._database, self._home, self._objects = database, home, objects
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()
        self._shrinking = threading.Lock()
        self._held: Counter[str] = Counter()
        self._is_marked = False

    @property
    def are_shared(self) -> bool:
        """Whether other servers read the files, too."""
        return self._objects is not None

    def check(self) -> None:
        """Raise StoreError if the object store does not answer now."""
        if self._objects is not None:
            self._objects.check()

    def upload(
        self,
        folder: Path,
        token: int | None = None,
        like: Sequence[Path] = (),
        paths: Collection[str] | None = None,
    ) -> tuple[StoredFile, ...]:
        """Upload a folder, or these files of it, and return the rows to insert. () without an
        object store.

        `token` is that of the claim whose job has made it. Files that are equal to one in the
        folders `like` share its object.
        """
        if self._objects is None:
            return ()
        self._mark(self._objects)
        name, mark = self._name(folder), "" if token is None else f"{token}-"
        prefix = f"{name}/{mark}{secrets.token_hex(8)}"
        known = {file.sha256: file.object for each in like for file in self._files(each)}
        found = []
        for path in sorted(folder.rglob("*") if paths is None else map(folder.joinpath, paths)):
            if path.is_file() and not path.is_symlink():
                sha256 = digest_of(path)
                place = known.get(sha256, f"{prefix}/{sha256}")
                size_bytes = path.stat().st_size
                inside = str(path.relative_to(folder))
                found.append(StoredFile(name, inside, place, sha256, size_bytes, sha256 in known))
        new = {file.object: folder / file.path for file in found if not file.is_shared}
        with ThreadPoolExecutor(UPLOADS_AT_ONCE) as pool:
            list(pool.map(self._objects.put_file, new.values(), new.keys()))
        return tuple(found)

    def fetch(self, folder: Path, paths: Collection[str] | None = None) -> bool:
        """Make a folder, or these files of it, as they were stored. False if none is stored.

        Files that are here are compared with their digests. In a whole folder, those of another
        claim, which has lost its job, are removed. DamagedError names an object that is missing or
        has changed; StoreError if the store does not answer.
        """
        if self._objects is None:
            return False
        files = self._files(folder)
        wanted = [file for file in files if paths is None or file.path in paths]
        if not wanted:
            return False
        with self._locked(folder):
            missing = [file for file in wanted if not _is_intact(folder / file.path, file.sha256)]
            for file in missing:
                self._download(self._objects, file, folder / file.path)
            if paths is None:
                _remove_others(folder, {folder / file.path for file in files})
            os.utime(folder)
        if missing:
            self.shrink()
        return True

    @contextlib.contextmanager
    def hold(self, folder: Path) -> Iterator[None]:
        """Keep the copy of a folder meanwhile."""
        name = self._name(folder)
        with self._lock:
            self._held[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[name] -= 1

    def bytes_of(self, folders: Iterable[Path]) -> dict[Path, int]:
        """Return the bytes of each of these folders that is stored."""
        if self._objects is None:
            return {}
        names, found = {self._name(folder): folder for folder in folders}, dict[Path, int]()
        for start in range(0, len(names), MAX_NAMES):
            some = list(names)[start : start + MAX_NAMES]
            query = sa.select(table.c.folder, sa.func.sum(table.c.size_bytes).label("size_bytes"))
            query = query.where(table.c.folder.in_(some)).group_by(table.c.folder)
            with self._database.read() as rows:
                for row in rows.execute(query):
                    found[names[row.folder]] = int(row.size_bytes)
        return found

    def with_file(self, path: str) -> list[str]:
        """Return the names of the folders that have a file at this path."""
        query = sa.select(table.c.folder).where(table.c.path == path)
        with self._database.read() as rows:
            return list(rows.scalars(query.order_by(table.c.folder)))

    def insert(self, files: Sequence[StoredFile]) -> None:
        """Let other servers see these files."""
        if files:
            with self._database.write() as rows:
                insert_files(rows, files)

    def forget(self, folders: Iterable[Path]) -> None:
        """Delete the rows of these folders. Objects that no other folder shares go later."""
        if self._objects is not None:
            with self._database.write() as rows:
                delete_files(rows, map(self._name, folders))

    # -- removal -----------------------------------------------------------------------------

    def shrink(self) -> None:
        """Remove the least recently used copies above the limit of the cache.

        What is held, was read lately, or is not stored elsewhere, stays: also above the limit.
        """
        if self._objects is None:
            return
        with self._shrinking, contextlib.suppress(FileNotFoundError):  # removed by another process
            copies = sorted(self._copies(), key=_used_s)
            sizes = {folder: bytes_of(folder) for folder in copies}
            excess = sum(sizes.values()) - self._cache_bytes
            for folder in copies:
                if excess > 0 and self._evict(folder):
                    excess -= sizes[folder]

    def collect(self, now: dt.datetime, dry_run: bool = False) -> tuple[int, int]:
        """Remove the objects that no row names, except new ones. Returns their number and bytes.

        StoreError if the service of another database stores its objects there, too.
        """
        if self._objects is None:
            return 0, 0
        self._mark(self._objects)
        # before the rows are read: what is shared meanwhile is named then
        found = tuple(self._objects.objects())
        with self._database.read() as rows:
            named = set(rows.scalars(sa.select(table.c.object).distinct()))
        unnamed = [each for each in found if each.name not in named]
        if any(each.name.startswith(f"{MARKS}/") for each in unnamed):
            raise StoreError(
                f"the service of another database keeps its files in '{self._objects.url}', too",
                f"give each database a {PREFIX}FILES_URL of its own",
            )
        old = [
            each
            for each in unnamed
            if each.name.partition("/")[0] in OURS and each.written < now - UNNAMED_FOR
        ]
        if not dry_run:
            self._objects.remove(each.name for each in old)
        return len(old), sum(each.size_bytes for each in old)

    def _mark(self, objects: ObjectStore) -> None:
        """Store an object of this database, by which those of other databases find its objects."""
        if self._is_marked:
            return
        with self._database.write() as rows:
            self._database.lock(rows, MARKS)
            mark = rows.scalar(sa.select(table.c.object).where(table.c.folder == MARKS))
            if mark is None:
                mark = f"{MARKS}/{secrets.token_hex(8)}"
                insert_files(rows, [StoredFile(MARKS, "mark", mark, EMPTY, 0)])
        objects.put(b"", mark)
        self._is_marked = True

    def _copies(self) -> list[Path]:
        """List the folders of the home that are stored elsewhere, too."""
        with self._database.read() as rows:
            stored = set(rows.scalars(sa.select(table.c.folder).distinct()))
        places = ("uploads/*", "reports/*", "models/[!.]*/*")
        local = (folder for place in places for folder in self._home.glob(place))
        return [folder for folder in local if self._name(folder) in stored]

    def _evict(self, folder: Path) -> bool:
        with self._locked(folder), self._lock:
            is_recent = time.time() - _used_s(folder) < RECENT_S
            if is_recent or self._held[self._name(folder)]:
                return False
            gone = self._temporary()
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    # -- one file ----------------------------------------------------------------------------

    def _download(self, objects: ObjectStore, file: StoredFile, target: Path) -> None:
        part, digest = self._temporary(), hashlib.sha256()
        try:
            with part.open("wb") as stream:
                for chunk in objects.chunks(file.object):
                    digest.update(chunk)
                    stream.write(chunk)
            if digest.hexdigest() != file.sha256:
                raise _damaged(file, "has another digest than when it was written")
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
        except FileNotFoundError as error:
            raise _damaged(file, "is missing") from error
        finally:
            part.unlink(missing_ok=True)

    def _temporary(self) -> Path:
        """Return a new name on the disk of the home."""
        folder = self._home / "fetched"
        folder.mkdir(exist_ok=True)
        return folder / secrets.token_hex(8)

    def _files(self, folder: Path) -> Sequence[StoredFile]:
        query = sa.select(table).where(table.c.folder == self._name(folder))
        with self._database.read() as rows:
            return [StoredFile(**row) for row in rows.execute(query).mappings()]

    def _locked(self, folder: Path) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(self._name(folder), threading.Lock())

    def _name(self, folder: Path) -> str:
        return str(folder.relative_to(self._home))


def files_from(settings: Settings, database: Database) -> Files:
    """Return the files of a server with these settings. PlanError for a URL that is none of S3."""
    if settings.files_url is None:
        return Files(database, settings.home)
    objects = ObjectStore(settings.files_url, f"{PREFIX}FILES_URL", WAIT_S)
    return Files(database, settings.home, objects, settings.files_cache_bytes)


# -- in the transaction of what names the files ----------------------------------------------


def insert_files(rows: sa.Connection, files: Sequence[StoredFile]) -> None:
    """Insert the files of folders in place of their earlier ones.

    StoreError if objects of another folder that they share have been removed meanwhile.
    """
    if not files:
        return
    folders = {file.folder for file in files}
    shared = {file.object for file in files if file.is_shared}
    if shared:
        named = sa.select(table.c.object).where(table.c.object.in_(shared))
        # locked, so that they are not removed before this transaction ends
        if shared - set(rows.scalars(named.with_for_update(read=True))):
            raise StoreError(
                f"the files that {', '.join(folders)} shares have been removed",
                "send the model again",
            )
    delete_files(rows, folders)
    columns = table.columns.keys()
    values = [{name: getattr(file, name) for name in columns} for file in files]
    rows.execute(sa.insert(table), values)


def delete_files(rows: sa.Connection, folders: Iterable[str]) -> None:
    """Delete the rows of all files of these folders."""
    rows.execute(sa.delete(table).where(table.c.folder.in_(tuple(folders))))


def _is_intact(path: Path, sha256: str) -> bool:
    return path.is_file() and not path.is_symlink() and digest_of(path) == sha256


def _remove_others(folder: Path, kept: Collection[Path]) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder before it
        if path.is_symlink() or not path.is_dir():
            if path not in kept:
                path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()


def _used_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # removed meanwhile
        return 0.0


def _damaged(file: StoredFile, reason: str) -> DamagedError:
    return DamagedError(
        f"'{file.path}' of {file.folder} is damaged: the object '{file.object}' {reason}",
        "the operator restores this object of `files_url` from a backup; else send the model again",
    )
