"""PyTorch on the GPU: a check that torch can use it, and a session with its own stream, events and
pinned host buffers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.feed_checks import FeedCheck, closed
from pipeline.backends.pytorch.module import (
    array_from_tensor,
    first_line,
    leaves_of,
    out_of_memory,
    tensor_from_array,
)
from pipeline.core.artifacts import Engine
from pipeline.core.shapes import Tensors
from pipeline.results.gpu_cost import CostFigure, GpuCost

if TYPE_CHECKING:
    import torch

DEVICE = "cuda"  # the first that CUDA_VISIBLE_DEVICES leaves
NO_WEIGHTS: dict[CostFigure, str] = {
    "weights": "a package of AOTInductor does not tell the size of its weights"
}


def why_not_cuda() -> str:
    """Return torch's reason why it cannot compute on the GPU; "" if it can. Creates a CUDA context.

    OutOfDeviceMemory if the GPU is full: that may pass, and falling back to the CPU would only hide
    it.
    """
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch warns of a driver that is too old for it
        if not torch.cuda.is_available():
            return next(
                (first_line(item.message) for item in caught if isinstance(item.message, Warning)),
                "torch.cuda.is_available() is False",
            )
        try:
            # fails if torch was built without code for this GPU generation
            torch.ones(1, device=DEVICE).sum().item()
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error) from error
        except RuntimeError as error:
            return first_line(error)
    return ""


class CudaTimer:
    """A timer of two events on the session's stream."""

    def __init__(self, stream: Any) -> None:
        import torch

        self._stream = stream
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        self._start.record(self._stream)

    def stop(self) -> None:
        self._stop.record(self._stream)

    def elapsed_s(self) -> float:
        self._stop.synchronize()
        milliseconds: float = self._start.elapsed_time(self._stop)
        return milliseconds / 1e3


class CudaTorchSession:
    """A session of one module on the GPU. Buffers are reused between runs of one shape.

    Each step makes the session's stream torch's current one and does not restore it: a `with` block
    would cost a small module a tenth of its time.
    """

    def __init__(self, engine: Engine, module: Any, weights: int | None = None) -> None:
        """Open a session. `weights` is the size of the module's weights in bytes, if known."""
        import torch

        self.inputs, self.outputs = engine.inputs, engine.outputs
        self._check, self._module = FeedCheck(engine.inputs, engine.profiles), module
        self._names = tuple(spec.name for spec in engine.outputs)
        self._stream: Any = torch.cuda.Stream()
        self._sent: dict[str, torch.Tensor] = {}  # pinned
        self._args: dict[str, torch.Tensor] = {}  # on the GPU
        self._received: dict[str, torch.Tensor] = {}  # pinned
        self._result: object = None
        # the weights were copied, and the module compiled, on the default stream
        torch.cuda.synchronize()
        self._weights_bytes = weights
        torch.cuda.reset_peak_memory_stats()
        self._allocated_bytes = torch.cuda.memory_allocated()

    def bind(self, feeds: Tensors) -> None:
        import torch

        self._check(feeds)
        torch.cuda.set_stream(self._stream)
        # an unfinished upload would still read the pinned buffers
        self._stream.synchronize()
        for spec in self.inputs:
            array = tensor_from_array(feeds[spec.name])
            if spec.name not in self._sent or self._sent[spec.name].shape != array.shape:
                self._allocate(spec.name, array)
            self._sent[spec.name].copy_(array)

    def _allocate(self, name: str, like: torch.Tensor) -> None:
        import torch

        try:
            self._args[name] = torch.empty(like.shape, dtype=like.dtype, device=DEVICE)
        except torch.OutOfMemoryError as error:
            raise out_of_memory(error) from error
        self._sent[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def upload(self) -> None:
        import torch

        torch.cuda.set_stream(self._stream)
        for name, tensor in self._args.items():
            tensor.copy_(self._sent[name], non_blocking=True)

    def execute(self) -> None:
        import torch

        torch.cuda.set_stream(self._stream)
        try:
            with torch.inference_mode():
                self._result = self._module(*(self._args[spec.name] for spec in self.inputs))
        except torch.OutOfMemoryError as error:
            self._result = None
            raise out_of_memory(error) from error

    def download(self) -> None:
        import torch

        torch.cuda.set_stream(self._stream)
        with torch.inference_mode():
            for name, tensor in zip(self._names, leaves_of(self._result), strict=True):
                buffer = self._received.get(name)
                if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    self._received[name] = buffer
                buffer.copy_(tensor, non_blocking=True)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def fetch(self) -> Mapping[str, NDArray[np.generic]]:
        return {name: array_from_tensor(self._received[name]) for name in self._names}

    def gpu_memory(self) -> GpuCost:
        """Return the weights, and the most that the allocator has held beside them in this session.

        Inputs and outputs count as activations.
        """
        import torch

        missing = NO_WEIGHTS if self._weights_bytes is None else {}
        activations = torch.cuda.max_memory_allocated() - self._allocated_bytes
        return GpuCost(
            weights_bytes=self._weights_bytes, activation_bytes=activations, missing=missing
        )

    def timer(self) -> CudaTimer:
        return CudaTimer(self._stream)

    def close(self) -> None:
        import torch

        self._stream.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())
        self._module, self._result = closed, None
        self._sent, self._args, self._received = {}, {}, {}
