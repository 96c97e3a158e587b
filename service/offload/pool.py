"""The server's end of its helpers: a few processes, started when the first is needed, each with one
piece of work at a time.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from pipeline.execution.child_process import IMPORT_PATH
from service import logs
from service.errors import TooLarge, Unavailable, Unprocessable
from service.offload.worker import LENGTHS, Parts

HELPERS = 2
HELP_FROM_BYTES = (
    64 * 1024
)  # of numbers as text, or one by one: from here on they are read and written outside this process
WORK_S = 60.0  # more than 256 MiB of JSON take
READ_BYTES = 2**20
DIED = (asyncio.IncompleteReadError, ConnectionError, TimeoutError)
KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH")
REFUSALS = {"Unprocessable": Unprocessable, "TooLarge": TooLarge}

log = logs.get("service.wires")


class Helpers:
    """Use `close` at the end. Lives in one event loop."""

    def __init__(self, count: int = HELPERS, module: str = "service.offload.worker") -> None:
        self._places, self._module = asyncio.Semaphore(count), module
        self._idle: list[asyncio.subprocess.Process] = []

    async def ask(
        self, work: str, parts: Iterable[bytes | memoryview], **arguments: object
    ) -> tuple[dict[str, Any], bytes]:
        """What the helpers' module makes of a body: the head and the body of its answer; its
        refusals are raised here.
        """
        async with self._places:
            process = self._taken() or await _started(self._module)
            try:
                async with asyncio.timeout(WORK_S):
                    head, body = await _exchange(process, {"work": work, **arguments}, list(parts))
            except BaseException as error:
                await _ended(process)
                if not isinstance(error, DIED):
                    raise
                log.error("helper.died", work=work, error=repr(error))
                raise Unavailable(
                    "the process that read or wrote this body ended",
                    "try again, or use a binary form",
                ) from None
            self._idle.append(process)
        if "error" in head:
            raise REFUSALS[head["error"]](head["message"], head["next"])
        return head, body

    def _taken(self) -> asyncio.subprocess.Process | None:
        """A helper that waits for work and has not been killed meanwhile, such as for memory."""
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        return None

    async def close(self) -> None:
        """End all helpers."""
        while self._idle:
            await _ended(self._idle.pop())


async def _started(module: str) -> asyncio.subprocess.Process:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment = {**kept, "PYTHONPATH": IMPORT_PATH, "PYTHONSAFEPATH": "1"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=pipe,
        stdout=pipe,
        limit=READ_BYTES,
        env=environment,
        start_new_session=True,
    )


async def _exchange(
    process: asyncio.subprocess.Process, head: Mapping[str, object], parts: Parts
) -> tuple[dict[str, Any], bytes]:
    given, taken = process.stdin, process.stdout
    assert given is not None
    assert taken is not None
    text = orjson.dumps(head)
    for part in (
        LENGTHS.pack(len(text), sum(map(len, parts))),
        text,
        *parts,
    ):  # writelines would join them
        given.write(part)
    await given.drain()
    head_length, body_length = LENGTHS.unpack(await taken.readexactly(LENGTHS.size))
    return orjson.loads(await taken.readexactly(head_length)), await taken.readexactly(body_length)


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
