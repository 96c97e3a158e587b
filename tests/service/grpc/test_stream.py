"""Many requests of one call: side by side, in order, not too many at a time, and to an end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from service.errors import Unavailable
from service.grpc.stream import MAX_REQUESTS, answer_each


class Story:
    """Answers that are given when the test says so."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.written: list[bytes] = []
        self.stopping = asyncio.Event()
        self.may_end: dict[bytes, asyncio.Event] = {}

    async def answer(self, request: bytes) -> bytes:
        self.begun.append(request)
        try:
            await self.may_end.setdefault(request, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(request)
            raise
        return request.upper()

    async def write(self, answer: bytes) -> None:
        self.written.append(answer)

    def finish(self, *requests: bytes) -> None:
        for request in requests:
            self.may_end.setdefault(request, asyncio.Event()).set()

    async def settle(self) -> None:
        for _ in range(20 * MAX_REQUESTS):
            await asyncio.sleep(0)


async def sent(*requests: bytes, open_end: bool = False) -> AsyncIterator[bytes]:
    for request in requests:
        yield request
    if open_end:
        await asyncio.Event().wait()


def test_they_are_begun_together_and_answered_in_order() -> None:
    async def run() -> None:
        story = Story()
        task = asyncio.create_task(
            answer_each(sent(b"a", b"b", b"c"), story.answer, story.write, story.stopping)
        )
        await story.settle()
        assert story.begun == [b"a", b"b", b"c"]
        story.finish(b"b", b"c")
        await story.settle()
        assert story.written == []
        story.finish(b"a")
        await task
        assert story.written == [b"A", b"B", b"C"]

    asyncio.run(run())


def test_only_so_many_are_in_work() -> None:
    async def run() -> None:
        story, names = Story(), [str(number).encode() for number in range(MAX_REQUESTS + 10)]
        task = asyncio.create_task(
            answer_each(sent(*names), story.answer, story.write, story.stopping)
        )
        await story.settle()
        assert len(story.begun) == MAX_REQUESTS
        story.finish(names[0])
        await story.settle()
        assert (len(story.begun), story.written) == (MAX_REQUESTS + 1, [b"0"])
        story.finish(*names)
        await task
        assert story.written == names

    asyncio.run(run())


def test_a_client_that_goes_cancels_what_is_not_answered() -> None:
    async def run() -> None:
        story, names = Story(), [str(number).encode() for number in range(MAX_REQUESTS + 10)]
        task = asyncio.create_task(
            answer_each(sent(*names), story.answer, story.write, story.stopping)
        )
        await story.settle()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert sorted(story.cancelled) == sorted(names[:MAX_REQUESTS])

    asyncio.run(run())


def test_a_server_that_stops_answers_what_has_come() -> None:
    async def run() -> None:
        story = Story()
        task = asyncio.create_task(
            answer_each(sent(b"a", b"b", open_end=True), story.answer, story.write, story.stopping)
        )
        await story.settle()
        story.stopping.set()
        await story.settle()
        assert not task.done()
        story.finish(b"a", b"b")
        with pytest.raises(Unavailable, match="the server is stopping"):
            await task
        assert story.written == [b"A", b"B"]

    asyncio.run(run())
