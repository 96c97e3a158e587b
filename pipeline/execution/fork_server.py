"""A process that has imported what children need, and forks itself for each of them.

    child = fork(module, environment, pipe, log)     a child that runs child_process.run_child, as a
                                                     fresh one does; None where there is no server

A small stage is short beside the start of its interpreter and its imports. A forked child has them
done, and else what a fresh child has: a session, an exit status, memory and a crash of its own.

- The server imports, and calls nothing of a library: it has no sessions, no GPU and no threads,
  except those that OpenBLAS ends before each fork. Children that measure are fresh interpreters all
  the same, since forks would share their memory layout.
- A server is used only while the environment, the folder and the limits of this process are those
  that it started with. The variables of Crucible may differ: children take them over.
- The server ends with this process, and its children with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

# What most children import, of libraries that start no thread when they are imported: ONNX Runtime
# and OpenVINO start one each, which would hold its locks for ever in a child.
FIRST = ("pipeline.execution.child_process", "onnx")
LATER = ("numpy.random", "polygraphy.comparator")  # imported while the first child works
OURS = "pipeline."  # the modules that the server imports for its children: no code of a user
CHANGING = ("CRUCIBLE_", "PYTEST_")  # variables that no library reads when it is imported
START_S = 60.0  # for the imports of a server, on a busy host
LOOK_S = 0.2  # between two looks at the parent
MAX_REQUEST_BYTES = 65536
GO = b"go"  # from the server to a child that it watches
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
MODULE = "pipeline.execution.fork_server"  # this one, which is __main__ in a server


class Forked:
    """A child of the server, as `subprocess.Popen` has one. Safe for several threads."""

    def __init__(self, pid: int, parent: int, ends: Connection[Any, Any]) -> None:
        self.pid, self.parent = pid, parent
        self.returncode: int | None = None
        self._ends = ends  # the exit code comes through it, once
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of a signal; None while it runs."""
        with self._lock:
            if self.returncode is None and self._ends.poll():
                try:
                    self.returncode = self._ends.recv().number
                except EOFError:  # the server was killed, and the kernel kills its children then
                    self.returncode = -signal.SIGKILL
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = None if end is None else max(0.0, end - time.monotonic())
            if not self._ends.poll(left_s):
                raise subprocess.TimeoutExpired(MODULE, timeout or 0.0)
        return code


class ForkServer:
    """The parent's end of a running server. Its owner's lock guards it, except `answer`."""

    def __init__(self, requests: socket.socket, pid: int, conditions: object) -> None:
        self.pid, self.conditions, self.has_forked = pid, conditions, False
        self.is_gone = False
        self._requests, self._unanswered = requests, 0
        self._forked: weakref.WeakSet[Forked] = weakref.WeakSet()
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> ForkServer:
        """Start a server. It imports while this process goes on."""
        ours, theirs = _connection()
        with theirs:
            process = subprocess.Popen(
                (sys.executable, "-m", MODULE, str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
            )
        server = cls(ours, process.pid, _conditions(environment))
        server._process = process
        return server

    @property
    def is_idle(self) -> bool:
        """True if none of its children runs, and none is to come."""
        forked = tuple(self._forked)
        return not self._unanswered and all(each.poll() is not None for each in forked)

    def request(
        self, module: str, pipe: Connection[Any, Any], log: IO[bytes]
    ) -> Connection[Any, Any]:
        """Ask for a child that reads its task from `pipe` and prints to `log`. Return what `answer`
        takes. OSError if the server is gone, or if this process lacks descriptors.
        """
        ends, theirs = Pipe(duplex=False)
        with theirs:
            descriptors = [pipe.fileno(), log.fileno(), theirs.fileno()]
            try:
                socket.send_fds(self._requests, [module.encode()], descriptors)
            except (BrokenPipeError, ConnectionResetError):
                self.is_gone = True
                raise
        self._unanswered += 1
        return ends

    def answer(self, ends: Connection[Any, Any]) -> Forked | None:
        """Wait for a child that was asked for. None if there is none, or not in time."""
        try:
            if not ends.poll(START_S):
                self.conditions = None  # no environment is equal to it: the next child has another
                return None
            told = ends.recv()
        except (OSError, EOFError):
            self.is_gone = True
            return None
        finally:
            with _lock:
                self._unanswered -= 1
        if not isinstance(told, _Pid):
            return None
        forked = Forked(told.number, self.pid, ends)
        with _lock:
            self._forked.add(forked)
            self.has_forked = True
        return forked

    def leave(self) -> None:
        """Close the connection. The server ends, unless this process is a child of it."""
        self._requests.close()

    def stop(self) -> None:
        """End the server and its children, unless this process is one of them."""
        self.leave()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _connection() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


_lock = threading.RLock()
_server: ForkServer | None = None
_is_useless = False  # a server has failed before its first child, and the next one would, too


def fork(
    module: str, environment: Mapping[str, str], pipe: Connection[Any, Any], log: IO[bytes]
) -> Forked | None:
    """Start a child that reads its task, a function of `module`, from `pipe` and prints to `log`.

    None if that takes a fresh interpreter: while children of another environment run, and where the
    server does not answer. The fresh one needs another pipe: a child may come late for this one.
    """
    global _is_useless
    forked = server = ends = None
    with _lock, contextlib.suppress(OSError):
        server = None if _is_useless else _server_for(environment)
        ends = None if server is None else server.request(module, pipe, log)
    if server is None:
        return None
    if not server.is_gone and ends is not None:
        forked = server.answer(ends)
    if server.is_gone:
        with _lock:
            _is_useless = _is_useless or not server.has_forked
            if _server is server:
                stop_server()
    return forked


def _server_for(environment: Mapping[str, str]) -> ForkServer | None:
    global _server
    if _server is not None and _server.conditions != _conditions(environment):
        if not _server.is_idle:
            return None
        stop_server()
    if _server is None:
        _server = ForkServer.start(environment)
    return _server


def stop_server() -> None:
    """End the server of this process with its children. The next child starts another one."""
    global _server
    with _lock:
        server, _server = _server, None
    if server is not None:
        server.stop()


def stop_idle_server() -> None:
    """End the server of this process, unless a child of it runs: one that a thread has started just
    now is stopped by whoever stops the others.
    """
    with _lock:
        if _server is not None and _server.is_idle:
            stop_server()


def _forget_server() -> None:
    """Leave the server to the parent of this process, which was forked without a new program."""
    global _server, _lock
    server, _server, _lock = _server, None, threading.RLock()
    if server is not None:
        server.leave()


atexit.register(stop_server)
os.register_at_fork(after_in_child=_forget_server)


def _conditions(environment: Mapping[str, str]) -> tuple[object, ...]:
    """What a child has from its server, and cannot change by itself.

    Without the module path, which is the same for all children of a process.
    """
    apart = (*CHANGING, "PYTHONPATH")
    return (
        {name: value for name, value in environment.items() if not name.startswith(apart)},
        Path.cwd(),
        os.sched_getaffinity(0),
        os.getpriority(os.PRIO_PROCESS, 0),
        [resource.getrlimit(number) for number in LIMITS],
    )


def changing(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a forked child takes over from this environment."""
    return {name: value for name, value in environment.items() if name.startswith(CHANGING)}


def take_over(variables: Mapping[str, str]) -> None:
    """Give this process the variables that `changing` has returned."""
    for name in changing(os.environ):
        del os.environ[name]
    os.environ.update(variables)


@dataclass(frozen=True, slots=True)
class _Pid:
    """A new child has told its process, which has a session of its own now."""

    number: int


@dataclass(frozen=True, slots=True)
class _End:
    """A child has ended with this exit code."""

    number: int


@dataclass(frozen=True, slots=True)
class _Refusal:
    """There is no child: the host has no process or descriptor left."""


# -- in the server -----------------------------------------------------------

_parent = 0  # the process that has started this one


@dataclass(frozen=True, slots=True)
class _Child:
    """A child of the server, until it has ended."""

    pid: int
    parent: int  # the process that has requested it
    reports: Connection[Any, Any]  # to that one: its end


@dataclass(frozen=True, slots=True)
class _State:
    """What the server has open."""

    requests: dict[socket.socket, int] = field(default_factory=dict)  # the process at the other end
    children: dict[int, _Child] = field(default_factory=dict)  # by the pidfd that tells their end

    def close(self) -> None:
        """Close everything in a new child, which has nothing to do with the others."""
        for requests in self.requests:
            requests.close()
        for descriptor, child in self.children.items():
            os.close(descriptor)
            child.reports.close()


def _serve(descriptor: int) -> None:
    """Fork a child for each request, and report its end. Never returns."""
    global _parent
    _parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGALRM, _end_with_parent)
    signal.siginterrupt(signal.SIGALRM, False)  # no call of a library meets EINTR
    os.set_inheritable(descriptor, False)
    os.close(os.pidfd_open(os.getpid()))  # where this cannot be, no child could be watched
    gc.disable()  # what is imported stays; children enable it
    _import(FIRST)
    parent = socket.socket(fileno=descriptor)
    state = _State(requests={parent: 0})
    while True:
        for ready in wait([*state.requests, *state.children]):
            if isinstance(ready, int):
                _report(state, ready)
            elif isinstance(ready, socket.socket):
                _answer(state, ready, is_last=ready is parent)


def _answer(state: _State, requests: socket.socket, is_last: bool) -> None:
    """Fork a child, if there is a request, or forget a process that has closed the connection."""
    request, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST_BYTES, 3)
    if request:
        _fork(state, state.requests[requests], request.decode(), *descriptors)
    elif is_last:
        os._exit(0)  # and the kernel ends the children
    else:
        del state.requests[requests]
        requests.close()


def _fork(state: _State, parent: int, module: str, pipe: int, log: int, reports: int) -> None:
    """Fork a child for one request, or refuse it."""
    if module.startswith(OURS):
        _import([module])
    gc.freeze()  # else the first collection of each child would copy all of this memory
    told = Connection(reports)
    try:
        requests = _fork_watched(state, parent, pipe, log, told)
    except OSError:
        _send(told, _Refusal())
        told.close()
    else:
        with contextlib.suppress(OSError):  # it has been killed, which is reported as any end
            requests.send(GO)
    finally:
        os.close(pipe)
        os.close(log)
    _import(LATER)


def _fork_watched(
    state: _State, parent: int, pipe: int, log: int, told: Connection[Any, Any]
) -> socket.socket:
    """Fork a child, which waits for GO, and watch it. Return the connection for its requests.

    OSError if the host has no process or descriptor left: then there is no child.
    """
    ours, theirs = _connection()
    with theirs:
        try:
            with warnings.catch_warnings():
                # Python counts the threads of OpenBLAS, which OpenBLAS ends before a fork
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                _become_child((state, ours), pipe, log, theirs, told)
            end = _watched(pid)
        except OSError:
            ours.close()
            raise
    state.children[end] = _Child(pid, parent, told)
    state.requests[ours] = pid
    return ours


def _watched(pid: int) -> int:
    """Return a descriptor that tells the end of a child. A child that cannot be watched is ended
    before it has begun.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _become_child(
    others: tuple[_State, socket.socket],
    pipe: int,
    log: int,
    requests: socket.socket,
    told: Connection[Any, Any],
) -> None:
    """Run the task of `pipe` in this process, which is a new child, and close what belongs to
    others. Never returns.
    """
    global _server
    code = 1
    try:
        for each in others:
            each.close()
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(log, descriptor)
        os.close(log)
        if requests.recv(len(GO)) != GO:
            os._exit(code)  # the server has ended
        told.send(_Pid(os.getpid()))
        told.close()
        gc.enable()
        if "numpy.random" in sys.modules:  # Python's own `random` does this by itself
            importlib.import_module("numpy.random").seed()
        _server = ForkServer(requests, os.getppid(), _conditions(os.environ))
        importlib.import_module("pipeline.execution.child_process").run_child(pipe)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  the edge of a process, which says why it ends
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _report(state: _State, descriptor: int) -> None:
    """Report the end of a child, and end those that it has requested."""
    child = state.children.pop(descriptor)
    os.close(descriptor)
    _, status = os.waitpid(child.pid, 0)
    for orphan in state.children.values():
        if orphan.parent == child.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan.pid, signal.SIGKILL)
    _send(child.reports, _End(os.waitstatus_to_exitcode(status)))
    child.reports.close()


def _send(told: Connection[Any, Any], message: _End | _Refusal) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent no longer wants to know
        told.send(message)


def _import(modules: Iterable[str]) -> None:
    """Import modules. One that fails is left to the child, which reports it.

    A server that imports reads no requests, so it looks now and then whether its parent lives.
    """
    signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def _end_with_parent(number: int, frame: object) -> None:
    if os.getppid() != _parent:
        os._exit(0)  # and the kernel ends the children


if __name__ == "__main__":
    # Run the importable module's code, not this __main__ copy.
    from pipeline.execution import fork_server

    fork_server._serve(int(sys.argv[1]))
