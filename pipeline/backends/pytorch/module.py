"""The user's PyTorch module: loading it with its weights, running it on host arrays, naming what it
returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.cuda import OutOfDeviceMemory
from pipeline.backends.feed_checks import installed_version
from pipeline.backends.pytorch.qat import freeze_fake_quantizers
from pipeline.core import ModelSource, Precision, Tensors, TensorSpec
from pipeline.distribution import install_command
from pipeline.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    import torch

CPU_INSTEAD = "set CUDA_VISIBLE_DEVICES= (empty) to compare on the CPU"


def torch_version() -> str:
    """The installed version, without importing torch. BackendUnavailable where there is none."""
    return installed_version("torch", install_command("torch"))


def load_module(source: ModelSource, device: str = "cpu") -> torch.nn.Module:
    """The user's module in eval mode and fp32, with its weights; the seed is set first, so random
    weights are always the same, on the GPU too.

    Sets torch's process-wide seed and precision. ModelError if anything of it cannot be had, with
    its cause.
    """
    torch_version()
    import torch

    allow_tf32(False)
    torch.manual_seed(source.seed)
    if source.kind == "pt2":
        return _module_of_program(load_program(source), device)
    module = _call_entrypoint(source).float().eval()
    if source.weights is not None:
        _load_weights(module, source.weights)
    module = freeze_fake_quantizers(module)
    return module if device == "cpu" else _moved(module, device)


def allow_tf32(allowed: bool) -> None:
    """Whether this process may compute products and convolutions of fp32 tensors in TF32."""
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


LOW = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
"""Precisions that a module is cast to as a whole, by torch's names of them."""


def check_castable(source: ModelSource, precision: Precision) -> None:
    """UnsupportedError for an exported program in 16 bits: its dtypes are part of its graph."""
    if precision in LOW and source.kind == "pt2":
        message = f"the .pt2 has its dtypes in its graph, so it cannot be cast to {precision}"
        raise UnsupportedError(
            message,
            f"give the module as `entrypoint`, or a .pt2 exported in {precision}",
        )


def in_precision(
    module: torch.nn.Module,
    precision: Precision,
    outputs: Sequence[TensorSpec],
) -> torch.nn.Module:
    """The module cast to this precision as a whole; inputs and `outputs` keep their dtypes.

    Its outputs come as one flat tuple of tensors. Sets whether this process may use TF32.
    """
    import torch

    allow_tf32(precision is Precision.TF32)
    low = getattr(torch, LOW[precision]) if precision in LOW else None
    dtypes = [getattr(torch, spec.dtype) for spec in outputs]

    def kept(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() and leaf.dtype != dtype else leaf

    class Cast(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
        def __init__(self) -> None:
            super().__init__()
            self.inner = module if low is None else module.to(low)
            self.training = False  # as the module is; an exported program cannot be told so

        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            given = (
                args
                if low is None
                else [
                    (
                        arg.to(
                            low,
                        )
                        if arg.is_floating_point()
                        else arg
                    )
                    for arg in args
                ]
            )
            leaves = leaves_of(self.inner(*given))
            return tuple(kept(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True))

    return Cast()


def _module_of_program(program: torch.export.ExportedProgram, device: str) -> torch.nn.Module:
    """On the GPU the whole program is moved: its graph names the device it was exported on."""
    if device != "cpu":
        from torch.export.passes import move_to_device_pass

        with _moving(device):
            program = move_to_device_pass(program, device)
    module: torch.nn.Module = program.module()
    return module


def _moved(module: torch.nn.Module, device: str) -> torch.nn.Module:
    with _moving(device):
        return module.to(device)


@contextlib.contextmanager
def _moving(device: str) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error) from error
    except RuntimeError as error:
        raise ModelError(
            f"the PyTorch model cannot be moved to '{device}': {first_line(error)}", CPU_INSTEAD
        ) from error


def out_of_memory(error: BaseException) -> OutOfDeviceMemory:
    """torch's own error for a full GPU, as ours."""
    said = first_line(error).partition(" If reserved but")[
        0
    ]  # the rest is advice on torch's allocator
    return OutOfDeviceMemory(
        f"the GPU's memory ran out in PyTorch: {said}",
        "free its memory (nvidia-smi lists who holds it), lower max in the profiles, or"
        f" {CPU_INSTEAD}",
    )


def load_program(source: ModelSource) -> torch.export.ExportedProgram:
    """The exported program of a .pt2 source. ModelError if the file cannot be read."""
    import torch

    assert source.path is not None
    with contextlib.suppress(ImportError):  # registers the operators of a program that holds Q/DQ
        importlib.import_module("torch.ao.quantization.fx._decomposed")
    try:
        return torch.export.load(source.path)
    except Exception as error:  # a damaged file fails in many ways
        advice = "save it with torch.export.save and this version of torch"
        raise ModelError(
            f"'{source.path}' cannot be read by torch {torch.__version__}: {first_line(error)}",
            advice,
        ) from error


def _call_entrypoint(source: ModelSource) -> torch.nn.Module:
    import torch

    name, _, function = (source.entrypoint or "").partition(":")
    if source.python_path is not None and str(source.python_path) not in sys.path:
        sys.path.insert(
            0, str(source.python_path)
        )  # and it stays: modules may import more while they run
    try:
        make = getattr(importlib.import_module(name), function, None)
    except (Exception, SystemExit) as error:  # the user's code: anything may come
        advice = "correct model.entrypoint or model.python_path, or install what the module imports"
        raise ModelError(
            f"cannot import '{name}' of entrypoint '{source.entrypoint}': {_said(error)}", advice
        ) from error
    if not callable(make):
        raise ModelError(
            f"module '{name}' has no function '{function}'",
            "correct model.entrypoint: `module:function`",
        )
    try:
        module = make()
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"entrypoint '{source.entrypoint}' raised {_said(error)}",
            "it is called without arguments; run it by itself first",
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"entrypoint '{source.entrypoint}' returned {type(module).__name__}",
            "it must return a torch.nn.Module",
        )
    return module


def _load_weights(module: torch.nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    advice = "give the weights that were saved from this very module"
    try:
        missing, unexpected = load_model(module, path, strict=False)
    except SafetensorError as error:
        raise ModelError(
            f"'{path}' is not a safetensors file: {error}",
            "save the weights with safetensors.torch.save_file",
        ) from error
    except RuntimeError as error:  # shapes that differ, one line each after the first
        raise ModelError(
            f"weights '{path}' do not fit the module: {_list(str(error).splitlines()[1:])}", advice
        ) from error
    faults = [
        f"{what} {_list(sorted(names))}"
        for what, names in (("lacks", missing), ("has unknown", unexpected))
        if names
    ]
    if faults:
        raise ModelError(
            f"weights '{path}' do not fit the module: the file {' and '.join(faults)}", advice
        )


def _list(names: list[str]) -> str:
    """Up to five names, and how many more."""
    shown = ", ".join(name.strip() for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# --- running it ---


def run_module(
    module: torch.nn.Module, source: ModelSource, feeds: Tensors, device: str = "cpu"
) -> dict[str, NDArray[np.generic]]:
    """Host arrays in, named host arrays out; `device` is where the module lies. ModelError if the
    module fails on them.
    """
    import torch

    with torch.inference_mode():
        return {
            name: array_from_tensor(value)
            for name, value in name_outputs(
                call_module(module, source, feeds, device), source
            ).items()
        }


def call_module(
    module: torch.nn.Module, source: ModelSource, feeds: Tensors, device: str = "cpu"
) -> object:
    """What the module returns, as its user wrote it; the inputs are passed by position, in the
    plan's order.
    """
    import torch

    try:
        return module(*(tensor_from_array(feeds[spec.name]).to(device) for spec in source.inputs))
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error) from error
    except Exception as error:  # the user's code: anything may come
        shapes = ", ".join(
            f"{spec.name} {feeds[spec.name].dtype}{list(feeds[spec.name].shape)}"
            for spec in source.inputs
        )
        advice = "check model.inputs (order, dtypes, shapes) and the ranges of the profiles"
        if "same device" in str(error):
            advice = (
                "its code makes tensors on the CPU: give them the device of an input, or"
                f" {CPU_INSTEAD}"
            )
        raise ModelError(f"the PyTorch model fails on {shapes}: {_said(error)}", advice) from error


def name_outputs(result: object, source: ModelSource) -> dict[str, torch.Tensor]:
    """Flatten what a module returned (tensor, tuple, list, dict, dataclass, nested) depth first,
    and name it.

    Names: the plan's `outputs`; else the keys of a dict or dataclass, nested ones joined by "_";
    else output_0, output_1, ... None is left out, as exporters do. ModelError for anything else
    that is no tensor.
    """
    import torch
    from torch.utils import _pytree as pytree

    _register_dataclass(result)
    leaves = [
        (path, leaf) for path, leaf in pytree.tree_flatten_with_path(result)[0] if leaf is not None
    ]
    names = list(source.outputs) or [
        _name_of_path(path, index) for index, (path, _) in enumerate(leaves)
    ]
    if len(names) != len(leaves):
        raise ModelError(
            f"model.outputs names {len(names)} outputs, the model returns {len(leaves)}",
            "name every output, in order",
        )
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise ModelError(
                f"output '{name}' of the model is a {type(leaf).__name__}, expected a tensor",
                "return tensors only",
            )
        if any(name == spec.name for spec in source.inputs):
            raise ModelError(
                f"'{name}' is the name of an input and of an output",
                "name the outputs in model.outputs",
            )
    return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


def leaves_of(result: object) -> list[torch.Tensor]:
    """The tensors of what a module returned, in the order of `name_outputs`, which must have seen
    it once.
    """
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]


def _register_dataclass(result: object) -> None:
    """Tell torch how to flatten a dataclass; its own containers, and those of transformers, it
    knows.
    """
    import torch
    from torch.utils import _pytree as pytree

    if dataclasses.is_dataclass(result) and type(result) not in pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(type(result))


def _name_of_path(path: tuple[Any, ...], index: int) -> str:
    from torch.utils import _pytree as pytree

    keyed = path and not isinstance(path[0], pytree.SequenceKey)
    parts = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))) for key in path]
    return "_".join(map(str, parts)) if keyed else f"output_{index}"


def tensor_from_array(array: NDArray[np.generic]) -> torch.Tensor:
    """Shares memory where it can; bfloat16 crosses as its bits, since torch does not know numpy's
    extension types.
    """
    import torch

    ready = np.require(array, requirements=["C", "W"])
    if ready.dtype.name == "bfloat16":
        return torch.from_numpy(ready.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(ready)


def array_from_tensor(tensor: torch.Tensor) -> NDArray[np.generic]:
    """A copy: an output may be an input, or a buffer of the module."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        import ml_dtypes

        return np.array(plain.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.array(plain.numpy())
