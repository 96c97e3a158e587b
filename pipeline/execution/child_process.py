"""Child processes for stages and measurements, with typed messages and a deadline.

    value = call_in_child(function, argument, name="export", log=path)     one call, one result
    child = Child(function, argument, name="bench")                        a conversation:
                                                                           child.send, child.receive

Each child is a process in its own session. A crash, exhausted memory and the global state of
libraries stay in the child. For a conversation, in which engines are measured, it is a fresh
interpreter. For one call it is forked from a process that has the imports done (fork_server.py).
A stop ends the child and all its own children: SIGTERM, a grace period, SIGKILL. A child dies with
its parent, even if SIGKILL ends the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, TypeVar

from pipeline.core.progress import CandidateFigures, Progress, silent
from pipeline.errors import ChildDied, ChildKilled, ChildStopped, CrucibleError, InternalError
from pipeline.execution.exit_causes import (
    NEXT_STEPS,
    ExitCause,
    crucible_error,
    how_it_died,
    memory_kills,
)
from pipeline.execution.fork_server import Forked, changing, fork, stop_idle_server, take_over

T = TypeVar("T")
GRACE_S = 3.0
REPORT_S = 60.0  # until the fork server tells how a child has ended: it may import meanwhile
# interval of repeated progress: a library may be silent for minutes, and displays show the time
ALIVE_S = 2.0
# thresholds: with Python's own, garbage collection takes 10 % of the import of torch or NNCF
FEWER_COLLECTIONS = (
    50_000,
    20,
    20,
)
MODULE = "pipeline.execution.child_process"  # this one, which is __main__ in a child
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Module path of children: sys.path at the start of this process. A user's folder that is put in
# front later may hold another `pipeline`.
IMPORT_PATH = os.pathsep.join(filter(None, sys.path))


@dataclass(frozen=True, slots=True)
class Start:
    """Parent to child, once: what to run."""

    parent: int
    name: str  # of the child, for its errors
    module: str
    function: str
    arguments: tuple[object, ...]
    conversation: bool  # the function gets a Channel first; otherwise a Progress last
    # those that a forked child takes over; None: a fresh child has its environment already
    variables: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Child to parent: progress of the call."""

    fraction: float | None
    text: str
    figures: CandidateFigures | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Child to parent, last: the function's value."""

    value: object


@dataclass(frozen=True, slots=True)
class Failed:
    """Child to parent, last: the function raised."""

    error: CrucibleError
    trace: str


@dataclass(frozen=True, slots=True)
class Message:
    """Either direction, in a conversation."""

    payload: object


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """How long a child may take. The texts are for the error after that time."""

    seconds: float
    work: str = ""  # what took too long; empty: the child's name
    next_step: str = ""


class Channel:
    """The child's end of a conversation."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def send(self, payload: object) -> None:
        self._connection.send(Message(payload))

    def receive(self) -> Any:
        """Wait for the parent's next message. EOFError if the parent has closed the connection."""
        return self._connection.recv().payload


_running: set[Child] = set()
"""Running children of this process, from all threads."""
_stops = 0
"""How often `stop_children` was called."""


def stop_children() -> None:
    """Stop every child of this process, and those that threads start just now. Threads that wait
    for a child get ChildStopped.
    """
    global _stops
    _stops += 1
    for child in tuple(_running):
        child.is_stopped = True
        child.end()
    stop_idle_server()


class Child:
    """A running child process. Use as a context manager: leaving it stops the child."""

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: object,
        name: str,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        conversation: bool = True,
        command: Callable[[Sequence[str]], Sequence[str]] = tuple,
        forked: bool = False,
    ) -> None:
        """`command` may put the child's command in that of a sandbox. `forked`: start the child
        from the fork server, if it can be had, and not as a fresh interpreter.
        """
        stops = _stops
        self.name = name
        self.is_stopped = False  # by stop_children
        self._own_log = log is None
        self.log = log or _temporary_log()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._kills = memory_kills()
        # CUDA counts GPUs as nvidia-smi does, so that the first is the same for both
        environment = {
            **os.environ,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            **(env or {}),
            "PYTHONPATH": IMPORT_PATH,
        }
        start = Start(
            os.getpid(), name, function.__module__, function.__qualname__, arguments, conversation
        )
        with self.log.open("ab") as sink:
            self._log_start = sink.tell()
            child = self._fork(start.module, environment, sink) if forked else None
            if child is not None:
                self._process: subprocess.Popen[bytes] | Forked = child
                start = replace(start, parent=child.parent, variables=changing(environment))
            else:
                self._connection, theirs = Pipe()
                with theirs:
                    self._process = subprocess.Popen(
                        command((sys.executable, "-m", MODULE, str(theirs.fileno()))),
                        stdin=subprocess.DEVNULL,
                        stdout=sink,
                        stderr=sink,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                        env=environment,
                    )
        _running.add(self)
        with contextlib.suppress(BrokenPipeError):  # the child died at once: receive() reports it
            self._connection.send(start)
        if stops != _stops:
            self.is_stopped = True
            self.end()

    def _fork(self, module: str, environment: Mapping[str, str], sink: IO[bytes]) -> Forked | None:
        self._connection, theirs = Pipe()
        with theirs:
            child = fork(module, environment, theirs, sink)
        if child is None:
            self._connection.close()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, payload: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # the next receive() reports how it died
            self._connection.send(Message(payload))

    def answered(self, timeout_s: float) -> bool:
        """Wait until the child sends a message or ends. Returns False after `timeout_s` seconds."""
        return self._connection.poll(timeout_s)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for the child's next message.

        Raises the error of the child, ChildDied if the child has ended, or TimeoutError.
        """
        message = self._next(timeout_s)
        if isinstance(message, Message):
            return message.payload
        raise InternalError(
            f"child '{self.name}' ended its conversation with {type(message).__name__}"
        )

    def result(self, limit: TimeLimit | None = None, progress: Progress = silent) -> Any:
        """Wait for the function's value and forward its progress.

        The last progress is repeated every ALIVE_S seconds without a message. ChildDied after the
        time limit.
        """
        end = math.inf if limit is None else time.monotonic() + limit.seconds
        last = Report(None, "")
        while True:
            remaining_s = max(0.0, end - time.monotonic())
            try:
                message = self._next(min(remaining_s, ALIVE_S))
            except TimeoutError:
                if remaining_s > ALIVE_S:
                    progress(last.fraction, last.text)
                    continue
                self.stop()
                assert limit is not None
                work = limit.work or self.name
                raise ChildDied(
                    f"{work} took longer than its limit of {limit.seconds:g} s and was stopped",
                    limit.next_step,
                ) from None
            if isinstance(message, Done):
                return message.value
            if isinstance(message, Report):
                last = message
                progress(message.fraction, message.text, message.figures)

    def stop(self, grace_s: float = GRACE_S) -> None:
        """End the child and its children, and release its log. No effect on an ended child."""
        self.end(grace_s)
        _running.discard(self)
        self._connection.close()
        if self._own_log:
            self.log.unlink(missing_ok=True)

    def end(self, grace_s: float = GRACE_S) -> None:
        """End the child and its children: SIGTERM, a grace period, SIGKILL. Thread-safe."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._signal(signal.SIGKILL)  # the group outlives its leader if a grandchild hangs
        self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _next(self, timeout_s: float | None) -> object:
        try:
            if not self._connection.poll(timeout_s):
                raise TimeoutError(f"no message from '{self.name}' within {timeout_s} s")
            message = self._connection.recv()
        except (EOFError, ConnectionResetError, pickle.UnpicklingError) as error:
            raise self._death() from error
        if isinstance(message, Failed):
            if isinstance(message.error, InternalError):
                message.error.add_note(message.trace)
            raise message.error
        return message

    def _death(self) -> ChildDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S if isinstance(self._process, subprocess.Popen) else REPORT_S)
        if self.is_stopped:
            return ChildStopped(
                f"the child process for '{self.name}' was stopped", "run the command again"
            )
        printed, code = self.log_tail(), self._process.poll()
        cause, how = how_it_died(code, self._kills, memory_kills(), printed)
        message = f"the child process for '{self.name}' {how}\n{printed}".rstrip()
        advice = NEXT_STEPS[cause]
        if not self._own_log:
            advice += f", or read {self.log}"
        kind = ChildDied if cause is ExitCause.ENDED else ChildKilled
        return kind(message, advice)

    def log_tail(self, lines: int = 12) -> str:
        """Return the last lines that this child printed. Older lines of the log are left out."""
        text = (
            self.log.read_bytes()[self._log_start :].decode("utf-8", errors="replace")
            if self.log.exists()
            else ""
        )
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def call_in_child(
    function: Callable[..., T],
    *arguments: object,
    name: str,
    log: Path | None = None,
    progress: Progress = silent,
    limit: TimeLimit | None = None,
) -> T:
    """Run `function(*arguments, progress)` in its own process and return its value.

    The function must be importable by name. Its arguments and value must be picklable. Its
    CrucibleErrors are raised here; any other exception becomes an InternalError. Its output goes
    to `log`. ChildDied after the time limit.
    """
    with Child(function, *arguments, name=name, log=log, conversation=False, forked=True) as child:
        value: T = child.result(limit, progress)
        return value


def die_with_parent(parent: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent ends (Linux; prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before this call
        os._exit(1)


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="crucible-", suffix=".log")
    os.close(handle)
    return Path(name)


def _resolve(module: str, qualname: str) -> Callable[..., object]:
    value: Any = importlib.import_module(module)
    for part in qualname.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def run_child(descriptor: int) -> None:
    """Run the function that comes through a connection, and send its value. Never returns."""
    gc.set_threshold(*FEWER_COLLECTIONS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.set_inheritable(descriptor, False)
    connection: Connection[Any, Any] = Connection(descriptor)
    name = ""
    try:
        start: Start = connection.recv()
        name = start.name
        if start.variables is not None:
            take_over(start.variables)
        die_with_parent(start.parent)
        function = _resolve(start.module, start.function)
        if start.conversation:
            value = function(Channel(connection), *start.arguments)
        else:
            value = function(
                *start.arguments,
                lambda fraction, text, figures=None: connection.send(
                    Report(fraction, text, figures)
                ),
            )
        answer: object = Done(value)
    except Exception as error:  # noqa: BLE001  the edge of a process: the parent must know
        answer = Failed(crucible_error(error, name), traceback.format_exc())
    with contextlib.suppress(OSError):  # the log may lie on a full disk
        if isinstance(answer, Failed):
            print(answer.trace, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    connection.send(answer)
    connection.close()
    os._exit(0)  # atexit handlers and threads of libraries may hang; all output is flushed


if __name__ == "__main__":
    # Run the importable module's code, not this __main__ copy: messages are pickled by module name.
    from pipeline.execution import child_process as process

    process.run_child(int(sys.argv[1]))
