"""Targets and sessions shared by the PyTorch baselines and the delivered programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.feed_checks import FeedCheck, closed
from pipeline.backends.layer_timing import HostTimer
from pipeline.backends.pytorch.cuda import DEVICE, CudaTorchSession
from pipeline.backends.pytorch.module import (
    array_from_tensor,
    leaves_of,
    tensor_from_array,
    torch_version,
    weights_bytes,
)
from pipeline.core.artifacts import Engine, Target
from pipeline.core.shapes import Profile, Tensors
from pipeline.host.amx import tiles_described
from pipeline.host.environment import cpu_flags, cpu_name
from pipeline.host.gpu import find_gpus
from pipeline.onnx_graph.feeds import draw_feeds

if TYPE_CHECKING:
    import torch


def host_target(backend: str) -> Target:
    """Return this host as a target, without importing torch.

    That is the first GPU, or the CPU if there is no GPU or torch is built without CUDA.
    """
    gpus = () if torch_version().endswith("+cpu") else find_gpus().devices
    if not gpus:
        return cpu_target(backend)
    first = gpus[0]
    return Target(
        backend=backend,
        version=torch_version(),
        device=first.name,
        compute_capability=first.compute_capability,
        driver=first.driver,
    )


def cpu_target(backend: str, flags: bool = False) -> Target:
    """Return the CPU of this host as a target.

    With `flags`, it has the instruction sets that compiled code depends on.
    """
    usable = [flag for flag in cpu_flags() if not flag.startswith("amx") or tiles_described()]
    names = tuple(usable) if flags else ()
    return Target(backend=backend, version=torch_version(), device=cpu_name(), cpu_flags=names)


def example_args(engine: Engine, profile: int | None, device: str) -> tuple[torch.Tensor, ...]:
    """Generate inputs at this profile's opt, in the order of the call, on the module's device.

    Without a number it is the first profile.
    """
    chosen = (engine.profiles or (Profile(),))[profile or 0]
    feeds = draw_feeds(engine.inputs, chosen.sizes("opt"), 0, chosen.values_at("opt"))
    return tuple(tensor_from_array(feeds[spec.name]).to(device) for spec in engine.inputs)


def open_session(
    engine: Engine, module: Any, device: str, loaded: object
) -> TorchSession | CudaTorchSession:
    """Open a session of a module on its device. `loaded` is the module that holds the weights."""
    if device != DEVICE:
        return TorchSession(engine, module)
    return CudaTorchSession(engine, module, weights_bytes(loaded))


class TorchSession:
    """A session of one module on host tensors."""

    def __init__(self, engine: Engine, module: Any) -> None:
        self.inputs, self.outputs = engine.inputs, engine.outputs
        self._check, self._module = FeedCheck(engine.inputs, engine.profiles), module
        self._names = tuple(spec.name for spec in engine.outputs)
        self._feeds: Tensors = {}
        self._args: tuple[torch.Tensor, ...] = ()
        self._result: object = None
        self._fetched: dict[str, NDArray[np.generic]] = {}

    def bind(self, feeds: Tensors) -> None:
        self._check(feeds)
        self._feeds = feeds

    def upload(self) -> None:
        self._args = tuple(tensor_from_array(self._feeds[spec.name]) for spec in self.inputs)

    def execute(self) -> None:
        import torch

        with torch.inference_mode():
            self._result = self._module(*self._args)

    def download(self) -> None:
        leaves = zip(self._names, leaves_of(self._result), strict=True)
        self._fetched = {name: array_from_tensor(leaf) for name, leaf in leaves}

    def synchronize(self) -> None:
        """Do nothing: on the CPU a run is finished when `execute` returns."""

    def fetch(self) -> Mapping[str, NDArray[np.generic]]:
        return self._fetched

    def timer(self) -> HostTimer:
        return HostTimer()

    def close(self) -> None:
        self._module, self._feeds, self._args, self._result = closed, {}, (), None
