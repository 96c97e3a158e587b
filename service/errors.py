"""The service's refusals. Every body has the same form, which Open Inference Protocol clients
understand too:

{"error": what was expected and what came, "code": stable, "next": what to do}

CrucibleError (pipeline.errors)
└── ServiceError
    ├── NoRequest 400     ├── MethodNotAllowed 405  ├── Unprocessable 422   ├── TimedOut 504
    ├── Unauthorized 401  ├── Conflict 409          ├── TooMany 429         └── StorageFull 507
    ├── Forbidden 403     ├── TooLarge 413          ├── TooLargeHead 431    ├── SlowHead 408
    ├── NotFound 404      ├── WrongHost 421         ├── Unavailable 503     └── SlowBody 408
    │   └── NotOwned
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from pipeline.errors import CrucibleError, DamagedError, DiskFull, HostError, UserError


class ServiceError(CrucibleError):
    """The service cannot do it; the other codes say more.

    Next: do what `next` says.
    """

    # `status` is the HTTP status; `headers` are sent with the answer

    code = "service"
    status = 500
    exit_code = 1  # of `crucible keys`

    def __init__(
        self, message: str, next_step: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message, next_step)
        self.headers = dict(headers or {})


class NoRequest(ServiceError):
    """The bytes are not an HTTP request, or it has several `Host` headers.

    Next: correct the client.
    """

    code, status = "service.no_request", 400


class Unauthorized(ServiceError):
    """There is no valid key.

    Next: send `Authorization: Bearer KEY` with a key of `crucible keys create`.
    """

    code, status = "service.unauthorized", 401

    def __init__(self, message: str, next_step: str = "") -> None:
        super().__init__(message, next_step, {"WWW-Authenticate": "Bearer"})


class Forbidden(ServiceError):
    """The key lacks the scope, a page of another site would change something, or shared memory is
    off or not for this client.

    Next: use a key with the scope that the message names.
    """

    code, status = "service.forbidden", 403


class NotFound(ServiceError):
    """There is no such job, report, plan, model, region or path, or it belongs to another owner.

    Next: list what there is: GET /jobs, GET /models, GET /docs.
    """

    code, status = "service.not_found", 404


class NotOwned(NotFound):
    """It exists, and belongs to another owner. Clients cannot tell it from NotFound."""


class MethodNotAllowed(ServiceError):
    """The path does not take this method.

    Next: use one of the methods in `Allow`.
    """

    code, status = "service.method_not_allowed", 405


class Conflict(ServiceError):
    """The state of the object does not allow it: the job has ended, the report may not be
    promoted, the Idempotency-Key was used with another request, or the model does not fit into
    memory.

    Next: do what `next` says; the same request fails again.
    """

    code, status = "service.conflict", 409


class TooLarge(ServiceError):
    """The request is larger than a limit.

    Next: send less, or ask the operator to raise the setting that the message names.
    """

    code, status = "service.too_large", 413


class WrongHost(ServiceError):
    """The service does not answer to the name in `Host`.

    Next: the operator adds the name to `CRUCIBLE_SERVICE_ALLOWED_HOSTS`.
    """

    code, status = "service.wrong_host", 421


class SlowHead(ServiceError):
    """Path, query and headers were not complete after 30 s, or the connection sent nothing for so
    long.

    Next: send the request again on a new connection.
    """

    code, status = "service.slow_head", 408


class SlowBody(ServiceError):
    """The body arrived more slowly than `min_body_bytes_per_s`.

    Next: send it over a faster connection, or ask the operator to lower the setting.
    """

    code, status = "service.slow_body", 408


class TooLargeHead(ServiceError):
    """Path, query and headers are longer than 64 KiB.

    Next: shorten them.
    """

    code, status = "service.too_large_head", 431


class Unprocessable(ServiceError):
    """The upload, the plan or a parameter is invalid.

    Next: correct what the message names.
    """

    code, status = "service.unprocessable", 422


class TooMany(ServiceError):
    """A limit is used up: of jobs, bytes, requests or streams, of a model's queue, or of requests
    without a valid key.

    Next: wait for `Retry-After` if it is sent; GET /limits shows what is used.
    """

    code, status = "service.too_many", 429

    def __init__(self, message: str, next_step: str = "", retry_after_s: int | None = None) -> None:
        # without a time: time alone does not help
        headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        super().__init__(message, next_step, headers)


class Unavailable(ServiceError):
    """The service starts or stops, a model is not ready, or there is no room for the body or the
    connection.

    Next: try again after `Retry-After`.
    """

    code, status = "service.unavailable", 503

    def __init__(self, message: str, next_step: str = "", retry_after_s: int = 5) -> None:
        super().__init__(message, next_step, {"Retry-After": str(retry_after_s)})


class TimedOut(ServiceError):
    """A model did not answer in time.

    Next: send less at once, raise `timeout_s`, or load more instances.
    """

    code, status = "service.timed_out", 504


class StorageFull(ServiceError):
    """The disk has less free space than `disk_reserve_bytes`.

    Next: the operator frees space; `crucible gc` removes old jobs.
    """

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
    # half of a surrogate pair, from a name in a .tar, is no text that JSON can hold
    return {name: text.encode("utf-8", "replace").decode() for name, text in body.items()}
