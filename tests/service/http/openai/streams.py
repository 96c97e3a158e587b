"""Reading the streams of /v1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
from httpx_sse import EventSource

from tests.service.builders.jobs import WITHIN_S
from tests.service.integration.test_server import Server

Events = list[tuple[str, Any]]


def post(server: Server, path: str = "completions", **body: Any) -> httpx.Response:
    """Send a request, of `capitals` if no other model is named."""
    body = {"model": "capitals", **body}
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=WITHIN_S)


def fault_of(answer: httpx.Response) -> tuple[int, Any]:
    """The status of a refusal, and what it says."""
    return answer.status_code, answer.json()["error"]


def events_of(server: Server, path: str = "completions", **body: Any) -> Events:
    """All events of a stream: their names and data. The data of the last one is its text."""
    body = {"model": "capitals", "stream": True, **body}
    url = f"{server.url}/v1/{path}"
    with httpx.stream("POST", url, json=body, timeout=WITHIN_S) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8", answer.read()
        return list(_events(answer))


def _events(answer: httpx.Response) -> Iterator[tuple[str, Any]]:
    for event in EventSource(answer).iter_sse():
        is_end = event.data == "[DONE]"
        yield event.event, event.data if is_end else orjson.loads(event.data)
