"""The bytes that the jobs and drafts of an owner store: uploads, work folders and reports.

Those of failed jobs are freed before a new job is refused, and then those of cancelled jobs, oldest
first. Such a job keeps its row and its log, but cannot be retried. Promoted engines do not count,
because an admin decides about them. Artifacts of the store do not count, because owners share them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from functools import partial

from service import logs
from service.context import Service
from service.errors import TooMany
from service.jobs.state import Job
from service.limits.key_limits import raised_by
from service.sandbox.process_limits import disk_use
from service.storage.files import Files
from service.storage.layout import Folders

log = logs.get("service.stored_bytes")


async def stored_bytes(service: Service, owner: str) -> int:
    """Return the bytes on the disk that all jobs and drafts of an owner take."""
    job_ids = await service.read(partial(service.jobs.ids, owner))
    drafts = await asyncio.to_thread(service.drafts.of, owner)
    ids = (*job_ids, *(draft.id for draft in drafts))
    return await asyncio.to_thread(_bytes_of, service.folders, service.files, ids)


async def make_room(service: Service, owner: str, count: int) -> None:
    """Free bytes until the owner may store `count` more. TooMany if that cannot be."""
    most = service.settings.max_stored_bytes
    used = await stored_bytes(service, owner)
    if used + count <= most:
        return
    for job in freed_first(await service.read(service.jobs.ended), owner):
        used -= await asyncio.to_thread(_free, service.folders, service.files, job.id)
        log.info("job.freed", job=job.id, state=job.state)
        if used + count <= most:
            return
    days = service.settings.retention_days
    raise TooMany(
        f"your jobs and drafts store {used} bytes, and this one needs {count} more; expected at"
        f" most {most} (`max_stored_bytes`)",
        f"wait until older jobs expire, {days:g} days after their end;"
        f" {raised_by('max_stored_bytes')}",
    )


def freed_first(ended: Iterable[Job], owner: str) -> list[Job]:
    """Return the jobs whose bytes may be freed, in this order."""
    jobs = [job for job in ended if job.owner == owner and job.state != "succeeded"]
    return sorted(jobs, key=lambda job: (job.state != "failed", job.id))


def _bytes_of(folders: Folders, files: Files, job_ids: Iterable[str]) -> int:
    kept = [
        folder
        for job_id in job_ids
        for folder in (folders.uploads(job_id), folders.work(job_id).root, folders.report(job_id))
    ]
    stored = files.bytes_of(kept)
    return sum(stored[folder] if folder in stored else disk_use(folder) for folder in kept)


def _free(folders: Folders, files: Files, job_id: str) -> int:
    """Delete everything but the log of a job. Returns the bytes freed."""
    before = _bytes_of(folders, files, [job_id])
    files.forget([folders.uploads(job_id)])
    shutil.rmtree(folders.uploads(job_id), ignore_errors=True)
    folders.work(job_id).empty()
    return before - _bytes_of(folders, files, [job_id])
