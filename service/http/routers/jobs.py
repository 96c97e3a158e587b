"""Routes for jobs: submit, list, follow, cancel, retry."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from pipeline.plan.schema import ROLES, LabelFiles
from service.context import Service
from service.devices.leases import utc_now
from service.http.routers.dependencies import REFUSALS, CurrentCaller, CurrentService
from service.http.schemas import CompileView, JobPage, JobView, view_of_compile, view_of_job
from service.http.sse import EventStream, stream
from service.jobs.redact import scrubbed
from service.jobs.state import Job, State
from service.storage.layout import MAX_LOG_BYTES
from service.storage.running_logs import RunningLogs
from service.submission.plan import LABELS_SUFFIX, NamedConfig, SubmittedPlan
from service.submission.submit import Body, submit
from service.submission.uploads import PARTS, TOKENIZER

router = APIRouter(tags=["jobs"], responses=REFUSALS)
MAX_SEQ = 2**63 - 1  # of SQLite

_PART = {"type": "string", "format": "binary"}
_UPLOAD = {"type": "object", "required": ["model"], "properties": dict.fromkeys(PARTS, _PART)}
_EXAMPLE = {
    "model": "(content of resnet50.onnx)",
    "plan": (
        "{name: resnet50, profiles: [{batch: [1, 8, 64]}], accuracy: {metric: top1, max_drop:"
        " 0.01}}"
    ),
    **{role: f"(content of {role}.npz)" for role in ROLES},
    **{f"{role}{LABELS_SUFFIX}": f"(content of {role}.jsonl)" for role in LabelFiles.model_fields},
    TOKENIZER: "(content of tokenizer.json, with `serving.text` in the plan)",
}
COMPILE_BODY: dict[str, Any] = {
    "description": "A model with its plan and data, or the name of one of the server's own plans",
    "required": True,
    "content": {
        "multipart/form-data": {"schema": _UPLOAD, "example": _EXAMPLE},
        "application/json": {
            "schema": NamedConfig.model_json_schema(),
            "example": {"config": "digits"},
        },
    },
}
_JSON = {"type": "string", "contentMediaType": "application/json"}
_TEXT = {"type": "string"}
EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"id": _TEXT, "event": _TEXT, "data": _JSON, "retry": {"type": "integer"}},
}
PLAN_NOTE = (
    f"The part `plan` is YAML or JSON with any of the keys {', '.join(SubmittedPlan.model_fields)}."
    " A language model is a .gguf file, or an archive of a folder in the form of Hugging Face; its"
    " plan begins with `language_model: {}`, and `selection` and `validation` are .jsonl."
)


@router.post(
    "/compile",
    status_code=202,
    response_model=JobView | CompileView,
    responses={
        200: {
            "model": JobView | CompileView,
            "description": "The job of an earlier equal request, which has ended",
        }
    },
    openapi_extra={"requestBody": COMPILE_BODY},
    description=(
        "Compile a model. An equal request of the same owner gets the same job, unless it failed or"
        f" was cancelled. A plan with `targets` gets a compile with a job for each. {PLAN_NOTE}"
    ),
)
async def compile_model(
    request: Request,
    response: Response,
    caller: CurrentCaller,
    service: CurrentService,
    idempotency_key: Annotated[str | None, Header()] = None,
) -> JobView | CompileView:
    caller.require("compile")
    body = Body(
        request.headers.get("content-type", ""),
        int(request.headers.get("content-length", 0)),  # the guard has checked its form
        request.stream(),
    )
    added = await submit(service, caller, body, idempotency_key)
    if isinstance(added, Job):
        return accepted(added, response)
    view = view_of_compile(added, utc_now())
    response.headers["Location"] = view.link
    response.status_code = 202 if view.outcome is None else 200
    return view


@router.get("/compiles/{compile_id}")
async def get_compile(
    compile_id: str, caller: CurrentCaller, service: CurrentService
) -> CompileView:
    """Return the targets of a compile side by side, each with its job."""
    found = await service.read(lambda: service.jobs.get_compile(compile_id, caller.sees))
    return view_of_compile(found, utc_now())


@router.get("/jobs")
async def list_jobs(
    caller: CurrentCaller,
    service: CurrentService,
    state: State | None = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: Annotated[
        str | None, Query(max_length=100, description="`next` of the previous page")
    ] = None,
) -> JobPage:
    """List jobs, newest first."""
    page = await service.read(lambda: service.jobs.list(caller.sees, state, limit, after))
    now = utc_now()
    return JobPage(jobs=tuple(view_of_job(job, now) for job in page.jobs), next=page.after)


@router.get("/jobs/{job_id}")
async def get_job(job_id: str, caller: CurrentCaller, service: CurrentService) -> JobView:
    """Return the state of a job."""
    return view_of_job(await service.read(lambda: service.jobs.get(job_id, caller.sees)), utc_now())


@router.get(
    "/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {"itemSchema": EVENT}},
            "description": "Server-sent events",
        }
    },
)
async def follow_job(
    job_id: str,
    caller: CurrentCaller,
    service: CurrentService,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_SEQ)] = None,
    after: Annotated[
        int,
        Query(
            ge=0,
            le=MAX_SEQ,
            description="Skip events up to this number, like the header Last-Event-ID",
        ),
    ] = 0,
) -> StreamingResponse:
    """Stream the events of a job from its start to its end: `stage` events, `figures` of candidates
    as they are measured, and one for each new state.
    """
    await service.read(lambda: service.jobs.get(job_id, caller.sees))
    begin = after if last_event_id is None else last_event_id
    events = stream(service, job_id, begin, caller)
    return EventStream(events, partial(service.limits.stream, caller.key))


@router.get("/jobs/{job_id}/log", response_class=PlainTextResponse)
async def tail_log(
    job_id: str,
    caller: CurrentCaller,
    service: CurrentService,
    bytes_: Annotated[
        int, Query(alias="bytes", ge=1, le=MAX_LOG_BYTES, description="Maximum length")
    ] = 65536,
) -> PlainTextResponse:
    """Return the end of the output of the job's processes."""
    job = await service.read(lambda: service.jobs.get(job_id, caller.sees))
    text = await log_of(service, job, bytes_)
    return PlainTextResponse(text, headers={"X-Content-Type-Options": "nosniff"})


@router.delete("/jobs/{job_id}", status_code=202)
async def cancel_job(job_id: str, caller: CurrentCaller, service: CurrentService) -> JobView:
    """Cancel a job. All its processes end within 5 s. Refused if it has ended."""
    caller.require("compile")
    return view_of_job(await service.runner.cancel(job_id, caller.sees, caller.actor), utc_now())


@router.post("/jobs/{job_id}/retry", status_code=202, response_model=JobView)
async def retry_job(
    job_id: str, response: Response, caller: CurrentCaller, service: CurrentService
) -> JobView:
    """Retry a job that failed or was cancelled. The new job continues from the artifacts of the old
    one.
    """
    caller.require("compile")
    service.host_for_job()  # raises Unavailable or StorageFull
    return accepted(await service.runner.retry(job_id, caller.sees, caller.actor), response)


async def log_of(service: Service, job: Job, most: int) -> str:
    """Return the last `most` bytes of a job's log, without paths of this host. That of a job that
    runs at another server may lack the last seconds.
    """
    work, runs_here = service.folders.work(job.id), service.runner.is_running(job.id)

    def read() -> str:
        if service.files.are_shared and not runs_here and not job.is_final:
            return RunningLogs(service.database).end_of(job.id, most)
        service.files.fetch(work.root, (work.log.name,))  # of a job that has ended
        text = work.read_log(most)[0].decode("utf-8", "replace")
        return scrubbed(text, service.folders)

    return await asyncio.to_thread(read)


def accepted(job: Job, response: Response) -> JobView:
    """Return the view of a new job, with its Location."""
    response.headers["Location"] = f"/jobs/{job.id}"
    response.status_code = 200 if job.is_final else 202
    return view_of_job(job, utc_now())
