"""Streams: many requests on one call.

They run concurrently, so that they can share a batch, and are answered in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine
from typing import TypeVar

from service.errors import Unavailable

# Requests of one stream that run at a time. Further ones wait, and gRPC holds their bytes back.
MAX_REQUESTS = 64


Answer = TypeVar("Answer")
Answering = Callable[[bytes], Coroutine[None, None, Answer]]
Writing = Callable[[Answer], Awaitable[None]]


async def answer_each(
    requests: AsyncIterable[bytes],
    answer: Answering[Answer],
    write: Writing[Answer],
    stopping: asyncio.Event,
) -> None:
    """Answer requests until they end, or until the server stops.

    When the server stops, it answers the requests that it has read, then raises Unavailable.
    Cancelling cancels every answer that is not written.
    """
    answers: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue()
    free = asyncio.Semaphore(MAX_REQUESTS)

    async def read() -> None:
        try:
            async for request in requests:
                await free.acquire()
                answers.put_nowait(tasks.create_task(answer(request)))
        finally:
            answers.put_nowait(None)

    async def end(reading: asyncio.Task[None]) -> None:
        await stopping.wait()
        reading.cancel()

    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(end(tasks.create_task(read())))
        while task := await answers.get():
            await write(await task)
            free.release()
        ending.cancel()
    if stopping.is_set():
        raise Unavailable("the server is stopping", "connect again in a moment")
