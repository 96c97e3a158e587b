"""nvidia-smi is stood in for by small programs that answer as it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.gpu import Gpu, find_gpus

TWO = "NVIDIA H200, 9.0, 580.65.06, 143771\nNVIDIA GB10, 12.1, 580.95.05, [N/A]\n"


def program(folder: Path, answer: str, exit_code: int = 0) -> str:
    file = folder / "smi"
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}END\nexit {exit_code}\n", encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def test_each_line_is_a_gpu(tmp_path: Path) -> None:
    found = find_gpus(program(tmp_path, TWO))
    assert found.reason == ""
    assert found.devices == (
        Gpu(name="NVIDIA H200", compute_capability="9.0", driver="580.65.06", memory_bytes=143771 * 2**20),
        Gpu(name="NVIDIA GB10", compute_capability="12.1", driver="580.95.05", memory_bytes=0),
    )


@pytest.mark.parametrize(
    ("answer", "exit_code", "reason"),
    [
        (
            "NVIDIA-SMI has failed because it couldn't\ncommunicate with the driver.\n",
            9,
            "exit code 9: NVIDIA-SMI has failed because it couldn't communicate",
        ),
        ("", 0, "lists no GPU"),
    ],
)
def test_no_gpu_has_a_reason(tmp_path: Path, answer: str, exit_code: int, reason: str) -> None:
    found = find_gpus(program(tmp_path, answer, exit_code))
    assert found.devices == ()
    assert reason in found.reason


def test_a_missing_tool_has_a_reason(tmp_path: Path) -> None:
    assert "nvidia-smi" in find_gpus(str(tmp_path / "nothing")).reason
