"""`crucible serve`: the application behind a socket, from its first request to an orderly end.

SIGTERM or Ctrl-C:  /readyz says 503 at once, event streams end with `server-restarting`, jobs are queued again,
                    models answer for LINGER_S more, and then what waits                                          up to shutdown_s - HTTP_S
                    then no connection is taken any more, and answers under way may finish                         up to HTTP_S
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import signal
import socket
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pipeline.errors import HostError
from service import logs
from service.app import create_app
from service.errors import NoRequest, ServiceError, SlowHead, TooLargeHead, answer_to
from service.guard import INFER
from service.rpc.server import rpc_server
from service.runner import WORKER
from service.service import HTTP_S, Probe, Service, probe
from service.serving.requests import Serving
from service.settings import MIB, Settings
from service.tls import Tls, tls_from

BACKLOG = 2048
HEAD_S = 30.0  # from a connection's start, or a request's first byte, to the end of its headers
MOST_HEAD_BYTES = 65536  # of a request's path, query and headers, besides what came in the piece in which they began
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT_BYTES, MAPPED_BYTES = 64 * MIB, 32 * MIB  # free memory that is kept; blocks that are given back at once, at the most that glibc takes
LINGER_S = 2.0  # so long /readyz says 503 and models still answer: a load balancer asks every second or so, and sends requests until then


class _Server(uvicorn.Server):
    """Signals are handled here and not by uvicorn, which would stop listening before a load balancer sees that we are going."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Http(HttpToolsProtocol):
    """Refuses what is no request in the form of all refusals, and heads without end, in bytes or in time, which uvicorn would wait for and keep."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._in_head = self._begun = self._is_whole = False
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self.url = b""
        super().__init__(*arguments, **options)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self._begun:  # the piece in which it begins may hold the end of another request
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(_too_large())
        self._begun = False

    def on_message_begin(self) -> None:
        self._in_head = self._begun = True
        self._head_bytes = 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget_deadline()
        super().on_headers_complete()
        is_sized = any(name == b"content-length" for name, _ in self.headers)  # then Guard lets in no more than may come
        self._is_whole = is_sized and self.scope["path"].endswith(INFER) and not self.pipeline  # what waits there has not passed Guard

    def on_body(self, body: bytes) -> None:
        """As uvicorn's, which stops reading for every 64 KiB until they are taken; but tensors are handed on when they are whole."""
        if not self._is_whole:
            super().on_body(body)
        elif not self.cycle.response_complete:
            self.cycle.body += body

    def _expect_head(self) -> None:
        self._forget_deadline()
        self._deadline = self.loop.call_later(HEAD_S, self._refuse_slow)

    def _forget_deadline(self) -> None:
        if self._deadline:
            self._deadline.cancel()

    def _refuse_slow(self) -> None:
        said = f"path, query and headers that are not whole after {HEAD_S:g} s"
        self._refuse(SlowHead(said, "send them at once, or close the connection"))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers where its parser refuses: a URL of 64 KiB in one piece among all else."""
        if len(self.url) >= MOST_HEAD_BYTES:
            self._refuse(_too_large())
        else:
            self._refuse(NoRequest("this is no HTTP/1.1 request", "send one with an HTTP client; bytes that no URL holds are written as %XX"))

    def _refuse(self, error: ServiceError) -> None:
        if self.transport.is_closing():
            return
        answer = answer_to(error)
        head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(answer.json)}"
        self.transport.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + answer.json)
        self.transport.close()


def _too_large() -> TooLargeHead:
    return TooLargeHead(f"path, query and headers of more than {MOST_HEAD_BYTES} bytes", "send them shorter; data belongs into the body")


def serve(settings: Settings, worker: Sequence[str] = WORKER, probe: Probe = probe, serving: Serving | None = None) -> None:
    """Serve until SIGTERM or Ctrl-C. HostError if the address or the home is taken."""
    logs.configure(settings)
    keep_memory()
    tls = tls_from(settings)
    with _listening(settings.host, settings.port) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(create_app(settings, worker, probe, serving), listener, tls))


def keep_memory() -> bool:
    """Keep what large bodies leave free: glibc would give it back after each, and fetch it again, 150 page faults for 602 KB. False without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES))


async def _serve(app: FastAPI, listener: socket.socket, tls: Tls | None) -> None:
    config = uvicorn.Config(
        app,
        http=_Http,
        ws="none",
        lifespan="off",  # it is begun below, where its errors reach whoever started the server
        log_config=None,
        access_log=False,  # service.observe writes a line per request
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
    service.started.add_done_callback(lambda task: asked.set() if task.cancelled() or task.exception() else None)
    await asked.wait()


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has the address and does not listen yet; HostError if it cannot be had."""
    name = host.strip("[]")
    with contextlib.ExitStack() as kept:
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listener = kept.enter_context(socket.socket(found[0], socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(found[4])
        except OSError as error:
            raise HostError(f"cannot listen on {host}, port {port}: {error.strerror}", "give another --host or --port") from error
        yield listener


def _address(listener: socket.socket, tls: Tls | None) -> str:
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"
