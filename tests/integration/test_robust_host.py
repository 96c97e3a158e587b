"""A host that fails: no space on its disk, no memory for a child, a clock that jumps. Each is
named, or does not matter.
"""

import contextlib
import datetime as dt
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.report.files import load_report
from tests.builders.cli import CANDIDATES, crucible, write_task
from tests.integration.robust import (
    assert_same,
    finish,
    forget_starts,
    needs_root,
    small_disk,
    small_memory,
    start,
    unfinished,
)

pytestmark = pytest.mark.timeout(1800)  # many compiles, on a host that may have more to do
FREE_BYTES = (4_096, 16_384, 49_152, 98_304, 163_840)  # a size of 0 would mean no limit


@needs_root
def test_a_disk_that_is_full_in_any_stage_is_named_and_the_next_run_goes_on(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, home, out = compiled[0] / "plan.yaml", tmp_path / "home", tmp_path / "out"
    failed: set[str] = set()
    with small_disk(home, "size=64k"):
        for free_bytes in FREE_BYTES:
            used = shutil.disk_usage(home).used
            subprocess.run(["mount", "-o", f"remount,size={used + free_bytes}", home], check=True)
            forget_starts(home)
            result = finish(start(plan, home, out))
            assert result.code == 1, result.out + result.err
            assert "host.disk_full" in result.err
            assert "CRUCIBLE_HOME" in result.err
            assert "bug" not in result.err
            assert list((home / "tmp").iterdir()) == []
            assert not out.exists()
            failed |= unfinished(home)
        assert len(failed) >= 3, failed
        subprocess.run(["mount", "-o", "remount,size=64m", home], check=True)
        result = finish(start(plan, home, out))
        assert result.code == 0, result.err
        assert_same(out, home, compiled)


@needs_root
def test_a_disk_without_room_for_a_folder_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "home", "nr_inodes=2"):
        result = crucible(
            "compile",
            write_task(tmp_path),
            env={"CRUCIBLE_HOME": str(tmp_path / "home")},
            cwd=tmp_path,
        )
    assert result.code == 1
    assert "host.disk_full" in result.err


@needs_root
def test_a_full_disk_under_the_results_is_named_and_earlier_results_stay(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, home = compiled
    with small_disk(tmp_path / "out", "size=4m"):
        shutil.copytree(folder / "out", tmp_path / "out", dirs_exist_ok=True)
        before = {
            file: file.read_bytes()
            for file in (tmp_path / "out").rglob("*")
            if file.is_file() and "figures" not in file.parts
        }
        subprocess.run(
            [
                "mount",
                "-o",
                f"remount,size={shutil.disk_usage(tmp_path / 'out').used}",
                tmp_path / "out",
            ],
            check=True,
        )
        result = crucible(
            "compile",
            folder / "plan.yaml",
            "--out",
            tmp_path / "out",
            env={"CRUCIBLE_HOME": str(home)},
        )
        assert result.code == 1, result.out + result.err
        assert "host.disk_full" in result.err
        assert {file: file.read_bytes() for file in before} == before
        assert load_report(tmp_path / "out").verdict == "unproven"


HOARD = """
import numpy as np

def hoard(graph):
    return graph if len([np.ones(1 << 20) for _ in range(1 << 14)]) else None  # 128 GiB
"""


@needs_root
def test_a_child_that_the_kernel_kills_for_memory_is_named_as_such(tmp_path: Path) -> None:
    plan = write_task(tmp_path, simplify={"surgery": "hoarder:hoard", "python_path": "."})
    (tmp_path / "hoarder.py").write_text(HOARD)
    with small_memory(600 << 20) as processes:
        join = f'echo $$ > {processes}; exec "$@"'
        result = finish(
            start(plan, tmp_path / "home", tmp_path / "out", prefix=("sh", "-c", join, "sh"))
        )
    assert result.code == 1, result.out + result.err
    assert "host.child_died" in result.err
    assert (
        "the child process for 'surgery' was killed by the kernel because memory ran out"
        in result.err
    )
    assert "free memory" in result.err
    assert list((tmp_path / "home" / "tmp").iterdir()) == []


JUMP_S = 24 * 3600.0  # of the wall clock, at least, with every second

# -- clocks ------------------------------------------------------------------


@pytest.fixture(scope="module")
def jumping_clock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the wall clock jumps by years with every second."""
    compiler, library = shutil.which("cc"), tmp_path_factory.mktemp("clock") / "jumping_clock.so"
    if not compiler:
        pytest.skip("needs a C compiler for the clock that jumps")
    source = Path(__file__).with_name("jumping_clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


@needs_root
def test_clocks_that_jump_change_nothing(tmp_path: Path, jumping_clock: dict[str, str]) -> None:
    """The wall clock jumps all the while; and the monotonic clock is not that of the run before, as
    after a move to another machine.
    """
    plan, home = write_task(tmp_path, candidates=CANDIDATES[:1]), tmp_path / "home"
    elsewhen = ("unshare", "--time", "--monotonic", "1000000000", "--boottime", "1000000000", "--")
    if subprocess.run([*elsewhen, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot make a time namespace")
    result = finish(start(plan, home, tmp_path / "out", prefix=elsewhen, **jumping_clock))
    assert result.code == 0, result.err
    report = load_report(tmp_path / "out")
    years = {dt.datetime.fromisoformat(step.created).year for step in report.steps}
    assert len(years) > 1, "the clock did not jump"
    assert 0 < sum(step.seconds for step in report.steps) < JUMP_S
    assert report.baseline is not None
    times = report.baseline.rows[0].end_to_end
    assert 0 < min(times.values_s) <= max(times.values_s) < JUMP_S
    assert all(candidate.benchmark for candidate in report.candidates)
    again = finish(start(plan, home, tmp_path / "again"))  # by the clocks of now
    assert again.code == 0, again.err
    assert all(step.reused for step in load_report(tmp_path / "again").steps)


WAIT = """
import sys, time
from pathlib import Path
from pipeline.core.artifacts import Artifact
from pipeline.execution.store import Key, Store

root = Path(sys.argv[1])

def make(folder):
    print("makes", flush=True)
    while not (root / "go").exists():
        time.sleep(0.05)
    (folder / "file").touch()
    return Artifact(root=folder, file="file")

store = Store(root, lambda text: print("waits", flush=True))
print(store.get(Key("wait", 1, ()), Artifact, make).reused)
"""


def test_a_wait_for_a_lock_goes_on_while_the_clock_jumps(
    tmp_path: Path, jumping_clock: dict[str, str]
) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **jumping_clock}
    messages = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            command = [sys.executable, "-c", WAIT, str(tmp_path)]
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
            )
            assert process.stdout is not None
            messages.append((process.stdout.readline().strip(), process.stdout))
        time.sleep(3)  # three jumps
        (tmp_path / "go").touch()
        assert [(first, rest.read().strip()) for first, rest in messages] == [
            ("makes", "False"),
            ("waits", "True"),
        ]
