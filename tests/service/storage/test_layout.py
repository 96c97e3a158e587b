"""The home belongs to one user."""

import stat
from pathlib import Path

import pytest

from service.storage.layout import HOME_MODE, secure_home


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
