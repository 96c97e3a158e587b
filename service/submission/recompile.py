"""Compiles a model again: with the profiles that its traffic suggests, or with its own plan."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import HostError, StoreError
from pipeline.plan.schema import Plan
from service import logs
from service.auth import Caller
from service.context import Service
from service.errors import Conflict
from service.jobs.redact import scrubbed
from service.jobs.state import Job, ModelVersion
from service.registry.models import ModelView, RecompileRequest, Version, version_name
from service.registry.traffic import ShapesView, Suggestion, plan_text
from service.storage.layout import Folders
from service.submission.submit import JobSpec, add_job, device_for, queue_lengths

MIN_REQUESTS = 100  # answered requests before profiles are taken from them

log = logs.get("service.submission")


@dataclass(frozen=True, slots=True)
class Recompile:
    """A version, the profiles that its traffic suggests, and the job that compiles for them."""

    version: Version
    suggestion: Suggestion | None  # None: the profiles of its plan
    job: Job | None  # None: a dry run


async def submit_recompile(
    service: Service, caller: Caller, name: str, request: RecompileRequest, key: str | None
) -> Recompile:
    """Add a job for the model and data of the loaded version, or of the current one if its plan
    stays as it is. The job belongs to the model's owner.

    Each request adds a new job. Conflict if there is too little traffic, nothing to change, or
    nothing to compile from.
    """
    check = service.host if request.dry_run else service.host_for_job
    check()
    model = await service.models.view(caller, name)
    suggestion = None
    if request.profiles == "same":
        version = _version(model, model.deployment.version or model.current.version)
    else:
        version = _loaded_version(model)
        suggestion = _suggestion(version, await service.models.shapes(caller, name))
    upload = service.folders.uploads(version.job)
    await asyncio.to_thread(service.files.fetch, upload)
    plan = await asyncio.to_thread(_plan_of, version, suggestion, service.folders)
    if request.dry_run:
        return Recompile(version, suggestion, None)
    if suggestion and suggestion.profiles == suggestion.current:
        raise Conflict(
            f"the traffic suggests the profiles that {version_name(name, version.version)} has",
            "nothing is to be done; GET /models/NAME/shapes shows the traffic",
        )

    async def prepare(job_id: str) -> JobSpec:
        await asyncio.to_thread(_copy_upload, version.job, job_id, suggestion, service.folders)
        lengths = await service.read(lambda: queue_lengths(service))
        device = device_for(plan, await service.job_devices(), lengths)
        digest = hashlib.sha256(json.dumps(["recompile", name]).encode()).hexdigest()
        recompiles = ModelVersion(model=name, version=version.version)
        return JobSpec(plan.name, device, job_id, digest, recompiles=recompiles, like=(upload,))

    job = await add_job(service, caller, version.owner, key, prepare)
    log.info("model.recompiled", model=name, version=version.version, job=job.id, key=caller.key)
    return Recompile(version, suggestion, job)


def _version(model: ModelView, number: int) -> Version:
    return next(version for version in model.versions if version.version == number)


def _loaded_version(model: ModelView) -> Version:
    """Return the loaded version of a model; Conflict if there is none, or if no size varies."""
    number = model.deployment.version
    if number is None:
        raise Conflict(
            f"model '{model.name}' is {model.deployment.state}, so no traffic is counted",
            f"load it with `crucible load {model.name}`, and send requests",
        )
    version = _version(model, number)
    if not version.has_free_sizes:
        raise Conflict(
            f"every input of {version_name(model.name, number)} has a fixed shape, so there are no"
            " profiles to change",
            "compile the model with dimensions that vary, if its requests differ in shape",
        )
    return version


def _suggestion(version: Version, traffic: ShapesView) -> Suggestion:
    """Return the profiles that traffic suggests; Conflict if there were too few requests."""
    if traffic.suggestion is None or traffic.answered < MIN_REQUESTS:
        raise Conflict(
            f"{version_name(version.model, traffic.version)} has answered {traffic.answered}"
            f" requests since it was loaded at {traffic.since}, expected at least {MIN_REQUESTS}",
            "try again after more requests",
        )
    return traffic.suggestion


def _plan_of(version: Version, suggestion: Suggestion | None, folders: Folders) -> Plan:
    """Return the plan of the job that built a version; Conflict if it or a file of it is gone."""
    try:
        plan = folders.load_plan(version.job)
        for file in _files_of(plan):
            if not file.is_file():
                raise StoreError(f"no file at '{file}'")
    except HostError as error:
        raise Conflict(
            f"job {version.job}, which built {version_name(version.model, version.version)}, can"
            f" not be repeated: {scrubbed(error.message, folders)}",
            "send the model again with `crucible submit`"
            + (
                f", and write into its plan `profiles: {plan_text(suggestion.profiles)}`"
                if suggestion
                else ""
            ),
        ) from error
    return plan


def _files_of(plan: Plan) -> list[Path]:
    """Return the files of the model, its tokenizer and the data."""
    roles = (plan.data.calibration, plan.data.selection, plan.data.validation)
    data = [file for role in roles if isinstance(role, tuple) for file in role]
    tokenizer = plan.serving.text.tokenizer if plan.serving.text else None
    labels = dict(plan.data.labels).values()
    files = (plan.model.path, plan.model.weights, tokenizer, *data, *labels)
    return [file for file in files if file is not None]


def _copy_upload(old: str, new: str, suggestion: Suggestion | None, folders: Folders) -> None:
    """Share one job's upload with another job, whose plan gets the suggested profiles."""
    folders.share_upload(old, new)
    # If the version's job was a benchmark, the folder has the files of that.
    shutil.rmtree(folders.compiled(new), ignore_errors=True)
    plan = folders.load_plan(new)
    if suggestion:
        benchmark = plan.benchmark.model_copy(update={"sizes": suggestion.sizes})
        changes = {"profiles": suggestion.profiles, "benchmark": benchmark}
        plan = plan.model_copy(update=changes)
    folders.save_plan(new, plan)
