"""The configuration of HAProxy: one frontend and one backend for HTTP, and one of each for gRPC.

It names no server. All are added over the runtime socket, so there is one way to add a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from service.errors import Answer, TimedOut, Unavailable, answer_to
from service.routing import grpc_refusals

HTTP, GRPC = "http", "grpc"
BACKENDS = (HTTP, GRPC)
DRAIN_S = 30
"""How long requests may take after the proxy is told to end."""

CHECK = "check inter 1s fastinter 250ms downinter 500ms fall 2 rise 1"
"""A server that stops answers requests for 2 s more (LINGER_S in service/server.py). It is found
within 1.25 s: one interval, and a second check after 250 ms.
"""

REFUSES = "observe layer4 error-limit 1 on-error mark-down"
"""A server of gRPC that takes no connection is down at once: so the call that found it so gets our
refusal if no other server is left.
"""

BUFFER_BYTES = 64 * 1024
"""Only a request that fits, with its head, is tried on another server after an answer. HAProxy has
at most two buffers for a connection, and none for an idle one.
"""

BODY_S = 2
"""How long the proxy waits for the body of such a request; one that takes longer is tried once."""

PURGE = "pool-purge-delay 2s"
"""Idle connections end before the server ends them after 5 s, uvicorn's default: a request could
be on its way.
"""

UNANSWERED = {
    502: Unavailable("the server behind the proxy ended before it answered", "try again later"),
    503: Unavailable("no server behind the proxy is ready", "try again later"),
    504: TimedOut("the server behind the proxy did not answer in time", "try again later"),
}
"""What clients read if HAProxy answers by itself, by the status that it gives."""


@dataclass(frozen=True, slots=True)
class ProxyOptions:
    """Where the proxy listens, and the socket over which it is told what to do."""

    host: str
    port: int  # of HTTP; gRPC: the port after it
    socket: Path
    max_connections: int = 4096


def configuration(options: ProxyOptions) -> str:
    """Return the text of the configuration file.

    A request goes to the server with the fewest requests; every stream of a gRPC connection is
    chosen a server of its own. A request that found no connection is tried on another server, and
    so is one for inference whose server answers 503: it lacks the model, or stops. Such a request
    has no effect. No other request is sent twice: it may have had its effect.

    Servers learn the client's address from `X-Forwarded-For`, if their `trusted_proxies` names the
    proxy.
    """
    folder = options.socket.parent
    return f"""\
global
    lua-load "{grpc_refusals.program_path(folder)}"
    stats socket "{options.socket}" mode 600 level admin
    hard-stop-after {DRAIN_S}s
    maxconn {options.max_connections}
    tune.bufsize {BUFFER_BYTES}

defaults
    mode http
    balance leastconn
    retries 3
    retry-on conn-failure
    option redispatch 1
    option forwardfor
    timeout connect 2s
    # Streams of events and of gRPC are silent for as long as a job's stage takes.
    timeout client 6h
    timeout server 6h
    timeout http-request 30s
    timeout http-keep-alive 60s

frontend {HTTP}-clients
    bind {_bind(options.host, options.port)}
    default_backend {HTTP}

frontend {GRPC}-clients
    bind {_bind(options.host, options.port + 1)} proto h2
    default_backend {GRPC}

backend {HTTP}
    acl infers path_end /infer
    http-request wait-for-body time {BODY_S}s if infers
    http-request disable-l7-retry unless infers
    retry-on conn-failure 503
{_error_answers()}{_health_check()}
backend {GRPC}
{grpc_refusals.server_line(folder)}{_health_check()}
{grpc_refusals.frontend(folder)}"""


def server_options(backend: str, port: int) -> str:
    """Return the words that describe a server, behind its name and address. `port`: its HTTP port,
    which answers health checks for gRPC too.
    """
    if backend == HTTP:
        return f"{CHECK} {PURGE}"
    return f"proto h2 {CHECK} {REFUSES} port {port} check-proto h1 {PURGE}"


def _health_check() -> str:
    """Servers answer to `localhost`, whatever address they are reached by."""
    return """\
    option httpchk
    http-check send meth GET uri /readyz ver HTTP/1.1 hdr Host localhost
    http-check expect status 200
"""


def _error_answers() -> str:
    """Answers in the form of the service's own refusals."""
    lines = []
    for status, error in UNANSWERED.items():
        answer = answer_to(error)
        headers = "".join(f' hdr {name} "{value}"' for name, value in answer.headers.items())
        body = f"content-type application/json string '{answer.json.decode()}'"
        lines.append(f"    http-error status {status} {body}{headers}\n")
    return "".join(lines)


def grpc_refusal() -> Answer:
    """Return what clients of gRPC read while no server is ready."""
    return answer_to(UNANSWERED[503])


def _bind(host: str, port: int) -> str:
    """HAProxy takes IPv6 addresses without brackets."""
    return f"{host.strip('[]')}:{port}"
