"""The error table: converts every exception of a request, including the framework's, to the same
form of answer.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from pipeline.errors import DiskFull, ObjectStoreError, StoreError
from pipeline.execution.exit_causes import crucible_error
from service import logs
from service.errors import Answer, NotFound, ServiceError, Unprocessable, answer_to
from service.jobs.redact import scrubbed
from service.storage.layout import Folders

FREE_SPACE = (
    "the operator of the service can free space with `crucible gc`, or move its home to a larger"
    " disk"
)

log = logs.get("service.answers")


def answer_error(error: Exception, request_id: str, folders: Folders) -> Answer:
    """Convert an exception to an answer without paths of this host. Internal errors are logged with
    their traceback, which clients do not get.
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
        case StoreError(__cause__=SQLAlchemyError()):  # its message has the database's address
            log.error("database.unavailable", error=error.message, next=error.next_step)
            return StoreError(
                "the service cannot use its database now",
                "try again in a moment; the operator finds the cause in the log",
            )
        case ObjectStoreError():  # its message has the address of the bucket
            log.error("files.unavailable", error=error.message, next=error.next_step)
            return StoreError(
                "the service cannot use the store of its files now",
                "try again in a moment; the operator finds the cause in the log",
            )
        case HTTPException(status_code=400):  # FastAPI's, for a body that is not text
            return Unprocessable(
                "the body does not match its Content-Type",
                "GET /docs shows what this path takes",
            )
        case HTTPException(status_code=404):
            return NotFound("no such path", "GET /docs lists all paths")
        case RequestValidationError():
            faults = "; ".join(
                f"{' '.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()
            )
            return Unprocessable(faults, "GET /docs shows what this path takes")
        case OSError():  # a full disk is the host's fault; any other is ours
            known = crucible_error(error)
            return DiskFull(known.message, FREE_SPACE) if isinstance(known, DiskFull) else error
    return error
