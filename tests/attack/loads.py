"""Many connections and large bodies: the server answers others, and its memory has a limit."""

from __future__ import annotations

import contextlib
import resource
import socket
import statistics
import threading
import time

from tests.attack.expect import counted, expect, statuses_in
from tests.attack.targets import ATTACKER, MODEL, READ_S, Server, Targets, received, started

MB = 10**6
BODIES, BODY_BYTES = 10, 240 * MB
MEMORY_BYTES = 1200 * MB  # what 10 unfinished bodies may take: CRUCIBLE_SERVICE_MAX_BYTES_IN_FLIGHT
DRIBBLING, DRIBBLING_S = 200, 10.0
HEALTH_S = 0.05
CONNECTIONS = 20_000
SPARE_DESCRIPTORS = 200
OPEN_S = 15.0  # for opening the connections
STALLED_S = 45.0


def dribbling_bodies(targets: Targets) -> str:
    """Hold 200 uploads whose bodies arrive byte by byte, and ask /healthz meanwhile."""
    server, times = targets.server, []
    head = server.head(
        "POST /compile", Content_Type="multipart/form-data; boundary=b", Content_Length=10**6
    )
    with contextlib.ExitStack() as stack:
        bodies = [
            stack.enter_context(contextlib.closing(server.connect())) for _ in range(DRIBBLING)
        ]
        for body in bodies:
            body.sendall(head)
        end = time.monotonic() + DRIBBLING_S
        while time.monotonic() < end:
            for body in bodies:
                with contextlib.suppress(OSError):
                    body.sendall(b"-")
            times.append(server.health_s(ATTACKER))
    median_s = statistics.median(times)
    expect(median_s < HEALTH_S, f"/healthz took {median_s * 1e3:.0f} ms in the median")
    return f"/healthz took less than {HEALTH_S * 1e3:.0f} ms in the median"


def stalled_body(targets: Targets) -> str:
    """Send half of a body and wait, to a path of tensors, of uploads and of JSON."""
    server, kinds = targets.server, {}
    paths = (f"/models/{MODEL}/infer", "/compile", "/v2/repository/index")
    with contextlib.ExitStack() as stack:
        for path in paths:
            connection = stack.enter_context(contextlib.closing(server.connect()))
            content = (
                "multipart/form-data; boundary=b" if path == "/compile" else "application/json"
            )
            head = server.head(f"POST {path}", "victim", Content_Type=content, Content_Length=10**6)
            connection.sendall(head + b" " * 10)
            kinds[path] = connection
        for path, connection in kinds.items():
            statuses = statuses_in(received(connection, STALLED_S))
            expect(bool(statuses), f"POST {path} waits for more than {STALLED_S:.0f} s")
            expect(400 <= statuses[0] < 500, f"POST {path}: {statuses}")
    return "each is refused"


def endless_chunks(targets: Targets) -> str:
    """Send chunks without an end, to a path of JSON and to one of tensors."""
    server, answers = targets.server, []
    for path in ("/v2/repository/index", f"/models/{MODEL}/infer"):
        head = server.head(f"POST {path}", "victim", Transfer_Encoding="chunked")
        with server.connect() as connection:
            connection.sendall(head)
            sent, chunk = 0, b"%x\r\n%b\r\n" % (MB, bytes(MB))
            with contextlib.suppress(ConnectionError, TimeoutError):
                while sent < 400:
                    connection.sendall(chunk)
                    sent += 1
            statuses = statuses_in(received(connection))
        expect(sent < 400, f"POST {path} took {sent} MB")
        expect(not statuses or statuses == [413], f"POST {path}: {statuses}")
        answers.append("413" if statuses else "cut")
    return counted(answers)


def unfinished_bodies(targets: Targets) -> str:
    """Send 10 bodies of 240 MB but for their last megabyte, and look at the memory."""
    server, statuses = targets.server, []
    before = server.memory_bytes()
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(contextlib.closing(server.connect())) for _ in range(BODIES)
        ]
        threads = [
            threading.Thread(target=_send_most, args=(server, connection))
            for connection in connections
        ]
        for thread in threads:
            thread.start()
        most = 0
        while any(thread.is_alive() for thread in threads):
            most = max(most, server.memory_bytes() - before)
            time.sleep(0.05)
        server.health_s()
        for connection in connections:
            statuses += statuses_in(received(connection, 0.2))
        more = f"{most / MB:.0f} MB more"
    expect(most < MEMORY_BYTES, f"{BODIES} bodies of {BODY_BYTES / MB:.0f} MB take {more}")
    return f"less than {MEMORY_BYTES / MB:.0f} MB more; {counted(map(str, statuses)) or 'all wait'}"


def many_connections(targets: Targets) -> str:
    """Open 20,000 connections that send nothing, or as many as open in 15 s."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    count = min(CONNECTIONS, descriptors - SPARE_DESCRIPTORS)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    connections: list[socket.socket] = []
    try:
        with started(targets.folder / "connections") as server:
            with contextlib.suppress(OSError):
                end = time.monotonic() + OPEN_S
                while len(connections) < count and time.monotonic() < end:
                    connections.append(server.connect(ATTACKER))
            slowest_s = max(server.health_s() for _ in range(10))
            damage = server.damage()
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, soft)
    expect(not damage, damage)
    expect(slowest_s < READ_S, f"/healthz from another address took {slowest_s:.1f} s")
    return f"{len(connections)} connections; /healthz answers another address"


def _send_most(server: Server, connection: socket.socket) -> None:
    """Send a body without its last megabyte, until the server refuses it."""
    connection.settimeout(READ_S)
    head = server.head(
        f"POST /models/{MODEL}/infer",
        "victim",
        Content_Type="application/octet-stream",
        Content_Length=BODY_BYTES,
    )
    with contextlib.suppress(OSError):
        connection.sendall(head)
        for _ in range(BODY_BYTES // MB - 1):
            connection.sendall(bytes(MB))
