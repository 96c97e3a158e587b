"""A benchmark in parts: each is measured by itself, and its result is kept at once."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import Row, publish
from pipeline.host.environment import environment
from pipeline.measurement.clock import monotonic

HOST = ("cpu", "cores", "gpus")
"""What two runs must have in common for one result file to hold both."""

Part = Callable[[], Sequence[Row]]
Targets = Callable[[Sequence[Row]], Mapping[str, bool]]


class LimitReached(BaseException):
    """The time is over. No Exception, since those are caught where one engine may fail."""


def measure_parts(
    name: str,
    parts: Mapping[str, Part],
    targets_of: Targets,
    into: Path,
    limit_s: float,
    run: Row,
    details: Mapping[str, list[Row]] | None = None,
) -> None:
    """Measure the parts in this order. After each one the result file holds all that is known: rows
    of other parts stay if they were measured on this host for the same `run`. `details` are further
    tables, by name, to whose rows the parts add.

    A part that fails keeps its earlier rows, and does not stop the next. All end after `limit_s`:
    the part that is measured then is given up, and the rest are left out. Exits with 1 if one has
    failed.
    """
    begin, missing, details = monotonic(), 0, details or {}
    earlier = earlier_document(name, into, run)
    known: list[Row] = list(earlier.get("rows", ()))
    for table, found in details.items():
        found += earlier.get(table, ())
    for part, measure in parts.items():
        print(f"== {part}", file=sys.stderr, flush=True)
        try:
            with ended_after(limit_s - (monotonic() - begin)):
                rows = measure()
            known = [*without(known, part), *({"part": part, **row} for row in rows)]
        # the edge of a part: the next must run
        except (Exception, LimitReached) as error:  # noqa: BLE001
            traceback.print_exc()
            if without(known, part) == known:
                known.append({"part": part, "note": f"failed: {type(error).__name__}: {error}"})
            missing += 1
        seconds = round(monotonic() - begin, 1)
        print(f"   {part}: done {seconds:g} s after the start", file=sys.stderr, flush=True)
        together = aligned(known)
        publish(name, together, targets_of(together), into, run, details)
    sys.exit(bool(missing))


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """LimitReached in the main thread if the block takes longer."""

    def end(signal_number: int, frame: object) -> None:
        raise LimitReached("the limit of the whole run was over")

    if seconds <= 0:
        end(0, None)
    before, begin = signal.signal(signal.SIGALRM, end), monotonic()
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # 0: no block is around this one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer_s:
            signal.setitimer(signal.ITIMER_REAL, max(outer_s - (monotonic() - begin), 0.001))


def earlier_document(name: str, into: Path, run: Row) -> Mapping[str, Any]:
    """The result file; empty unless it is of this host and of the same `run`."""
    file = into / f"{name}.json"
    if not file.is_file():
        return {}
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    here = environment().model_dump(mode="json")
    same_host = all(document["environment"][key] == here[key] for key in HOST)
    return document if same_host and document["run"] == run else {}


def without(rows: Iterable[Row], part: str) -> list[Row]:
    """The rows of all other parts."""
    return [row for row in rows if row["part"] != part]


def aligned(rows: Iterable[Row]) -> list[Row]:
    """The same rows, all with the columns of all."""
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    last = [column for column in columns if column != "note"] + ["note"]
    return [{column: row.get(column) for column in last} for row in rows]
