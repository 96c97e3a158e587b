"""Turns requests into jobs: to compile an upload or one of the server's own plans, or to measure a
model again.

If anything fails before the job is added, even a client's disconnect, no files are left.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from pipeline.errors import HostError, PlanError, StoreAway
from pipeline.llm.plan import AnyPlan, LanguagePlan, load_any_plan
from pipeline.plan.schema import CandidateConfig, Plan, TargetConfig, plan_for_target
from pipeline.plan.source import accuracy_code, code_digest, source_from_config
from service import logs
from service.auth import Caller
from service.context import Service
from service.devices.leases import utc_now
from service.errors import NotFound, TooLarge, Unprocessable
from service.jobs.messages import HostIdentity
from service.jobs.publish import REPORT_FILES, check_form, published_any_report, published_engine
from service.jobs.redact import scrubbed
from service.jobs.state import Job, ModelVersion, new_id
from service.jobs.store import Compile, NewJob, Once
from service.jobs.traces import current_trace
from service.registry.models import BenchmarkRequest
from service.sandbox.process_limits import disk_use
from service.sandbox.proof import Proof
from service.settings import Settings
from service.submission import language, uploads
from service.submission import plan as submitted
from service.submission.plan import NamedConfig
from service.submission.stored_bytes import make_room

log = logs.get("service.submission")
GPU_BACKENDS = ("tensorrt", "tensorrt_rtx", "torch")
MAX_KEY_CHARACTERS = 255  # characters of an Idempotency-Key


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """The plan to compile, with two digests that are equal for equal requests: `identity` includes
    this host's tools; `digest` does not (for the Idempotency-Key).
    """

    plan: AnyPlan
    identity: str
    digest: str
    warnings: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[TargetConfig, ...]:
        return self.plan.targets if isinstance(self.plan, Plan) else ()


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The properties of a new job. Its upload is complete."""

    name: str  # of the plan
    device: str
    identity: str
    digest: str
    measures: ModelVersion | None = None
    recompiles: ModelVersion | None = None
    target: str = ""  # as Job.target
    wait_for_node_s: float = 0.0
    counted_bytes: int = 0  # of the upload, which count already: those of a draft
    beside_bytes: int = 0  # of new jobs that are added with it, and do not count yet
    like: tuple[Path, ...] = ()  # stored folders with files of the upload


Prepare = Callable[[str], Awaitable[JobSpec]]
"""Write the upload of the job with this id, and describe the job."""


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request that arrives."""

    content_type: str
    length: int  # as announced; 0: unknown
    stream: AsyncIterator[bytes]

    async def counted(self, service: Service, caller: Caller) -> AsyncIterator[bytes]:
        """Yield the body. TooMany where it exceeds the uploads of the caller's key."""
        async for chunk in self.stream:
            await service.limits.take_upload(caller.key, len(chunk))
            yield chunk


async def submit(
    service: Service,
    caller: Caller,
    body: Body,
    key: str | None,
    check_token: uploads.CheckToken | None = None,
) -> Job | Compile:
    """Add a job for a request's body, or one for each target of its plan. An equal request gets
    the job of an earlier one. `check_token`: the body is the form of a browser.
    """
    host, owner = service.host_for_job(), caller.owner
    await service.limits.check_upload(caller.key, body.length)
    _check_key(key)
    await asyncio.to_thread(service.files.check)  # before a long body is read
    upload_id = new_id(utc_now())
    try:
        request = await _receive(service, caller, body, upload_id, host, check_token)
        if request.targets:
            return await _submit_targets(service, caller, key, upload_id, request)
    except BaseException:
        await asyncio.to_thread(service.folders.remove, upload_id)
        raise

    async def prepare(job_id: str) -> JobSpec:
        return await spec_of(service, job_id, request)

    return await add_job(service, caller, owner, key, prepare, upload_id)


async def _receive(
    service: Service,
    caller: Caller,
    body: Body,
    upload_id: str,
    host: HostIdentity,
    check_token: uploads.CheckToken | None,
) -> CompileRequest:
    content_type, stream = body.content_type, body.counted(service, caller)
    await make_room(service, caller.owner, body.length)
    is_json = content_type.partition(";")[0].strip().lower() == "application/json"
    if is_json and check_token is None:
        text = await _read_short(stream, service.settings.max_plan_bytes)
        return await _config_request(text, service.settings, caller.owner, host)
    folder, limits = service.folders.uploads(upload_id), limits_of(service.settings)
    parts = await uploads.receive(stream, content_type, folder, limits, check_token)
    return await request_of_parts(service, parts, caller.owner, host)


async def _submit_targets(
    service: Service,
    caller: Caller,
    key: str | None,
    upload_id: str,
    request: CompileRequest,
) -> Compile:
    """Add a job for each target of a plan, all or none. They share the files of the upload, which
    is removed then.
    """
    new = dict[str, NewJob]()
    await asyncio.to_thread(service.folders.save_plan, upload_id, request.plan)
    bytes_each = await asyncio.to_thread(disk_use, service.folders.uploads(upload_id))
    for target in request.targets:

        async def prepare(job_id: str, target: TargetConfig = target) -> JobSpec:
            await asyncio.to_thread(service.folders.share_upload, upload_id, job_id)
            plan = await asyncio.to_thread(service.folders.load_plan, job_id)
            text, parts = target.requirement.text, [target.requirement.text, target.threads]
            of_target = replace(
                request,
                plan=plan_for_target(plan, target),
                identity=_text_digest([request.identity, *parts]),
                digest=_text_digest([request.digest, *parts]),
            )
            spec = await spec_of(service, job_id, of_target)
            beside_bytes = len(new) * bytes_each
            return replace(spec, device=text, target=text, beside_bytes=beside_bytes)

        own_key = _text_digest([key, target.title]) if key else None  # as short as a key must be
        try:
            new[target.title] = await _new_job(service, caller.owner, own_key, prepare)
        except BaseException:
            await _remove(service, [each.job.id for each in new.values()])
            raise
    try:
        compiled = await service.runner.submit_compile(upload_id, new, caller.actor)
    except Exception:  # not CancelledError: the runner then adds the jobs anyway
        await _remove(service, [each.job.id for each in new.values()])
        raise
    unused = {each.job.id for each in new.values()} - {each.job.id for each in compiled.targets}
    await _remove(service, [upload_id, *unused])
    return compiled


async def spec_of(service: Service, job_id: str, request: CompileRequest) -> JobSpec:
    """Write the plan of a new job beside its upload, and describe the job."""
    lengths = await service.read(lambda: queue_lengths(service))
    plan = request.plan
    devices, wait_s = await service.job_devices(), 0.0
    if isinstance(plan, Plan):
        device, wait_s = device_for(plan, devices, lengths), plan.wait_for_node_s
    else:
        device = language.device_for(plan, devices, lengths)
    await asyncio.to_thread(service.folders.save_plan, job_id, plan)
    if request.warnings:  # before the job's child can put a link in the place of its log
        await asyncio.to_thread(service.folders.work(job_id).start_log, request.warnings)
    return JobSpec(
        plan.name,
        device,
        request.identity,
        request.digest,
        wait_for_node_s=wait_s,
    )


async def submit_benchmark(
    service: Service, caller: Caller, name: str, options: BenchmarkRequest, key: str | None
) -> Job:
    """Add a job that measures a model's version again. Each request adds a new job, because no two
    measurements are equal.
    """
    service.host_for_job()

    async def prepare(job_id: str) -> JobSpec:
        version, device = await service.models.lend(caller, name, options.version, job_id)
        plan = await asyncio.to_thread(service.folders.load_any_plan, job_id)
        if not isinstance(plan, Plan):
            raise Unprocessable(
                f"'{name}' is a language model, which is not measured again by itself",
                "compile it again: what it has built is reused, and the race runs again",
            )
        digest = hashlib.sha256(
            json.dumps(["benchmark", name, options.version]).encode()
        ).hexdigest()
        measures = ModelVersion(model=name, version=version.version)
        like = (service.folders.uploads(version.job), service.folders.report(version.job))
        return JobSpec(plan.name, device, job_id, digest, measures, like=like)

    return await add_job(service, caller, caller.owner, key, prepare)


async def add_job(
    service: Service,
    caller: Caller,
    owner: str,
    key: str | None,
    prepare: Prepare,
    job_id: str | None = None,
) -> Job:
    """Add the job that `prepare` describes for this owner, or return the job of an earlier equal
    request. `job_id`: that of an upload which has arrived; it is removed if no job is added.
    """
    new = await _new_job(service, owner, key, prepare, job_id)
    try:
        added, _ = await service.runner.submit(new.job, new.once, caller.actor, new.files)
    except Exception:  # not CancelledError: the runner then adds the job anyway
        await _remove(service, [new.job.id])
        raise
    if added.id != new.job.id:
        await _remove(service, [new.job.id])
    return added


async def _new_job(
    service: Service, owner: str, key: str | None, prepare: Prepare, job_id: str | None = None
) -> NewJob:
    """Return the job that `prepare` describes for this owner, whose upload is complete and stored.
    After an error no files are left.
    """
    _check_key(key)
    await asyncio.to_thread(service.files.check)
    now = utc_now()
    job_id = job_id or new_id(now)
    folder = service.folders.uploads(job_id)
    try:
        spec = await prepare(job_id)
        size = await asyncio.to_thread(disk_use, folder)
        await make_room(service, owner, size + spec.beside_bytes - spec.counted_bytes)
        files = await asyncio.to_thread(partial(service.files.upload, folder, like=spec.like))
        estimate_s = await service.read(
            lambda: service.jobs.usual_s(owner, spec.name, spec.device, spec.measures is not None)
        )
        await _forget_damaged(service, owner, spec.identity)
    except BaseException:
        await _remove(service, [job_id])
        raise
    job = Job(
        id=job_id,
        owner=owner,
        identity=spec.identity,
        name=spec.name,
        device=spec.device,
        measures=spec.measures,
        recompiles=spec.recompiles,
        target=spec.target,
        wait_for_node_s=spec.wait_for_node_s,
        created=now.isoformat(timespec="milliseconds"),
        estimate_s=estimate_s,
        trace=current_trace(),
    )
    return NewJob(job, Once(key, spec.digest) if key else None, files)


async def _remove(service: Service, job_ids: Sequence[str]) -> None:
    """Remove the files of jobs that were not added."""
    for job_id in job_ids:
        await asyncio.to_thread(service.folders.remove, job_id)


def _check_key(key: str | None) -> None:
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise Unprocessable(
            f"an Idempotency-Key of {len(key)} characters, expected 1 to {MAX_KEY_CHARACTERS}",
            "send a UUID, for example",
        )


async def _forget_damaged(service: Service, owner: str, identity: str) -> None:
    """Exclude an equal earlier job with damaged files, so that the new job makes them again."""
    while True:
        same = await service.read(lambda: service.jobs.of_identity(owner, identity))
        if same is None or same.state != "succeeded":
            return
        try:
            await asyncio.to_thread(_check_job, service, same.id)
            return
        except StoreAway:
            raise
        except HostError as error:
            log.error("job.damaged", job=same.id, error=error.message)
            await service.read(partial(service.jobs.forget_identity, same.id))


def _check_job(service: Service, job_id: str) -> None:
    """Raise HostError unless a job's plan, report and engine are unchanged."""
    folder = service.folders.report(job_id)
    service.files.fetch(service.folders.uploads(job_id))
    service.files.fetch(folder)
    service.folders.load_any_plan(job_id)
    for name in REPORT_FILES:
        check_form(folder, name)
    if published_any_report(folder).has_engine:
        published_engine(folder)


def device_for(plan: Plan, devices: Sequence[str], load: Mapping[str, int]) -> str:
    """Choose the device of a plan: the GPU with the fewest jobs, or the CPU if no candidate can use
    a GPU. `load` counts the jobs by device.
    """
    gpus = [device for device in devices if device.startswith("gpu:")]
    may_use_gpu = not plan.candidates or any(map(uses_gpu, plan.candidates))
    if not gpus or not may_use_gpu:
        return "cpu"
    return min(gpus, key=lambda device: (load.get(device, 0), device))


def uses_gpu(candidate: CandidateConfig) -> bool:
    """Return True if a candidate runs on a GPU where there is one."""
    return candidate.backend in GPU_BACKENDS or candidate.provider != "cpu"


def queue_lengths(service: Service) -> Counter[str]:
    """Count the unfinished jobs by device."""
    return Counter(job.device for job in service.jobs.unfinished())


# -- uploads ---------------------------------------------------------------


def limits_of(settings: Settings) -> uploads.Limits:
    """Return the limits of an upload."""
    return uploads.Limits(
        settings.max_upload_bytes, settings.max_plan_bytes, settings.max_unpacked_bytes
    )


async def request_of_parts(
    service: Service, parts: Mapping[str, uploads.Part], owner: str, host: HostIdentity
) -> CompileRequest:
    """Check the files of an upload, and convert its plan. Unprocessable if one is refused."""
    settings = service.settings
    async with service.unpacking:
        request = await asyncio.to_thread(_converted, parts, settings, owner, host)
    if isinstance(request.plan, LanguagePlan):
        await check_language_model(service, request.plan)
        return request
    model = request.plan.model.path or request.plan.model.weights
    assert model is not None  # plan_from sets one of the two
    await check_model(service, parts["model"], model)
    return request


async def check_model(service: Service, part: uploads.Part, model: Path) -> None:
    """Raise Unprocessable unless a file has the form of a model, and this service may run it."""
    await service.upload_readers.ask("check_model", [os.fsencode(model)])
    if service.settings.allow_code and submitted.is_code(part):
        check_sandbox(await service.proof())


async def check_language_model(service: Service, plan: LanguagePlan) -> None:
    """Raise Unprocessable unless the uploaded files are a language model with texts."""
    try:
        await service.upload_readers.ask("check_language_model", [plan.model_dump_json().encode()])
    except Unprocessable as error:
        message = scrubbed(error.message, service.folders)
        raise Unprocessable(message, scrubbed(error.next_step, service.folders)) from error


def check_sandbox(proof: Proof) -> None:
    """Raise Unprocessable unless the sandbox stops all that a job's code must not do."""
    if proof.succeeded:
        reason = proof.fault or f"code in it could {', '.join(proof.succeeded)}"
        raise Unprocessable(
            f"this service runs no code from uploads, because its sandbox does not hold: {reason}",
            "send ONNX; `crucible doctor` tells the operator which layer is missing",
        )


def _converted(
    parts: Mapping[str, uploads.Part], settings: Settings, owner: str, host: HostIdentity
) -> CompileRequest:
    text = parts["plan"].path.read_bytes() if "plan" in parts else b""
    document = submitted.document_from(text)
    if language.is_language_upload(document, parts["model"]):
        language.check_host(host)
        plan = language.language_plan_from(document, parts, settings)
        return CompileRequest(
            plan=plan,
            identity=language.identity(plan, parts, owner, host.digest),
            digest=language.identity(plan, parts, owner, ""),
        )
    client_plan = submitted.parse(text)
    return CompileRequest(
        plan=submitted.plan_from(client_plan, parts, settings),
        identity=submitted.identity(client_plan, parts, owner, host.digest),
        digest=submitted.identity(client_plan, parts, owner, ""),
        warnings=submitted.warnings_of(text),
    )


# -- the server's own plans ----------------------------------------------


async def _read_short(stream: AsyncIterator[bytes], limit: int) -> bytes:
    body = b""
    async for chunk in stream:
        body += chunk
        if len(body) > limit:
            raise TooLarge(
                f"a JSON body of more than {limit} bytes",
                'send {"config": NAME}, or a model as multipart/form-data',
            )
    return body


async def _config_request(
    body: bytes, settings: Settings, owner: str, host: HostIdentity
) -> CompileRequest:
    try:
        name = NamedConfig.model_validate_json(body).config
    except ValidationError as error:
        message = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}"
            for fault in error.errors()
        )
        raise Unprocessable(
            f'expected {{"config": NAME}}: {message}', "or send a model as multipart/form-data"
        ) from error
    return await asyncio.to_thread(_request_of_config, name, settings, owner, host)


def _request_of_config(
    name: str, settings: Settings, owner: str, host: HostIdentity
) -> CompileRequest:
    known = {}
    if settings.configs:
        known = {file.stem: file for file in sorted(settings.configs.glob("*.yaml"))}
    if name not in known:
        raise NotFound(
            f"this service has no config '{name}'",
            f"known: {', '.join(known) or 'none'}; or send a model",
        )
    plan = load_any_plan(known[name])
    if isinstance(plan, LanguagePlan):
        language.check_host(host)
        return CompileRequest(
            plan=plan,
            identity=language.identity_of_config(plan, owner, host.digest),
            digest=language.identity_of_config(plan, owner, ""),
        )
    content = _content_of(plan)
    return CompileRequest(
        plan=plan,
        identity=_text_digest([owner, host.digest, content]),
        digest=_text_digest([owner, "", content]),
    )


def _text_digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _content_of(plan: Plan) -> list[str]:
    """Return digests of the plan and of all files and code that it names."""
    content = [plan.model_dump_json(), source_from_config(plan.model, plan.profiles).digest]
    for role in (plan.data.calibration, plan.data.selection, plan.data.validation):
        content += [_digest(file) for file in role] if isinstance(role, tuple) else []
    content += [_digest(file) for _, file in plan.data.labels if file is not None]
    if plan.serving.text is not None:
        content.append(_digest(plan.serving.text.file))
    content += accuracy_code(plan.accuracy)
    if plan.simplify.surgery is not None:
        content.append(
            code_digest(plan.simplify.surgery, plan.simplify.python_path, "simplify.surgery")
        )
    return content


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise PlanError(
            f"a file of the plan cannot be read: {error}",
            "ask the operator of this service to correct the plan",
        ) from error
