"""What every test shares: a home of its own, so that none touches the user's store, and no GPU test
that is silently absent.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.host.gpu import find_gpus
from tests.builders.cli import crucible, write_task
from tests.builders.validate import Bench
from tests.gpu.plugin import GpuTests


@pytest.fixture(scope="session", autouse=True)
def session_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The home of fixtures that live longer than one test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRUCIBLE_HOME", str(tmp_path_factory.mktemp("session-home")))
        yield


@pytest.fixture(autouse=True)
def own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CRUCIBLE_HOME in a temporary folder, for this process and its children."""
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("CRUCIBLE_HOME", str(folder))
    return folder


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One finished compile of the tiny task, which tests only read: (its folder, its home). Report
    and engine are in `out`.
    """
    folder, home = tmp_path_factory.mktemp("task"), tmp_path_factory.mktemp("store")
    result = crucible(
        "compile", write_task(folder), "--out", folder / "out", env={"CRUCIBLE_HOME": str(home)}
    )
    assert result.code == 0, result.err
    return folder, home


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def pytest_addoption(parser: pytest.Parser) -> None:
    file = os.environ.get("CRUCIBLE_GPU_RESULTS")
    says = (
        "write how each GPU test ended, with the environment, as JSON [default:"
        " $CRUCIBLE_GPU_RESULTS]"
    )
    parser.addoption(
        "--gpu-results", type=Path, default=Path(file) if file else None, metavar="FILE", help=says
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(
        GpuTests(find_gpus(), config.getoption("--gpu-results")), "gpu-tests"
    )
