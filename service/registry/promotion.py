"""Promote a report to a version of a model: check the report, prove the batches in a child."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pipeline.core import CODE_BACKENDS, Engine
from pipeline.errors import CrucibleError
from pipeline.execution.child_process import Child
from pipeline.execution.store import Manifest, read_manifest
from pipeline.results.report import Report
from pipeline.serving_inputs import BatchSpec, Padding
from service.errors import Conflict, NotFound
from service.jobs.publish import published_engine, published_report
from service.jobs.state import Job
from service.jobs.store import JobStore
from service.jobs.worker_client import VISIBLE, visible
from service.registry.models import Version
from service.storage.layout import Folders

PROOF_S = 900.0  # time for loading and about twenty runs at the largest sizes

Prove = Callable[[Engine, tuple[Padding, ...], str], Awaitable[BatchSpec]]
"""Prove the batches of an engine on a device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A report that may be promoted, and its engine with unchanged files."""

    job: str
    owner: str
    report: Report
    engine: Engine


def candidate_of(
    job_id: str, owner: str | None, override: bool, jobs: JobStore, folders: Folders
) -> Candidate:
    """Read and check the report of a job.

    NotFound if there is no report, Conflict if it may not be promoted, DamagedError if the report
    or a file of its engine has changed.
    """
    job = jobs.get(job_id, owner)
    folder = folders.report(job.id)
    if job.state != "succeeded":
        raise NotFound(
            f"job {job_id} is {job.state}: there is no report",
            f"GET /jobs/{job_id} shows its progress",
        )
    report = published_report(folder)
    check_report(report, override)
    engine = published_engine(folder)
    check_own(engine, read_manifest(engine.root), job)
    return Candidate(job.id, job.owner, report, engine)


def check_own(engine: Engine, manifest: Manifest, job: Job) -> None:
    """Conflict for an engine that is code, unless this job of this server has built it.

    The evidence is in the database, not in the folder of the engine.
    """
    if engine.target.backend not in CODE_BACKENDS:
        return
    if manifest.sha256 != job.engine or manifest.value != engine.model_dump(mode="json"):
        message = "this engine is a PyTorch program, which runs as code"
        raise Conflict(
            f"{message}, and it differs from the engine that job {job.id} built on this server",
            "compile the model again on this server, and promote that report",
        )


def check_report(report: Report, override: bool) -> None:
    """Conflict if there is no engine, or if the verdict is `unproven` and there is no override.

    A report is also `unproven` if other engines served requests during its measurements.
    """
    reasons = "; ".join(report.reasons) or "the report gives no reason"
    if not report.has_engine:
        raise Conflict(
            f"this report's verdict is {report.verdict}, and there is no engine to serve:"
            f" {reasons}",
            "correct the plan and compile again",
        )
    if report.verdict == "unproven" and not override:
        raise Conflict(
            f"this report's verdict is unproven: {reasons}",
            'fix the cause, or promote the report with "override": true, which is logged',
        )


def version_of(
    candidate: Candidate, model: str, override: bool, batch: BatchSpec, created: str
) -> Version:
    """Build the version from a report. The repository assigns its number."""
    report, engine = candidate.report, candidate.engine
    on_gpu = engine.target.compute_capability is not None
    return Version(
        model=model,
        version=1,
        owner=candidate.owner,
        job=candidate.job,
        created=created,
        verdict=report.verdict,
        override=override and report.verdict == "unproven",
        before=None,
        label=engine.recipe.label,
        backend=engine.target.backend,
        precision=engine.recipe.precision,
        target=engine.target.device,
        on_gpu=on_gpu,
        size_bytes=engine.size_bytes,
        peak_bytes=0 if on_gpu else peak_of(report),
        inputs=engine.inputs,
        outputs=engine.outputs,
        profiles=engine.profiles,
        batch=batch,
        best_point=report.best_point,
        image=report.plan.serving.image,
        labels=report.plan.serving.labels,
    )


def peak_of(report: Report) -> int:
    """The peak memory of a process that measured the delivered engine; 0 without measurements."""
    benchmark = report.benchmark_delivered
    if not benchmark:
        return 0
    return max((row.peak_memory_bytes for row in benchmark.rows), default=0)


async def prove(engine: Engine, padding: tuple[Padding, ...], device: str) -> BatchSpec:
    """Prove in a child that sees one device; Conflict if the engine does not run there."""
    from pipeline.benchmark.batch_invariance import prove_batch

    environment = {VISIBLE: visible(device, os.environ.get(VISIBLE))}
    with Child(
        prove_batch, engine, padding, name="batch proof", env=environment, conversation=False
    ) as child:
        try:
            batch: BatchSpec = await asyncio.to_thread(child.result, PROOF_S)
        except CrucibleError as error:
            raise Conflict(
                f"the engine does not run here: {error.message}", error.next_step
            ) from error
    return batch
