"""How long stages took on this host: one line of JSON each, from which the next run's estimate is
read.

    <store root>/history.jsonl

Many processes append at once: each line is one write to a file opened for appending, and begins
with its newline, so that a line which a crash tore does not spoil the next. A line that cannot be
read, torn or of another version, counts for nothing.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from filelock import FileLock
from pydantic import ValidationError

from pipeline.core import Frozen

FILE = "history.jsonl"
COUNTED = 5  # an estimate is the median of so many last times
MAX_BYTES = 400_000  # about 2,000 lines; beyond, the older half is dropped


class Entry(Frozen):
    """One stage that ran to its end."""

    plan: str = ""  # its name
    stage: str
    subject: str
    seconds: float
    created: str  # UTC, ISO 8601
    device: str = ""  # that it ran for, where the stage has a target


class History:
    """The times of one store. Losing some costs an estimate, so a disk that cannot be written is no
    error here.
    """

    def __init__(self, root: Path) -> None:
        self._file = root / FILE

    def entries(self) -> tuple[Entry, ...]:
        """Everything that can be read, oldest first."""
        try:
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(_readable(lines))

    def estimate(self, stage: str, subject: str, plan: str = "") -> float | None:
        """Seconds that this stage usually takes; None if it never ran. Runs of this plan are
        preferred: other models take other times.
        """
        same = [
            entry for entry in self.entries() if (entry.stage, entry.subject) == (stage, subject)
        ]
        ours = [entry for entry in same if entry.plan == plan] or same
        return median(entry.seconds for entry in ours[-COUNTED:]) if ours else None

    def add(
        self, stage: str, subject: str, seconds: float, plan: str = "", device: str = ""
    ) -> None:
        """Append one entry, in one write."""
        created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        entry = Entry(
            plan=plan,
            stage=stage,
            subject=subject,
            seconds=round(seconds, 3),
            created=created,
            device=device,
        )
        with contextlib.suppress(OSError):
            with self._file.open("ab", buffering=0) as file:
                file.write(f"\n{entry.model_dump_json()}".encode())
                size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                self._shorten()

    def _shorten(self) -> None:
        """Keep the newer half. A line that another process appends meanwhile may be lost."""
        with FileLock(self._file.with_suffix(".lock"), timeout=1):
            entries = self.entries()
            if self._file.stat().st_size <= MAX_BYTES:  # another process was first
                return
            work = self._file.with_suffix(f".{os.getpid()}")
            work.write_text(
                "".join(f"\n{entry.model_dump_json()}" for entry in entries[len(entries) // 2 :]),
                encoding="utf-8",
            )
            work.replace(self._file)


def _readable(lines: Iterable[str]) -> Iterable[Entry]:
    for line in lines:
        with contextlib.suppress(ValidationError):
            if line:
                yield Entry.model_validate_json(line)
