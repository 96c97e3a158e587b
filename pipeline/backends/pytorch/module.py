"""The user's PyTorch module: load it with its weights, run it on host arrays, name its outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.cuda import OutOfDeviceMemory
from pipeline.backends.feed_checks import installed_version
from pipeline.backends.pytorch.quantize_aware.frozen import freeze_fake_quantizers
from pipeline.core.artifacts import ModelSource
from pipeline.core.recipe import Precision
from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.distribution import install_command
from pipeline.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    import torch

CPU_INSTEAD = "set CUDA_VISIBLE_DEVICES= (empty) to compare on the CPU"


def torch_version() -> str:
    """Return the installed version without importing torch. BackendUnavailable if it is missing."""
    return installed_version("torch", install_command("torch"))


def load_module(source: ModelSource, device: str = "cpu") -> torch.nn.Module:
    """Load the user's module in eval mode and fp32, with its weights.

    The seed is set first, so that random weights are always the same, on the GPU too. Sets torch's
    process-wide seed and precision. ModelError, with its cause, if the module or its weights cannot
    be loaded.
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
    """Allow or forbid TF32 for products and convolutions of fp32 tensors in this process."""
    import torch

    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


LOW = {Precision.FP16: "float16", Precision.BF16: "bfloat16"}
"""torch's names of the precisions that a whole module is cast to."""


def check_castable(source: ModelSource, precision: Precision) -> None:
    """Raise UnsupportedError for an exported program in 16 bits: its graph contains its dtypes."""
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
    """Return the whole module cast to a precision. Inputs and `outputs` keep their dtypes.

    Its outputs are one flat tuple of tensors. Allows TF32 in this process, or forbids it.
    """
    import torch

    allow_tf32(precision is Precision.TF32)
    low = getattr(torch, LOW[precision]) if precision in LOW else None
    dtypes = [getattr(torch, spec.dtype) for spec in outputs]

    def to_output(leaf: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() and leaf.dtype != dtype else leaf

    def to_input(arg: torch.Tensor) -> torch.Tensor:
        return arg.to(low) if low is not None and arg.is_floating_point() else arg

    class Cast(torch.nn.Module):  # type: ignore[misc]  # torch is not looked into
        def __init__(self) -> None:
            super().__init__()
            self.inner = module if low is None else module.to(low)
            self.training = False  # as in the module; an exported program has no eval()

        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs = [to_input(arg) for arg in args]
            leaves = leaves_of(self.inner(*inputs))
            return tuple(to_output(leaf, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True))

    return Cast()


def _module_of_program(program: torch.export.ExportedProgram, device: str) -> torch.nn.Module:
    """Return the module of a program on a device.

    For the GPU the whole program is moved: its graph contains the device of the export.
    """
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
    """Return our exception for torch's error on a full GPU."""
    # the rest of the line is advice on torch's allocator
    message = first_line(error).partition(" If reserved but")[0]
    return OutOfDeviceMemory(
        f"the GPU's memory ran out in PyTorch: {message}",
        "free its memory (nvidia-smi lists who holds it), lower max in the profiles, or"
        f" {CPU_INSTEAD}",
    )


def load_program(source: ModelSource) -> torch.export.ExportedProgram:
    """Load the exported program of a .pt2 source. ModelError if the file cannot be read."""
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
    # The path stays in sys.path: modules may import others while they run.
    if source.python_path is not None and str(source.python_path) not in sys.path:
        sys.path.insert(0, str(source.python_path))
    try:
        imported = importlib.import_module(name)
        make = getattr(imported, function, None)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        advice = "correct model.entrypoint or model.python_path, or install what the module imports"
        raise ModelError(
            f"cannot import '{name}' of entrypoint '{source.entrypoint}': {_error_text(error)}",
            advice,
        ) from error
    if not callable(make):
        near = _near_name(imported, function)
        raise ModelError(
            f"module '{name}' has no function or class '{function}'{near}",
            "correct model.entrypoint: `module:function`",
        )
    try:
        module = make()
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"entrypoint '{source.entrypoint}' raised {_error_text(error)}",
            "run it by itself first: it is called without arguments, and builds the module on the"
            " CPU, from where Crucible moves it",
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"entrypoint '{source.entrypoint}' returned {type(module).__name__}",
            "it must return a torch.nn.Module",
        )
    return module


def _near_name(module: ModuleType, name: str) -> str:
    """Return a suggestion: the callable of `module` whose name is most like `name`."""
    names = [known for known, value in vars(module).items() if callable(value)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f": did you mean '{near[0]}'?" if near else ""


def _load_weights(module: torch.nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    advice = "give weights that were saved from this module"
    try:
        missing, unexpected = load_model(module, path, strict=False)
    except SafetensorError as error:
        from_torch = zipfile.is_zipfile(path)  # torch.save writes this format
        cause = "it looks like a file of torch.save" if from_torch else error
        raise ModelError(
            f"'{path}' is not a safetensors file: {cause}",
            "save the weights with `safetensors.torch.save_model(net, 'weights.safetensors')`",
        ) from error
    except RuntimeError as error:  # shapes that differ, one line each after the first
        raise ModelError(
            f"weights '{path}' do not fit the module: {_list(str(error).splitlines()[1:])}", advice
        ) from error
    faults = []
    if missing:
        faults.append(f"lacks {_list(sorted(missing))}")
    if unexpected:
        faults.append(f"has unknown {_list(sorted(unexpected))}")
    if faults:
        raise ModelError(
            f"weights '{path}' do not fit the module: the file {' and '.join(faults)}", advice
        )


def _list(names: list[str]) -> str:
    """Return up to five names, and the number of the others."""
    shown = ", ".join(name.strip() for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# --- running ---


def run_module(
    module: torch.nn.Module, source: ModelSource, feeds: Tensors, device: str = "cpu"
) -> dict[str, NDArray[Any]]:
    """Run the module on host arrays, and return its named outputs as host arrays.

    `device` is the device of the module. ModelError if the module fails on the arrays.
    """
    import torch

    with torch.inference_mode():
        outputs = name_outputs(call_module(module, source, feeds, device), source)
        return {name: array_from_tensor(value) for name, value in outputs.items()}


def call_module(
    module: torch.nn.Module, source: ModelSource, feeds: Tensors, device: str = "cpu"
) -> object:
    """Call the module and return its result as it is. Inputs are passed in the plan's order.

    ModelError if the module fails.
    """
    import torch

    try:
        return module(*(tensor_from_array(feeds[spec.name]).to(device) for spec in source.inputs))
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error) from error
    except Exception as error:  # the user's code may raise anything
        shapes = ", ".join(
            f"{spec.name} {feeds[spec.name].dtype}{list(feeds[spec.name].shape)}"
            for spec in source.inputs
        )
        advice = "check model.inputs (order, dtypes, shapes) and the ranges of the profiles"
        if "same device" in str(error):  # torch raises a plain RuntimeError
            advice = (
                "its code creates tensors on the CPU: give them the device of an input, or"
                f" {CPU_INSTEAD}"
            )
        raise ModelError(
            f"the PyTorch model fails on {shapes}: {_error_text(error)}", advice
        ) from error


def name_outputs(result: object, source: ModelSource) -> dict[str, torch.Tensor]:
    """Flatten the result of a module depth first, and name its tensors.

    The result is a tensor, tuple, list, dict, dataclass, or nested. Names: the plan's `outputs`;
    else the keys of a dict or dataclass, nested ones joined by "_"; else output_0, output_1, ...
    None is left out, as exporters do. ModelError for any other value that is not a tensor.
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
    """Return the tensors of a module's result, in the order of `name_outputs`.

    `name_outputs` must have been called before on a result of this type.
    """
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]


def _register_dataclass(result: object) -> None:
    """Register a dataclass, so that torch can flatten it.

    torch knows its own containers and those of transformers.
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


def weights_bytes(module: object) -> int | None:
    """Return the bytes of a module's parameters and buffers; None for a compiled package."""
    import torch

    if not isinstance(module, torch.nn.Module):
        return None
    total: int = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return total


def tensor_from_array(array: NDArray[np.generic]) -> torch.Tensor:
    """Return a tensor that shares the array's memory if possible.

    bfloat16 is passed as bits, since torch does not know numpy's extension types.
    """
    import torch

    contiguous = np.require(array, requirements=["C", "W"])
    if contiguous.dtype.name == "bfloat16":
        return torch.from_numpy(contiguous.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(contiguous)


def array_from_tensor(tensor: torch.Tensor) -> NDArray[np.generic]:
    """Return a copy of a tensor, since an output may be an input, or a buffer of the module."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    if plain.dtype is torch.bfloat16:
        import ml_dtypes

        return np.array(plain.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.array(plain.numpy())
