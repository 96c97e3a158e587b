"""The gate in front of the application. It checks Host, Origin, key, size and the bytes of all
unfinished requests before it reads the first byte of a body.

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

from starlette.requests import Request
from starlette.responses import Response

from service.auth import (
    NOBODY,
    Caller,
    SessionKey,
    Source,
    Verify,
    caller_from,
    caller_from_session,
)
from service.bytes_in_flight import BytesInFlight, Share
from service.errors import (
    Answer,
    Forbidden,
    NoRequest,
    ServiceError,
    TooLarge,
    WrongHost,
    answer_to,
)
from service.limits.client_address import HEADER, TrustedProxies
from service.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
Respond = Callable[[Request, Answer], Response]
"""Gives a refusal the form that its reader expects: JSON, or a page."""

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# paths without data that a key protects
PUBLIC = frozenset(
    {
        "/healthz",
        "/readyz",
        "/docs",
        "/help",
        "/openapi.json",
        "/v2/health/live",
        "/v2/health/ready",
    }
)
HELP = "/help/"  # beginning of every path of the documentation
UPLOADS = frozenset({"/compile", "/ui/drafts", "/ui/language-models"})
# Web pages take a session's cookie, and nothing else does: a browser sends it by itself.
PAGES = "/ui/"
SESSION_COOKIE = "crucible_session"
INFER = "/infer"  # end of every path that takes tensors
TRY = "/try"  # end of the page with a form of tensors
MAX_DIGITS = 18  # of a Content-Length
# of an upload, which goes to the disk: the piece that is written, and those that wait
UPLOAD_MEMORY_BYTES = 1 << 20
PORT = re.compile(r":\d+$")  # at the end of a Host
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def request_id_from(client_id: str) -> str:
    """Return the client's id of its request if it is valid, or a new one."""
    return client_id if REQUEST_ID.fullmatch(client_id) else secrets.token_hex(8)


def json_response(_: Request, answer: Answer) -> Response:
    return Response(answer.json, answer.status, answer.headers, "application/json")


class Guard:
    """Passes a request to the application with its Caller and request id in the scope's state, or
    refuses it.
    """

    def __init__(
        self,
        app: Application,
        settings: Settings,
        verify: Verify,
        session_key: SessionKey,
        bytes_in_flight: BytesInFlight,
        respond: Respond = json_response,
    ) -> None:
        self._application, self._settings, self._respond = app, settings, respond
        self._verify, self._session_key, self._hosts = verify, session_key, settings.hosts
        self._bytes_in_flight = bytes_in_flight
        self._proxies = TrustedProxies(settings.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = _headers(scope["headers"])
        request_id = request_id_from(headers.get("x-request-id", ""))
        state = scope.setdefault("state", {})
        # for the log, even of a refused request
        state["request_id"] = request_id
        state["source"] = Source(self._client_of(scope), request_id)
        with self._bytes_in_flight.share() as share:
            try:
                if len(headers) < len(scope["headers"]):  # a name comes twice
                    _check_one_host(scope["headers"])
                await self._check(scope["method"], scope["path"], headers, state)
                share.grow(_memory_bytes(scope["path"], headers))
            except ServiceError as error:
                state["refusal"] = error
                state.setdefault("caller", Caller("", (), source=state["source"]))
                await send_answer(scope, send, answer_to(error), self._respond)
                return
            state["share"] = share
            body = _CountedBody(scope, receive, send, self._limit(scope["path"]), self._respond)
            is_empty = headers.get("content-length", "0") == "0"
            body.complete = is_empty and "transfer-encoding" not in headers
            if "content-length" not in headers and scope["path"] not in UPLOADS:
                body.share = share
            await self._application(scope, body.receive, body.send)

    async def _check(
        self, method: str, path: str, headers: dict[str, str], state: dict[str, Any]
    ) -> None:
        """Add the caller of a request to its state. ServiceError if the request is refused."""
        self._check_host(headers.get("host", ""))
        if method not in SAFE:
            self._check_origin(headers)
        state["caller"] = await self._caller(path, headers, state["source"])
        length, limit = headers.get("content-length", "0"), self._limit(path)
        is_number = length.isascii() and length.isdigit() and len(length) <= MAX_DIGITS
        if not is_number or int(length) > limit:
            raise TooLarge(
                f"a body of {length[:MAX_DIGITS]} bytes, expected at most {limit}",
                "send less, or ask the operator to raise the limit",
            )

    def _client_of(self, scope: Scope) -> str:
        peer = (scope.get("client") or ("",))[0]
        values = (value for name, value in scope["headers"] if name.lower() == HEADER.encode())
        return self._proxies.client(peer, (value.decode("latin-1") for value in values))

    def _check_host(self, host: str) -> None:
        name = PORT.sub("", host).lower()
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
        name = _host_of(origin or "")
        if not name or name.lower() != headers.get("host", "").lower():
            raise Forbidden(
                f"a request from another site ('{origin or 'not named'}') may change nothing here",
                "send it from a program, or from this site",
            )

    async def _caller(self, path: str, headers: dict[str, str], source: Source) -> Caller:
        if path in PUBLIC or path.startswith(HELP):
            return NOBODY
        if is_page(path):
            token = session_token(headers.get("cookie", ""))
            return await caller_from_session(token, source, self._settings, self._session_key)
        authorization = headers.get("authorization", "")
        return await caller_from(authorization, source, self._settings, self._verify)

    def _limit(self, path: str) -> int:
        if path.endswith(INFER) or (is_page(path) and path.endswith(TRY)):
            return self._settings.max_infer_bytes
        return self._settings.max_upload_bytes if path in UPLOADS else self._settings.max_body_bytes


def is_page(path: str) -> bool:
    """Whether a path belongs to the web pages."""
    return path == "/" or path.startswith(PAGES)


def session_token(cookies: str) -> str:
    """Return the token of a session from the header Cookie. Empty if it has none; or two, of which
    another site of this domain may have set one.
    """
    pairs = (pair.strip().partition("=") for pair in cookies.split(";"))
    found = [value for name, _, value in pairs if name == SESSION_COOKIE]
    return found[0] if len(found) == 1 else ""


def _memory_bytes(path: str, headers: dict[str, str]) -> int:
    """Return how many bytes of a body are in memory at a time, as far as its head tells."""
    length = headers.get("content-length")
    if path in UPLOADS:
        return min(int(length or UPLOAD_MEMORY_BYTES), UPLOAD_MEMORY_BYTES)
    return int(length or 0)


class _CountedBody:
    """Counts a body while it arrives. If it exceeds a limit, whatever its headers say, the request
    is refused.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limit: int, respond: Respond
    ) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._limit, self._respond = limit, respond
        self._count = 0
        self._started = self._over = False
        self.complete = False  # no more of the body will arrive
        self.share: Share | None = None  # it grows with a body of unknown length

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self.complete = not message.get("more_body", False)
            try:
                self._add(len(message.get("body", b"")))
            except ServiceError as error:
                await self._refuse(error)
                return {"type": "http.disconnect"}
        return message

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > self._limit:
            raise TooLarge(
                f"a body of more than {self._limit} bytes",
                "send less, or ask the operator to raise the limit",
            )
        if self.share is not None:
            self.share.grow(count)

    async def send(self, message: Message) -> None:
        if self._over:  # already refused
            return
        if message["type"] == "http.response.start":
            self._started = True
            headers = list(message.get("headers", ()))
            headers.append((b"x-request-id", self._scope["state"]["request_id"].encode()))
            if not self.complete:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        await self._send(message)

    async def _refuse(self, error: ServiceError) -> None:
        if not self._started and not self._over:
            await send_answer(self._scope, self._send, answer_to(error), self._respond)
        self._over = True


def _check_one_host(raw: Iterable[tuple[bytes, bytes]]) -> None:
    """Refuse several Host headers: a proxy in front may have decided by another one than we do."""
    count = sum(name.lower() == b"host" for name, _ in raw)
    if count > 1:
        raise NoRequest(f"{count} Host headers, expected one", "send the header Host once")


def _host_of(origin: str) -> str:
    """The host and port of an origin; empty if it has none, or is no URL, such as `http://[`."""
    try:
        return urlsplit(origin).netloc.rpartition("@")[2]
    except ValueError:
        return ""


def _headers(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}


async def send_answer(
    scope: Scope, send: Send, answer: Answer, respond: Respond = json_response
) -> None:
    """Answer instead of the application. Closes the connection, so that no more of the request is
    read.
    """
    response = respond(Request(scope), answer)
    response.headers["connection"] = "close"
    response.headers["x-request-id"] = scope["state"]["request_id"]
    start = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": response.body})
