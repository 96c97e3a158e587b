"""Files of a home from before `files_url` was set: other servers find them once they are uploaded.

    for each in older_folders(database, folders):     what the database names, and nobody has stored
        upload_older(database, folders, files, each)  one folder, whole or not at all

Each folder is known as soon as it is uploaded: after an interruption the next call goes on with the
others. Servers may run meanwhile.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from pipeline.errors import StoreError
from pipeline.execution.store import bytes_of
from service.jobs.state import FINAL
from service.storage.database import Database
from service.storage.files import Files, insert_files
from service.storage.layout import Folders
from service.storage.tables import files as stored_files
from service.storage.tables import jobs, versions


@dataclass(frozen=True, slots=True)
class OlderFolder:
    """A folder of the home that no other server knows."""

    folder: Path
    job: str  # that it belongs to, or that has built the version
    version: tuple[str, int] | None = None  # model and version
    paths: tuple[str, ...] | None = None  # these files of it; None: all

    @property
    def size_bytes(self) -> int:
        if self.paths is None:
            return bytes_of(self.folder)
        files = [self.folder / path for path in self.paths]
        return sum(file.stat().st_size for file in files if file.is_file())


def older_folders(database: Database, folders: Folders) -> tuple[OlderFolder, ...]:
    """Return the uploads, logs, reports and versions that are here and not stored in the object
    store. Reports come before the versions that share their objects.
    """
    with database.read() as rows:
        known = set(rows.scalars(sa.select(stored_files.c.folder).distinct()))
        states = rows.execute(sa.select(jobs.c.id, jobs.c.state).order_by(jobs.c.id)).all()
        numbers = rows.execute(sa.select(versions.c.model, versions.c.version, versions.c.job_id))
        promoted = [
            OlderFolder(folders.version(model, version), job, (model, version))
            for model, version, job in numbers
        ]
    found = list[OlderFolder]()
    for job, state in states:
        found.append(OlderFolder(folders.uploads(job), job))
        work = folders.work(job)
        if state in FINAL and work.log.is_file() and not work.log.is_symlink():
            found.append(OlderFolder(work.root, job, paths=(work.log.name,)))
        if state == "succeeded":
            found.append(OlderFolder(folders.report(job), job))
    return tuple(
        each
        for each in (*found, *promoted)
        if str(each.folder.relative_to(folders.home)) not in known and each.folder.is_dir()
    )


def upload_older(database: Database, folders: Folders, files: Files, older: OlderFolder) -> bool:
    """Upload a folder and let other servers see it. False if it is gone, or stored, meanwhile.

    StoreError if the object store or the database does not answer: the next call tries it again.
    """
    upload = folders.uploads(older.job)
    if older.folder == upload:
        with contextlib.suppress(StoreError):  # damaged: a retry of the job says so
            # an earlier version wrote the path of this home, which other servers do not have
            folders.save_plan(older.job, folders.load_plan(older.job))
    like = (folders.report(older.job),) if older.version else ()
    try:
        stored = files.upload(older.folder, like=like, paths=older.paths)
    except FileNotFoundError:  # removed meanwhile
        return False
    name = str(older.folder.relative_to(folders.home))
    with database.write() as rows:
        if older.version is not None:
            database.lock(rows, f"model {older.version[0]}")
        is_stored = sa.select(stored_files.c.folder).where(stored_files.c.folder == name).limit(1)
        if not rows.execute(_owner(older)).first() or rows.execute(is_stored).first():
            return False
        insert_files(rows, stored)
    return True


def _owner(older: OlderFolder) -> sa.Select[tuple[str]]:
    """Return the query for the row without which nobody needs the folder; it stays meanwhile."""
    if older.version is None:
        return sa.select(jobs.c.id).where(jobs.c.id == older.job).with_for_update()
    model, version = older.version
    row = (versions.c.model == model) & (versions.c.version == version)
    return sa.select(versions.c.model).where(row)
