"""PyTorch modules that were trained with fake quantisers: made fit to run and export, or refused by
name.

torch.ao's fake quantisers go on observing in eval mode, so that the reference would change its own
scales with every batch; and they branch on tensors, which torch.export cannot follow. Each is
replaced by the bare operator with the scale that it has learnt, which computes the same. The
TorchScript exporter makes QuantizeLinear and DequantizeLinear of it; torch.export has no shapes for
the operator (torch 2.15).
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core import ModelSource, Progress, Tensors, silent
from pipeline.errors import ModelError

if TYPE_CHECKING:
    import torch

CONVERTED = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic.quantized",
    "torch.nn.quantized",
    "torchao.",
)
FLOAT_STILL = ("FloatFunctional", "FXFloatFunctional")  # stand among them, and compute in floats
FULL_RANGES = ((-128, 127), (0, 255))


def freeze_fake_quantizers(module: torch.nn.Module) -> torch.nn.Module:
    """The module with every fake quantiser of torch.ao fixed as it was trained. ModelError for
    kinds of quantisation that no exporter carries.
    """
    import torch

    for name, child in module.named_modules():
        kind = f"{type(child).__module__}.{type(child).__qualname__}"
        if kind.startswith(CONVERTED) and not kind.endswith(FLOAT_STILL):
            message = f"module '{name}' is a {kind}, which no exporter turns into Q/DQ pairs"
            raise ModelError(
                message,
                "give the model as torch.ao's prepare_qat left it, before `convert`; or export it"
                " by other means and give the .onnx",
            )
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if _is_known(child):
                setattr(
                    parent,
                    name,
                    _frozen(child) if int(child.fake_quant_enabled[0]) else torch.nn.Identity(),
                )
    return module


def _is_known(module: Any) -> bool:
    """Whether this is torch.ao's own FakeQuantize, or a subclass that computes as it does."""
    theirs = sys.modules.get(
        "torch.ao.quantization.fake_quantize"
    )  # not there: the module cannot hold any
    kinds = (theirs.FakeQuantize, theirs.FusedMovingAvgObsFakeQuantize) if theirs else ()
    return isinstance(module, kinds) and type(module).forward in [kind.forward for kind in kinds]


def _frozen(trained: Any) -> torch.nn.Module:
    import torch

    low, high = trained.activation_post_process.quant_min, trained.activation_post_process.quant_max
    axis = int(trained.ch_axis) if trained.is_per_channel else None

    class FrozenFakeQuantize(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
        """One fake quantiser with its scale as a constant."""

        def __init__(self) -> None:
            super().__init__()
            shape = () if axis is None else (-1,)
            self.register_buffer("scale", trained.scale.detach().clone().reshape(shape))
            self.register_buffer(
                "zero_point", trained.zero_point.detach().clone().reshape(shape).to(torch.int32)
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
    """Whether `freeze_fake_quantizers` replaced any."""
    return any(
        type(child).__qualname__.endswith("FrozenFakeQuantize") for child in module.modules()
    )


def check_ranges(program: torch.export.ExportedProgram) -> None:
    """ModelError for a .pt2 that quantises to a part of its 8 bits: torch's translation to ONNX
    drops those limits without a word.
    """
    for node in program.graph.nodes:
        if (
            str(node.target).startswith("quantized_decomposed.quantize_per_tensor")
            and (limits := tuple(node.args[3:5])) not in FULL_RANGES
        ):
            message = (
                f"'{node.name}' of the .pt2 quantises to {limits[0]} to {limits[1]}, and the export"
                " to ONNX would take all of the 8 bits"
            )
            raise ModelError(
                message,
                "train with quant_min and quant_max of the whole dtype (-128 to 127, or 0 to 255)",
            )


def scales_run(module: torch.nn.Module, source: ModelSource, feeds: Tensors) -> Counter[bytes]:
    """Every scale that quantises while the module runs once, counted; a tensor that is quantised
    twice with one scale counts once.
    """
    from pipeline.backends.pytorch.module import run_module

    mode = _recorder()
    with mode:
        run_module(module, source, feeds)
    return Counter(scale for scale, _ in mode.seen)


def quantises(source: ModelSource, feeds: Tensors, progress: Progress = silent) -> bool:
    """Whether a PyTorch model quantises anything in one run, so that its export may bring Q/DQ."""
    from pipeline.backends.pytorch.module import load_module

    progress(None, "running the PyTorch model")
    return bool(scales_run(load_module(source), source, feeds))


def _recorder() -> Any:
    """A dispatch mode that notes the scale of each fake quantisation and dequantisation."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            super().__init__()
            self.seen: set[tuple[bytes, int]] = set()
            self.alive: list[torch.Tensor] = []  # so that no address is used twice

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "fake_quantize_per_" in str(func) or str(func).startswith(
                "quantized_decomposed.dequantize_per_"
            ):
                scale = (
                    args[1].detach().cpu().numpy() if isinstance(args[1], torch.Tensor) else args[1]
                )
                self.alive.append(args[0])
                self.seen.add(
                    (
                        np.asarray(np.asarray(scale, np.float32), np.float64).tobytes(),
                        args[0].data_ptr(),
                    )
                )
            return func(*args, **(kwargs or {}))

    return Recorder()
