"""From a request to a job: to compile an upload or one of the server's own plans, or to measure a
model again.

Whatever goes wrong before the job is added, a client that hangs up included, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from pipeline.errors import HostError, PlanError
from pipeline.plan.schema import CandidateConfig, Plan, load_plan
from pipeline.plan.source import code_digest, source_from_config
from service import logs
from service.auth import Caller
from service.context import Service
from service.devices.leases import utc_now
from service.errors import NotFound, TooLarge, Unprocessable
from service.jobs.messages import HostIdentity
from service.jobs.publish import REPORT_FILES, check_form, published_engine, published_report
from service.jobs.state import Job, Measures, new_id
from service.jobs.store import Once
from service.jobs.traces import current_trace
from service.registry.models import BenchmarkRequest
from service.settings import Settings
from service.submission import plan as submitted
from service.submission import uploads
from service.submission.plan import NamedConfig

log = logs.get("service.submission")
GPU_BACKENDS = ("tensorrt", "tensorrt_rtx", "torch")
MAX_KEY_CHARACTERS = 255  # characters of an Idempotency-Key


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be compiled, and what makes an equal request: with this host's tools, and without
    (for the Idempotency-Key).
    """

    plan: Plan
    identity: str
    digest: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a job is to do; its upload is complete."""

    name: str  # of its plan
    device: str
    identity: str
    digest: str
    measures: Measures | None = None


Prepare = Callable[[str], Awaitable[Prepared]]
"""Fills the upload of the job with this id."""


async def submit(
    service: Service, owner: str, content_type: str, stream: AsyncIterator[bytes], key: str | None
) -> Job:
    """Add a job for a request's body, or find the one that an equal request made."""
    host = service.host()

    async def prepare(job_id: str) -> Prepared:
        if content_type.partition(";")[0].strip().lower() == "application/json":
            wanted = await _wanted_config(
                await _short(stream, service.settings.max_plan_bytes), service.settings, owner, host
            )
        else:
            wanted = await _wanted_upload(
                stream, content_type, service.folders.uploads(job_id), service, owner, host
            )
        device = device_for(
            wanted.plan, tuple(host.devices), await service.read(lambda: _load(service))
        )
        await asyncio.to_thread(service.folders.save_plan, job_id, wanted.plan)
        return Prepared(wanted.plan.name, device, wanted.identity, wanted.digest)

    return await _submit(service, owner, key, prepare)


async def submit_benchmark(
    service: Service, caller: Caller, name: str, asked: BenchmarkRequest, key: str | None
) -> Job:
    """Add a job that measures a model's version again: each request another one, for no two runs
    are the same.
    """
    service.host()

    async def prepare(job_id: str) -> Prepared:
        version, device = await service.models.lend(caller, name, asked.version, job_id)
        plan = await asyncio.to_thread(service.folders.load_plan, job_id)
        digest = hashlib.sha256(json.dumps(["benchmark", name, asked.version]).encode()).hexdigest()
        return Prepared(
            plan.name, device, job_id, digest, Measures(model=name, version=version.version)
        )

    return await _submit(service, caller.owner, key, prepare)


async def _submit(service: Service, owner: str, key: str | None, prepare: Prepare) -> Job:
    if key is not None and not 0 < len(key) <= MAX_KEY_CHARACTERS:
        raise Unprocessable(
            f"an Idempotency-Key of {len(key)} characters, expected 1 to {MAX_KEY_CHARACTERS}",
            "send a UUID, for example",
        )
    now = utc_now()
    job_id = new_id(now)
    folder = service.folders.uploads(job_id)
    try:
        ready = await prepare(job_id)
        job = Job(
            id=job_id,
            owner=owner,
            identity=ready.identity,
            name=ready.name,
            device=ready.device,
            measures=ready.measures,
            created=now.isoformat(timespec="milliseconds"),
            estimate_s=await service.read(
                lambda: service.jobs.usual_s(
                    owner, ready.name, ready.device, ready.measures is not None
                )
            ),
            trace=current_trace(),
        )
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder, True)
        raise
    await _forget_damaged(service, owner, ready.identity)
    try:
        added, _ = await service.runner.submit(job, Once(key, ready.digest) if key else None)
    except Exception:  # not a cancellation: the runner adds the job nevertheless
        await asyncio.to_thread(shutil.rmtree, folder, True)
        raise
    if added.id != job_id:
        await asyncio.to_thread(shutil.rmtree, folder, True)
    return added


async def _forget_damaged(service: Service, owner: str, identity: str) -> None:
    """An equal request is not answered with a job whose files are damaged: it makes them again."""
    while True:
        same = await service.read(lambda: service.jobs.of_identity(owner, identity))
        if same is None or same.state != "succeeded":
            return
        try:
            await asyncio.to_thread(_check_job, service, same.id)
            return
        except HostError as error:
            log.error("job.damaged", job=same.id, error=error.message)
            await service.read(partial(service.jobs.forget_identity, same.id))


def _check_job(service: Service, job_id: str) -> None:
    """HostError unless a job's plan, report and engine are what they were."""
    service.folders.load_plan(job_id)
    folder = service.folders.report(job_id)
    for name in REPORT_FILES:
        check_form(folder, name)
    if published_report(folder).has_engine:
        published_engine(folder)


def device_for(plan: Plan, devices: Sequence[str], load: Mapping[str, int]) -> str:
    """Whose queue a plan goes to: of the GPU with the fewest jobs, or of the CPU if no candidate
    could use a GPU.
    """
    gpus = [device for device in devices if device.startswith("gpu:")]
    if not gpus or (
        plan.candidates
        and not any(
            uses_gpu(
                candidate,
            )
            for candidate in plan.candidates
        )
    ):
        return "cpu"
    return min(gpus, key=lambda device: (load.get(device, 0), device))


def uses_gpu(candidate: CandidateConfig) -> bool:
    """Whether a candidate runs on a GPU where there is one."""
    return candidate.backend in GPU_BACKENDS or candidate.provider != "cpu"


def _load(service: Service) -> Counter[str]:
    return Counter(job.device for job in service.jobs.unfinished())


# -- an upload ---------------------------------------------------------------


async def _wanted_upload(
    stream: AsyncIterator[bytes],
    content_type: str,
    folder: Path,
    service: Service,
    owner: str,
    host: HostIdentity,
) -> Wanted:
    settings = service.settings
    limits = uploads.Limits(
        settings.max_upload_bytes, settings.max_plan_bytes, settings.max_unpacked_bytes
    )
    parts = await uploads.receive(stream, content_type, folder, limits)
    async with service.unpacking:
        return await asyncio.to_thread(_wanted_parts, parts, settings, owner, host)


def _wanted_parts(
    parts: Mapping[str, uploads.Part], settings: Settings, owner: str, host: HostIdentity
) -> Wanted:
    asked = submitted.parse(parts["plan"].path.read_bytes() if "plan" in parts else b"")
    plan = submitted.plan_from(asked, parts, settings)
    return Wanted(
        plan, *(submitted.identity(asked, parts, owner, digest) for digest in (host.digest, ""))
    )


# -- a plan of the server's own ----------------------------------------------


async def _short(stream: AsyncIterator[bytes], limit: int) -> bytes:
    body = b""
    async for chunk in stream:
        body += chunk
        if len(body) > limit:
            raise TooLarge(
                f"a JSON body of more than {limit} bytes",
                'send {"config": NAME}, or a model as multipart/form-data',
            )
    return body


async def _wanted_config(body: bytes, settings: Settings, owner: str, host: HostIdentity) -> Wanted:
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
    return await asyncio.to_thread(_named, name, settings, owner, host)


def _named(name: str, settings: Settings, owner: str, host: HostIdentity) -> Wanted:
    known = (
        {file.stem: file for file in sorted(settings.configs.glob("*.yaml"))}
        if settings.configs
        else {}
    )
    if name not in known:
        raise NotFound(
            f"no config '{name}' that may be named here",
            f"known: {', '.join(known) or 'none'}; or send a model",
        )
    plan = load_plan(known[name])
    content = _content_of(plan)
    return Wanted(
        plan,
        *(
            hashlib.sha256(json.dumps([owner, digest, content]).encode()).hexdigest()
            for digest in (host.digest, "")
        ),
    )


def _content_of(plan: Plan) -> list[str]:
    """Digests of the plan and of all that it names."""
    content = [plan.model_dump_json(), source_from_config(plan.model, plan.profiles).digest]
    for role in (plan.data.calibration, plan.data.selection, plan.data.validation):
        content += [_digest(file) for file in role] if isinstance(role, tuple) else []
    if ":" in plan.accuracy.metric:
        content.append(
            code_digest(plan.accuracy.metric, plan.accuracy.python_path, "accuracy.metric")
        )
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
            f"the plan's data cannot be read: {error}",
            "whoever runs this service can mend the plan",
        ) from error
