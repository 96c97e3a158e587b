"""Heads of HTTP requests that proxies and servers read differently, or that never end."""

from __future__ import annotations

import contextlib

from tests.attack.expect import counted, expect, refused, statuses_in
from tests.attack.targets import ATTACKER, MODEL, READ_S, Targets, received

HEADS = 200
SLOW_S = 45.0  # a head must be complete after 30 s
INNER = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"  # the smuggled request
MB = 2**20


def smuggling(targets: Targets) -> str:
    """Hide a second request behind a length or an encoding that is read in two ways."""
    length = f"Content-Length: {len(INNER)}"
    chunked = "Transfer-Encoding: chunked"
    heads = {
        "length and chunks": [length, chunked],
        "chunks and length": [chunked, length],
        "two lengths": [length, "Content-Length: 0"],
        "list of lengths": [f"Content-Length: 0, {len(INNER)}"],
        "signed length": [f"Content-Length: +{len(INNER)}"],
        "xchunked": ["Transfer-Encoding: xchunked", length],
        "chunked twice": [chunked, "Transfer-Encoding: identity", length],
        "space before the colon": [f"Content-Length : {len(INNER)}"],
        "obs-fold": ["X: a\r\n b: c", length],
        "folded encoding": ["Transfer-Encoding:\r\n chunked", length],
        "CR alone": ["X: a\rContent-Length: 0", length],
        "NUL": ["X: a\0b", length],
    }
    line = "POST /v2/repository/index HTTP/1.1"
    answers = []
    for name, lines in heads.items():
        data = "\r\n".join([line, _host(targets), _key(targets), *lines, "", ""]).encode()
        answers.append(_refused(targets, name, data + b"0\r\n\r\n" + INNER))
    for name, data in {
        "bare LF": f"{line}\n{_host(targets)}\n{_key(targets)}\n{length}\n\n".encode(),
        "huge chunk": _chunks(targets, line, b"FFFFFFFFFFFFFFFFF\r\n"),
        "negative chunk": _chunks(targets, line, b"-1\r\n"),
        "chunk of no number": _chunks(targets, line, b"0x5\r\nabcde\r\n0\r\n\r\n"),
    }.items():
        answers.append(_refused(targets, name, data + INNER))
    return counted(answers)


def two_hosts(targets: Targets) -> str:
    """Send two Host headers, in both orders, none, and an empty one."""
    ours, theirs = _host(targets), "Host: evil.example"
    cases = {"ours first": [ours, theirs], "ours last": [theirs, ours], "same": [ours, ours]}
    answers = []
    for name, lines in cases.items():
        data = "\r\n".join(["GET /models HTTP/1.1", *lines, _key(targets), "", ""]).encode()
        answers.append(_refused(targets, name, data))
    for name, lines in {"none": [], "empty": ["Host: "]}.items():
        data = "\r\n".join(["GET /models HTTP/1.1", *lines, _key(targets), "", ""]).encode()
        answers.append(_refused(targets, name, data, 400, 421))
    return counted(answers)


def foreign_host(targets: Targets) -> str:
    """Call the service by another name, as a page does after DNS rebinding, and from its origin."""
    answers = []
    with targets.server.client() as client:
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "[::]"):
            answers.append(refused(host, client.get("/models", headers={"Host": host}), 421))
        for origin in ("http://evil.example", "null", "http://localhost:1", "file://"):
            answer = client.post("/v2/repository/index", json={}, headers={"Origin": origin})
            answers.append(refused(origin, answer, 403))
    return counted(answers)


def large_heads(targets: Targets) -> str:
    """Send a URL, one header, and 10^5 headers of a megabyte and more."""
    begin = f"{_host(targets)}\r\n{_key(targets)}\r\n"
    heads = {
        "URL": f"GET /{'x' * MB} HTTP/1.1\r\n{begin}\r\n",
        "query": f"GET /models?a={'x' * MB} HTTP/1.1\r\n{begin}\r\n",
        "header": f"GET /models HTTP/1.1\r\n{begin}X: {'x' * MB}\r\n\r\n",
        "headers": f"GET /models HTTP/1.1\r\n{begin}{'X: 1' + chr(13) + chr(10)}" * 10**5,
    }
    return counted(_refused(targets, name, text.encode(), 400, 431) for name, text in heads.items())


def slow_heads(targets: Targets) -> str:
    """Hold 200 connections with heads that never end."""
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(contextlib.closing(targets.server.connect(ATTACKER)))
            for _ in range(HEADS)
        ]
        for connection in connections:
            connection.sendall(b"GET /models HTTP/1.1\r\nX: ")
        health_s = max(targets.server.health_s() for _ in range(20))
        expect(health_s < READ_S, f"/healthz took {health_s:.1f} s")
        ends = [received(connection, SLOW_S) for connection in connections]
    answers = [status for end in ends for status in statuses_in(end)]
    expect(set(answers) == {408} and len(answers) == HEADS, f"{len(answers)} answers: {answers}")
    return "/healthz answered meanwhile; 408 in the end"


def expect_continue(targets: Targets) -> str:
    """Ask `Expect: 100-continue` for bodies that are too large, without a key, and never sent."""
    answers = []
    for path, status, line, length in (
        ("/compile", 413, _key(targets), 10**15),
        (f"/models/{MODEL}/infer", 413, _key(targets), 10**12),
        ("/compile", 401, "X: no key", 10),
    ):
        lines = [f"POST {path} HTTP/1.1", _host(targets), line]
        lines += ["Expect: 100-continue", f"Content-Length: {length}", "", ""]
        with targets.server.connect(ATTACKER) as connection:
            connection.sendall("\r\n".join(lines).encode())
            data = received(connection)
        statuses = statuses_in(data)
        expect(statuses == [status], f"POST {path}: {statuses}")
        answers.append(f"{status} without 100")
    before, held = targets.server.memory_bytes(), []
    for _ in range(HEADS):
        head = targets.server.head(
            f"POST /models/{MODEL}/infer", Expect="100-continue", Content_Length=240 * MB
        )
        held.append(targets.server.connect())
        held[-1].sendall(head)
    grown = targets.server.memory_bytes() - before
    targets.server.health_s()
    for connection in held:
        connection.close()
    expect(grown < 100 * MB, f"{HEADS} bodies that were not sent take {grown / MB:.0f} MiB")
    return f"{counted(answers)}; {HEADS} bodies that are not sent take {grown / MB:.0f} MiB"


def _host(targets: Targets) -> str:
    return f"Host: {targets.server.address[0]}:{targets.server.address[1]}"


def _key(targets: Targets) -> str:
    return f"Authorization: Bearer {targets.server.keys['attacker']}"


def _chunks(targets: Targets, line: str, chunks: bytes) -> bytes:
    lines = [line, _host(targets), _key(targets), "Transfer-Encoding: chunked", "", ""]
    return "\r\n".join(lines).encode() + chunks


def _refused(targets: Targets, name: str, data: bytes, *statuses: int) -> str:
    """Return the status of the only answer, which must be 400 unless `statuses` has others."""
    got = statuses_in(targets.server.answer_to(data))
    expect(len(got) == 1 and got[0] in (statuses or (400,)), f"{name}: {got or 'no answer'}")
    return str(got[0])
