"""`crucible serve`: run the application on a socket, from startup to an orderly shutdown.

SIGTERM or Ctrl-C:  /readyz answers 503 at once, event streams end with `server-restarting`, jobs
                    are queued again,
                    models answer new requests for LINGER_S more, and then the waiting ones, up to
                    shutdown_s - HTTP_S,
                    then new connections are refused, and unfinished answers get up to HTTP_S
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
TRIM_BYTES = 64 * MIB  # free memory that the process keeps
MMAP_BYTES = 32 * MIB  # from this size on, blocks are returned at once; glibc's maximum
# time during which /readyz answers 503 and models still answer: a load balancer probes about every
# second, and sends requests until then
LINGER_S = 2.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which would stop listening before a load balancer
    notices the shutdown.
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
    """Serve until SIGTERM or Ctrl-C. HostError if the address or the home is in use."""
    logs.configure(settings)
    keep_memory()
    tls = tls_from(settings)
    with (
        _listening(settings.host, settings.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(create_app(settings, worker, probe, serving), listener, tls))


def keep_memory() -> bool:
    """Keep the memory that large bodies free: glibc would return it after each request and fetch it
    again, with 150 page faults for 602 KB. Returns False without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, TRIM_BYTES) and mallopt(M_MMAP_THRESHOLD, MMAP_BYTES))


async def _serve(app: FastAPI, listener: socket.socket, tls: Tls | None) -> None:
    config = uvicorn.Config(
        app,
        http=protocol(),
        ws="none",
        lifespan="off",  # started below, where its errors reach the caller of `serve`
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
        await _shutdown_request(service, serving)
        await service.stop(LINGER_S)
        server.should_exit = True
        if rpc:
            await asyncio.gather(serving, rpc.stop())
        await serving
        if not service.started.cancelled():
            await service.started  # raises the error of a failed startup


async def _shutdown_request(service: Service, serving: asyncio.Task[None]) -> None:
    """Wait for a signal, a failed startup, or the end of the server."""
    loop, request = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request.set)
    serving.add_done_callback(lambda _: request.set())
    service.started.add_done_callback(
        lambda task: request.set() if task.cancelled() or task.exception() else None
    )
    await request.wait()


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound to the address and does not listen yet. HostError if the address
    is not available.
    """
    name = host.strip("[]")
    with contextlib.ExitStack() as resources:
        try:
            address = socket.getaddrinfo(
                name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = resources.enter_context(socket.socket(address[0], socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address[4])
        except OSError as error:
            raise HostError(
                f"cannot listen on {host}, port {port}: {error.strerror}",
                "give another --host or --port",
            ) from error
        yield listener


def _address(listener: socket.socket, tls: Tls | None) -> str:
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
