"""The name under which Crucible is installed is its own, and the same everywhere."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import distribution
from tests.builders.cli import crucible

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PLACES = (
    ".ci",
    "benchmarks",
    "calibration_data",
    "configs",
    "docker",
    "docs",
    "pipeline",
    "service",
    "tests",
)
SUFFIXES = ("", ".cpu", ".gpu", ".html", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml")
FOREIGN = re.compile("pip install " + r"['\"]?crucible|['\"`]" + r"crucible\[")
"""The package index's `crucible` is somebody else's, and ours is on no index."""


def text_files() -> Iterator[Path]:
    yield from (file for file in ROOT.iterdir() if file.is_file() and file.suffix in SUFFIXES)
    for place in PLACES:
        inside = (ROOT / place).rglob("*")
        yield from (file for file in inside if file.is_file() and file.suffix in SUFFIXES)


def test_no_file_names_the_package_of_another_project() -> None:
    lines = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in text_files()
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        if FOREIGN.search(line)
    ]
    assert lines == []


def test_the_installed_name_is_that_of_the_project() -> None:
    assert PROJECT["name"] == distribution.DISTRIBUTION != "crucible"
    installed = importlib.metadata.version(distribution.DISTRIBUTION)
    assert installed == distribution.version() == PROJECT["version"]


def test_every_extra_that_a_message_names_exists() -> None:
    files = [*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "service").rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    named = set(re.findall(r"""install_command\(["'](\w+)["']\)""", text))
    assert {"modelopt", "openvino", "otel", "rtx", "tensorrt", "torch"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


def test_the_command_works_in_a_checkout() -> None:
    command = distribution.install_command("torch", "openvino")
    assert command == "pip install -e '.[torch,openvino]' in the checkout of Crucible"


def test_the_command_line_says_its_version() -> None:
    result = crucible("--version")
    assert (result.code, result.err) == (0, "")
    assert result.out.strip() == distribution.version_line()
    name = distribution.DISTRIBUTION
    assert result.out.startswith(f"crucible {PROJECT['version']} (distribution {name}")


def git(folder: Path, *words: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", *settings, *words]
    return subprocess.check_output(command, cwd=folder, text=True).strip()


def test_the_revision_is_that_of_the_checkout(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert distribution.checkout_revision(tmp_path) == ""  # no commit yet
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    assert distribution.checkout_revision(tmp_path) == git(tmp_path, "rev-parse", "HEAD")


def test_a_folder_inside_a_foreign_checkout_has_no_revision(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    (tmp_path / "site-packages").mkdir()
    assert distribution.checkout_revision(tmp_path / "site-packages") == ""


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            {"url": "https://example.org/x", "vcs_info": {"vcs": "git", "commit_id": "0123abcd"}},
            "0123abcd",
        ),
        ({"url": "file:///x"}, ""),
    ],
)
def test_an_install_from_git_says_its_commit(
    record: dict[str, object],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = tmp_path / "crucible_compiler-9.dist-info"
    info.mkdir()
    facts = f"Metadata-Version: 2.1\nName: {distribution.DISTRIBUTION}\nVersion: 9\n"
    (info / "METADATA").write_text(facts)
    (info / "direct_url.json").write_text(json.dumps(record))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert (distribution.version(), distribution.installed_revision()) == ("9", expected)


def test_without_an_install_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert (distribution.version(), distribution.installed_revision()) == ("absent", "")
