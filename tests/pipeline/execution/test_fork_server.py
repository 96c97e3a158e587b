"""The server that children are forked from: what they share with it, and what they do not."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline.core.progress import Progress
from pipeline.errors import ChildDied, ChildStopped
from pipeline.execution import child_process, fork_server
from pipeline.execution.child_process import Channel, Child, call_in_child
from pipeline.execution.fork_server import stop_server
from tests.builders.cli import FEATURES, answers, write_model

ROOT = Path(__file__).parents[3]
WITHIN_S = 60.0  # for what takes less than a second on a quiet host


# -- functions of children ---------------------------------------------------


def parent(progress: Progress) -> int:
    return os.getppid()


def tell_parent(channel: Channel) -> None:
    channel.send(os.getppid())


def variable(name: str, progress: Progress) -> tuple[str | None, int]:
    return os.environ.get(name), os.getppid()


def folder(progress: Progress) -> str:
    return str(Path.cwd())


def place(progress: Progress) -> tuple[int, int, list[int]]:
    """Process, session and open sockets."""
    sockets = []
    for link in Path("/proc/self/fd").iterdir():
        if link.is_symlink() and str(link.readlink()).startswith("socket:"):
            sockets.append(int(link.name))
    return os.getpid(), os.getsid(0), sockets


def draw(progress: Progress) -> float:
    return float(np.random.random())


def multiply(size: int, progress: Progress) -> float:
    """With the threads of OpenBLAS."""
    return float((np.ones((size, size)) @ np.ones((size, size)))[0, 0])


def classify(model: Path, x: np.ndarray, progress: Progress) -> np.ndarray:
    """With the threads of ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    labels: np.ndarray = session.run(None, {"x": x})[0].argmax(axis=1)
    return labels


def wait_for(file: Path, progress: Progress) -> int:
    progress(None, "waits")
    while not file.exists():
        time.sleep(0.01)
    return os.getppid()


def parents_of_two(progress: Progress) -> tuple[int, int]:
    return os.getppid(), call_in_child(parent, name="inner")


def hang_below(pids: Path, progress: Progress) -> None:
    call_in_child(write_and_hang, pids, name="inner")


def write_and_hang(pids: Path, progress: Progress) -> None:
    pids.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
    pids.with_suffix(".new").rename(pids)
    time.sleep(600)


def leave(progress: Progress) -> None:
    sys.exit(3)


# -- what they share ---------------------------------------------------------


def test_calls_are_forked_from_one_server_and_conversations_are_not() -> None:
    first, second = (call_in_child(parent, name="call") for _ in range(2))
    assert first == second != os.getpid()
    with Child(tell_parent, name="conversation") as child:
        assert child.receive(WITHIN_S) == os.getpid()


def test_a_child_asks_the_server_that_it_was_forked_from() -> None:
    outer, inner = call_in_child(parents_of_two, name="outer")
    assert outer == inner != os.getpid()


def test_children_have_a_session_of_their_own_and_no_socket_of_another() -> None:
    pid, session, sockets = call_in_child(place, name="place")
    assert session == pid
    assert len(sockets) == 2, "one to the parent, and one to the server"


def test_children_draw_different_random_numbers() -> None:
    assert call_in_child(draw, name="draw") != call_in_child(draw, name="draw")


def test_a_server_has_one_thread_when_it_forks() -> None:
    """Those of OpenBLAS have ended then, and only a child that multiplies starts them again."""
    server = [call_in_child(parent, name="call") for _ in range(2)][-1]
    assert psutil.Process(server).num_threads() == 1


def test_threads_of_libraries_work_in_children(tmp_path: Path) -> None:
    write_model(tmp_path / "model.onnx")
    x = np.random.default_rng(0).normal(0, 1, (500, FEATURES)).astype(np.float32)
    for _ in range(2):
        assert call_in_child(multiply, 700, name="multiply") == 700.0
        labels = call_in_child(classify, tmp_path / "model.onnx", x, name="classify")
        assert (labels == answers(x)).all()


# -- what a child has of its parent -------------------------------------------


def test_a_variable_of_ours_reaches_a_child_of_the_same_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    for value in ("one", "other", None):
        if value is None:
            monkeypatch.delenv("CRUCIBLE_TEST")
        else:
            monkeypatch.setenv("CRUCIBLE_TEST", value)
        seen.append(call_in_child(variable, "CRUCIBLE_TEST", name="variable"))
    assert [value for value, _ in seen] == ["one", "other", None]
    assert len({server for _, server in seen}) == 1


def test_any_other_variable_takes_a_server_that_started_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = call_in_child(variable, "OMP_NUM_THREADS", name="variable")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    after = call_in_child(variable, "OMP_NUM_THREADS", name="variable")
    assert after[0] == "3"
    assert before[1] != after[1]
    assert not psutil.pid_exists(before[1])


def test_a_child_starts_in_the_folder_of_its_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert call_in_child(folder, name="folder") == str(Path.cwd())
    monkeypatch.chdir(tmp_path)
    assert call_in_child(folder, name="folder") == str(tmp_path)


def test_another_environment_takes_a_fresh_interpreter_while_children_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = _started(pool, tmp_path / "enough")
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        try:
            fresh = call_in_child(variable, "OMP_NUM_THREADS", name="variable")
        finally:
            (tmp_path / "enough").touch()
        assert fresh == ("3", os.getpid())
        assert waiting.result(WITHIN_S) != os.getpid()


def _started(pool: ThreadPoolExecutor, file: Path) -> Future[int]:
    """A child that runs, and ends when the file is there."""
    runs = threading.Event()

    def progress(fraction: float | None, text: str, figures: object = None) -> None:
        if text:
            runs.set()

    future = pool.submit(call_in_child, wait_for, file, name="waiting", progress=progress)
    assert runs.wait(WITHIN_S)
    return future


# -- ends --------------------------------------------------------------------


def test_children_die_with_a_server_that_is_killed_and_the_next_one_has_another(
    tmp_path: Path,
) -> None:
    server = call_in_child(parent, name="call")
    with ThreadPoolExecutor(1) as pool:
        waiting = _started(pool, tmp_path / "never")
        os.kill(server, signal.SIGKILL)
        with pytest.raises(ChildDied, match="SIGKILL"):
            waiting.result(WITHIN_S)
    assert call_in_child(parent, name="call") == os.getpid(), "while the old one is cleared away"
    assert call_in_child(parent, name="call") not in (os.getpid(), server)


def test_a_server_that_never_answers_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_server()
    monkeypatch.setattr(fork_server, "MODULE", "pipeline.execution.no_such_module")
    monkeypatch.setattr(fork_server, "_is_useless", False)
    assert [call_in_child(parent, name="call") for _ in range(2)] == [os.getpid()] * 2
    assert fork_server._is_useless


def test_a_process_without_descriptors_leaves_the_other_children_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_pipe(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with ThreadPoolExecutor(1) as pool:
        waiting = _started(pool, tmp_path / "enough")
        monkeypatch.setattr(fork_server, "Pipe", no_pipe)
        assert call_in_child(parent, name="call") == os.getpid(), "a fresh interpreter"
        (tmp_path / "enough").touch()
        assert waiting.result(WITHIN_S) != os.getpid()


NO_FORK = """
import os
from pathlib import Path
fork = os.fork
def refuse():
    if Path({flag!r}).exists():
        raise BlockingIOError("Resource temporarily unavailable")
    return fork()
os.fork = refuse
"""


def test_a_host_without_processes_leaves_the_other_children_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    (tmp_path / "sitecustomize.py").write_text(NO_FORK.format(flag=str(flag)))
    monkeypatch.setattr(child_process, "IMPORT_PATH", f"{tmp_path}:{child_process.IMPORT_PATH}")
    stop_server()
    with ThreadPoolExecutor(1) as pool:
        waiting = _started(pool, tmp_path / "enough")
        flag.touch()
        assert call_in_child(parent, name="call") == os.getpid(), "a fresh interpreter"
        flag.unlink()
        server = call_in_child(parent, name="call")
        (tmp_path / "enough").touch()
        assert waiting.result(WITHIN_S) == server != os.getpid()
    stop_server()


def test_a_child_that_leaves_ends_with_its_code() -> None:
    with pytest.raises(ChildDied, match="ended with exit code 3"):
        call_in_child(leave, name="leaves")


def test_a_stop_reaches_a_child_that_is_starting(tmp_path: Path) -> None:
    server = psutil.Process(call_in_child(parent, name="call"))
    server.suspend()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(call_in_child, wait_for, tmp_path / "never", name="starting")
        assert _until(lambda: fork_server._server is not None and not fork_server._server.is_idle)
        child_process.stop_children()
        server.resume()
        with pytest.raises(ChildStopped):
            starting.result(WITHIN_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_child_has_started_ends_with_it(number: signal.Signals, tmp_path: Path) -> None:
    def kill_outer(pids: Path) -> int:
        inner, server = _read(pids)
        (outer,) = (child.pid for child in psutil.Process(server).children() if child.pid != inner)
        os.kill(outer, number)
        return inner

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call_in_child, hang_below, tmp_path / "pids", name="outer")
        inner = kill_outer(tmp_path / "pids")
        with pytest.raises(ChildDied, match=number.name):
            waiting.result(WITHIN_S)
    assert _until(lambda: not psutil.pid_exists(inner))


SLOW = """
import sys, time
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "polygraphy.comparator":
            time.sleep(600)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("imports", [False, True], ids=["idle", "while the server imports"])
def test_all_end_with_a_parent_killed_by_sigkill(tmp_path: Path, imports: bool) -> None:
    if imports:
        (tmp_path / "sitecustomize.py").write_text(SLOW)
    code = "import sys; from pathlib import Path\n"
    code += "from pipeline.execution.child_process import call_in_child\n"
    code += "from tests.pipeline.execution.test_fork_server import hang_below, write_and_hang\n"
    code += f"call_in_child({'write_and_hang' if imports else 'hang_below'}, Path(sys.argv[1]),"
    code += " name='outer')"
    command = [sys.executable, "-c", code, str(tmp_path / "pids")]
    path = f"{tmp_path}:{ROOT}"
    killed = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    inner, server = _read(tmp_path / "pids")
    everything = [server, *(child.pid for child in psutil.Process(server).children())]
    assert inner in everything
    assert len(everything) == (2 if imports else 3)
    killed.kill()
    killed.wait()
    assert _until(lambda: not any(psutil.pid_exists(pid) for pid in everything))


def test_a_server_ends_with_its_process() -> None:
    code = "from pipeline.execution.child_process import call_in_child\n"
    code += "from tests.pipeline.execution.test_fork_server import parent\n"
    code += "print(call_in_child(parent, name='call'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert _until(lambda: not psutil.pid_exists(int(done.stdout)))


def test_a_process_forked_from_ours_leaves_our_server_alone() -> None:
    server = call_in_child(parent, name="call")
    pid = os.fork()
    if pid == 0:
        stop_server()  # as at the end of a process
        os._exit(0)
    os.waitpid(pid, 0)
    assert call_in_child(parent, name="call") == server


def _read(pids: Path) -> tuple[int, int]:
    assert _until(pids.exists)
    inner, server = map(int, pids.read_text().split())
    return inner, server


def _until(holds: Callable[[], bool]) -> bool:
    """Wait until something holds. Returns False after a minute."""
    end = time.monotonic() + WITHIN_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
