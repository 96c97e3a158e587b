"""Refusals as gRPC tells them: one table from HTTP's status codes, so that both wires refuse
alike.
"""

from __future__ import annotations

from grpc import StatusCode

from service.errors import Answer

STATUSES = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    405: StatusCode.UNIMPLEMENTED,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.FAILED_PRECONDITION,
    413: StatusCode.RESOURCE_EXHAUSTED,
    421: StatusCode.INVALID_ARGUMENT,
    422: StatusCode.INVALID_ARGUMENT,
    429: StatusCode.RESOURCE_EXHAUSTED,
    431: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
    507: StatusCode.RESOURCE_EXHAUSTED,
}


def status_of(answer: Answer) -> StatusCode:
    """The status of a refusal."""
    return STATUSES.get(answer.status, StatusCode.UNKNOWN)


def details_of(answer: Answer) -> str:
    """What a client shows: what was expected, what came, and in brackets what to do next."""
    after = answer.body.get("next")
    return f"{answer.body['error']} ({after})" if after else answer.body["error"]


def metadata_of(answer: Answer) -> tuple[tuple[str, str], ...]:
    """What programs read, besides the status: the code of the error, and after how many seconds to
    try again.
    """
    later = answer.headers.get("Retry-After")
    return (("crucible-code", answer.body["code"]), *((("retry-after", later),) if later else ()))
