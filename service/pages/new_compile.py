"""/ui/new: upload a model. /ui/drafts/ID: the form that makes the upload a job."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from pipeline.errors import CrucibleError
from service.architectures import ARCHITECTURES
from service.auth import Caller
from service.context import Service
from service.errors import Answer, TooLarge, Unavailable, Unprocessable
from service.http.error_responses import answer_error
from service.http.routers.dependencies import CurrentService
from service.jobs.state import Job
from service.pages.access import Author, Visitor, check_token
from service.pages.commands import commands
from service.pages.forms.compile import (
    METRIC_CHOICES,
    OBJECTIVES,
    POINTS,
    Form,
    first_form,
    form_from,
    is_onnx,
    needs_architecture,
    plan_text,
)
from service.pages.forms.targets import elsewhere, targets_of
from service.pages.rendering import HEADERS, fragment, page
from service.storage.drafts import Draft
from service.submission.drafts import receive_draft, submit_draft
from service.submission.language import GGUF
from service.submission.plan import CODE, SAFETENSORS, parse
from service.submission.submit import Body, submit
from service.submission.uploads import ARCHIVES

router = APIRouter(include_in_schema=False)
BASELINE = "pytorch"  # no candidate
PROGRAM = "torch"  # a candidate for PyTorch models only
ROLES = {
    "calibration": "Samples for the ranges of int8: an .npz file with an array for each input.",
    "selection": "Samples that choose the winner. top1 and others need an array `labels` too.",
    "validation": "Samples for the last check of the winner. The choice does not see them.",
}
LABEL_ROLES = {
    "selection_labels": (
        "Boxes or texts of the selection samples, if the .npz has no array `labels`: .json"
        " in the format of COCO, or .jsonl with a line for each sample."
    ),
    "validation_labels": "Those of the validation samples.",
}
TEXT_ROLES = {
    "selection": "Every candidate is scored on these texts.",
    "validation": "Read once, at the end, for the winner.",
    "calibration": "Chooses scales, for candidates with `awq` or `scale_estimation`.",
}


@router.get("/ui/new")
async def new_page(request: Request, caller: Visitor, service: CurrentService) -> Response:
    caller.require("compile")
    return await _new_page(request, caller, service)


@router.post("/ui/drafts")
async def upload_draft(request: Request, caller: Visitor, service: CurrentService) -> Response:
    """Store an upload. Its token is in a header, or in the form before the files, because a form of
    gigabytes is not read into memory.
    """
    caller.require("compile")
    body = _body_of(request)
    try:
        draft = await receive_draft(service, caller, body, partial(check_token, request))
    except (CrucibleError, OSError) as error:
        refusal = _refusal(request, service, error)
        if "hx-request" in request.headers:
            text = fragment("refusal.html", refusal=refusal.body, title="The upload was refused")
            return HTMLResponse(text, refusal.status, {**refusal.headers, **HEADERS})
        return await _new_page(request, caller, service, refusal)
    target = f"/ui/drafts/{draft.id}"
    if "hx-request" in request.headers:
        return Response(headers={"HX-Redirect": target})
    return RedirectResponse(target, 303)


@router.post("/ui/language-models")
async def compile_language_model(
    request: Request, caller: Visitor, service: CurrentService
) -> Response:
    """Add a job for a language model with its plan and texts. The token is as for a draft."""
    caller.require("compile")
    body = _body_of(request)
    try:
        added = await submit(service, caller, body, None, partial(check_token, request))
    except (CrucibleError, OSError) as error:
        return await _new_page(request, caller, service, _refusal(request, service, error))
    target = f"/ui/jobs/{added.id}" if isinstance(added, Job) else "/"
    return RedirectResponse(target, 303)


@router.get("/ui/drafts/{draft_id}")
async def draft_page(
    request: Request, draft_id: str, caller: Visitor, service: CurrentService
) -> Response:
    draft = await _draft(service, draft_id, caller)
    return await _form_page(request, service, draft, first_form(draft))


@router.post("/ui/drafts/{draft_id}")
async def compile_draft(
    request: Request, draft_id: str, caller: Author, service: CurrentService
) -> Response:
    draft = await _draft(service, draft_id, caller)
    form = form_from(draft, await request.form())
    try:
        job = await submit_draft(service, caller, draft, await _plan(service, draft, form))
    except (CrucibleError, OSError) as error:
        refusal = _refusal(request, service, error)
        return await _form_page(request, service, draft, form, refusal=refusal)
    return RedirectResponse(f"/ui/jobs/{job.id}", 303)


async def _plan(service: Service, draft: Draft, form: Form) -> str:
    """Return the plan of a form. TooLarge and Unprocessable if it cannot be one."""
    most = service.settings.max_plan_bytes
    if len(form.more.encode()) > most:
        raise TooLarge(f"the further keys have more than {most} bytes", "send the plan as a file")
    try:
        return await asyncio.to_thread(plan_text, draft, form)
    except ValueError as error:  # such as an integer of thousands of digits
        raise Unprocessable(f"the further keys: {error}", "correct them") from None


@router.post("/ui/drafts/{draft_id}/commands")
async def draft_commands(
    request: Request, draft_id: str, caller: Author, service: CurrentService
) -> Response:
    """Show the form as commands, below the form or alone for a script of its page."""
    draft = await _draft(service, draft_id, caller)
    form = form_from(draft, await request.form())
    texts: dict[str, str] = {}
    refusal = None
    try:
        plan = await _plan(service, draft, form)
        await asyncio.to_thread(parse, plan.encode())
        url = str(request.base_url).rstrip("/")
        texts = commands(draft, plan, url, service.settings.needs_keys)
    except CrucibleError as error:
        refusal = _refusal(request, service, error)
    if "hx-request" in request.headers:
        status = refusal.status if refusal else 200
        return HTMLResponse(
            fragment("commands.html", commands=texts, refusal=refusal), status, HEADERS
        )
    return await _form_page(request, service, draft, form, texts, refusal)


@router.post("/ui/drafts/{draft_id}/delete")
async def delete_draft(draft_id: str, caller: Author, service: CurrentService) -> Response:
    draft = await _draft(service, draft_id, caller)
    await asyncio.to_thread(service.drafts.remove, draft.id)
    return RedirectResponse("/ui/new", 303)


def _body_of(request: Request) -> Body:
    return Body(
        request.headers.get("content-type", ""),
        int(request.headers.get("content-length", 0)),  # the guard has checked its form
        request.stream(),
    )


async def _draft(service: Service, draft_id: str, caller: Caller) -> Draft:
    caller.require("compile")
    return await asyncio.to_thread(service.drafts.get, draft_id, caller.owner)


def _refusal(request: Request, service: Service, error: Exception) -> Answer:
    """Convert an error to what its page shows, and note it for the log."""
    request.state.refusal = error
    return answer_error(error, request.state.request_id, service.folders)


async def _new_page(
    request: Request, caller: Caller, service: Service, refusal: Answer | None = None
) -> Response:
    settings = service.settings
    usage = await service.limits.usage(caller.key)
    left = settings.max_upload_bytes_per_hour - usage.uploaded_bytes
    answer = page(
        request,
        "new.html",
        refusal.status if refusal else 200,
        refusal=refusal,
        has_disk=service.has_disk_reserve(),
        most=max(0, min(settings.max_upload_bytes, left)),
        suffixes=(".onnx", SAFETENSORS, *ARCHIVES, *((CODE,) if settings.allow_code else ())),
        roles=ROLES,
        label_roles=LABEL_ROLES,
        language_suffixes=(GGUF, *ARCHIVES),
        text_roles=TEXT_ROLES,
        lacks_language=_why_no_language_models(service),
    )
    answer.headers.update(refusal.headers if refusal else {})
    return answer


def _why_no_language_models(service: Service) -> str:
    """Return why this service compiles no language models; "" if it does, or still starts."""
    try:
        return service.host().language_models
    except Unavailable:
        return ""


async def _form_page(
    request: Request,
    service: Service,
    draft: Draft,
    form: Form,
    texts: dict[str, str] | None = None,
    refusal: Answer | None = None,
) -> Response:
    offered, refused = _candidates(service, draft)
    nodes = await service.runner.nodes()
    values: dict[str, Any] = {
        "draft": draft,
        "form": form,
        "refusal": refusal,
        "commands": texts or {},
        "points": POINTS,
        "metrics": METRIC_CHOICES,
        "objectives": OBJECTIVES,
        "architectures": ARCHITECTURES if needs_architecture(draft) else (),
        "offered": offered,
        "refused": refused,
        "targets": targets_of(nodes),
        "elsewhere": elsewhere(service.host().candidates, nodes),
    }
    return page(request, "draft.html", refusal.status if refusal else 200, **values)


def _candidates(service: Service, draft: Draft) -> tuple[dict[str, list[str]], list[str]]:
    """Return the precisions that this host offers by backend, and a sentence for each reason of a
    refusal.
    """
    offered: dict[str, list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for name, reason in service.host().candidates.items():
        backend, _, precision = name.partition(" ")
        if backend == BASELINE or (backend == PROGRAM and is_onnx(draft)):
            continue
        if reason:
            refused.setdefault((backend, reason), []).append(precision)
        else:
            offered.setdefault(backend, []).append(precision)
    return offered, [
        f"{backend} {', '.join(precisions)}: {reason}"
        for (backend, reason), precisions in refused.items()
    ]
