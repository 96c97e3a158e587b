"""End a piece of work at every step in the file system: `python -m tests.integration.kills WORK
HOW`.

Each try is a process of its own, in which an audit hook (PEP 578) sees the steps before they are
taken: the first try ends at the first step, the second at the second, until one comes to its end.
After each, `check` looks at what is there; then the work is done again, undisturbed, and
`check_done` looks. Prints how many steps were tried.

A script, because pytest's process has threads, and a process with threads should not fork.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.artifacts import Engine
from pipeline.execution.store import Key, Store
from pipeline.host.replace_folder import Exchange, exchange_names
from pipeline.report.bundle import deliver_engine, load_engine, withdraw_engine
from pipeline.report.files import load_report
from service.jobs.publish import publish
from service.storage.layout import Folders
from tests.builders.report import sample_report
from tests.service.builders.jobs import write_out

TEMPLATES: list[tempfile.TemporaryDirectory[str]] = []
STEPS = (
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.remove",
    "os.truncate",
    "shutil.copyfile",
    "shutil.rmtree",
    "ctypes.dlsym",  # of renameat2: the step before the names are exchanged
)
WRITES = os.O_WRONLY | os.O_RDWR


class Ended(BaseException):
    """As KeyboardInterrupt, but nobody else's."""


@dataclass(frozen=True)
class Work:
    prepare: Callable[[Path], None]
    do: Callable[[Path], None]
    check: Callable[[Path], None]
    check_done: Callable[[Path], None]


def try_every_step(work: Work, kill: bool) -> int:
    step = 0
    while True:
        step += 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            work.prepare(folder)
            finished = _ended_at(step, functools.partial(work.do, folder), kill)
            if not finished:
                work.check(folder)
                work.prepare(folder)
                work.do(folder)
            work.check_done(folder)
            if finished:
                return step - 1


def _ended_at(step: int, do: Callable[[], None], kill: bool) -> bool:
    """Do it in a process that ends at this step; return whether it came to its end before."""
    pid = os.fork()
    if pid == 0:
        left = step

        def look(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in STEPS or (event == "open" and int(str(arguments[2])) & WRITES):
                left -= 1
                if left == 0 and kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                if left == 0:
                    raise Ended

        sys.addaudithook(look)
        try:
            do()
        except Ended:
            os._exit(1)
        except BaseException as error:  # noqa: BLE001  libraries turn it into theirs
            os._exit(1 if left <= 0 else _printed(error))
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 1, -signal.SIGKILL), status
    return status == 0


def _printed(error: BaseException) -> int:
    print(repr(error), file=sys.stderr, flush=True)
    return 2


# -- the works ----------------------------------------------------------------------------------


@functools.cache
def some_engine() -> Engine:
    return next(each.engine for each in sample_report().candidates if each.engine is not None)


def engine_of(store: Path, content: bytes) -> Engine:
    winner = some_engine()

    def make(folder: Path) -> Engine:
        for name in (winner.file, "weights.bin"):
            (folder / name).write_bytes(content)
        return winner.model_copy(update={"root": folder, "digest": content.decode()})

    return Store(store).get(Key("build", 1, (content.decode(),)), Engine, make).value


def exchange_of(exchanges: bool) -> Exchange:
    return exchange_names if exchanges else lambda first, second: False


def delivery(exchanges: bool) -> Work:
    def prepare(folder: Path) -> None:
        for content in (b"old", b"new"):
            engine_of(folder / "store", content)
        if not (folder / "out").exists():
            (folder / "out").mkdir()
            deliver_engine(engine_of(folder / "store", b"old"), folder / "out" / "engine")

    def do(folder: Path) -> None:
        engine = engine_of(folder / "store", b"new")
        deliver_engine(engine, folder / "out" / "engine", exchange_of(exchanges))

    def check(folder: Path) -> None:
        assert load_engine(folder / "out").digest in ("old", "new")

    def check_done(folder: Path) -> None:
        assert load_engine(folder / "out").digest == "new"
        assert [path.name for path in (folder / "out").iterdir()] == ["engine"]

    return Work(prepare, do, check, check_done)


def withdrawal() -> Work:
    delivered = delivery(exchanges=True)

    def check(folder: Path) -> None:
        if (folder / "out" / "engine").exists():
            load_engine(folder / "out")

    def check_done(folder: Path) -> None:
        assert not (folder / "out" / "engine").exists()

    def prepare(folder: Path) -> None:
        if not (folder / "out" / "engine").exists():
            shutil.rmtree(folder / "out", ignore_errors=True)
        delivered.prepare(folder)

    def do(folder: Path) -> None:
        withdraw_engine(folder / "out" / "engine")

    return Work(prepare, do, check, check_done)


@functools.cache
def template() -> Path:
    """A report as a job leaves it; removed at the end of this process."""
    folder = tempfile.TemporaryDirectory()
    TEMPLATES.append(folder)
    write_out(Path(folder.name) / "out", Path(folder.name) / "store")
    return Path(folder.name) / "out"


def publication(exchanges: bool) -> Work:
    """The place holds an earlier attempt's report, named `old` in report.md."""

    def prepare(folder: Path) -> None:
        place = folder / "reports" / "1"
        if not place.parent.exists():
            shutil.copytree(template(), place)
            (place / "report.md").write_text("old")
        shutil.rmtree(folder / "jobs", ignore_errors=True)
        shutil.copytree(template(), folder / "jobs" / "1" / "out")
        (folder / "jobs" / "1" / "out" / "report.md").write_text("new")

    def do(folder: Path) -> None:
        out, place = folder / "jobs" / "1" / "out", folder / "reports" / "1"
        publish(out, place, Folders(folder), exchange_of(exchanges))

    def version_in(place: Path) -> str:
        load_engine(place)
        assert load_report(place).verdict == "accepted"
        return (place / "report.md").read_text()

    def check(folder: Path) -> None:
        place = folder / "reports" / "1"
        if exchanges or place.exists():
            assert version_in(place) in ("old", "new")
        else:
            assert version_in(folder / "reports" / ".1.old") == "old"

    def check_done(folder: Path) -> None:
        assert version_in(folder / "reports" / "1") == "new"
        assert [path.name for path in (folder / "reports").iterdir()] == ["1"]

    return Work(prepare, do, check, check_done)


WORKS = {
    "deliver": delivery(exchanges=True),
    "deliver-renames": delivery(exchanges=False),
    "withdraw": withdrawal(),
    "publish": publication(exchanges=True),
    "publish-renames": publication(exchanges=False),
}


if __name__ == "__main__":
    print(try_every_step(WORKS[sys.argv[1]], kill=sys.argv[2] == "kill"))
