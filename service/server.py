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
import resource
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvloop
from fastapi import FastAPI

from pipeline.errors import HostError
from service import logs
from service.app import create_app
from service.context import HTTP_S, Probe, Service, probe
from service.grpc.server import rpc_server
from service.http.connection_limits import ConnectionLimits
from service.http.guard import Application
from service.http.processes.parent import HttpProcesses
from service.http.protocol import Server, keep_memory, protocol, uvicorn_config
from service.inference import Serving
from service.jobs.queue import WORKER
from service.language.generation import Generating
from service.settings import Settings
from service.tls import Tls, tls_from

BACKLOG = 2048
log = logs.get("service.server")
# time during which /readyz answers 503 and models still answer: a load balancer probes about every
# second, and sends requests until then
LINGER_S = 2.0


def serve(
    settings: Settings,
    worker: Sequence[str] = WORKER,
    probe: Probe = probe,
    serving: Serving | None = None,
    generating: Generating | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C. HostError if the address or the home is in use."""
    logs.configure(settings)
    keep_memory()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each large body has descriptors
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    tls = tls_from(settings)
    with (
        _listening(settings.host, settings.port) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        app = create_app(settings, worker, probe, serving, generating=generating)
        runner.run(_serve(app, listener, tls))


def connections_of(
    app: Application, listener: socket.socket, settings: Settings, limits: ConnectionLimits
) -> _InThisProcess | HttpProcesses:
    """Return what serves the HTTP connections of a listening socket."""
    if settings.http_processes > 1:
        return HttpProcesses(app, listener, settings, limits, HTTP_S)
    return _InThisProcess(app, listener, settings, limits)


class _InThisProcess:
    """The HTTP connections of a server without HTTP processes."""

    def __init__(
        self,
        app: Application,
        listener: socket.socket,
        settings: Settings,
        limits: ConnectionLimits,
    ) -> None:
        http = protocol(settings, limits)
        self._server = Server(uvicorn_config(app, settings, HTTP_S, http))
        self.ended = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def start(self) -> None:
        pass  # uvicorn accepts connections as soon as its task runs

    async def stop(self) -> None:
        self._server.should_exit = True
        await self.ended


async def _serve(app: FastAPI, listener: socket.socket, tls: Tls | None) -> None:
    async with app.router.lifespan_context(app), rpc_server(app.state.service, tls) as rpc:
        service: Service = app.state.service
        listener.listen(BACKLOG)
        limits = ConnectionLimits(service.settings, service.metrics.refuse_connection)
        connections = connections_of(app, listener, service.settings, limits)
        await connections.start()
        proving = asyncio.create_task(_prove_sandbox(service))
        print(f"Crucible listens on {_address(listener, tls)}", flush=True)
        if rpc:
            print(f"gRPC listens on {rpc.address}", flush=True)
        await _shutdown_request(service, connections.ended)
        proving.cancel()
        await service.stop(LINGER_S)
        await asyncio.gather(connections.stop(), *([rpc.stop()] if rpc else []))
        if not service.started.cancelled():
            await service.started  # raises the error of a failed startup


async def _prove_sandbox(service: Service) -> None:
    """Write to the log what the sandbox holds on this host."""
    if service.settings.sandbox == "off":
        return
    await service.started
    proof = await service.proof()
    write = log.warning if proof.succeeded else log.info
    write("sandbox.proved", layers=service.sandbox.held("cpu"), not_stopped=proof.succeeded)


async def _shutdown_request(service: Service, serving: asyncio.Future[Any]) -> None:
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
