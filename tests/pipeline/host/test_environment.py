from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.host.environment import cpu_flags, environment, peak_memory_bytes, usable_cores
from tests.builders.nvml import Device, Nvml, install_nvml


def test_environment_names_this_host() -> None:
    here = environment()
    assert here.cpu
    assert here.cpu_flags == cpu_flags() == tuple(sorted(here.cpu_flags))
    assert 1 <= here.cores == usable_cores()
    assert here.memory_bytes > 2**28
    assert here.packages["numpy"] == np.__version__


def test_environment_names_the_gpus_their_driver_and_tensorrt_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a virtual machine without /proc/driver/nvidia, with TensorRT's bindings unpacked by
    hand.
    """
    gpus = [Device("NVIDIA H200", f"GPU-{number}") for number in range(2)]
    install_nvml(tmp_path / "nvml", monkeypatch, Nvml(*gpus, driver="580.159"))
    package = tmp_path / "tensorrt_cu12_bindings-10.6.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tensorrt-cu12-bindings\nVersion: 10.6.0\n"
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    here = environment()
    assert here.gpus == ("NVIDIA H200", "NVIDIA H200")
    assert here.gpu_driver == "580.159"
    assert here.packages["tensorrt-cu12-bindings"] == "10.6.0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (environment().gpus, environment().gpu_driver) == ((), None)


def test_looking_at_the_host_imports_nothing_heavy() -> None:
    script = (
        "import sys; from pipeline.host.environment import environment; environment(); "
        "print({'torch', 'onnxruntime', 'openvino', 'onnx'} & set(sys.modules))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "set()"
    )


def test_peak_memory_is_of_the_process_itself() -> None:
    """A small child of a large process: ru_maxrss would report the parent's size."""
    script = f"""
import subprocess, sys
large = b"x" * 400_000_000
child = '''import sys; sys.path[:0] = {sys.path!r}
from pipeline.host.environment import peak_memory_bytes
print(peak_memory_bytes())'''
command = [sys.executable, "-c", child]
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert 10_000_000 < int(printed) < 300_000_000
    before = peak_memory_bytes()
    large = np.ones(50_000_000 // 8)
    assert peak_memory_bytes() >= before
    assert large.sum() > 0
