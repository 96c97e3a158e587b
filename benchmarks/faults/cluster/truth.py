"""What must hold after all faults, read from the database, from S3, and from when jobs ran.

Each function returns the violations it finds, one sentence each.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from benchmarks.faults.cluster.job_worker import STAMP_S
from service.jobs.state import FINAL
from service.storage.database import Database
from service.storage.tables import audit, events, files, jobs, versions

# A run that was killed may have written a stamp just before: two runs overlap if by more than this.
TOLERANCE_S = 2 * STAMP_S


@dataclass(frozen=True, slots=True)
class Run:
    """From when to when the process of a job ran, since the start of the machine."""

    job: str
    name: str
    begun_s: float
    ended_s: float


def runs_in(folder: Path) -> dict[str, list[Run]]:
    """Return the runs of each job, in the order of their begin."""
    found = dict[str, list[Run]]()
    for file in folder.glob("*/*"):
        stamps = [line for line in file.read_text(encoding="ascii").split("\n")[:-1] if line]
        if stamps:
            run = Run(file.parent.name, file.name, float(stamps[0]), float(stamps[-1]))
            found.setdefault(run.job, []).append(run)
    return {job: sorted(runs, key=lambda run: run.begun_s) for job, runs in found.items()}


def lost_jobs(database: Database, accepted: Mapping[str, str]) -> Iterator[str]:
    """Every job that a client was told of is there, and has succeeded; and each name has one."""
    with database.read() as rows:
        found = {row.id: row for row in rows.execute(sa.select(jobs))}
        begun = set(rows.scalars(sa.select(events.c.job_id).distinct()))
    for job, name in accepted.items():
        if job not in found:
            yield f"job {job} ('{name}') was accepted, and is not in the database"
        elif found[job].state != "succeeded":
            yield f"job {job} ('{name}') is {found[job].state}, expected succeeded"
    for row in found.values():
        if row.state in FINAL and row.server is not None:
            yield f"job {row.id} is {row.state}, and still claimed by {row.server}"
        if row.id not in begun:
            yield f"job {row.id} has no events"
    for identity, number in Counter((row.owner, row.identity) for row in found.values()).items():
        if number > 1:
            yield f"{number} jobs for the same request, identity {identity[1]}"


def wrong_events(database: Database) -> Iterator[str]:
    """Every job begins once, ends once, and has a `running` event for each attempt."""
    with database.read() as rows:
        kinds = dict[str, list[str]]()
        for row in rows.execute(sa.select(events).order_by(events.c.seq)):
            kinds.setdefault(row.job_id, []).append(row.kind)
        attempts = dict(rows.execute(sa.select(jobs.c.id, jobs.c.attempt)).all())
    for job, of_job in kinds.items():
        changes = [kind for kind in of_job if kind not in ("stage", "figures")]
        ends = [kind for kind in changes if kind in FINAL]
        if of_job[0] != "queued" or len(ends) != 1 or of_job[-1] not in FINAL:
            yield f"the events of job {job} are {', '.join(changes)}; expected one begin, one end"
        elif changes.count("running") != attempts[job]:
            yield f"job {job} has {changes.count('running')} starts and {attempts[job]} attempts"


def run_at_once(runs: Mapping[str, Sequence[Run]]) -> Iterator[str]:
    """No two runs of one job overlap."""
    for job, of_job in runs.items():
        for one, two in combinations(of_job, 2):
            both_s = min(one.ended_s, two.ended_s) - max(one.begun_s, two.begun_s)
            if both_s > TOLERANCE_S:
                yield f"two runs of job {job} ran at once for {both_s:.2f} s"


def wrong_reports(
    database: Database, s3: Any, bucket: str, prefix: str, runs: Mapping[str, Sequence[Run]]
) -> Iterator[str]:
    """The report of each job is of one claim, the last; its objects are intact; and its text is
    that of the last run.
    """
    with database.read() as rows:
        succeeded = sa.select(jobs.c.id, jobs.c.fencing_token).where(jobs.c.state == "succeeded")
        tokens = dict(rows.execute(succeeded).all())
        stored = dict[str, dict[str, Any]]()
        for row in rows.execute(sa.select(files).where(files.c.folder.startswith("reports/"))):
            stored.setdefault(row.folder.partition("/")[2], {})[row.path] = row
    for job in stored.keys() - tokens.keys():
        yield f"job {job} has no result, and a report"
    for job, token in tokens.items():
        of_job = stored.get(job, {})
        if "report.md" not in of_job:
            yield f"job {job} has succeeded without a report"
            continue
        claims = {row.object.split("/")[2] for row in of_job.values()}
        if len(claims) != 1 or claims.pop().partition("-")[0] != str(token):
            yield f"the report of job {job} is not that of its last claim, {token}"
        for path, row in of_job.items():
            body = s3.get_object(Bucket=bucket, Key=f"{prefix}/{row.object}")["Body"].read()
            if hashlib.sha256(body).hexdigest() != row.sha256:
                yield f"'{path}' of the report of job {job} is damaged in S3"
            last = runs[job][-1].name if job in runs else ""
            if (
                path == "report.md"
                and body.startswith(b"run ")
                and body != f"run {last}\n".encode()
            ):
                yield f"the report of job {job} is that of an earlier run"


def wrong_versions(database: Database, promoted: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Each promotion has made one version, and the versions of a model are numbered from 1 on."""
    with database.read() as rows:
        found = dict[str, list[Any]]()
        for row in rows.execute(sa.select(versions).order_by(versions.c.version)):
            found.setdefault(row.model, []).append(row)
    for model, of_model in found.items():
        for job, number in Counter(row.job_id for row in of_model).items():
            if number > 1:
                yield f"job {job} was published {number} times as a version of '{model}'"
        numbers = [row.version for row in of_model]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            yield f"'{model}' has the versions {numbers}"
    for model, jobs_of_model in promoted.items():
        kept = [row.job_id for row in found.get(model, [])]
        if kept != list(jobs_of_model)[-len(kept) :] or not kept:
            yield f"the versions of '{model}' are not the last promotions"


def wrong_audit(database: Database) -> Iterator[str]:
    """The audit has no gap."""
    with database.read() as rows:
        numbers = list(rows.scalars(sa.select(audit.c.seq).order_by(audit.c.seq)))
    if numbers and numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        yield "the audit has gaps"
