"""Reports for pages: read, checked and, if an administrator reads another's, recorded."""

from __future__ import annotations

import asyncio

from pipeline.results.report import Report
from service.auth import Caller
from service.context import Service
from service.http.routers.reports import report_folder
from service.jobs.publish import published_report


async def report_of(service: Service, job_id: str, caller: Caller) -> Report:
    """Return the report of a job. NotFound if there is none, or if this caller may not see it;
    DamagedError if it has changed.
    """
    folder = await report_folder(job_id, caller, service)
    return await asyncio.to_thread(published_report, folder)
