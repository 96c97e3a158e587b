"""Drafts: an upload of the web pages first becomes a draft, then a plan makes it a job."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

from service import logs
from service.auth import Caller
from service.context import Service
from service.devices.leases import utc_now
from service.errors import TooMany, Unprocessable
from service.jobs.state import Job, new_id
from service.sandbox.process_limits import disk_use
from service.storage.drafts import Draft, Interface, StoredPart, gone
from service.submission import uploads
from service.submission.language import is_language_upload
from service.submission.plan import UNPACKED, model_file
from service.submission.stored_bytes import make_room
from service.submission.submit import (
    Body,
    JobSpec,
    add_job,
    check_model,
    limits_of,
    request_of_parts,
    spec_of,
)
from service.submission.uploads import CheckToken, Part

log = logs.get("service.submission")
MAX_DRAFTS = 20  # of an owner


async def receive_draft(
    service: Service, caller: Caller, body: Body, check_token: CheckToken
) -> Draft:
    """Store an upload as a draft of the caller. If anything fails, no files are left.

    Unprocessable if it is no model, or has a plan; StorageFull and TooMany as for a job.
    """
    service.host_for_job()
    await asyncio.to_thread(service.files.check)
    await service.limits.check_upload(caller.key, body.length)
    if len(await asyncio.to_thread(service.drafts.of, caller.owner)) >= MAX_DRAFTS:
        raise TooMany(
            f"there are {MAX_DRAFTS} drafts already", "compile one, or delete it on its page"
        )
    draft_id = new_id(utc_now())
    folder, limits = service.folders.uploads(draft_id), limits_of(service.settings)
    try:
        await make_room(service, caller.owner, body.length)
        stream = body.counted(service, caller)
        parts = await uploads.receive(stream, body.content_type, folder, limits, check_token)
        if "plan" in parts:
            raise Unprocessable(
                "a draft with a part `plan`: its page makes the plan",
                "leave `plan` out, or send both to POST /compile",
            )
        model, interface = await _read_model(service, parts["model"])
        files = {name: part.path.name for name, part in parts.items()}
        if model.parent == folder:  # no archive
            files["model"] = model.name
        stored = {
            name: StoredPart(
                file=files[name], sha256=part.sha256, size=part.size, filename=part.filename
            )
            for name, part in parts.items()
        }
        await make_room(service, caller.owner, await asyncio.to_thread(disk_use, folder))
        draft = Draft(
            id=draft_id,
            owner=caller.owner,
            created=utc_now(),  # an upload may take longer than a draft lasts
            parts=stored,
            interface=interface,
        )
        await asyncio.to_thread(service.drafts.add, draft)
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, folder, True)
        raise
    log.info("draft.received", draft=draft.id, key=caller.key)
    return draft


async def _read_model(service: Service, part: Part) -> tuple[Path, Interface]:
    """Return the file of the model, and what it says of its inputs and outputs."""
    if is_language_upload({}, part):
        raise Unprocessable(
            f"'{part.filename}' is a language model, which this form does not take",
            "use the form for language models below, or `crucible submit PLAN.yaml`",
        )
    async with service.unpacking:
        model = await asyncio.to_thread(model_file, part, service.settings)
    await check_model(service, part, model)
    if model.suffix != ".onnx":
        return model, Interface()
    _, text = await service.upload_readers.ask("read_interface", [os.fsencode(model)])
    await asyncio.to_thread(shutil.rmtree, part.path.with_name(UNPACKED), True)
    return model, Interface.model_validate_json(text)


async def submit_draft(service: Service, caller: Caller, draft: Draft, plan: str) -> Job:
    """Add a job for a draft and the text of its plan, as POST /compile does, and delete the draft.

    If the plan is refused, the draft stays.
    """
    host, most = service.host_for_job(), service.settings.max_plan_bytes
    size = len(plan.encode())
    if size > most:
        raise Unprocessable(f"a plan of {size} bytes, expected at most {most}", "write less")

    async def prepare(job_id: str) -> JobSpec:
        old, new = service.folders.uploads(draft.id), service.folders.uploads(job_id)
        await asyncio.to_thread(service.files.fetch, old)
        counted_bytes = await asyncio.to_thread(disk_use, old)
        parts = await asyncio.to_thread(_link, draft, old, new)
        parts["plan"] = Part("plan", new / "plan", "", size, "plan.yaml")
        await asyncio.to_thread(parts["plan"].path.write_text, plan, "utf-8")
        request = await request_of_parts(service, parts, caller.owner, host)
        if request.targets:
            raise Unprocessable(
                "a page compiles for one device, and the plan has `targets`",
                "leave them out, or send the plan with `crucible submit`",
            )
        spec = await spec_of(service, job_id, request)
        return replace(spec, counted_bytes=counted_bytes, like=(old,))

    job = await add_job(service, caller, caller.owner, None, prepare)
    await asyncio.to_thread(service.drafts.remove, draft.id)
    return job


def _link(draft: Draft, old: Path, new: Path) -> dict[str, Part]:
    """Share the files of a draft with the upload of a job."""
    new.mkdir(parents=True)
    try:
        for name, part in draft.parts.items():
            os.link(old / part.file, new / name)
    except FileNotFoundError:  # submitted or removed meanwhile
        raise gone() from None
    return {
        name: Part(name, new / name, part.sha256, part.size, part.filename)
        for name, part in draft.parts.items()
    }
