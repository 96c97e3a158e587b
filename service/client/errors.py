"""The errors of a client: what the server refuses, and no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from pipeline.errors import CrucibleError, HostError
from service.http.schemas import Refusal

if TYPE_CHECKING:
    pass


class RemoteError(CrucibleError):
    """The server's refusal of a request: its message and next step, its `code`, and the HTTP
    status.
    """

    exit_code = 1

    def __init__(
        self, message: str, next_step: str = "", code: str = "service", status: int = 0
    ) -> None:
        super().__init__(message, next_step)
        self.code, self.status = code, status


class Unreachable(HostError):
    """The client cannot reach the server.

    Next: start the server, or correct its address in `CRUCIBLE_URL`.
    """

    code = "service.unreachable"


def refusal_of(status: int, body: bytes, url: str) -> RemoteError:
    """Convert a refused request to an error, with the server's own message if the body has our
    form.
    """
    try:
        refusal = Refusal.model_validate_json(body)
    except ValidationError:
        return RemoteError(
            f"{url} answered with HTTP status {status}",
            "check that this is the address of a Crucible service",
            status=status,
        )
    return RemoteError(refusal.error, refusal.next, refusal.code, status)
