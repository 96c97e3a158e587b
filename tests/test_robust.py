"""Killed, interrupted, out of disk, two at once: the store stays whole and the next run finishes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures_cli import crucible, environment, write_task

STAGES = ("export", "simplify", "build", "reference", "validate", "calibrate", "convert", "benchmark")  # in the order of their first run


def start(plan: Path, home: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline.cli", "compile", str(plan), "--out", str(plan.parent / "out")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment({"CRUCIBLE_HOME": str(home)}))


def wait_for_stage(home: Path, stage: str, process: subprocess.Popen[str]) -> None:
    """Until the log of this stage is there: its child has been started."""
    while not list((home / "logs").glob(f"{stage}-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def finished(home: Path) -> set[str]:
    return {str(file.parent.relative_to(home)) for file in (home / "artifacts").rglob("artifact.json")}


@pytest.mark.slow
def test_ctrl_c_in_every_stage_ends_with_130_and_the_next_run_goes_on(tmp_path: Path) -> None:
    plan, home = write_task(tmp_path), tmp_path / "home"
    before: set[str] = set()
    for stage in STAGES:
        shutil.rmtree(home / "logs", ignore_errors=True)
        process = start(plan, home)
        wait_for_stage(home, stage, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130, f"{stage}: {err}"
        assert "run the same command to go on" in err
        assert list((home / "tmp").iterdir()) == []
        assert before <= finished(home)
        before = finished(home)
        assert not (tmp_path / "out").exists()
    last = crucible("compile", plan, env={"CRUCIBLE_HOME": str(home)}, cwd=tmp_path)
    assert last.summary["verdict"] == "accepted", last.err
    assert before <= finished(home)


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_a_store_from_which_the_next_run_finishes(tmp_path: Path) -> None:
    plan, home = write_task(tmp_path), tmp_path / "home"
    for delay in (0.7, 1.6, 2.9, 4.3):
        process = start(plan, home)
        time.sleep(delay)
        process.kill()
        process.communicate()
        for manifest in (home / "artifacts").rglob("artifact.json") if home.exists() else ():
            assert json.loads(manifest.read_text())["files"] is not None
    last = crucible("compile", plan, env={"CRUCIBLE_HOME": str(home)}, cwd=tmp_path)
    assert last.summary["verdict"] == "accepted", last.err
    assert list((home / "tmp").iterdir()) == []


def test_two_at_once_both_succeed_and_build_once(tmp_path: Path) -> None:
    plan, home = write_task(tmp_path), tmp_path / "home"
    both = [start(plan, home), start(plan, home)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert any("waiting for it" in err for _, err in outputs)
    exports = list((home / "artifacts" / "export").iterdir())
    assert len(exports) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    plan, home = write_task(tmp_path), tmp_path / "home"
    home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", home], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr}")
    try:
        done = crucible("compile", plan, env={"CRUCIBLE_HOME": str(home)}, cwd=tmp_path)
        assert done.code == 1, done.out + done.err
        assert "disk is full" in done.err
        assert "CRUCIBLE_HOME" in done.err
        assert list((home / "tmp").iterdir()) == []
        assert not (tmp_path / "crucible-out").exists()
    finally:
        subprocess.run(["umount", home], check=True)
