"""NVTX ranges come from the library that is installed, and are closed whatever happens."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.host.nvtx import PackageRanges, TorchRanges, find_ranges, range_of

PACKAGE = """
from pathlib import Path
calls = Path(__file__).with_name("calls")
def push_range(message):
    with calls.open("a") as stream: print(message, file=stream)
def pop_range():
    push_range("pop")
"""


def nvtx_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Install a package nvtx that writes its calls down. Returns what reads them."""
    folder.mkdir()
    (folder / "nvtx.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "nvtx", sys)  # so that the end of the test removes it
    del sys.modules["nvtx"]
    calls = folder / "calls"
    return lambda: calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_package_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    calls = nvtx_package(tmp_path / "site", monkeypatch)
    ranges = find_ranges(on_gpu)
    assert isinstance(ranges, PackageRanges)
    with range_of(ranges, "outer"), range_of(ranges, "inner"):
        assert calls() == ["outer", "inner"]
    assert calls() == ["outer", "inner", "pop", "pop"]


def test_a_range_is_closed_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = nvtx_package(tmp_path / "site", monkeypatch)
    with pytest.raises(ZeroDivisionError), range_of(find_ranges(False), "fails"):
        raise ZeroDivisionError
    assert calls() == ["fails", "pop"]


@pytest.mark.skipif(importlib.util.find_spec("nvtx") is not None, reason="nvtx is installed")
def test_without_a_library_there_are_no_ranges() -> None:
    assert find_ranges(on_gpu=False) is None, "PyTorch is not imported for an engine on a CPU"
    with range_of(None, "nothing happens"):
        pass


@pytest.mark.gpu
def test_on_a_gpu_pytorch_has_ranges() -> None:
    ranges = find_ranges(on_gpu=True)
    assert isinstance(ranges, PackageRanges | TorchRanges)
    with range_of(ranges, "a range"):
        ranges.push("inner")
        ranges.pop()
