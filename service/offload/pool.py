"""A pool of helper processes for the server.

Each helper is started on demand and does one task at a time.
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
# From this size on, numbers as text or one by one are read and written by a helper.
HELP_FROM_BYTES = 64 * 1024
WORK_S = 60.0  # more than 256 MiB of JSON need
READ_BYTES = 2**20
DIED = (asyncio.IncompleteReadError, ConnectionError, TimeoutError)
INHERITED = ("PATH", "LANG", "LD_LIBRARY_PATH")
REFUSALS = {"Unprocessable": Unprocessable, "TooLarge": TooLarge}

log = logs.get("service.wires")


class Helpers:
    """The helpers of one event loop. Call `close` at the end."""

    def __init__(self, count: int = HELPERS, module: str = "service.offload.worker") -> None:
        self._limit, self._module = asyncio.Semaphore(count), module
        self._idle: list[asyncio.subprocess.Process] = []

    async def ask(
        self, work: str, parts: Iterable[bytes | memoryview], **arguments: object
    ) -> tuple[dict[str, Any], bytes]:
        """Run `work` of the helpers' module on a body; return the head and body of its answer.

        An error of the module is raised here.
        """
        async with self._limit:
            process = self._take_idle() or await _start(self._module)
            try:
                async with asyncio.timeout(WORK_S):
                    head, body = await _exchange(process, {"work": work, **arguments}, list(parts))
            except BaseException as error:
                await _end(process)
                if not isinstance(error, DIED):
                    raise
                log.error("helper.died", work=work, error=repr(error))
                raise Unavailable(
                    "the process that read or wrote this body ended",
                    "send the request again, or use a binary form",
                ) from None
            self._idle.append(process)
        if "error" in head:
            raise REFUSALS[head["error"]](head["message"], head["next"])
        return head, body

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


async def _start(module: str) -> asyncio.subprocess.Process:
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    environment = {**inherited, "PYTHONPATH": IMPORT_PATH, "PYTHONSAFEPATH": "1"}
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
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None
    text = orjson.dumps(head)
    lengths = LENGTHS.pack(len(text), sum(map(len, parts)))
    for part in (lengths, text, *parts):  # `writelines` would copy them into one
        requests.write(part)
    await requests.drain()
    head_length, body_length = LENGTHS.unpack(await answers.readexactly(LENGTHS.size))
    answer_head = orjson.loads(await answers.readexactly(head_length))
    return answer_head, await answers.readexactly(body_length)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
