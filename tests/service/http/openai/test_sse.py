"""Streams of answers: what is sent while nothing comes, and what an error becomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from service.errors import answer_to
from service.http.openai.forms import CompletionForm, Head
from service.http.openai.running import RunningAnswers
from service.http.openai.sse import DONE, AnswerStream
from service.http.sse import HEARTBEAT
from service.language.generation import Part, ScoredToken

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


class LateAnswer:
    """An answer whose second part comes when `go` is set; then it ends, or fails."""

    model, version = "m", 1
    prompt_tokens = cached_tokens = completion_tokens = 1

    def __init__(self, error: Exception | None) -> None:
        self.go, self._error = asyncio.Event(), error

    async def __aiter__(self) -> AsyncIterator[Part]:
        yield Part("a")
        yield Part(tokens=(ScoredToken(1, "b", None),))  # its text is held back
        await self.go.wait()
        if self._error is not None:
            raise self._error
        yield Part("b", finish="stop")


def sent(error: Exception | None) -> list[bytes]:
    """All that a stream sends. The answer goes on after the first sign of life."""
    pieces = list[bytes]()

    async def story() -> None:
        answer = LateAnswer(error)

        @asynccontextmanager
        async def run() -> AsyncIterator[RunningAnswers]:
            together = RunningAnswers([answer])
            reading = asyncio.create_task(together.read(0, answer))
            yield together
            await reading

        async def send(message: MutableMapping[str, Any]) -> None:
            if body := message.get("body"):
                pieces.append(body)
            if HEARTBEAT in pieces:
                answer.go.set()

        async def receive() -> MutableMapping[str, Any]:
            await asyncio.Event().wait()
            raise AssertionError("the client stays")

        form = CompletionForm(Head("1", 0, "m@1"), None, False)
        await AnswerStream(run, form, False, answer_to, heartbeat_s=0.01)(SCOPE, receive, send)

    asyncio.run(story())
    return pieces


def test_a_comment_is_sent_while_no_part_comes() -> None:
    first, *comments, second, done = sent(None)
    assert b'"text":"a"' in first
    assert set(comments) == {HEARTBEAT}
    assert b'"text":"b"' in second
    assert done == DONE


def test_a_time_out_of_the_answer_is_no_silence() -> None:
    *_, last = sent(TimeoutError("of something else"))
    assert last.startswith(b"event: error\n")
    assert b'"type":"server_error"' in last
