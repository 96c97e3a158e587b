"""NVTX ranges, which Nsight shows above the kernels: from the package nvtx, or from PyTorch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Ranges(Protocol):
    """The library's functions, each for the thread that calls it."""

    def push(self, name: str) -> None: ...
    def pop(self) -> None: ...


class PackageRanges:
    """Ranges of NVIDIA's package nvtx."""

    def __init__(self) -> None:
        nvtx = importlib.import_module("nvtx")
        self._push, self._pop = nvtx.push_range, nvtx.pop_range

    def push(self, name: str) -> None:
        self._push(name)

    def pop(self) -> None:
        self._pop()


class TorchRanges:
    """Ranges of a PyTorch that is built with CUDA."""

    def __init__(self) -> None:
        nvtx = importlib.import_module("torch.cuda.nvtx")
        self._push, self._pop = nvtx.range_push, nvtx.range_pop

    def push(self, name: str) -> None:
        self._push(name)

    def pop(self) -> None:
        self._pop()


def find_ranges(on_gpu: bool) -> Ranges | None:
    """Return ranges for this process; None if no library is installed.

    PyTorch is imported only for an engine on a GPU: the import takes seconds.
    """
    if importlib.util.find_spec("nvtx") is not None:
        return PackageRanges()
    if on_gpu and importlib.util.find_spec("torch") is not None:
        import torch

        if torch.version.cuda is not None:
            return TorchRanges()
    return None


@contextmanager
def range_of(ranges: Ranges | None, name: str) -> Iterator[None]:
    """Open a range around the work in this context. Without a library nothing happens."""
    if ranges is None:
        yield
        return
    ranges.push(name)
    try:
        yield
    finally:
        ranges.pop()
