"""The outermost layer: it writes one log line and one set of metrics per request, and answers
unhandled errors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

from starlette.requests import ClientDisconnect

from service import logs
from service.auth import Caller
from service.http.error_responses import answer_error
from service.http.guard import (
    Application,
    Message,
    Receive,
    Respond,
    Scope,
    Send,
    json_response,
    send_answer,
)
from service.observability.prometheus import Metrics
from service.storage.layout import Folders

log = logs.get("service.requests")

# label of requests without a route: a label per unknown path would let strangers fill the memory
NO_ROUTE = "none"
KNOWN = 1024  # sets of labels whose metric is not looked up again

Refused = Callable[[Caller, str, int, Exception | None], None]
"""Take a refused request: its caller, its method and path, the status, and the error."""


class AccessLog:
    """Middleware that logs and measures the application's requests."""

    def __init__(
        self,
        app: Application,
        metrics: Metrics,
        folders: Folders,
        refused: Refused,
        respond: Respond = json_response,
    ) -> None:
        self._application, self._folders = app, folders
        self._refused, self._respond = refused, respond
        self._count = lru_cache(KNOWN)(metrics.requests.labels)
        self._time = lru_cache(KNOWN)(metrics.request_seconds.labels)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        begin, status, sent = time.perf_counter(), 0, 0

        async def counting_send(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._application(scope, receive, counting_send)
        except ClientDisconnect:
            pass
        except Exception as error:  # noqa: BLE001  the edge of a request: others go on
            request_id = scope["state"]["request_id"]
            answer = answer_error(error, request_id, self._folders)
            # otherwise the connection is cut, and the client notices an incomplete answer
            if not status:
                await send_answer(scope, counting_send, answer, self._respond)
        finally:
            self._record(scope, status, sent, time.perf_counter() - begin)

    def _record(self, scope: Scope, status: int, sent: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", NO_ROUTE)
        method = scope["method"] if route != NO_ROUTE else NO_ROUTE
        self._count(method, route, status).inc()
        self._time(method, route).observe(seconds)
        state = scope.get("state", {})
        caller = state.get("caller")
        if 400 <= status < 500:
            who = caller or Caller("", (), source=state["source"])
            request = f"{scope['method']} {scope['path']}"
            self._refused(who, request, status, state.get("refusal"))
        log.info(
            "request",
            method=scope["method"],
            path=scope["path"],
            status=status or "client gone",
            seconds=round(seconds, 4),
            bytes=sent,
            request=state.get("request_id"),
            key=caller.key if caller else None,
        )
