"""`crucible serve`: the application behind a socket, from its first request to an orderly end.

SIGTERM or Ctrl-C:  /readyz says 503 at once, event streams end with `server-restarting`, jobs are
                    queued again,
                    models answer for LINGER_S more, and then what waits: up to shutdown_s - HTTP_S,
                    then no connection is taken any more, and answers under way may finish: up to
                    HTTP_S
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import signal
import socket
from collections.abc import Iterator, Sequence

import uvicorn
import uvloop
from fastapi import FastAPI

from pipeline.errors import HostError
from service import logs
from service.app import create_app
from service.context import HTTP_S, Probe, Service, probe
from service.grpc.server import rpc_server
from service.http.protocol import protocol
from service.inference import Serving
from service.jobs.queue import WORKER
from service.settings import MIB, Settings
from service.tls import Tls, tls_from

BACKLOG = 2048
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES, MAPPED_BYTES = (
    64 * MIB,
    32 * MIB,
)  # free memory that is kept; blocks that are given back at once, at the most that glibc takes
# so long /readyz says 503 and models still answer: a load balancer asks every second or so, and
# sends requests until then
LINGER_S = 2.0


class _Server(uvicorn.Server):
    """Signals are handled here and not by uvicorn, which would stop listening before a load
    balancer sees that we are going.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    settings: Settings,
    worker: Sequence[str] = WORKER,
    probe: Probe = probe,
    serving: Serving | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. HostError if the address or the home is taken."""
    logs.configure(settings)
    keep_memory()
    tls = tls_from(settings)
    with (
        _listening(settings.host, settings.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(create_app(settings, worker, probe, serving), listener, tls))


def keep_memory() -> bool:
    """Keep what large bodies leave free: glibc would give it back after each, and fetch it again,
    150 page faults for 602 KB. False without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
    )


async def _serve(app: FastAPI, listener: socket.socket, tls: Tls | None) -> None:
    config = uvicorn.Config(
        app,
        http=protocol(),
        ws="none",
        lifespan="off",  # it is begun below, where its errors reach whoever started the server
        log_config=None,
        access_log=False,  # service.http.access_log writes a line per request
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(HTTP_S),
        ssl_certfile=tls.certificate_file if tls else None,
        ssl_keyfile=tls.key_file if tls else None,
    )
    server = _Server(config)
    async with app.router.lifespan_context(app), rpc_server(app.state.service, tls) as rpc:
        service: Service = app.state.service
        listener.listen(BACKLOG)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        print(f"Crucible listens on {_address(listener, tls)}", flush=True)
        if rpc:
            print(f"gRPC listens on {rpc.address}", flush=True)
        await _asked_to_end(service, serving)
        await service.stop(LINGER_S)
        server.should_exit = True
        await asyncio.gather(serving, *([rpc.stop()] if rpc else []))
        if not service.started.cancelled():
            await service.started  # raises what kept the service from starting


async def _asked_to_end(service: Service, serving: asyncio.Task[None]) -> None:
    """Until a signal comes, or the service cannot start, or the server ends by itself."""
    loop, asked = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    serving.add_done_callback(lambda _: asked.set())
    service.started.add_done_callback(
        lambda task: asked.set() if task.cancelled() or task.exception() else None
    )
    await asked.wait()


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has the address and does not listen yet; HostError if it cannot be had."""
    name = host.strip("[]")
    with contextlib.ExitStack() as kept:
        try:
            found = socket.getaddrinfo(
                name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = kept.enter_context(socket.socket(found[0], socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[4])
        except OSError as error:
            raise HostError(
                f"cannot listen on {host}, port {port}: {error.strerror}",
                "give another --host or --port",
            ) from error
        yield listener


def _address(listener: socket.socket, tls: Tls | None) -> str:
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
