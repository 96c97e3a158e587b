"""Durations of stages on this host, one JSON line each, for the estimates of later runs.

    <store root>/history.jsonl

Several processes may append at the same time: each line is one write to a file opened for
appending. A line begins with its newline, so that a line torn by a crash does not damage the next
one. Unreadable lines, torn or of another version, are ignored.
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

from pipeline.core.frozen import Frozen

FILE = "history.jsonl"
COUNTED = 5  # an estimate is the median of this many last durations
MAX_BYTES = 400_000  # about 2,000 lines; beyond, the older half is dropped


class Entry(Frozen):
    """One stage that ran to its end."""

    plan: str = ""  # name of the plan
    stage: str
    subject: str
    seconds: float
    created: str  # UTC, ISO 8601
    device: str = ""  # device of the target, if the stage has one


class History:
    """The durations of one store.

    A lost entry costs only an estimate, so a write error is ignored.
    """

    def __init__(self, root: Path) -> None:
        self._file = root / FILE

    def entries(self) -> tuple[Entry, ...]:
        """Return all readable entries, oldest first."""
        try:
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ()
        return tuple(_readable(lines))

    def estimate(self, stage: str, subject: str, plan: str = "") -> float | None:
        """Return the usual duration of this stage in seconds; None if it never ran.

        Runs of this plan are preferred, because other models take other times.
        """
        of_stage = [
            entry for entry in self.entries() if (entry.stage, entry.subject) == (stage, subject)
        ]
        entries = [entry for entry in of_stage if entry.plan == plan] or of_stage
        return median(entry.seconds for entry in entries[-COUNTED:]) if entries else None

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
        """Drop the older half. A line that another process appends meanwhile may be lost."""
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
