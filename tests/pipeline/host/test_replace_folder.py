"""While a folder is replaced, the old or the new one is there, whenever the process is killed."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.host.replace_folder import (
    Exchange,
    current_folder,
    exchange_names,
    locked,
    replace_folder,
)
from tests.builders.cli import environment
from tests.integration.kills import WORKS


def folder_of(place: Path, text: str) -> Path:
    place.mkdir()
    (place / "text").write_text(text)
    return place


def renames(first: Path, second: Path) -> bool:
    """A file system that cannot exchange names."""
    return False


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("exchange", [exchange_names, renames])
@pytest.mark.parametrize("left", ["nothing", "aside", "both", "new"])
def test_a_folder_is_replaced_whatever_was_left(
    tmp_path: Path,
    exchange: Exchange,
    left: str,
) -> None:
    if left in ("aside", "both"):
        folder_of(tmp_path / ".place.old", "old")
    if left in ("both", "new"):
        folder_of(tmp_path / "place", "later")
    replace_folder(folder_of(tmp_path / "work", "new"), tmp_path / "place", exchange)
    assert ((tmp_path / "place" / "text").read_text(), names(tmp_path)) == ("new", ["place"])


def test_two_names_are_exchanged_in_one_step_here(tmp_path: Path) -> None:
    """Where the file system cannot do that, the renames of the other tests are what is used."""
    first, second = folder_of(tmp_path / "a", "a"), folder_of(tmp_path / "b", "b")
    if not exchange_names(first, second):
        pytest.skip("this file system cannot exchange names")
    assert [(each / "text").read_text() for each in (first, second)] == ["b", "a"]
    with pytest.raises(OSError, match="No such file") as refused:
        exchange_names(tmp_path / "nowhere", first)
    assert refused.value.errno == errno.ENOENT


@pytest.mark.parametrize("exchange", [exchange_names, renames])
def test_a_file_in_the_folders_place_is_left_alone(tmp_path: Path, exchange: Exchange) -> None:
    (tmp_path / "place").write_text("mine")
    with pytest.raises(NotADirectoryError):
        replace_folder(folder_of(tmp_path / "work", "new"), tmp_path / "place", exchange)
    assert (tmp_path / "place").read_text() == "mine"


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path: Path) -> None:
    folder_of(tmp_path / "place", "old")
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "nowhere", tmp_path / "place", renames)
    assert ((tmp_path / "place" / "text").read_text(), names(tmp_path)) == ("old", ["place"])


def test_a_reader_finds_the_old_folder_between_two_renames(tmp_path: Path) -> None:
    place = tmp_path / "place"
    assert current_folder(place) == place
    aside = folder_of(tmp_path / ".place.old", "old")
    assert current_folder(place) == aside
    folder_of(place, "new")
    assert current_folder(place) == place


DIES = """
import os, sys
from pathlib import Path
from pipeline.host.replace_folder import locked
with locked(Path(sys.argv[1])):
    os.kill(os.getpid(), 9)
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


def test_the_lock_of_a_folder_is_released_with_its_process(tmp_path: Path) -> None:
    assert run("-c", DIES, tmp_path).returncode == -9
    with locked(tmp_path) as is_alone:
        assert is_alone


TRIES = [*((work, "kill") for work in WORKS)]
TRIES += [("deliver-renames", "exception"), ("publish-renames", "exception")]


@pytest.mark.slow
@pytest.mark.parametrize(("work", "how"), TRIES)
def test_work_that_ends_at_any_step_leaves_the_old_or_the_new(work: str, how: str) -> None:
    result = run("-m", "tests.integration.kills", work, how)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 5
