"""An application behind the service's own connections, which run in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from service.http.connection_limits import ConnectionLimits
from service.http.guard import Application
from service.server import connections_of
from service.settings import Settings
from tests.service.builders.jobs import WITHIN_S


@contextmanager
def listening(
    app: Application,
    processes: int,
    refused: Callable[[str], None] = lambda limit: None,
    **settings: Any,
) -> Iterator[tuple[str, int]]:
    """Serve an application; yield its address. `refused` gets the limits of refused connections."""
    listener = socket.create_server(("127.0.0.1", 0))
    options = Settings(http_processes=processes, **settings)
    limits = ConnectionLimits(options, refused)
    stop, started = asyncio.Event(), threading.Event()

    async def serve() -> None:
        connections = connections_of(app, listener, options, limits)
        await connections.start()
        started.set()
        await stop.wait()
        await connections.stop()

    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        thread = threading.Thread(target=runner.run, args=[serve()])
        address = listener.getsockname()
        thread.start()
        assert started.wait(WITHIN_S)
        try:
            yield address
        finally:
            runner.get_loop().call_soon_threadsafe(stop.set)
            thread.join(WITHIN_S)
    assert not thread.is_alive()
