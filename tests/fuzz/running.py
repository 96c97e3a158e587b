"""Run one target: make cases, read them, count, and measure memory.

A case is decided by the target, the seed and its number alone. The case that runs is always in a
file, so that a crash or an endless loop leaves it behind, too.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

import psutil

from tests.fuzz.mutation import Make

WINDOWS = 6  # of a run; the first one warms up caches and the allocator
# A case of a shorter window would have to leak more than caches and the allocator grow by.
MIN_WINDOW = 1000
MAX_GROWTH_BYTES = 512  # of a case: half of the smallest leak that must be found
MAX_FAILURES = 20  # of a target, each at another place

Read = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Target:
    """A parser, and what it may say to a stranger's bytes."""

    name: str
    make: Make
    open: Callable[[Path], AbstractContextManager[Read]]  # the reader, with a folder of its own
    refusals: tuple[type[BaseException], ...]
    weight: int = 1  # how many cases it gets beside the others
    settles: int = 0  # cases until its caches are full: memory is judged after them only


@dataclass(slots=True)
class Outcome:
    """What the cases of one target gave."""

    target: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    peak_growth_bytes: int = 0  # the largest resident size, over that after the warm-up
    # of a case, after the warm-up: a leak grows in every window, so one of the smallest is taken;
    # None: too few cases
    growth_bytes: float | None = None
    failures: dict[str, Path] = field(default_factory=dict)  # the case's file, by what went wrong

    @property
    def leaks(self) -> bool:
        return self.growth_bytes is not None and self.growth_bytes > MAX_GROWTH_BYTES


def reader(read: Read) -> Callable[[Path], AbstractContextManager[Read]]:
    """The `open` of a parser without any state."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Read]:
        yield read

    return opened


def case_of(target: Target, seed: int, number: int) -> bytes:
    """Make a case again."""
    return target.make(Random(f"{target.name}:{seed}:{number}"))


def run(
    target: Target, seed: int, cases: int, folder: Path, end_s: float = float("inf")
) -> Outcome:
    """Read `cases` cases, or fewer if `time.monotonic()` reaches `end_s`."""
    outcome, begin_s = Outcome(target.name), time.monotonic()
    windows = list[tuple[int, int]]()  # the resident size and the cases at the end of each
    with (
        tempfile.TemporaryDirectory(prefix="crucible-fuzz-") as scratch,
        _frozen(),
        _kept(folder / f"{target.name}.current") as keep,
        target.open(Path(scratch)) as read,
    ):
        for number in range(cases):
            case = case_of(target, seed, number)
            keep(case)
            if problem := _read(target, read, case, outcome):
                _report(problem, folder / f"{target.name}-{seed}-{number}", case, outcome)
            outcome.cases += 1
            now_s = time.monotonic()
            time_share = (now_s - begin_s) / (end_s - begin_s) if now_s < end_s else 1.0
            done = max(outcome.cases / cases, time_share)
            if done * WINDOWS >= len(windows) + 1:
                windows.append((resident_bytes(), outcome.cases))
            if done >= 1 or len(outcome.failures) >= MAX_FAILURES:
                break
    settled = [window for window in windows if window[1] >= target.settles]
    steps = [step for step in pairwise(settled) if step[1][1] - step[0][1] >= MIN_WINDOW]
    if growths := sorted((new - old) / (end - begin) for (old, begin), (new, end) in steps):
        outcome.growth_bytes = growths[len(growths) // 4]
        outcome.peak_growth_bytes = max(settled)[0] - settled[0][0]
    outcome.seconds = time.monotonic() - begin_s
    return outcome


@contextmanager
def _frozen() -> Iterator[None]:
    """Spare the garbage collector what was there before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def resident_bytes() -> int:
    """The resident size without what is free: a leak could hide there."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    resident: int = psutil.Process().memory_info().rss
    return resident


def _read(target: Target, read: Read, case: bytes, outcome: Outcome) -> BaseException | None:
    """Count what a case gives; return the error that no case may cause."""
    try:
        read(case)
    except target.refusals:
        outcome.refused += 1
    except Exception as error:  # noqa: BLE001  that is what is searched for
        return error
    else:
        outcome.accepted += 1
    return None


def _report(error: BaseException, file: Path, case: bytes, outcome: Outcome) -> None:
    """Keep a case, once for each place that raises."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    problem = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"[:500]
    place = problem.partition(": ")[0]
    if not any(known.startswith(place) for known in outcome.failures):
        file.write_bytes(case)
        outcome.failures[problem] = file
        traceback.print_exception(error)


@contextmanager
def _kept(file: Path) -> Iterator[Callable[[bytes], None]]:
    """Keep the newest case in a file. It is removed if the run ends by itself."""
    with file.open("wb", buffering=0) as stream:

        def keep(case: bytes) -> None:
            stream.truncate(len(case))
            stream.seek(0)
            stream.write(case)

        yield keep
    file.unlink()
