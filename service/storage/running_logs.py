"""The output of running jobs, for servers that do not have its file.

    logs.append("1", token, 100, "a line\n")   the part that ends at byte 100 of the job's log
    logs.end_of("1", 65536)                     the last parts, of at most so many bytes together
    logs.forget("1", token)                     the job has ended: its log is among the files

Only the server that holds the claim of a job writes. A new claim replaces the parts of the old one.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from service.storage.database import Database
from service.storage.layout import MAX_LOG_BYTES
from service.storage.tables import jobs, running_logs

_ORDER = (running_logs.c.fencing_token, running_logs.c.end_bytes)


@dataclass(frozen=True, slots=True)
class RunningLogs:
    """The parts of the logs of all running jobs. Safe for threads."""

    database: Database

    def append(self, job_id: str, token: int, end_bytes: int, text: str) -> None:
        """Add a part, and delete those before the end that clients can read. No effect if another
        server has claimed the job.
        """
        of_job, parts = running_logs.c.job_id == job_id, running_logs.c
        old = (parts.fencing_token < token) | (parts.end_bytes <= end_bytes - MAX_LOG_BYTES)
        claim = sa.select(jobs.c.fencing_token).where(jobs.c.id == job_id)
        with self.database.write() as rows:
            if rows.scalar(claim.with_for_update(read=True)) != token:
                return
            rows.execute(sa.delete(running_logs).where(of_job, old))
            values = {"job_id": job_id, "fencing_token": token, "end_bytes": end_bytes}
            rows.execute(sa.insert(running_logs).values({**values, "text": text}))

    def end_of(self, job_id: str, most: int) -> str:
        """Return the end of the output of a job, at most `most` bytes; empty if there is none."""
        query = sa.select(running_logs.c.text).where(running_logs.c.job_id == job_id)
        with self.database.read() as rows:
            text = "".join(rows.scalars(query.order_by(*_ORDER)))
        return text.encode()[-most:].decode("utf-8", "replace")

    def forget(self, job_id: str, token: int) -> None:
        """Remove the output of a job under this claim, and under older ones."""
        old = running_logs.c.fencing_token <= token
        with self.database.write() as rows:
            rows.execute(sa.delete(running_logs).where(running_logs.c.job_id == job_id, old))
