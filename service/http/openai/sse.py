"""Answers as server-sent events: `data: {...}` for each part, then `data: [DONE]`.

An error after the first event is `event: error` with a refusal as its data, and ends the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from fastapi.responses import StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from service.errors import Answer
from service.http.openai.answers import usage_of
from service.http.openai.errors import refusal_body
from service.http.openai.forms import Form
from service.http.openai.running import RunningAnswers
from service.http.routers.inference_io import while_connected
from service.http.sse import HEARTBEAT, HEARTBEAT_S

DONE = format_sse_event(data_str="[DONE]")

Run = Callable[[], AbstractAsyncContextManager[RunningAnswers]]
AnswerError = Callable[[Exception], Answer]
"""Convert an error to an answer, and log it if it is ours."""


class AnswerStream(StreamingResponse):
    """A streamed answer. `run` is entered for as long as it is sent, and may refuse the request
    before the first byte.
    """

    def __init__(
        self,
        run: Run,
        form: Form,
        includes_usage: bool,
        answer_error: AnswerError,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        super().__init__(
            (),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._run, self._form, self._heartbeat_s = run, form, heartbeat_s
        self._includes_usage, self._answer_error = includes_usage, answer_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            answers = await while_connected(stack.enter_async_context(self._run()), receive)
            self.body_iterator = self._events(answers)
            await super().__call__(scope, receive, send)

    async def _events(self, answers: RunningAnswers) -> AsyncIterator[bytes]:
        for first in self._form.begin(len(answers.answers)):
            yield self._data(first)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s) as silence:
                        item = await answers.next()
                except TimeoutError:
                    if not silence.expired():
                        raise
                    yield HEARTBEAT
                    continue
                if item is None:
                    break
                if (event := self._form.piece(*item)) is not None:
                    yield self._data(event)
        except Exception as error:  # noqa: BLE001  the status is sent: the stream must tell
            body = refusal_body(self._answer_error(error), error)
            yield format_sse_event(event="error", data_str=body.decode())
            return
        if self._includes_usage:
            yield self._data(self._form.usage(usage_of(answers.answers)))
        yield DONE

    def _data(self, event: BaseModel) -> bytes:
        if self._includes_usage and "usage" not in event.model_fields_set:
            event = event.model_copy(update={"usage": None})
        return format_sse_event(data_str=event.model_dump_json(exclude_unset=True))
