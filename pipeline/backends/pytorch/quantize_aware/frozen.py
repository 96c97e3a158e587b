"""Freeze the fake quantisers of trained PyTorch modules, or refuse a module by name.

torch.ao's fake quantisers continue to observe in eval mode, so that the reference would change its
own scales with every batch. They also branch on tensors, which torch.export cannot follow. Each is
replaced by the plain operator with the learnt scale, which computes the same. The TorchScript
exporter turns it into QuantizeLinear and DequantizeLinear. torch.export has no shapes for the
operator (torch 2.15).
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.artifacts import ModelSource
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Tensors
from pipeline.errors import ModelError

if TYPE_CHECKING:
    import torch

CONVERTED = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.nn.quantized",
    "torchao.",
)
FLOAT_MODULES = ("FloatFunctional", "FXFloatFunctional")  # in the same packages, but float
FULL_RANGES = ((-128, 127), (0, 255))


def freeze_fake_quantizers(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module with every fake quantiser, ours or torch.ao's, frozen at its learnt scale.

    ModelError for a kind of quantisation that no exporter supports, and for one of ours that has
    seen no data.
    """
    import torch

    from pipeline.backends.pytorch.quantize_aware.fake_quantizer import HIGH, LOW, FakeQuantizer

    for name, child in module.named_modules():
        kind = f"{type(child).__module__}.{type(child).__qualname__}"
        if kind.startswith(CONVERTED) and not kind.endswith(FLOAT_MODULES):
            message = f"module '{name}' is a {kind}, which no exporter turns into Q/DQ pairs"
            raise ModelError(
                message,
                "give the model as torch.ao's prepare_qat left it, before `convert`; or export it"
                " by other means and give the .onnx",
            )
    unseen = [
        name
        for name, child in module.named_modules()
        if isinstance(child, FakeQuantizer) and not child.has_range
    ]
    if unseen:
        raise ModelError(
            f"{len(unseen)} fake quantisers have seen no data (the first is '{unseen[0]}')",
            "run some batches in training mode after `quantize_aware`, and save the weights then",
        )
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FakeQuantizer):
                of = child.bound if child.axis is None else parent.original
                setattr(parent, name, _frozen(child.scale(of), (LOW, HIGH), child.axis))
            elif _is_known(child):
                is_enabled = bool(child.fake_quant_enabled[0])
                setattr(parent, name, _frozen_ao(child) if is_enabled else torch.nn.Identity())
    return module


def _is_known(module: Any) -> bool:
    """Return True for torch.ao's own FakeQuantize, or a subclass with the same forward."""
    library = sys.modules.get("torch.ao.quantization.fake_quantize")
    if library is None:  # then no module can be an instance of its classes
        return False
    kinds = (library.FakeQuantize, library.FusedMovingAvgObsFakeQuantize)
    return isinstance(module, kinds) and type(module).forward in [kind.forward for kind in kinds]


def _frozen_ao(trained: Any) -> torch.nn.Module:
    observer = trained.activation_post_process
    axis = int(trained.ch_axis) if trained.is_per_channel else None
    return _frozen(
        trained.scale, (observer.quant_min, observer.quant_max), axis, trained.zero_point
    )


def _frozen(
    scales: torch.Tensor,
    limits: tuple[int, int],
    axis: int | None,
    zeros: torch.Tensor | None = None,
) -> torch.nn.Module:
    """Return a fake quantiser with these scales. Without `zeros`, zero points are 0."""
    import torch

    low, high = limits
    zero_points = torch.zeros_like(scales) if zeros is None else zeros

    class FrozenFakeQuantize(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
        """A fake quantiser with a constant scale."""

        def __init__(self) -> None:
            super().__init__()
            shape = () if axis is None else (-1,)
            self.register_buffer("scale", scales.detach().clone().reshape(shape))
            self.register_buffer(
                "zero_point", zero_points.detach().clone().reshape(shape).to(torch.int32)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if axis is None:
                return torch.fake_quantize_per_tensor_affine(
                    x, self.scale, self.zero_point, low, high
                )
            return torch.fake_quantize_per_channel_affine(
                x, self.scale, self.zero_point, axis, low, high
            )

    return FrozenFakeQuantize()


def holds_fake_quantizers(module: torch.nn.Module) -> bool:
    """Return True if `freeze_fake_quantizers` replaced any."""
    return any(
        type(child).__qualname__.endswith("FrozenFakeQuantize") for child in module.modules()
    )


def check_ranges(program: torch.export.ExportedProgram) -> None:
    """Raise ModelError for a .pt2 that quantises to a part of its 8 bits.

    torch's translation to ONNX silently drops those limits.
    """
    for node in program.graph.nodes:
        if not str(node.target).startswith("quantized_decomposed.quantize_per_tensor"):
            continue
        limits = tuple(node.args[3:5])
        if limits not in FULL_RANGES:
            message = (
                f"'{node.name}' of the .pt2 quantises to {limits[0]} to {limits[1]}, and the export"
                " to ONNX would take all of the 8 bits"
            )
            raise ModelError(
                message,
                "train with quant_min and quant_max of the whole dtype (-128 to 127, or 0 to 255)",
            )


def scales_run(module: torch.nn.Module, source: ModelSource, feeds: Tensors) -> Counter[bytes]:
    """Count the quantisation scales of one run of the module.

    A tensor that is quantised twice with one scale counts once.
    """
    from pipeline.backends.pytorch.module import run_module

    mode = _recorder()
    with mode:
        run_module(module, source, feeds)
    return Counter(scale for scale, _ in mode.quantisations)


def quantises(source: ModelSource, feeds: Tensors, progress: Progress = silent) -> bool:
    """Return True if a run of a PyTorch model quantises anything: its export may contain Q/DQ."""
    from pipeline.backends.pytorch.module import load_module

    progress(None, "running the PyTorch model")
    return bool(scales_run(load_module(source), source, feeds))


def _recorder() -> Any:
    """Return a dispatch mode that records the scales of fake quantisation and dequantisation."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            super().__init__()
            self.quantisations: set[tuple[bytes, int]] = set()  # scale, address of the tensor
            self.alive: list[torch.Tensor] = []  # so that no address is used twice

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = str(func)
            is_fake = "fake_quantize_per_" in name
            if is_fake or name.startswith("quantized_decomposed.dequantize_per_"):
                tensor, scale = args[0], args[1]
                if isinstance(scale, torch.Tensor):
                    scale = scale.detach().cpu().numpy()
                content = np.asarray(np.asarray(scale, np.float32), np.float64).tobytes()
                self.alive.append(tensor)
                self.quantisations.add((content, tensor.data_ptr()))
            return func(*args, **(kwargs or {}))

    return Recorder()
