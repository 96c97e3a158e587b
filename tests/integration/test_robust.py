"""Killed, interrupted, damaged, two at once: the store stays whole, and the next run comes to what
an undisturbed one came to.
"""

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.execution.store import MANIFEST
from pipeline.report.files import load_report
from tests.builders.sensitivity import write_broken_task
from tests.integration.robust import (
    assert_same,
    finish,
    forget_stage,
    start,
    still_running,
    unfinished,
    wait_for_stage,
)

pytestmark = pytest.mark.timeout(1800)  # many compiles, on a host that may have more to do
STAGES = (
    "export",
    "simplify",
    "build",
    "reference",
    "prove",
    "validate",
    "calibrate",
    "convert",
    "cover",
    "benchmark",
)  # as they first run
TRIES = 20  # to kill a compile in a stage of a few milliseconds, beside busy processes


def kill_in(stage: str, delay_s: float, plan: Path, home: Path, out: Path) -> set[str]:
    """SIGKILL a compile so long after a child for this stage was started; which stages that hit.

    Sooner, where the stage ends sooner: it may be faster now than when its time was taken.
    """
    forget_stage(home, stage)
    process = start(plan, home, out)
    wait_for_stage(home, stage, process)
    end = time.monotonic() + delay_s
    while time.monotonic() < end and stage in unfinished(home):
        time.sleep(0.005)
    process.kill()
    result = finish(process)
    assert result.code == -signal.SIGKILL, result
    return unfinished(home)


def kill_at_once(stage: str, plan: Path, home: Path, out: Path) -> set[str]:
    """SIGKILL a compile as soon as this stage runs. Again, if the stage has ended before."""
    hit: set[str] = set()
    for _ in range(TRIES):
        hit |= kill_in(stage, 0.0, plan, home, out)
        if stage in hit:
            break
    return hit


@pytest.mark.slow
def test_after_sigkill_at_twenty_random_moments_one_run_comes_to_the_same(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, home, out = compiled[0] / "plan.yaml", tmp_path / "home", tmp_path / "out"
    took_s = {
        step.stage: step.seconds for step in reversed(load_report(compiled[0] / "out").steps)
    }  # the first of each name
    moment = random.Random(6)
    hit: set[str] = set()
    for stage in STAGES:
        hit |= kill_at_once(stage, plan, home, out)
        hit |= kill_in(stage, moment.uniform(0, 0.7 * took_s[stage]), plan, home, out)
    assert hit == set(STAGES)
    assert not out.exists()
    result = finish(start(plan, home, out))
    assert result.summary["verdict"] == "unproven", result.err
    report = assert_same(out, home, compiled)
    assert [
        note.text for note in report.notes if note.stage == "store"
    ] == []  # a kill damages nothing that counts
    assert still_running(home) == []


@pytest.mark.slow
def test_after_sigkill_while_nodes_are_ranked_one_run_comes_to_the_same(tmp_path: Path) -> None:
    """The stage that only a rescue runs."""
    int8 = {"backend": "onnxruntime", "precision": "int8", "method": "minmax", "keep_fp32": "auto"}
    plan, undisturbed = (
        write_broken_task(tmp_path, "stretched", candidates=[int8], simplify={}),
        (tmp_path, tmp_path / "its-home"),
    )
    result = finish(start(plan, undisturbed[1], tmp_path / "out"))
    assert result.summary["verdict"] == "unproven", result.err
    expected = load_report(tmp_path / "out")
    took_s = next(step.seconds for step in expected.steps if step.stage == "rank")
    home, out, moment = tmp_path / "home", tmp_path / "other", random.Random(6)
    assert "rank" in kill_at_once("rank", plan, home, out)
    kill_in("rank", moment.uniform(0, 0.7 * took_s), plan, home, out)
    assert not out.exists()
    result = finish(start(plan, home, out))
    assert result.summary["verdict"] == "unproven", result.err
    report = assert_same(out, home, undisturbed)
    assert (
        report.candidates[1].recipe.keep_fp32
        == expected.candidates[1].recipe.keep_fp32
        == ("broken",)
    )
    assert still_running(home) == []


@pytest.mark.slow
def test_ctrl_c_in_every_stage_ends_with_130_and_leaves_what_was_finished(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, home, out = compiled[0] / "plan.yaml", tmp_path / "home", tmp_path / "out"
    before: set[Path] = set()
    for stage in STAGES:
        forget_stage(home, stage)
        before = {file for file in before if file.exists()}
        process = start(plan, home, out)
        wait_for_stage(home, stage, process)
        process.send_signal(signal.SIGINT)
        result = finish(process)
        assert result.code == 130, f"{stage}: {result.err}"
        assert "run the same command to continue" in result.err
        assert "  failed  " not in result.err
        assert list((home / "tmp").iterdir()) == []
        finished = set((home / "artifacts").rglob(MANIFEST))
        assert before <= finished
        before = finished
        assert not out.exists()
    assert {file.parts[-3] for file in before} == set(STAGES) - {"benchmark"}
    assert still_running(home) == []


def test_two_at_once_both_succeed_and_make_everything_once(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    plan, home, outs = (
        compiled[0] / "plan.yaml",
        tmp_path / "home",
        (tmp_path / "one", tmp_path / "other"),
    )
    both = [finish(process) for process in [start(plan, home, out) for out in outs]]
    assert [result.code for result in both] == [0, 0], both
    assert any("waiting for it" in result.err for result in both)
    one, other = (assert_same(out, home, compiled) for out in outs)
    assert [step.digest for step in one.steps] == [step.digest for step in other.steps]
    for mine, theirs in zip(one.steps, other.steps, strict=True):
        assert mine.reused != theirs.reused, mine


# -- damage ------------------------------------------------------------------


def flip(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change_a_number(file: Path) -> None:
    """JSON of the same form, in which one calibrated bound is another."""
    text = file.read_text()
    assert '"maximum": ' in text
    file.write_text(text.replace('"maximum": ', '"maximum": 1', 1))


def add_beside(file: Path) -> None:
    file.with_name("stray").write_bytes(b"")


DAMAGE: dict[tuple[str, str], Callable[[Path], None]] = {
    ("export", "model.onnx"): flip,
    ("simplify", "model.onnx"): Path.unlink,
    ("calibrate", MANIFEST): change_a_number,
    ("convert", "model.onnx"): add_beside,
    ("build", "model.onnx"): flip,
    ("reference", "*.npz"): cut_short,
    ("prove", MANIFEST): flip,
    ("validate", MANIFEST): cut_short,
    ("cover", MANIFEST): Path.unlink,
}


def test_damaged_artifacts_of_every_kind_are_found_made_again_and_said(
    compiled: tuple[Path, Path], tmp_path: Path
) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    shutil.copytree(compiled[1], home)
    damaged = set()
    for step in load_report(compiled[0] / "out").steps:
        for (stage, pattern), damage in DAMAGE.items():
            if step.stage == stage:
                damage(sorted((home / "artifacts" / stage / step.digest).rglob(pattern))[0])
                damaged.add(step.digest)
    table = next(iter((home / "artifacts" / "calibrate").rglob("table.json")))
    flip(table)
    result = finish(start(compiled[0] / "plan.yaml", home, out))
    assert result.code == 0, result.err
    report = assert_same(out, home, compiled)
    assert {step.digest for step in report.steps if not step.reused} == damaged
    messages = [note.text for note in report.notes if note.stage == "store"]
    assert len(messages) == len(damaged)
    for digest in damaged:
        assert any(f"{digest[:12]} was damaged and is made again" in text for text in messages)
