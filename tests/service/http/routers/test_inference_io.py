"""Work that ends when its client is gone, however the server tells of that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from service.http.guard import GONE
from service.http.routers.inference_io import while_connected


def story(run: Callable[[asyncio.Future[None], Request], Awaitable[None]], tells: bool) -> None:
    """Run with a future for the client's end, and a request whose server does or does not pass it
    on.
    """

    async def inside() -> None:
        gone = asyncio.get_running_loop().create_future()

        async def receive() -> dict[str, Any]:
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        scope: dict[str, Any] = {"type": "http", **({GONE: gone} if tells else {})}
        await run(gone, Request(scope, receive))

    asyncio.run(inside())


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_work_is_cancelled_when_the_client_is_gone(tells: bool, before: bool) -> None:
    async def run(gone: asyncio.Future[None], request: Request) -> None:
        cancelled = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        if before:
            gone.set_result(None)
        else:
            asyncio.get_running_loop().call_later(0.01, gone.set_result, None)
        with pytest.raises(ClientDisconnect):
            await while_connected(work(), request)
        assert cancelled == [True]

    story(run, tells)


@pytest.mark.parametrize("tells", [True, False])
def test_a_client_that_goes_as_the_work_ends_cancels_nothing_after_it(tells: bool) -> None:
    async def run(gone: asyncio.Future[None], request: Request) -> None:
        async def work() -> int:
            await asyncio.sleep(0)
            gone.set_result(None)
            return 17

        assert await while_connected(work(), request) == 17
        for _ in range(5):
            await asyncio.sleep(0)

    story(run, tells)


@pytest.mark.parametrize("tells", [True, False])
def test_another_cancellation_is_not_taken_for_the_client(tells: bool) -> None:
    async def run(gone: asyncio.Future[None], request: Request) -> None:
        task = asyncio.create_task(while_connected(asyncio.Event().wait(), request))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    story(run, tells)
