"""This host's NVIDIA GPUs in the service's numbering.

`gpu:1` is the second GPU of CUDA_VISIBLE_DEVICES, in leases and in every child. NVML itself counts
all GPUs of the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

from pipeline.host.gpu import NvmlDevice, open_nvml


@contextlib.contextmanager
def visible_gpus(nvml: ModuleType | None = None) -> Iterator[tuple[NvmlDevice, ...]]:
    """Yield the GPUs of this server: the first is gpu:0. Empty without a driver."""
    with open_nvml(nvml) as opened:
        yield opened.visible_devices()
