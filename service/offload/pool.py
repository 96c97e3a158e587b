"""A pool of helper processes for the server.

Each helper is started on demand and does one task at a time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

from pipeline.execution.child_process import IMPORT_PATH
from service import logs
from service.errors import TooLarge, Unavailable, Unprocessable
from service.offload.worker import FROM_HELPER, FromHelper
from service.sandbox.framing import BadMessage, Failed, Parts, decode, frame, receive_frame
from service.sandbox.layers import Sandbox

HELPERS = 2
# From this size on, numbers as text or one by one are read and written by a helper.
HELP_FROM_BYTES = 64 * 1024
WORK_S = 60.0  # more than 256 MiB of JSON need
END_S = 5.0  # from the end of a helper's output to its own
READ_BYTES = 2**20
# of a result, by the bytes of its request: JSON writes a value of 2 bytes in up to 17 characters
MAX_GROWTH = 16
MAX_IMAGE_BYTES = 1 << 30  # of the tensor of an image, however small its file is
BROKEN = (EOFError, ConnectionError, TimeoutError, BadMessage)
INHERITED = ("PATH", "LANG", "LD_LIBRARY_PATH")

log = logs.get("service.wires")


class HelperDied(Unavailable):
    """A helper ended during its work. `returncode` is negative after a signal."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(
            "the process that read or wrote this body ended",
            "send the request again, or use a binary form",
            1,
        )
        self.returncode = returncode


class Helpers:
    """The helpers of one event loop. Call `close` at the end."""

    def __init__(
        self,
        count: int = HELPERS,
        module: str = "service.offload.worker",
        max_unpacked_bytes: int = 0,
        sandbox: Sandbox | None = None,
        read: Sequence[Path] = (),
        work_s: float = WORK_S,
        max_answer_bytes: int | None = None,
    ) -> None:
        """`max_answer_bytes`: of a result; None: as many as the work of the usual module needs."""
        self._limit, self._module = asyncio.Semaphore(count), module
        self._sandbox, self._read = sandbox or Sandbox(Path()), read
        self._max_unpacked_bytes = max_unpacked_bytes  # of an archive
        self._work_s, self._max_answer_bytes = work_s, max_answer_bytes
        self._idle: list[asyncio.subprocess.Process] = []

    async def ask(
        self, work: str, parts: Iterable[bytes | memoryview], **arguments: object
    ) -> tuple[int, bytes]:
        """Run `work` of the helpers' module on a body; return its result after the length of the
        JSON at the start of the result.

        An error of the module is raised here. HelperDied if there is no result.
        """
        async with self._limit:
            process = self._take_idle() or await self._start()
            try:
                async with asyncio.timeout(self._work_s):
                    answer, body = await self._exchange(
                        process, orjson.dumps({"work": work, **arguments}), list(parts)
                    )
            except BaseException as error:
                if isinstance(error, EOFError | ConnectionError):
                    await _until_ended(process)
                await _end(process)
                if not isinstance(error, BROKEN):
                    raise
                log.error("helper.died", work=work, error=repr(error))
                raise HelperDied(process.returncode) from None
            self._idle.append(process)
        if isinstance(answer, Failed):
            kind = TooLarge if answer.code == TooLarge.code else Unprocessable
            raise kind(answer.message, answer.next_step)
        return answer.header_length, body

    async def _exchange(
        self, process: asyncio.subprocess.Process, head: bytes, parts: Parts
    ) -> tuple[FromHelper, bytes]:
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None
        for part in frame(head, parts):  # `writelines` would copy them into one
            requests.write(part)
        await requests.drain()
        max_bytes = self._max_answer_bytes
        if max_bytes is None:
            grown_bytes = MAX_GROWTH * sum(map(len, parts))
            max_bytes = MAX_IMAGE_BYTES + self._max_unpacked_bytes + grown_bytes
        answer_head, body = await receive_frame(answers, max_bytes)
        return decode(FROM_HELPER, answer_head), body

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *self._sandbox.of_helper(self._read).command((sys.executable, "-m", self._module)),
            stdin=pipe,
            stdout=pipe,
            limit=READ_BYTES,
            env=environment(),
            start_new_session=True,
        )

    def _take_idle(self) -> asyncio.subprocess.Process | None:
        """Take an idle helper that still runs: the host may have killed one, such as for memory."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return None

    async def close(self) -> None:
        """End all helpers."""
        while self._idle:
            await _end(self._idle.pop())


def environment() -> dict[str, str]:
    """Return the environment variables of a process that imports the same modules as this one."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {**inherited, "PYTHONPATH": IMPORT_PATH, "PYTHONSAFEPATH": "1"}


async def _until_ended(process: asyncio.subprocess.Process) -> None:
    """Wait a while for a helper that has closed its output: only its own status tells why it ended.
    To kill it at once would hide that, or lose it.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await process.wait()


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
