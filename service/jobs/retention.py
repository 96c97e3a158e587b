"""What the home need not keep any longer: `doomed` decides and is pure; `look` finds what there is,
`collect` removes.

    jobs         ended longer than `retention_days` ago, with upload, work and report
    folders      uploads that became no job, a day after the last byte; work and reports of no job,
                 after `retention_days`
                 but not one whose report proves a version of a model that is kept
    artifacts    of the store: not used for `retention_days`, and for as long as a job may take, so
                 that none that runs loses what it found

What has not ended is kept, however old. A job whose row is damaged is kept: whoever mends it will
want the files.
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
from service.jobs.process_limits import disk_use
from service.jobs.state import Job
from service.jobs.store import JobStore
from service.settings import Settings
from service.storage.layout import Folders

ORPHAN_AFTER = dt.timedelta(days=1)  # since the last byte: an upload under way has no job yet
DAILY_S = 24 * 3600.0

log = logs.get("service.retention")


@dataclass(frozen=True, slots=True)
class Item:
    """A folder that may have served its time."""

    path: Path
    used: dt.datetime  # last


@dataclass(frozen=True, slots=True)
class Contents:
    """What there is to decide about."""

    ended: tuple[Job, ...]
    known: frozenset[str]  # ids of all jobs, damaged ones too
    uploads: tuple[Item, ...]
    others: tuple[Item, ...]  # work and reports
    artifacts: tuple[Item, ...]
    promoted: frozenset[str] = frozenset()  # jobs whose reports prove a version of a model


@dataclass(frozen=True, slots=True)
class Doomed:
    """What is to go."""

    jobs: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()  # of no job
    artifacts: tuple[Item, ...] = ()


@dataclass(frozen=True, slots=True)
class Collected:
    """What went."""

    jobs: int
    folders: int
    artifacts: int
    freed_bytes: int


def doomed(contents: Contents, now: dt.datetime, settings: Settings) -> Doomed:
    """What has served its time."""
    kept_for = dt.timedelta(days=settings.retention_days)
    unused = now - kept_for - dt.timedelta(seconds=settings.job_timeout_s)

    def orphans(items: tuple[Item, ...], after: dt.timedelta) -> tuple[Path, ...]:
        return tuple(
            item.path
            for item in items
            if item.path.name not in contents.known and item.used < now - after
        )

    return Doomed(
        jobs=tuple(
            job.id
            for job in contents.ended
            if job.id not in contents.promoted and _ended_before(job, now - kept_for)
        ),
        folders=orphans(contents.uploads, ORPHAN_AFTER) + orphans(contents.others, kept_for),
        artifacts=tuple(item for item in contents.artifacts if item.used < unused),
    )


def _ended_before(job: Job, moment: dt.datetime) -> bool:
    return job.finished is not None and dt.datetime.fromisoformat(job.finished) < moment


def look(home: Path, jobs: JobStore, promoted: frozenset[str]) -> Contents:
    """What lies in the home. Folders before jobs: a job that is added meanwhile is known."""
    folders = Folders(home)
    uploads = tuple(_items(folders.uploads("any").parent))
    others = (*_items(folders.work("any").root.parent), *_items(folders.report("any").parent))
    artifacts = tuple(
        Item(folder, dt.datetime.fromtimestamp(used_s, dt.UTC))
        for folder, used_s in Store(home).artifacts()
    )
    return Contents(jobs.ended(), jobs.ids(), uploads, others, artifacts, promoted)


def collect(
    settings: Settings,
    jobs: JobStore,
    clock: Callable[[], dt.datetime],
    dry_run: bool = False,
    promoted: frozenset[str] = frozenset(),
) -> Collected:
    """Remove what has served its time, or only say what it is. Each job's row goes before its
    files: what a kill leaves is of no job.
    """
    home, folders, store = settings.home, Folders(settings.home), Store(settings.home)
    old = doomed(look(home, jobs, promoted), clock(), settings)
    freed, artifacts = 0, 0
    for job_id in old.jobs:
        places = (folders.uploads(job_id), folders.work(job_id).root, folders.report(job_id))
        freed += sum(map(disk_use, places))
        if not dry_run:
            with contextlib.suppress(NotFound):  # another was first
                jobs.remove(job_id)
            folders.remove(job_id)
            log.info("job.removed", job=job_id)
    for folder in old.folders:
        freed += disk_use(folder)
        if not dry_run:
            shutil.rmtree(folder, ignore_errors=True)
            log.info("folder.removed", folder=str(folder.relative_to(home)))
    for item in old.artifacts:
        size = disk_use(item.path)
        if dry_run or store.remove(item.path, item.used.timestamp()):
            freed, artifacts = freed + size, artifacts + 1
    return Collected(len(old.jobs), len(old.folders), artifacts, freed)


def _items(parent: Path) -> Iterator[Item]:
    """The folders in a folder, each with the time of the newest change in it."""
    for folder in sorted(parent.glob("*")):
        if folder.is_dir():
            changes = [
                _changed_s(Path(place, name))
                for place, _, files in os.walk(folder)
                for name in (".", *files)
            ]
            yield Item(folder, dt.datetime.fromtimestamp(max(changes, default=0.0), dt.UTC))


def _changed_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:  # it has vanished meanwhile
        return 0.0
