from __future__ import annotations

import importlib.util

import pytest

from pipeline.backends import tensorrt_
from pipeline.errors import BackendUnavailable
from pipeline.gpu import Gpu, Gpus

H200 = Gpus(devices=(Gpu(name="NVIDIA H200", compute_capability="9.0", driver="580.1", memory_bytes=2**37),))


def test_probing_this_host_says_what_is_missing() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        tensorrt_.probe()
    assert ("`tensorrt` is not installed" in caught.value.message) == (importlib.util.find_spec("tensorrt") is None)
    assert caught.value.next_step


@pytest.mark.parametrize(
    ("gpus", "version", "message", "next_step"),
    [
        (Gpus(reason="no NVIDIA driver"), None, "no NVIDIA driver; the library `tensorrt` is not installed", "crucible[tensorrt]' on a host with"),
        (Gpus(reason="no NVIDIA driver"), "10.6", "this host: no NVIDIA driver", "on a host with an NVIDIA GPU"),
        (H200, None, "the library `tensorrt` is not installed", "pip install 'crucible[tensorrt]'"),
        (H200, "10.6", "TensorRT 10.6 and NVIDIA H200 are here, but", "onnxruntime"),
    ],
)
def test_everything_that_is_missing_is_named_at_once(gpus: Gpus, version: str | None, message: str, next_step: str) -> None:
    error = tensorrt_.unavailable(gpus, version)
    assert message in error.message
    assert next_step in error.next_step
