"""The home belongs to one user; logs are read as they are."""

import stat
from pathlib import Path

import pytest

from service.storage.layout import HOME_MODE, Work, secure_home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_home_is_private_and_the_folder_above_it_is_not_touched(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert secure_home(tmp_path / "home") == ""
    assert (mode(tmp_path / "home"), mode(tmp_path)) == (HOME_MODE, 0o755)


@pytest.mark.parametrize(("before", "changed"), [(0o755, "0755"), (0o2770, "2770"), (0o700, "")])
def test_an_open_home_is_closed(tmp_path: Path, before: int, changed: str) -> None:
    tmp_path.chmod(before)
    assert secure_home(tmp_path) == changed
    assert mode(tmp_path) == HOME_MODE


def test_the_home_of_another_user_is_left_as_it_is() -> None:
    with pytest.raises(PermissionError):
        secure_home(Path("/proc/self"))  # whose mode not even root may change


def test_the_end_of_a_log_is_read_but_not_through_a_link(tmp_path: Path) -> None:
    work = Work(tmp_path)
    assert work.read_log(100) == (b"", 0)
    work.log.write_bytes(b"0123456789")
    assert work.read_log(100) == (b"0123456789", 0)
    assert work.read_log(100, after=4) == (b"456789", 4)
    assert work.read_log(3, after=4) == (b"789", 7)
    work.log.rename(tmp_path / "other")
    work.log.symlink_to(tmp_path / "other")
    assert work.read_log(100) == (b"", 0)
