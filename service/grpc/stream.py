"""Many requests on one call: they are worked on side by side, so that they can share a batch, and
answered in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine
from typing import TypeVar

from service.errors import Unavailable

MOST = 64  # requests of one stream in work; whoever sends more waits, and gRPC holds the bytes back


Answer = TypeVar("Answer")
Answering = Callable[[bytes], Coroutine[None, None, Answer]]
Writing = Callable[[Answer], Awaitable[None]]


async def answer_each(
    requests: AsyncIterable[bytes],
    answer: Answering[Answer],
    write: Writing[Answer],
    stopping: asyncio.Event,
) -> None:
    """Answer until the requests end; once the server stops, those that have come. Unavailable tells
    the client then why it hears no more.

    Cancelling cancels every answer that is not written.
    """
    begun: asyncio.Queue[asyncio.Task[Answer] | None] = asyncio.Queue()
    free = asyncio.Semaphore(MOST)

    async def read() -> None:
        try:
            async for request in requests:
                await free.acquire()
                begun.put_nowait(tasks.create_task(answer(request)))
        finally:
            begun.put_nowait(None)

    async def end(reading: asyncio.Task[None]) -> None:
        await stopping.wait()
        reading.cancel()

    async with asyncio.TaskGroup() as tasks:
        ending = tasks.create_task(end(tasks.create_task(read())))
        while task := await begun.get():
            await write(await task)
            free.release()
        ending.cancel()
    if stopping.is_set():
        raise Unavailable("the server is stopping", "connect again in a moment")
