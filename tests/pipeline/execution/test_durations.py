"""Past times of stages: the estimate, and a file that many processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.execution.durations import COUNTED, FILE, MAX_BYTES, History


def test_the_estimate_is_the_median_of_the_last_runs(tmp_path: Path) -> None:
    history = History(tmp_path)
    assert history.estimate("build", "fp16") is None
    for seconds in (900.0, 68.0, 70.0, 66.0, 1.0, 67.0):
        history.add("build", "fp16", seconds)
    history.add("build", "int8", 5.0)
    assert COUNTED == 5
    assert history.estimate("build", "fp16") == 67.0
    assert history.estimate("build", "int8") == 5.0
    assert history.estimate("simplify", "fp16") is None


def test_runs_of_the_same_plan_are_preferred(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.add("build", "fp16", 24.0, plan="resnet18")
    history.add("build", "fp16", 125.0, plan="encoder", device="NVIDIA H200")
    assert history.estimate("build", "fp16", plan="resnet18") == 24.0
    assert history.estimate("build", "fp16", plan="encoder") == 125.0
    assert history.estimate("build", "fp16", plan="new") == pytest.approx(74.5)
    assert [entry.device for entry in history.entries()] == ["", "NVIDIA H200"]


def test_torn_and_foreign_lines_count_for_nothing(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.add("build", "x", 2.0)
    with (tmp_path / FILE).open("ab") as file:
        file.write(
            b'\n{"stage": "build", "future": 1}\n\xff\xfe\nnull\n[1]\n{"stage": "bui'
        )  # the last as a crash leaves it
    history.add("build", "x", 4.0)
    assert [entry.seconds for entry in history.entries()] == [2.0, 4.0]
    assert history.estimate("build", "x") == 3.0


def test_many_processes_append_whole_lines(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from pipeline.execution.durations import History\nfor _ in"
        " range(200): History(pathlib.Path(sys.argv[1])).add('build', sys.argv[2] * 50, 1.0)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name]) for name in "abc"
    ]
    assert [child.wait() for child in children] == [0, 0, 0]
    subjects = [entry.subject for entry in History(tmp_path).entries()]
    assert {subject: subjects.count(subject) for subject in set(subjects)} == {
        name * 50: 200 for name in "abc"
    }


def test_the_file_stays_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    history = History(tmp_path)
    for number in range(60):
        history.add("build", "x" * 10_000, float(number))
    assert (tmp_path / FILE).stat().st_size <= MAX_BYTES
    durations = [entry.seconds for entry in history.entries()]
    assert durations == [float(number) for number in range(60 - len(durations), 60)]
    assert len(durations) >= 20


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    history = History(tmp_path / "missing")
    history.add("build", "x", 1.0)
    assert history.entries() == ()
