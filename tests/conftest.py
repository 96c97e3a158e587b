"""What every test shares: a home of its own, so that none touches the user's store, and no GPU test that is silently absent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.gpu import find_gpus
from tests.fixtures_validate import Bench


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """CRUCIBLE_HOME in a temporary folder, for this process and its children."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("CRUCIBLE_HOME", str(folder))
    return folder


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_gpus().devices:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
