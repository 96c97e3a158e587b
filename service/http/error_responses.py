"""The error table: every exception that a request may end with, the framework's too, as one form of
answer.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from pipeline.errors import DiskFull
from pipeline.execution.exit_causes import crucible_error
from service import logs
from service.errors import Answer, NotFound, ServiceError, Unprocessable, answer_to
from service.jobs.redact import scrubbed
from service.storage.layout import Folders

FREE_SPACE = (
    "whoever runs the service can free some space with `crucible gc`, or move its home to a larger"
    " disk"
)

log = logs.get("service.answers")


def answer_error(error: Exception, request_id: str, folders: Folders) -> Answer:
    """The answer to an exception, without paths of this host; what is our own fault is logged with
    its traceback, which clients do not get.
    """
    answer = answer_to(_ours(error), request_id)
    answer = replace(
        answer, body={name: scrubbed(text, folders) for name, text in answer.body.items()}
    )
    if answer.status == 500:
        log.error(
            "request.fault",
            request=request_id,
            error=str(error),
            exc_info=None if isinstance(error, ServiceError) else error,
        )
    return answer


def _ours(error: Exception) -> Exception:
    match error:
        case HTTPException(status_code=400):  # FastAPI's, of bytes that are no text
            return Unprocessable(
                "the body cannot be read as what its Content-Type says",
                "GET /docs shows what this path takes",
            )
        case HTTPException(status_code=404):
            return NotFound("nothing lies at this path", "GET /docs lists what there is")
        case RequestValidationError():
            faults = "; ".join(
                f"{' '.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
            )
            return Unprocessable(faults, "GET /docs shows what this path takes")
        case OSError():  # a full disk is the host's fault; any other is ours
            known = crucible_error(error)
            return DiskFull(known.message, FREE_SPACE) if isinstance(known, DiskFull) else error
    return error
