"""The service's refusals. Every body has the same form, which Open Inference Protocol clients
understand too:

{"error": what was expected and what came, "code": stable, "next": what to do}

CrucibleError (pipeline.errors)
└── ServiceError
    ├── NoRequest 400     ├── MethodNotAllowed 405  ├── Unprocessable 422   ├── TimedOut 504
    ├── Unauthorized 401  ├── Conflict 409          ├── TooMany 429         └── StorageFull 507
    ├── Forbidden 403     ├── TooLarge 413          ├── TooLargeHead 431
    ├── NotFound 404      ├── WrongHost 421         ├── Unavailable 503     └── SlowHead 408
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from pipeline.errors import CrucibleError, DamagedError, DiskFull, HostError, UserError


class ServiceError(CrucibleError):
    """A refused request. `status` is the HTTP status; `headers` are sent with the answer."""

    code = "service"
    status = 500
    exit_code = 1  # of `crucible keys`

    def __init__(
        self, message: str, next_step: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, next_step)
        self.headers = dict(headers or {})


class NoRequest(ServiceError):
    code, status = "service.no_request", 400


class Unauthorized(ServiceError):
    code, status = "service.unauthorized", 401

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message, next_step, {"WWW-Authenticate": "Bearer"})


class Forbidden(ServiceError):
    code, status = "service.forbidden", 403


class NotFound(ServiceError):
    code, status = "service.not_found", 404


class MethodNotAllowed(ServiceError):
    code, status = "service.method_not_allowed", 405


class Conflict(ServiceError):
    code, status = "service.conflict", 409


class TooLarge(ServiceError):
    code, status = "service.too_large", 413


class WrongHost(ServiceError):
    code, status = "service.wrong_host", 421


class SlowHead(ServiceError):
    code, status = "service.slow_head", 408


class TooLargeHead(ServiceError):
    code, status = "service.too_large_head", 431


class Unprocessable(ServiceError):
    code, status = "service.unprocessable", 422


class _RetryLater(ServiceError):
    def __init__(self, message: str, next_step: str = "", retry_after_s: int = 5) -> None:
        super().__init__(message, next_step, {"Retry-After": str(retry_after_s)})


class TooMany(_RetryLater):
    code, status = "service.too_many", 429


class Unavailable(_RetryLater):
    code, status = "service.unavailable", 503


class TimedOut(ServiceError):
    code, status = "service.timed_out", 504


class StorageFull(ServiceError):
    code, status = "service.storage_full", 507


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that is sent instead of a result."""

    status: int
    body: dict[str, str]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def json(self) -> bytes:
        return orjson.dumps(self.body)


def answer_to(error: BaseException, request_id: str = "") -> Answer:
    """Convert any error to an answer. Internal errors stay hidden: clients get only the request id,
    which the log contains too.
    """
    if isinstance(error, ServiceError):
        return Answer(error.status, _body(error), error.headers)
    if isinstance(error, DiskFull):
        return Answer(StorageFull.status, _body(error))
    if isinstance(error, DamagedError):  # our files are damaged, and a retry does not help
        return Answer(ServiceError.status, _body(error))
    if isinstance(error, UserError):
        return Answer(Unprocessable.status, _body(error))
    if isinstance(error, HostError):
        return Answer(Unavailable.status, _body(error), {"Retry-After": "30"})
    message = "an error inside the service"
    if request_id:
        message = f"{message}, logged as request {request_id}"
    next_step = "give the request id to the operator of this service"
    return Answer(500, {"error": message, "code": "internal", "next": next_step})


def _body(error: CrucibleError) -> dict[str, str]:
    body = {"error": error.message, "code": error.code}
    if error.next_step:
        body["next"] = error.next_step
    return body
