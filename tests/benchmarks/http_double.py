"""A server of HTTP/1.1 in threads, whose answers a test chooses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, dict[str, str], bytes]
CLOSE: Answer = (0, {}, b"")  # no answer: the connection is closed


@contextlib.contextmanager
def answering(answer: Callable[[str, bytes], Answer]) -> Iterator[int]:
    """The port of a server that answers a POST with what `answer(path, body)` gives."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, headers, body = answer(
                self.path, self.rfile.read(int(self.headers["Content-Length"]))
            )
            if status == 0:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
