"""What TensorRT says: read from where its own logger prints while it builds, told to a logger of
ours in Python elsewhere.

TensorRT tells a logger every message, thousands in a build, many of them between two runs of a
kernel that it times. With a logger in Python it chose kernels that were about 2 % slower together,
with a progress monitor 3 % (`python -m benchmarks gpu_models tactics`). So a build has neither:
TensorRT's own logger drops by itself what is unimportant, and prints the rest.
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
PRINTED = re.compile(
    r"\[[\d/]+-[\d:]+\] \[TRT\] \[([FEW])\] "
)  # others may have left a line without its end
_ONE_AT_A_TIME = threading.RLock()
SEVERITIES = {"F": "INTERNAL_ERROR", "E": "ERROR", "W": "WARNING"}


def messages_of(trt: Any) -> list[tuple[str, str]]:
    """Severity and text of all that the library has said since the list was last cleared."""
    return logger_of(trt).messages  # type: ignore[no-any-return]


@cache
def logger_of(trt: Any) -> Any:
    """The logger of what runs engines. TensorRT ignores a second one while anything made with the
    first is alive.
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
    """The logger of what parses and builds: TensorRT's own, heard by `listening`. No Python runs
    while a kernel is timed.
    """
    return trt.Logger(trt.Logger.WARNING)


@contextlib.contextmanager
def listening(trt: Any) -> Iterator[None]:
    """Add to `messages_of` what TensorRT's own logger prints meanwhile. It still arrives where this
    process prints. One thread at a time.
    """
    with _ONE_AT_A_TIME, _stdout_in_a_file() as file, file.open("rb") as printed:
        _write_whole_lines()
        printed.seek(0, os.SEEK_END)
        try:
            yield
        finally:
            _, *parts = PRINTED.split(printed.read().decode(errors="replace"))
            messages_of(trt).extend(
                (SEVERITIES[letter], text.rstrip("\n"))
                for letter, text in zip(parts[::2], parts[1::2], strict=True)
            )


@contextlib.contextmanager
def _stdout_in_a_file() -> Iterator[Path]:
    """As it is in a child process, whose log it is: there the last words before a crash stay.
    Elsewhere for a while, then all is handed on.
    """
    try:
        mode = os.fstat(STDOUT).st_mode
    except OSError:  # it is closed: what is printed is lost
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
            with (
                contextlib.suppress(OSError),
                open(STDOUT, "wb", closefd=False) as out,
            ):  # nobody may read it any more
                out.write(file.read())


@cache
def _write_whole_lines() -> Any:
    """PYTHONUNBUFFERED takes the buffer of C's stdout, too: a message is then written piece by
    piece, and what others print falls into it.

    Returns the new buffer, which must stay.
    """
    libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(LINE_BYTES)
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), buffer, LINE_BUFFERED, LINE_BYTES)
    return buffer
