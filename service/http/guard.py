"""The gate in front of the application. It checks Host, Origin, key and size before it reads the
first byte of a body.

It is pure ASGI, because a framework's hooks may run after a body was read. A request that is
answered before its body has arrived, here or in the application, is answered with `Connection:
close`, so that the server reads no more of it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from service.auth import NOBODY, Caller, Verify, caller_from
from service.errors import Answer, Forbidden, ServiceError, TooLarge, WrongHost, answer_to
from service.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# paths without data that a key protects
PUBLIC = frozenset(
    {"/healthz", "/readyz", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"}
)
UPLOADS = frozenset({"/compile"})
INFER = "/infer"  # end of every path that takes tensors
MAX_DIGITS = 18  # of a Content-Length
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id_from(client_id: str) -> str:
    """Return the client's id of its request if it is valid, or a new one."""
    return client_id if REQUEST_ID.fullmatch(client_id) else secrets.token_hex(8)


class Guard:
    """Passes a request to the application with its Caller and request id in the scope's state, or
    refuses it.
    """

    def __init__(self, app: Application, settings: Settings, verify: Verify) -> None:
        self._application, self._settings = app, settings
        self._verify, self._hosts = verify, settings.hosts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = _headers(scope["headers"])
        request_id = request_id_from(headers.get("x-request-id", ""))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id  # for the log, even of a refused request
        try:
            state["caller"] = await self._check(scope["method"], scope["path"], headers)
        except ServiceError as error:
            await send_answer(send, answer_to(error), request_id)
            return
        body = _CountedBody(receive, send, self._limit(scope["path"]), request_id)
        is_empty = headers.get("content-length", "0") == "0"
        body.complete = is_empty and "transfer-encoding" not in headers
        await self._application(scope, body.receive, body.send)

    async def _check(self, method: str, path: str, headers: dict[str, str]) -> Caller:
        """Return the caller of a request. ServiceError if the request is refused."""
        self._check_host(headers.get("host", ""))
        if method not in SAFE:
            self._check_origin(headers)
        caller = await self._caller(path, headers)
        length, limit = headers.get("content-length", "0"), self._limit(path)
        is_number = length.isascii() and length.isdigit() and len(length) <= MAX_DIGITS
        if not is_number or int(length) > limit:
            raise TooLarge(
                f"a body of {length[:MAX_DIGITS]} bytes, expected at most {limit}",
                "send less, or ask the operator to raise the limit",
            )
        return caller

    def _check_host(self, host: str) -> None:
        name = re.sub(r":\d+$", "", host).lower()
        if name not in self._hosts:
            raise WrongHost(
                f"this service does not answer to the name '{name}'",
                "the operator can add the name to CRUCIBLE_SERVICE_ALLOWED_HOSTS",
            )

    def _check_origin(self, headers: dict[str, str]) -> None:
        """Refuse changes from web pages of other sites, even if no key is needed."""
        origin = headers.get("origin")
        if origin is None and headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
            return
        name = urlsplit(origin or "").netloc.rpartition("@")[2]
        if not name or name.lower() != headers.get("host", "").lower():
            raise Forbidden(
                f"a request from another site ('{origin or 'not named'}') may change nothing here",
                "send it from a program, or from this site",
            )

    async def _caller(self, path: str, headers: dict[str, str]) -> Caller:
        if path in PUBLIC:
            return NOBODY
        return await caller_from(headers.get("authorization", ""), self._settings, self._verify)

    def _limit(self, path: str) -> int:
        if path.endswith(INFER):
            return self._settings.max_infer_bytes
        return self._settings.max_upload_bytes if path in UPLOADS else self._settings.max_body_bytes


class _CountedBody:
    """Counts a body while it arrives. If it exceeds the limit, whatever its headers say, the
    request ends with 413.
    """

    def __init__(self, receive: Receive, send: Send, limit: int, request_id: str) -> None:
        self._receive, self._send, self._limit, self._request_id = receive, send, limit, request_id
        self._count = 0
        self._started = self._over = False
        self.complete = False  # no more of the body will arrive

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._count += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
            if self._count > self._limit:
                await self._refuse()
                return {"type": "http.disconnect"}
        return message

    async def send(self, message: Message) -> None:
        if self._over:  # already refused
            return
        if message["type"] == "http.response.start":
            self._started = True
            headers = list(message.get("headers", ()))
            headers.append((b"x-request-id", self._request_id.encode()))
            if not self.complete:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self._send(message)

    async def _refuse(self) -> None:
        if not self._started and not self._over:
            error = TooLarge(
                f"a body of more than {self._limit} bytes",
                "send less, or ask the operator to raise the limit",
            )
            await send_answer(self._send, answer_to(error), self._request_id)
        self._over = True


def _headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}


async def send_answer(send: Send, answer: Answer, request_id: str) -> None:
    """Answer instead of the application. Closes the connection, so that no more of the request is
    read.
    """
    body = answer.json
    fixed = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": request_id,
    }
    headers = [
        (name.lower().encode(), value.encode("latin-1"))
        for name, value in {**fixed, **answer.headers}.items()
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
