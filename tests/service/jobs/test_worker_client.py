"""What a child is given, and what the guardian makes of it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.execution.child_process import IMPORT_PATH
from service.jobs.worker_client import environment_for
from service.sandbox.process_tree import alive, kill_all, of_jobs, started_at
from service.storage.layout import MAX_LOG_BYTES, Folders, Work

SERVER = {
    "PATH": "/bin",
    "LC_ALL": "C",
    "HOME": "/root",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "CRUCIBLE_SERVICE_ADMIN_KEY_FILE": "/key",
    "CRUCIBLE_HOME": "/home",
    "PYTHONSTARTUP": "/x",
    "LD_PRELOAD": "/x.so",
    "TMPDIR": "/tmp",
}


def test_a_childs_environment_is_made_for_it() -> None:
    environment = environment_for("7", "cpu", Work(Path("/w")), SERVER)
    assert environment == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "HOME": "/w/home",
        "TMPDIR": "/w/tmp",
        "CRUCIBLE_HOME": "/w/home",
        "XDG_CACHE_HOME": "/w/home/cache",
        "PYTHONPATH": IMPORT_PATH,
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
        "USER": "crucible",
        "CRUCIBLE_JOB": "7",
    }


@pytest.mark.parametrize(
    ("device", "server", "ids"),
    [("cpu", "0", ""), ("gpu:1", None, "1"), ("gpu:1", "3, 5", "5"), ("gpu:0", "GPU-ab", "GPU-ab")],
)
def test_a_child_sees_its_device_only(device: str, server: str | None, ids: str) -> None:
    base = SERVER if server is None else {**SERVER, "CUDA_VISIBLE_DEVICES": server}
    assert environment_for("7", device, Work(Path("/w")), base)["CUDA_VISIBLE_DEVICES"] == ids


GUARDED = f"guarded{os.getpid()}"  # tests may run twice on one machine


def guarded(
    code: str, parent: int | None = None, file_bytes: int = 10**6
) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        "service.sandbox.guardian",
        str(parent or os.getpid()),
        str(file_bytes),
        sys.executable,
        "-c",
        code,
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "CRUCIBLE_JOB": GUARDED},
    )


def test_the_worker_is_restricted() -> None:
    says = f"""
import resource, os
print(open('/proc/self/status').read())
kinds = ("CORE", "NOFILE", "FSIZE", "AS")
print([resource.getrlimit(getattr(resource, "RLIMIT_" + kind)) for kind in kinds])
print(os.getsid(0) == os.getppid(), os.getsid(0) != {os.getsid(0)})
"""
    with guarded(says) as process:
        output, _ = process.communicate(timeout=60)
    assert re.search(r"NoNewPrivs:\s*1", output)
    assert "[(0, 0), (4096, 4096), (1000000, 1000000), (-1, -1)]" in output
    assert "True True" in output


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -signal.SIGABRT),
        ("pass", 0),
    ],
)
def test_the_guardian_ends_as_the_worker_did(code: str, status: int) -> None:
    with guarded(code) as process:
        assert process.wait(60) == status


@pytest.mark.parametrize("end", ["worker", "term", "kill"])
def test_nothing_outlives_the_guardian(end: str) -> None:
    """But where it is killed itself: then the worker dies, and the server looks for the rest."""
    leaves = (
        "import subprocess, time; subprocess.run(['sh', '-c', 'setsid sleep 600 &']);"
        " print('ready', flush=True); "
    )
    with guarded(leaves + ("" if end == "worker" else "time.sleep(600)")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if end != "worker":
            process.send_signal(signal.SIGTERM if end == "term" else signal.SIGKILL)
        assert process.wait(60) == {"worker": 0, "term": 143, "kill": -9}[end]
    if end == "kill":
        assert kill_all(lambda: of_jobs([GUARDED]))
    assert of_jobs([GUARDED]) == []


def test_a_guardian_whose_server_is_gone_starts_nothing() -> None:
    with guarded("print('started')", parent=1) as process:
        output, _ = process.communicate(timeout=60)
    assert (output, process.returncode) == ("", 1)


def test_a_command_that_is_not_there_is_an_exit_code() -> None:
    command = [
        sys.executable,
        "-m",
        "service.sandbox.guardian",
        str(os.getpid()),
        "1000000",
        "/no/such/program",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 127
    assert "cannot run '/no/such/program'" in result.stderr


def test_a_pid_that_was_used_again_is_another_process() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        started = started_at(process.pid)
        assert [each.pid for each in alive(process.pid, started)] == [process.pid]
        assert alive(process.pid, started - 100) == []
        process.kill()
        end = time.monotonic() + 60
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
        assert alive(process.pid, started) == []
    assert (alive(process.pid, started), started_at(process.pid)) == ([], 0.0)


def test_what_cannot_be_killed_is_said() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        still_there = psutil.Process(process.pid)
        assert not kill_all(lambda: [still_there], within_s=0.1)


def test_a_work_directory_keeps_its_store_between_attempts(tmp_path: Path) -> None:
    work = Folders(tmp_path).work("7")
    work.prepare()
    for folder in (work.home, work.temporary, work.out):
        folder.mkdir(exist_ok=True)
        (folder / "file").touch()
    work.log.touch()
    work.prepare()
    assert (work.home / "file").exists()
    assert list(work.temporary.iterdir()) == []
    assert not work.out.exists()
    work.empty()
    assert [path.name for path in work.root.iterdir()] == ["log"]
    work.shorten_log()
    assert work.log.read_bytes() == b""
    work.log.write_bytes(b"a" * 10 + b"b" * MAX_LOG_BYTES)
    work.shorten_log()
    assert work.log.read_bytes() == b"b" * MAX_LOG_BYTES
    Folders(tmp_path).remove("7")
    assert not work.root.exists()
