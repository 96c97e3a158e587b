"""Garbage collection of the home. `expired` decides and is pure; `look` lists the contents;
`collect` removes.

    jobs         ended more than `retention_days` ago, with upload, work and report
    folders      uploads without a job, a day after the last write; work and reports without a job,
                 after `retention_days`
                 except reports that prove a version of a model
    audit        entries older than `audit_days`
    objects      of `files_url`: not named by the database for a day
    artifacts    of the store: unused for `retention_days` plus the job timeout, so that no running
                 job loses an artifact
    builds       those artifacts that servers share below `files_url`, in the same way

A job that has not ended is kept, whatever its age. A job with a damaged row is kept too, because a
repair needs its files.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.execution.store import Store
from service import logs
from service.errors import NotFound
from service.jobs.builds import Builds
from service.jobs.state import Job
from service.jobs.store import JobStore
from service.sandbox.process_limits import disk_use
from service.settings import Settings
from service.storage.audit_entry import SERVICE, Actor
from service.storage.files import Files
from service.storage.layout import Folders

ORPHAN_AFTER = dt.timedelta(days=1)  # since the last write: an unfinished upload has no job yet
DAILY_S = 24 * 3600.0

log = logs.get("service.retention")


@dataclass(frozen=True, slots=True)
class Item:
    """A folder that may have expired."""

    path: Path
    used: dt.datetime  # time of the last use


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of the home."""

    ended: tuple[Job, ...]
    known: frozenset[str]  # ids of all jobs, including damaged ones
    uploads: tuple[Item, ...]
    outputs: tuple[Item, ...]  # work and reports
    artifacts: tuple[Item, ...]
    promoted: frozenset[str] = frozenset()  # jobs whose reports prove a version of a model


@dataclass(frozen=True, slots=True)
class Expired:
    """The items to remove."""

    jobs: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()  # without a job
    artifacts: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Collected:
    """The number of removed items, and the bytes freed."""

    jobs: int
    folders: int
    artifacts: int
    freed_bytes: int
    audit_entries: int = 0
    objects: int = 0  # of `files_url`
    builds: int = 0  # artifacts of `files_url`


def expired(contents: Contents, now: dt.datetime, settings: Settings) -> Expired:
    """Choose the items that have expired."""
    retention = dt.timedelta(days=settings.retention_days)
    unused_since = now - _unused(settings)

    def orphans(items: tuple[Item, ...], after: dt.timedelta) -> tuple[Path, ...]:
        return tuple(
            item.path
            for item in items
            if item.path.name not in contents.known and item.used < now - after
        )

    return Expired(
        jobs=tuple(
            job.id
            for job in contents.ended
            if job.id not in contents.promoted and _ended_before(job, now - retention)
        ),
        folders=orphans(contents.uploads, ORPHAN_AFTER) + orphans(contents.outputs, retention),
        artifacts=tuple(item for item in contents.artifacts if item.used < unused_since),
    )


def _ended_before(job: Job, moment: dt.datetime) -> bool:
    return job.finished is not None and dt.datetime.fromisoformat(job.finished) < moment


def look(home: Path, jobs: JobStore, promoted: frozenset[str]) -> Contents:
    """List the contents of the home. Folders are listed before jobs, so that a job added meanwhile
    is known.
    """
    folders = Folders(home)
    uploads = tuple(_items(folders.uploads("any").parent))
    outputs = (*_items(folders.work("any").root.parent), *_items(folders.report("any").parent))
    artifacts = tuple(
        Item(folder, dt.datetime.fromtimestamp(used_s, dt.UTC))
        for folder, used_s in Store(home).artifacts()
    )
    return Contents(jobs.ended(), jobs.ids(), uploads, outputs, artifacts, promoted)


def collect(
    settings: Settings,
    jobs: JobStore,
    clock: Callable[[], dt.datetime],
    dry_run: bool = False,
    promoted: frozenset[str] = frozenset(),
    actor: Actor = SERVICE,
    files: Files | None = None,
    builds: Builds | None = None,
) -> Collected:
    """Remove the expired items, or only count them if `dry_run`. Each job's row is removed before
    its files, so that an interrupted removal leaves only folders without a job.
    """
    home, folders, store = settings.home, Folders(settings.home), Store(settings.home)
    now = clock()
    items = expired(look(home, jobs, promoted), now, settings)
    freed, artifacts = 0, 0
    for job_id in items.jobs:
        paths = (folders.uploads(job_id), folders.work(job_id).root, folders.report(job_id))
        freed += sum(map(disk_use, paths))
        if not dry_run:
            with contextlib.suppress(NotFound):  # another process was first
                jobs.remove(job_id, actor)
            folders.remove(job_id)
            log.info("job.removed", job=job_id)
    for folder in items.folders:
        freed += disk_use(folder)
        if not dry_run:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("folder.removed", folder=str(folder.relative_to(home)))
    for item in items.artifacts:
        size = disk_use(item.path)
        if dry_run or store.remove(item.path, item.used.timestamp()):
            freed, artifacts = freed + size, artifacts + 1
    entries = jobs.audit.expire(now - dt.timedelta(days=settings.audit_days), dry_run)
    objects, object_bytes = files.collect(now, dry_run) if files else (0, 0)
    shared, shared_bytes = 0, 0
    if builds:
        shared, shared_bytes = builds.collect(_unused(settings).total_seconds(), dry_run)
    freed += object_bytes + shared_bytes
    counts = (len(items.jobs), len(items.folders), artifacts)
    return Collected(*counts, freed, entries, objects, shared)


def _unused(settings: Settings) -> dt.timedelta:
    """Return how long an artifact is kept after its last use: to the end of any running job."""
    return dt.timedelta(days=settings.retention_days, seconds=settings.job_timeout_s)


def _items(parent: Path) -> Iterator[Item]:
    """Yield the folders in a folder, each with the time of its newest change."""
    for folder in sorted(parent.glob("*")):
        if folder.is_dir():
            yield Item(folder, dt.datetime.fromtimestamp(_newest_change_s(folder), dt.UTC))


def _newest_change_s(folder: Path) -> float:
    newest_s = 0.0
    for parent, _, files in os.walk(folder):
        for name in (".", *files):
            newest_s = max(newest_s, _changed_s(Path(parent, name)))
    return newest_s


def _changed_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:  # removed meanwhile
        return 0.0
