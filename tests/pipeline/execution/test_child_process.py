"""Children: values, errors, deaths, deadlines, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from pipeline.core.progress import Progress
from pipeline.errors import ChildDied, ChildStopped, DataError, DiskFull, InternalError
from pipeline.execution import child_process as process
from pipeline.execution.child_process import Channel, Child, TimeLimit, call_in_child, stop_children
from tests.pipeline.execution.figures import accuracy, candidate, latency


def double(number: int, progress: Progress) -> int:
    print("noise on stdout")
    progress(0.5, "half way")
    return 2 * number


def refuse(progress: Progress) -> None:
    raise DataError("expected good data, got bad", "send good data")


def stumble(progress: Progress) -> None:
    raise KeyError("a bug")


def fill_disk(progress: Progress) -> None:
    raise OSError(28, "No space left on device", "/somewhere/file")


def die(number: int, progress: Progress) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def hang(progress: Progress) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def tell_and_hang(progress: Progress) -> None:
    progress(None, "hangs")
    time.sleep(60)


def start_sleeper(pid_file: Path, progress: Progress) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    pid_file.write_text(str(sleeper.pid))
    time.sleep(60)


def echo(channel: Channel) -> None:
    while (payload := channel.receive()) is not None:
        channel.send(payload)


def work_silently(enough: Path, progress: Progress) -> str:
    """Silent after the first word until `enough` exists."""
    progress(0.5, "half way")
    while not enough.exists():
        time.sleep(0.02)
    return "done"


def test_the_last_progress_is_told_again_while_a_child_is_silent(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(process, "ALIVE_S", 0.2)
    events: list[tuple[float | None, str]] = []

    def hear(fraction: float | None, text: str, figures: object = None) -> None:
        events.append((fraction, text))
        if events.count((0.5, "half way")) == 3:
            (tmp_path / "enough").touch()

    assert call_in_child(work_silently, tmp_path / "enough", name="silent", progress=hear) == "done"
    assert set(events) <= {(None, ""), (0.5, "half way")}


def test_a_child_returns_its_value_and_reports_progress(tmp_path: Path) -> None:
    events: list[tuple[float | None, str]] = []
    log = tmp_path / "log"
    assert (
        call_in_child(
            double,
            21,
            name="double",
            log=log,
            progress=lambda f, t, figures=None: events.append((f, t)),
        )
        == 42
    )
    assert set(events) <= {(None, ""), (0.5, "half way")}  # the first while the child starts
    assert events[-1] == (0.5, "half way")
    assert "noise on stdout" in log.read_text()


def measure(progress: Progress) -> None:
    progress(0.5, "first runs", candidate("int8", accuracy(), latency()))
    progress(0.6, "more")


def test_figures_of_a_candidate_come_with_their_progress() -> None:
    events: list[tuple[str, object]] = []
    call_in_child(
        measure,
        name="measure",
        progress=lambda fraction, text, figures=None: events.append((text, figures)),
    )
    assert [event for event in events if event[0]] == [
        ("first runs", candidate("int8", accuracy(), latency())),
        ("more", None),
    ]


def test_a_users_folder_on_our_path_hides_no_module_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pipeline", "service", "tests"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "raise RuntimeError('the user has modules of this name')"
        )
    monkeypatch.syspath_prepend(tmp_path)
    assert call_in_child(double, 21, name="double") == 42


def test_our_errors_cross_the_boundary_whole() -> None:
    with pytest.raises(DataError) as error:
        call_in_child(refuse, name="refuse")
    assert error.value.next_step == "send good data"


def test_any_other_exception_is_our_bug_and_keeps_its_traceback() -> None:
    with pytest.raises(InternalError, match="KeyError") as error:
        call_in_child(stumble, name="stumble")
    assert "a bug" in error.value.__notes__[0]


def test_a_full_disk_is_named_with_the_file() -> None:
    with pytest.raises(DiskFull, match="/somewhere/file"):
        call_in_child(fill_disk, name="fill")


def test_a_dead_child_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(ChildDied, match=r"signal 11") as error:
        call_in_child(die, 11, name="die", log=tmp_path / "die.log")
    assert str(tmp_path / "die.log") in error.value.next_step


@pytest.mark.parametrize(
    ("number", "words", "advice"),
    [(signal.SIGSEGV, "SIGSEGV", "your own code"), (signal.SIGKILL, "SIGKILL", "more memory")],
)
def test_a_death_by_signal_is_named(number: int, words: str, advice: str) -> None:
    with pytest.raises(ChildDied, match=words) as error:
        call_in_child(die, int(number), name="die")
    assert advice in error.value.next_step
    assert error.value.may_pass is (number == signal.SIGKILL)


def test_a_deadline_kills_a_child_that_ignores_sigterm() -> None:
    limit = TimeLimit(1, "the test", "wait longer")
    with pytest.raises(ChildDied, match="the test took longer than its limit of 1 s") as error:
        call_in_child(hang, name="hang", limit=limit)
    assert error.value.next_step == "wait longer"


def test_stopping_a_child_stops_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with Child(start_sleeper, pid_file, name="parent", conversation=False):
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.02)
        assert psutil.pid_exists(int(pid_file.read_text()))
    assert _gone(int(pid_file.read_text()))


def test_another_thread_can_end_a_child_that_somebody_waits_for() -> None:
    """Whoever waits hears of the death; stopping it afterwards is harmless."""
    hangs = threading.Event()
    with (
        ThreadPoolExecutor(1) as pool,
        Child(tell_and_hang, name="ended", conversation=False) as child,
    ):
        waiting = pool.submit(
            child.result, None, lambda fraction, text, figures=None: hangs.set() if text else None
        )
        assert hangs.wait(60)
        child.end()
        with pytest.raises(ChildDied, match="SIGTERM"):
            waiting.result(60)
        child.end()
    assert _gone(child.pid)


def test_the_children_of_every_thread_are_stopped_and_whoever_waits_hears_of_it() -> None:
    count = 3
    barrier = threading.Barrier(count + 1)

    def wait(number: int) -> None:
        def progress(fraction: float | None, text: str, figures: object = None) -> None:
            if text:
                barrier.wait(60)

        call_in_child(tell_and_hang, name=f"child {number}", progress=progress)

    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(wait, number) for number in range(count)]
        barrier.wait(60)
        stop_children()
        for future in waiting:
            with pytest.raises(ChildStopped, match="was stopped"):
                future.result(60)
    stop_children()  # there is nobody left
    living = psutil.Process().children(recursive=True)
    assert [process for process in living if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_conversation_goes_both_ways() -> None:
    with Child(echo, name="echo") as child:
        child.send({"a": 1})
        assert child.receive(timeout_s=60) == {"a": 1}
        with pytest.raises(TimeoutError):
            child.receive(timeout_s=0.05)


def test_children_die_with_a_parent_killed_by_sigkill(tmp_path: Path) -> None:
    code = "from tests.pipeline.execution.test_child_process import hang\n"
    code += "from pipeline.execution.child_process import Child\n"
    code += (
        "child = Child(hang, name='x', conversation=False); print(child.pid, flush=True);"
        " child.result()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert _gone(pid)


def _gone(pid: int) -> bool:
    for _ in range(3000):  # a minute
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False
