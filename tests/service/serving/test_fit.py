"""A load is weighed against the memory that is free."""

from pathlib import Path

import psutil
import pytest

from service.errors import Conflict
from service.serving.fit import check_fit, free_bytes


def test_both_numbers_are_told() -> None:
    check_fit("'m'", 10, 10, "cpu")
    with pytest.raises(Conflict, match=r"^'m' needs at least 2\.0 MiB, 1\.5 MiB of gpu:0 are free"):
        check_fit("'m'", 2 * 2**20, 3 * 2**19, "gpu:0")


@pytest.mark.parametrize(("most", "used", "free"), [("1000", "400", 600), ("1000", "2000", 0), ("max", "5", None)])
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, most: str, used: str, free: int | None) -> None:
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    found = free_bytes("cpu", tmp_path)
    assert found == free if free is not None else 0 < found <= psutil.virtual_memory().total


def test_a_machine_without_a_limit(tmp_path: Path) -> None:
    assert 0 < free_bytes("cpu", tmp_path) <= psutil.virtual_memory().total
