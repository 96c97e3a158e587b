"""TensorRT's messages: read from the output of its own logger during a build, and sent to a logger
in Python elsewhere.

TensorRT sends a logger every message, thousands in a build, many of them between two runs of a
kernel that it times. With a logger in Python it chose kernels that were about 2 % slower together,
with a progress monitor 3 % (`python -m benchmarks gpu_models tactics`). So a build has neither:
TensorRT's own logger drops unimportant messages itself and prints the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

MAX_MESSAGES = 10_000  # kept of a library that warns in every run
LINE_BYTES = 1 << 16
LINE_BUFFERED = 1  # _IOLBF of stdio.h (glibc)
STDOUT = 1  # where TensorRT's own logger prints: 10.6, 11.2 and RTX 1.7
PRINTED_TO = Path(f"/proc/self/fd/{STDOUT}")
# Not anchored to the start of a line: another writer may have printed a line without its end.
PRINTED = re.compile(r"\[[\d/]+-[\d:]+\] \[TRT\] \[([FEW])\] ")
_ONE_AT_A_TIME = threading.RLock()
SEVERITIES = {"F": "INTERNAL_ERROR", "E": "ERROR", "W": "WARNING"}


def messages_of(trt: Any) -> list[tuple[str, str]]:
    """Return severity and text of the library's messages since the list was last cleared."""
    return logger_of(trt).messages  # type: ignore[no-any-return]


@cache
def logger_of(trt: Any) -> Any:
    """Return the logger for running engines.

    TensorRT ignores a second logger while any object of the first is alive.
    """

    class Messages(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[tuple[str, str]] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR, trt.ILogger.WARNING):
                if len(self.messages) == MAX_MESSAGES:
                    del self.messages[0]
                self.messages.append((severity.name, text))

    return Messages()


@cache
def builders_logger_of(trt: Any) -> Any:
    """Return the logger for parsing and building: TensorRT's own, which `listening` reads.

    It runs no Python while a kernel is timed.
    """
    return trt.Logger(trt.Logger.WARNING)


@contextlib.contextmanager
def listening(trt: Any) -> Iterator[None]:
    """Add the messages that TensorRT's own logger prints in this context to `messages_of`.

    They still reach the standard output of this process. One thread at a time.
    """
    with _ONE_AT_A_TIME, _stdout_in_a_file() as file, file.open("rb") as output:
        _buffer_lines()
        output.seek(0, os.SEEK_END)
        try:
            yield
        finally:
            _, *parts = PRINTED.split(output.read().decode(errors="replace"))
            messages_of(trt).extend(
                (SEVERITIES[letter], text.rstrip("\n"))
                for letter, text in zip(parts[::2], parts[1::2], strict=True)
            )


@contextlib.contextmanager
def _stdout_in_a_file() -> Iterator[Path]:
    """Give the path of a file that standard output is written to within this context.

    In a child process standard output is a log file already and stays as it is: it keeps the last
    messages before a crash. Elsewhere a temporary file takes its place; afterwards its content is
    copied to standard output.
    """
    try:
        mode = os.fstat(STDOUT).st_mode
    except OSError:  # standard output is closed: the messages are lost
        yield Path(os.devnull)
        return
    if stat.S_ISREG(mode):
        yield PRINTED_TO
        return
    with tempfile.TemporaryFile() as file:
        before = os.dup(STDOUT)
        os.dup2(file.fileno(), STDOUT)
        try:
            yield PRINTED_TO
        finally:
            os.dup2(before, STDOUT)
            os.close(before)
            file.seek(0)
            # the reader of standard output may be gone
            with contextlib.suppress(OSError), open(STDOUT, "wb", closefd=False) as out:
                out.write(file.read())


@cache
def _buffer_lines() -> Any:
    """Give C's stdout a line buffer. Return the buffer, which must stay alive.

    PYTHONUNBUFFERED removes the buffer of C's stdout too: a message is then written piece by piece
    and mixes with the output of others.
    """
    libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(LINE_BYTES)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), buffer, LINE_BUFFERED, LINE_BYTES)
    return buffer
