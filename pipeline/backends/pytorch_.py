"""PyTorch on the CPU: the user's module itself, which is the accuracy reference, and the baselines eager, traced and compile.

    eager     the module as its user has it, in inference mode
    traced    torch.jit.trace at opt, frozen, optimize_for_inference (folds batch norms, picks oneDNN layouts)
    compile   torch.compile in its default mode (inductor); compiled at opt while the session opens

Always fp32 without TF32 and without bf16 shortcuts: the reference must not be approximate itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.metadata
import os
import shutil
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.core import (
    BuildOptions,
    Engine,
    Frozen,
    ModelSource,
    OnnxModel,
    Precision,
    Profile,
    Progress,
    Recipe,
    Refusal,
    Target,
    Tensors,
    TensorSpec,
    silent,
    sizes_from_shapes,
)
from pipeline.errors import BackendUnavailable, DataError, HostError, ModelError, UnsupportedError
from pipeline.graph import draw_feeds
from pipeline.measure import monotonic
from pipeline.source import digest_of_source

if TYPE_CHECKING:
    import torch

PRECISIONS = frozenset({Precision.FP32})
DISTRIBUTIONS = ("torch", "safetensors")
VARIANTS = ("eager", "traced", "compile")
FILE = "source.json"


class Baseline(Frozen):
    """What a PyTorch engine is made of: the user's source, and the outputs of its export, so that both speak of the same tensors."""

    source: ModelSource
    outputs: tuple[TensorSpec, ...]


# --- the user's module ---


def load_module(source: ModelSource) -> torch.nn.Module:
    """The user's module in eval mode and fp32, with its weights; the seed is set first, so random weights are always the same.

    Sets torch's process-wide seed and precision. ModelError if anything of it cannot be had, with its cause.
    """
    probe()
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(source.seed)
    if source.kind == "pt2":
        module: torch.nn.Module = load_program(source).module()
        return module
    module = _call_entrypoint(source).float().eval()
    if source.weights is not None:
        _load_weights(module, source.weights)
    return module


def load_program(source: ModelSource) -> torch.export.ExportedProgram:
    """The exported program of a .pt2 source. ModelError if the file cannot be read."""
    import torch

    assert source.path is not None
    try:
        return torch.export.load(source.path)
    except Exception as error:  # a damaged file fails in many ways
        advice = "save it with torch.export.save and this version of torch"
        raise ModelError(f"'{source.path}' cannot be read by torch {torch.__version__}: {_first_line(error)}", advice) from error


def _call_entrypoint(source: ModelSource) -> torch.nn.Module:
    import torch

    name, _, function = (source.entrypoint or "").partition(":")
    if source.python_path is not None and str(source.python_path) not in sys.path:
        sys.path.insert(0, str(source.python_path))  # and it stays: modules may import more while they run
    try:
        make = getattr(importlib.import_module(name), function, None)
    except Exception as error:  # the user's code: anything may come
        advice = "correct model.entrypoint or model.python_path, or install what the module imports"
        raise ModelError(f"cannot import '{name}' of entrypoint '{source.entrypoint}': {_said(error)}", advice) from error
    if not callable(make):
        raise ModelError(f"module '{name}' has no function '{function}'", "correct model.entrypoint: `module:function`")
    try:
        module = make()
    except Exception as error:
        raise ModelError(
            f"entrypoint '{source.entrypoint}' raised {_said(error)}", "it is called without arguments; run it by itself first"
        ) from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"entrypoint '{source.entrypoint}' returned {type(module).__name__}", "it must return a torch.nn.Module")
    return module


def _load_weights(module: torch.nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    advice = "give the weights that were saved from this very module"
    try:
        missing, unexpected = load_model(module, path, strict=False)
    except SafetensorError as error:
        raise ModelError(f"'{path}' is not a safetensors file: {error}", "save the weights with safetensors.torch.save_file") from error
    except RuntimeError as error:  # shapes that differ, one line each after the first
        raise ModelError(f"weights '{path}' do not fit the module: {_list(str(error).splitlines()[1:])}", advice) from error
    faults = [f"{what} {_list(sorted(names))}" for what, names in (("lacks", missing), ("has unknown", unexpected)) if names]
    if faults:
        raise ModelError(f"weights '{path}' do not fit the module: the file {' and '.join(faults)}", advice)


def _list(names: list[str]) -> str:
    """Up to five names, and how many more."""
    shown = ", ".join(name.strip() for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


# --- running it ---


def run_module(module: torch.nn.Module, source: ModelSource, feeds: Tensors) -> dict[str, NDArray[np.generic]]:
    """Host arrays in, named host arrays out. ModelError if the module fails on them."""
    import torch

    with torch.inference_mode():
        return {name: array_from_tensor(value) for name, value in name_outputs(call_module(module, source, feeds), source).items()}


def call_module(module: torch.nn.Module, source: ModelSource, feeds: Tensors) -> object:
    """What the module returns, as its user wrote it; the inputs are passed by position, in the plan's order."""
    try:
        return module(*(tensor_from_array(feeds[spec.name]) for spec in source.inputs))
    except Exception as error:  # the user's code: anything may come
        shapes = ", ".join(f"{spec.name} {feeds[spec.name].dtype}{list(feeds[spec.name].shape)}" for spec in source.inputs)
        advice = "check model.inputs (order, dtypes, shapes) and the ranges of the profiles"
        raise ModelError(f"the PyTorch model fails on {shapes}: {_said(error)}", advice) from error


def name_outputs(result: object, source: ModelSource) -> dict[str, torch.Tensor]:
    """Flatten what a module returned (tensor, tuple, list, dict, dataclass, nested) depth first, and name it.

    Names: the plan's `outputs`; else the keys of a dict or dataclass, nested ones joined by "_"; else output_0, output_1, ...
    None is left out, as exporters do. ModelError for anything else that is no tensor.
    """
    import torch
    from torch.utils import _pytree as pytree

    _register_dataclass(result)
    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(result)[0] if leaf is not None]
    names = list(source.outputs) or [_name_of_path(path, index) for index, (path, _) in enumerate(leaves)]
    if len(names) != len(leaves):
        raise ModelError(f"model.outputs names {len(names)} outputs, the model returns {len(leaves)}", "name every output, in order")
    for name, (_, leaf) in zip(names, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            raise ModelError(f"output '{name}' of the model is a {type(leaf).__name__}, expected a tensor", "return tensors only")
        if any(name == spec.name for spec in source.inputs):
            raise ModelError(f"'{name}' is the name of an input and of an output", "name the outputs in model.outputs")
    return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


def _register_dataclass(result: object) -> None:
    """Tell torch how to flatten a dataclass; its own containers, and those of transformers, it knows."""
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
    """Shares memory where it can; bfloat16 crosses as its bits, since torch does not know numpy's extension types."""
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


# --- the backend ---


def probe() -> Target:
    """This host as PyTorch's CPU path sees it, without importing torch."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnavailable("PyTorch is not installed", "pip install 'crucible[torch]'") from error
    return Target(backend="pytorch", version=version, device="cpu")


def unsupported(model: OnnxModel, target: Target) -> tuple[Refusal, ...]:
    """None: it runs the module itself, not the graph."""
    return ()


def build(baseline: Baseline, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent) -> Engine:
    """Write down what to load. The module is loaded, traced or compiled in the process that runs it, since neither can be stored whole."""
    if recipe.variant not in VARIANTS or recipe.precision is not Precision.FP32:
        raise UnsupportedError(f"pytorch has no variant '{recipe.variant}' in {recipe.precision}", f"choose {', '.join(VARIANTS)} in fp32")
    source = baseline.source
    text = baseline.model_dump_json(indent=1)
    (out / FILE).write_text(text, encoding="utf-8")
    identity = "\n".join([source.digest, *(spec.model_dump_json() for spec in baseline.outputs), recipe.model_dump_json(), options.model_dump_json()])
    return Engine(
        root=out,
        file=FILE,
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        target=probe(),
        recipe=recipe,
        inputs=source.inputs,
        outputs=baseline.outputs,
        profiles=options.profiles,
        threads=options.threads,
        size_bytes=sum(path.stat().st_size for path in (source.path, source.weights) if path is not None),
    )


def load(engine: Engine, device: str = "") -> TorchLoaded:
    """The module in memory. Sets torch's process-wide thread count. ModelError if the user's files have changed since the build."""
    reasons = engine.target.accepts(probe())
    if reasons:
        raise BackendUnavailable("; ".join(reasons), "compile the plan again on this host")
    if device not in ("", "cpu"):
        raise UnsupportedError(f"the PyTorch baselines run on the CPU, not on '{device}'", "leave the device out")
    import torch

    source = Baseline.model_validate_json(engine.path.read_text(encoding="utf-8")).source
    if digest_of_source(source) != source.digest:
        raise ModelError("the model's source or weights have changed since this baseline was built", "compile the plan again")
    torch.set_num_threads(engine.threads or len(os.sched_getaffinity(0)))
    return TorchLoaded(engine, source, load_module(source))


class TorchLoaded:
    """One module in memory."""

    def __init__(self, engine: Engine, source: ModelSource, module: torch.nn.Module) -> None:
        self._engine, self._source, self._module = engine, source, module

    def session(self, profile: int = 0) -> TorchSession:
        """Traces or compiles at this profile's opt, and runs there once, so that what cannot run fails here."""
        chosen = (self._engine.profiles or (Profile(),))[profile]
        feeds = draw_feeds(self._engine.inputs, chosen.sizes("opt"), seed=0)
        module = _VARIANTS[self._engine.recipe.variant](self._module, tuple(tensor_from_array(feeds[spec.name]) for spec in self._engine.inputs))
        return TorchSession(self._engine, self._source, module)

    def close(self) -> None:
        del self._module


def _eager(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    return module


def _traced(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    import torch

    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation, and what tracing freezes: export checks that
        traced = torch.jit.trace(module, args, strict=False, check_trace=False)  # not strict: dicts may be returned
        traced = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
        traced(*args)
    return traced


def _compiled(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    import torch

    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise HostError(f"torch.compile needs a C++ compiler, and there is no '{compiler}'", "install g++, or drop the baseline `compile`")
    compiled = torch.compile(module)
    try:
        with torch.inference_mode():
            compiled(*args)
    except torch._inductor.exc.InductorError as error:
        advice = "install g++ and the headers of this Python, or drop the baseline `compile`"
        raise HostError(f"torch.compile cannot compile this model here: {_first_line(error)}", advice) from error
    return compiled


_VARIANTS = {"eager": _eager, "traced": _traced, "compile": _compiled}


class HostTimer:
    """The monotonic clock: everything here runs in the calling thread and is done when it returns."""

    def __init__(self) -> None:
        self._start = self._stop = 0.0

    def start(self) -> None:
        self._start = monotonic()

    def stop(self) -> None:
        self._stop = monotonic()

    def elapsed_s(self) -> float:
        return self._stop - self._start


class TorchSession:
    """Runs one module on host tensors."""

    def __init__(self, engine: Engine, source: ModelSource, module: Any) -> None:
        self.inputs, self.outputs = engine.inputs, engine.outputs
        self._profiles, self._source, self._module = engine.profiles or (Profile(),), source, module
        self._names = tuple(spec.name for spec in engine.outputs)
        self._feeds: Tensors = {}
        self._args: tuple[torch.Tensor, ...] = ()
        self._result: object = None
        self._fetched: dict[str, NDArray[np.generic]] = {}

    def bind(self, feeds: Tensors) -> None:
        fault = _fault_of_feeds(self.inputs, self._profiles, feeds)
        if fault:
            raise DataError(fault, "give exactly the engine's inputs; `crucible inspect` shows them")
        self._feeds = feeds

    def upload(self) -> None:
        self._args = tuple(tensor_from_array(self._feeds[spec.name]) for spec in self.inputs)

    def execute(self) -> None:
        import torch

        with torch.inference_mode():
            self._result = self._module(*self._args)

    def download(self) -> None:
        named = name_outputs(self._result, self._source)
        self._fetched = {name: array_from_tensor(tensor) for name, tensor in zip(self._names, named.values(), strict=True)}

    def synchronize(self) -> None:
        """Nothing to wait for on the CPU."""

    def fetch(self) -> Mapping[str, NDArray[np.generic]]:
        return self._fetched

    def timer(self) -> HostTimer:
        return HostTimer()

    def close(self) -> None:
        self._feeds, self._args, self._result = {}, (), None


def _fault_of_feeds(inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...], feeds: Tensors) -> str:
    """What is wrong with these feeds, as a sentence; empty if nothing."""
    names = [spec.name for spec in inputs]
    if sorted(names) != sorted(feeds):
        return f"expected inputs {', '.join(names)}, got {', '.join(feeds)}"
    for spec in inputs:
        if feeds[spec.name].dtype.name != spec.dtype:
            return f"input '{spec.name}' is {feeds[spec.name].dtype.name}, expected {spec.dtype}"
    sizes = sizes_from_shapes(inputs, {name: feeds[name].shape for name in names})
    if isinstance(sizes, str):
        return sizes
    if not any(profile.holds(sizes) for profile in profiles):
        return f"no profile holds {', '.join(f'{name}={size}' for name, size in sizes.items())}"
    return ""
