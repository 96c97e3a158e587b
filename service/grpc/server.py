"""The gRPC port: opened with the service, closed when the service stops."""

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
    """The gRPC server of one port."""

    def __init__(self, service: Service, tls: Tls | None) -> None:
        settings = service.settings
        self._edge = Edge(service)
        self._server = grpc.aio.server(
            handlers=[self._edge],
            maximum_concurrent_rpcs=settings.max_connections,
            options=[
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                # after decompression
                ("grpc.max_receive_message_length", min(settings.max_infer_bytes, _MAX_BYTES)),
                ("grpc.max_send_message_length", -1),
                # With port reuse, a second server would share the port and get half of the calls.
                ("grpc.so_reuseport", 0),
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
                "set another CRUCIBLE_SERVICE_GRPC_PORT, or turn gRPC off:"
                " CRUCIBLE_SERVICE_GRPC=false"
            )
            raise HostError(
                f"cannot listen on {host}, port {settings.rpc_port}, for gRPC", step
            ) from error
        self.address = f"{name}:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float = HTTP_S) -> None:
        """Refuse new calls; running calls finish, and streams answer the requests they have read.

        It can be called again.
        """
        self._edge.stopping.set()
        await self._server.stop(grace_s)
        await self._edge.close()


@asynccontextmanager
async def rpc_server(service: Service, tls: Tls | None) -> AsyncIterator[RpcServer | None]:
    """Run the gRPC server; None if the settings turn it off. HostError if the port is in use."""
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
