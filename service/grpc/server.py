"""The port: opened when the service is, and closed when it stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from pipeline.errors import HostError
from service.context import HTTP_S, Service
from service.grpc.dispatcher import Edge
from service.tls import Tls

_MAX_BYTES = 2**31 - 1  # of a message: gRPC counts them in 32 bits


class RpcServer:
    """What answers at one port."""

    def __init__(self, service: Service, tls: Tls | None) -> None:
        settings = service.settings
        self._edge = Edge(service)
        self._server = grpc.aio.server(
            handlers=[self._edge],
            options=[
                (
                    "grpc.max_receive_message_length",
                    min(settings.max_infer_bytes, _MAX_BYTES),
                ),  # after decompression
                ("grpc.max_send_message_length", -1),
                (
                    "grpc.so_reuseport",
                    0,
                ),  # else a second server would share the port, and take half of the calls
            ],
        )
        host = settings.host.strip("[]")
        name = f"[{host}]" if ":" in host else host
        try:
            address = f"{name}:{settings.rpc_port}"
            port = (
                self._server.add_secure_port(address, _credentials(tls))
                if tls
                else self._server.add_insecure_port(address)
            )
        except RuntimeError as error:
            step = (
                "give another CRUCIBLE_SERVICE_GRPC_PORT, or do without gRPC:"
                " CRUCIBLE_SERVICE_GRPC=false"
            )
            raise HostError(
                f"cannot listen on {host}, port {settings.rpc_port}, for gRPC", step
            ) from error
        self.address = f"{name}:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float = HTTP_S) -> None:
        """Take no more calls; those under way may finish, and streams answer what has come.
        Harmless if repeated.
        """
        self._edge.stopping.set()
        await self._server.stop(grace_s)
        await self._edge.close()


@asynccontextmanager
async def rpc_server(service: Service, tls: Tls | None) -> AsyncIterator[RpcServer | None]:
    """The service over gRPC, or None where the settings want none. HostError if the port is
    taken.
    """
    if not service.settings.grpc:
        yield None
        return
    server = RpcServer(service, tls)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials([(tls.key, tls.certificate)])
