"""The process of HAProxy, from its start to an orderly end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import HostError, PlanError
from pipeline.execution.child_process import die_with_parent
from service.routing import grpc_refusals
from service.routing.configuration import DRAIN_S, ProxyOptions, configuration, grpc_refusal
from service.routing.runtime import Runtime

START_S = 10.0
POLL_S = 0.05
MAX_SOCKET_BYTES = 90
"""Linux takes 107 bytes for the path of a socket; HAProxy appends its process id and `.tmp`."""


def socket_of(home: Path) -> Path:
    """Return the runtime socket of the proxy of this home."""
    return home / "proxy" / "haproxy.sock"


def program() -> str:
    """Return the path of HAProxy. HostError if it is not installed."""
    found = shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if found is None:
        raise HostError(
            "HAProxy is not installed on this host", "apt-get install haproxy (2.6 or later)"
        )
    return found


@contextmanager
def running(options: ProxyOptions) -> Iterator[tuple[subprocess.Popen[bytes], Runtime]]:
    """Run HAProxy, which has no server yet. At the end, requests in flight get up to DRAIN_S.

    HostError if it does not start, with what it printed above. PlanError if a proxy of this home
    runs already.
    """
    runtime = Runtime(options.socket)
    file = _prepared(options, runtime)
    parent = os.getpid()
    process = subprocess.Popen(
        [program(), "-db", "-f", str(file)],
        preexec_fn=lambda: die_with_parent(parent),
        start_new_session=True,  # Ctrl-C of a terminal would end it at once
    )
    try:
        _wait_until_ready(process, runtime, options)
        yield process, runtime
    finally:
        _stop(process)
        options.socket.unlink(missing_ok=True)


def _prepared(options: ProxyOptions, runtime: Runtime) -> Path:
    """Write the configuration beside the socket, into a folder that is closed to others."""
    if len(os.fsencode(options.socket)) > MAX_SOCKET_BYTES:
        raise PlanError(
            f"the path of the proxy's socket has more than {MAX_SOCKET_BYTES} bytes:"
            f" '{options.socket}'",
            "give a shorter --home",
        )
    folder = options.socket.parent
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if _answers(runtime):
        raise PlanError(
            f"a proxy runs already on '{options.socket}'", "stop it, or give another --home"
        )
    refusals = grpc_refusals.program(grpc_refusal())
    grpc_refusals.program_path(folder).write_text(refusals, encoding="utf-8")
    file = folder / "haproxy.cfg"
    file.write_text(configuration(options), encoding="utf-8")
    return file


def _answers(runtime: Runtime) -> bool:
    try:
        runtime.servers()
    except HostError:
        return False
    return True


def _wait_until_ready(
    process: subprocess.Popen[bytes], runtime: Runtime, options: ProxyOptions
) -> None:
    end = time.monotonic() + START_S
    while not _answers(runtime):
        if process.poll() is not None or time.monotonic() > end:
            raise HostError(
                f"HAProxy does not start on {options.host}, ports {options.port} and"
                f" {options.port + 1}; its own message is above",
                "give another --host or --port",
            )
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Close the ports at once, and wait for requests in flight."""
    process.send_signal(signal.SIGUSR1)
    try:
        process.wait(DRAIN_S + 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
