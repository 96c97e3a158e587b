"""ONNX Runtime as if its build had the providers of a GPU, on a host that seems to have one.

Sessions run on the CPU; what they were opened with is remembered.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from tests.builders.nvml import Device, Nvml, install_nvml

GPU_UUID = "GPU-00000000-0000-0000-0000-0000000000d0"
CPU = "CPUExecutionProvider"


def pretend_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML that lists one GPU; CUDA finds none of that name."""
    install_nvml(folder, monkeypatch, Nvml(Device("NVIDIA Double", GPU_UUID)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPU_UUID)


class OnnxRuntimeDouble:
    """The module; `broken` are providers that the library leaves out when a session is opened."""

    def __init__(self, *providers: str, broken: Sequence[str] = ()) -> None:
        self.providers, self.broken = providers, broken
        self.opened: list[list[tuple[str, dict[str, str]]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(onnxruntime, name)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "onnxruntime", self)

    def get_available_providers(self) -> list[str]:
        return [*self.providers, CPU]

    def InferenceSession(  # noqa: N802  as the library has it
        self,
        model: str | bytes,
        options: Any,
        providers: list[tuple[str, dict[str, str]]],
    ) -> SessionDouble:
        self.opened.append(providers)
        names = [name for name, _ in providers if name not in self.broken]
        session = onnxruntime.InferenceSession(model, options, providers=[CPU])
        return SessionDouble(session, names)


class SessionDouble:
    """A session on the CPU that says it has these providers."""

    def __init__(self, session: Any, providers: list[str]) -> None:
        self.run, self._providers = session.run, providers

    def get_providers(self) -> list[str]:
        return self._providers
