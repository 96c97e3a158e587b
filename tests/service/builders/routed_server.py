"""A small server for tests of the proxy: `python -m tests.service.builders.routed_server PORT`.

HTTP on PORT and gRPC on the port after it. Every answer is this process's id. `/hold`, and the
gRPC method `hold`, answer after a request to `/release`. A POST to a path with `lacking-ID` is
answered with 503 by the process of this id.
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc

RELEASED = threading.Event()
METHOD = "/test.Server/"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_GET(self) -> None:
        if self.path == "/release":
            RELEASED.set()
        if self.path == "/hold":
            RELEASED.wait()
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(503 if f"lacking-{os.getpid()}/" in self.path else 200)

    def _answer(self, status: int) -> None:
        body = str(os.getpid()).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that have gone, as health checks do."""


class Methods(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if details.method == METHOD + "hold":
                RELEASED.wait()
            return str(os.getpid()).encode()

        return grpc.unary_unary_rpc_method_handler(answer)


def main(port: int) -> None:
    rpc = grpc.server(ThreadPoolExecutor(16), handlers=[Methods()])
    rpc.add_insecure_port(f"127.0.0.1:{port + 1}")
    rpc.start()
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
