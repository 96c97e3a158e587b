"""Promote a report to a version of a model: check the report, prove the batches in a child."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.core.artifacts import CODE_BACKENDS, Engine
from pipeline.errors import CrucibleError, DamagedError
from pipeline.execution.child_process import Child, TimeLimit
from pipeline.execution.store import Manifest, read_manifest
from pipeline.llm.engine import LanguageEngine, read_settings
from pipeline.llm.results import AnyReport, LanguageReport
from pipeline.results.report import PackingProof, Report
from pipeline.serving_inputs import BatchSpec, Packing, Padding, ServingConfig, client_inputs
from pipeline.text_inputs import TOKENIZER_FILE, vector_output
from service.errors import Conflict, NotFound
from service.inference import ServedText
from service.jobs.publish import (
    AnyEngine,
    published_any_report,
    published_engine,
)
from service.jobs.state import Job
from service.jobs.store import JobStore
from service.jobs.worker_client import environment_for
from service.registry.models import LanguageSize, Version
from service.sandbox.layers import Sandbox
from service.storage.layout import Folders, Work

NO_ROWS = BatchSpec(axes={}, reason="a language model takes prompts, whose tokens it joins itself")
PROOF_S = 900.0  # time for loading and about twenty runs at the largest sizes

Prove = Callable[[Engine, tuple[Padding, ...], str], Awaitable[BatchSpec]]
"""Prove the batches of an engine on a device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A report that may be promoted, and its engine with unchanged files: of a model with inputs
    and outputs, or of a language model.
    """

    job: str
    owner: str
    report: AnyReport
    engine: AnyEngine


def candidate_of(
    job_id: str,
    owner: str | None,
    override: bool,
    jobs: JobStore,
    folders: Folders,
    fetch: Callable[[Path], object],
) -> Candidate:
    """Read and check the report of a job, which `fetch` brings to this host.

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
    fetch(folder)
    report = published_any_report(folder)
    check_report(report, override)
    engine = published_engine(folder)
    check_own(engine, read_manifest(engine.root), job)
    return Candidate(job.id, job.owner, report, engine)


def is_code(engine: AnyEngine) -> bool:
    """Return True for an engine that runs as code when it is loaded. A language model never does:
    its folder has weights, which our own decoder reads.
    """
    return isinstance(engine, Engine) and engine.target.backend in CODE_BACKENDS


def check_own(engine: AnyEngine, manifest: Manifest, job: Job) -> None:
    """Conflict for an engine that is code, unless this job of this server has built it.

    The evidence is in the database, not in the folder of the engine.
    """
    if not is_code(engine):
        return
    if manifest.sha256 != job.engine or manifest.value != engine.model_dump(mode="json"):
        message = "this engine is a PyTorch program, which runs as code"
        raise Conflict(
            f"{message}, and it differs from the engine that job {job.id} built on this server",
            "compile the model again on this server, and promote that report",
        )


def check_report(report: AnyReport, override: bool) -> None:
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
            'fix the cause, or promote the report with "override": true (`--override` of'
            " `crucible promote`), which is logged",
        )


def version_of(
    candidate: Candidate, model: str, override: bool, batch: BatchSpec, created: str
) -> Version:
    """Build the version from a report. The repository assigns its number. `batch` is not used for a
    language model.
    """
    report, engine = candidate.report, candidate.engine
    overridden = override and report.verdict == "unproven"
    if isinstance(engine, LanguageEngine):
        return _language_version(candidate, engine, model, overridden, created)
    assert isinstance(report, Report)
    serving, on_gpu = report.plan.serving, engine.target.compute_capability is not None
    return Version(
        model=model,
        version=1,
        owner=candidate.owner,
        job=candidate.job,
        created=created,
        verdict=report.verdict,
        override=overridden,
        before=None,
        label=engine.recipe.label,
        backend=engine.target.backend,
        precision=engine.recipe.precision,
        target=engine.target.device,
        on_gpu=on_gpu,
        size_bytes=engine.size_bytes,
        peak_bytes=0 if on_gpu else peak_of(report),
        inputs=client_inputs(engine.inputs, serving.packing),
        outputs=engine.outputs,
        profiles=engine.profiles,
        batch=with_packing(batch, serving.packing, report.packing),
        best_point=report.best_point,
        image=serving.image,
        labels=serving.labels,
        text=_served_text(serving, engine),
    )


def _served_text(serving: ServingConfig, engine: Engine) -> ServedText | None:
    """Return how the engine serves texts; None if its plan does not say. DamagedError without the
    tokenizer.
    """
    if serving.text is None:
        return None
    digest = read_manifest(engine.root).files.get(TOKENIZER_FILE)
    if digest is None:
        raise DamagedError(f"the engine has no '{TOKENIZER_FILE}'", "compile the model again")
    output = vector_output(serving.text, engine.outputs).name
    recipe = serving.text.recipe.model_copy(update={"output": output})
    return ServedText(recipe=recipe, tokenizer_sha256=digest)


def _language_version(
    candidate: Candidate, engine: LanguageEngine, model: str, overridden: bool, created: str
) -> Version:
    """Build the version of a language model. DamagedError without its settings."""
    report, settings = candidate.report, read_settings(engine.root)
    assert isinstance(report, LanguageReport)
    return Version(
        model=model,
        version=1,
        owner=candidate.owner,
        job=candidate.job,
        created=created,
        verdict=report.verdict,
        override=overridden,
        before=None,
        label=engine.label,
        backend=engine.library,
        precision=engine.precision,
        target=engine.target.device,
        on_gpu=engine.is_on_gpu,
        size_bytes=sum(file.stat().st_size for file in engine.root.iterdir()),
        inputs=(),
        outputs=(),
        profiles=(),
        batch=NO_ROWS,
        language=LanguageSize(
            context=min(report.plan.context, settings.context),
            vocabulary=settings.vocabulary,
            cache_bytes_per_token=settings.cache_values_per_token * engine.cache_value_bytes,
        ),
    )


def with_packing(
    batch: BatchSpec, packing: Packing | None, proof: PackingProof | None
) -> BatchSpec:
    """Add what the plan declares about packing, and what the compile found out."""
    if packing is None:
        return batch
    why = proof.reason if proof else "the report has no proof of it"
    return batch.model_copy(
        update={
            "packing": packing,
            "packs": batch.proved and not why,
            "reason": batch.reason or (why and f"packing is off: {why}"),
        }
    )


def peak_of(report: Report) -> int:
    """The peak memory of a process that measured the delivered engine; 0 without measurements."""
    benchmark = report.benchmark_delivered
    if not benchmark:
        return 0
    return max((row.peak_memory_bytes for row in benchmark.rows), default=0)


async def prove(
    engine: Engine, padding: tuple[Padding, ...], device: str, sandbox: Sandbox
) -> BatchSpec:
    """Prove in a child in the sandbox, which sees one device; Conflict if the engine does not run
    there.
    """
    from pipeline.benchmark.batch_invariance import prove_batch

    mark = f"proof-{secrets.token_hex(4)}"
    work = Work(Folders(sandbox.home).serving / mark)
    work.prepare()
    environment = environment_for(mark, device, work, os.environ)
    box = sandbox.enter(mark, work, device, shared=(engine.root.absolute(),))
    try:
        with Child(
            prove_batch,
            engine,
            padding,
            name="batch proof",
            conversation=False,
            command=partial(box.command, environment=environment),
        ) as child:
            batch: BatchSpec = await asyncio.to_thread(child.result, TimeLimit(PROOF_S))
    except CrucibleError as error:
        raise Conflict(f"the engine does not run here: {error.message}", error.next_step) from error
    finally:
        box.close()
        shutil.rmtree(work.root, ignore_errors=True)
    return batch
