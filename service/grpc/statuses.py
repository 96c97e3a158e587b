"""gRPC statuses of errors: one table from HTTP's status codes, so that both protocols agree."""

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
    """The gRPC status of an error."""
    return STATUSES.get(answer.status, StatusCode.UNKNOWN)


def details_of(answer: Answer) -> str:
    """The text for people: the expected and actual values, and the next step in brackets."""
    next_step = answer.body.get("next")
    return f"{answer.body['error']} ({next_step})" if next_step else answer.body["error"]


def metadata_of(answer: Answer) -> tuple[tuple[str, str], ...]:
    """The metadata for programs: the error code, and the seconds to wait before a retry."""
    code = ("crucible-code", answer.body["code"])
    retry_after = answer.headers.get("Retry-After")
    return (code, ("retry-after", retry_after)) if retry_after else (code,)
