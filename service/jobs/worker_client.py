"""The server's side of one job's child: start it with a minimal environment, exchange messages, and
end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import HostError
from pipeline.execution.child_process import IMPORT_PATH
from pipeline.execution.exit_causes import MemoryKills, how_it_died, memory_kills
from pipeline.host.gpu import VISIBLE, visible
from service.jobs.messages import FROM_CHILD, FROM_SERVER, FromChild, FromServer
from service.jobs.state import Failure
from service.sandbox import process_tree as processes
from service.sandbox.framing import decode, frame, receive_frame
from service.sandbox.layers import Box, Sandbox
from service.storage.layout import Work

PRINTED_BYTES = 2000  # of a worker's log, copied to the server's log
GRACE_S = 2.0  # for the guardian to kill all processes; then the server kills them
INHERITED = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
)
INHERITED_PREFIXES = ("LC_", "NVIDIA_")
USER = "crucible"  # libraries ask for it, and the user of a child has no entry in /etc/passwd


def environment_for(
    job_id: str, device: str, work: Work, server: Mapping[str, str]
) -> dict[str, str]:
    """Build a child's environment: allowed variables of the server, folders inside its work
    directory, its device, and its mark.
    """
    inherited = {
        name: value
        for name, value in server.items()
        if name in INHERITED or name.startswith(INHERITED_PREFIXES)
    }
    folders = {
        "HOME": work.home,  # libraries keep their caches below it, or in TMPDIR
        "TMPDIR": work.temporary,
        "CRUCIBLE_HOME": work.home,
        "XDG_CACHE_HOME": work.home / "cache",
    }
    return {
        **inherited,
        **{name: str(folder.absolute()) for name, folder in folders.items()},
        "PYTHONPATH": IMPORT_PATH,
        "PYTHONSAFEPATH": "1",  # no module is imported from the folder that it writes
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        VISIBLE: visible(device, server.get(VISIBLE)),
        "USER": USER,
        processes.MARK: job_id,
    }


async def start_guarded(
    command: Sequence[str],
    end: socket.socket,
    work: Work,
    file_bytes: int,
    environment: Mapping[str, str],
    box: Box,
) -> asyncio.subprocess.Process:
    """Start `command` in a box, below a guardian, in its own session, with the number of its `end`
    of a socket as last argument. Closes `end`.
    """
    guardian = (sys.executable, "-m", "service.sandbox.guardian", str(os.getpid()), str(file_bytes))
    try:
        with end, work.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *guardian,
                *box.command((*command, str(end.fileno()))),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[end.fileno()],
                start_new_session=True,
                cwd=work.root,
                env=dict(environment),
            )
    except OSError as error:
        raise HostError(
            f"cannot start a child process: {error}", "free memory or processes, and try again"
        ) from error


async def how_it_ended(process: asyncio.subprocess.Process, before: MemoryKills) -> str:
    """Describe how a guarded process died, once it has closed the connection."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE_S)
    code = process.returncode
    return (
        "closed the connection before it answered"
        if code is None
        else how_it_died(code, before, memory_kills(), "")[1]
    )


async def end_guarded(process: asyncio.subprocess.Process, mark: str) -> None:
    """End a guarded process and all processes that carry its mark, even those that left its
    session.
    """
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE_S)
    await asyncio.to_thread(processes.kill_all, lambda: processes.of_jobs([mark]))
    await process.wait()


@dataclass(frozen=True, slots=True)
class GuardedProcess:
    """A process in a box, below a guardian. The caller of `start` must call `end`."""

    process: asyncio.subprocess.Process
    mark: str
    work: Work
    _box: Box
    _kills: MemoryKills

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        theirs: socket.socket,
        mark: str,
        device: str,
        work: Work,
        file_bytes: int,
        sandbox: Sandbox,
        shared: Path,
    ) -> GuardedProcess:
        """Start `command`, which may read `shared` and has one device. Closes `theirs`, also if
        that fails.
        """
        with theirs:
            before, environment = memory_kills(), environment_for(mark, device, work, os.environ)
            box = await asyncio.to_thread(sandbox.enter, mark, work, device, shared=(shared,))
            try:
                process = await start_guarded(command, theirs, work, file_bytes, environment, box)
            except BaseException:
                await asyncio.to_thread(box.close)
                raise
        return cls(process, mark, work, box, before)

    @property
    def pid(self) -> int:
        """The process id of the guardian."""
        return self.process.pid

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()

    async def death(self) -> str:
        """Describe how it ended, once it has closed the connection."""
        return await how_it_ended(self.process, self._kills)

    def printed(self) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError), self.work.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - PRINTED_BYTES))
            return file.read().decode(errors="replace")
        return ""

    async def end(self) -> None:
        """End it with all processes that it started. Their memory is free on return."""
        ending = asyncio.ensure_future(end_guarded(self.process, self.mark))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # wait anyway: no process may stay behind
            await asyncio.wait([ending])
            raise
        await asyncio.to_thread(self._box.close)
        await asyncio.to_thread(self.work.clear_temporary)


@dataclass(frozen=True, slots=True)
class Child:
    """A running child. The caller of `start` must call `end`."""

    job_id: str
    pid: int
    started: float  # seconds since 1970
    _process: asyncio.subprocess.Process
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _kills: MemoryKills

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        job_id: str,
        work: Work,
        file_bytes: int,
        environment: Mapping[str, str],
        box: Box,
    ) -> Child:
        """Start `command` as `start_guarded` does."""
        before = memory_kills()
        ours, theirs = socket.socketpair()
        try:
            process = await start_guarded(command, theirs, work, file_bytes, environment, box)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        return cls(
            job_id, process.pid, processes.started_at(process.pid), process, reader, writer, before
        )

    async def send(self, message: FromServer) -> None:
        """Send a message. If the child is gone, this does nothing: `receive` reports it."""
        with contextlib.suppress(ConnectionError):
            self._writer.writelines(frame(FROM_SERVER.dump_json(message)))
            await self._writer.drain()

    async def receive(self) -> FromChild:
        """Return the next message. EOFError if the child is gone, BadMessage if it violates the
        protocol.
        """
        head, _ = await receive_frame(self._reader)
        return decode(FROM_CHILD, head)

    async def death(self) -> Failure:
        """Return how the child ended, once it has closed the connection without an answer."""
        cause = await how_it_ended(self._process, self._kills)
        return Failure(
            code="host.child_died",
            message=f"the job's process {cause}",
            next_step="retry the job; its log shows what it did",
        )

    async def end(self) -> None:
        """End the child and all processes that it started."""
        await end_guarded(self._process, self.job_id)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
