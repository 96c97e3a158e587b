"""PyTorch, on the GPU where there is one: the user's module itself, which is the accuracy reference, and the baselines eager, traced and compile.

    eager     the module as its user has it, in inference mode
    traced    torch.jit.trace at opt, frozen, optimize_for_inference (folds batch norms, picks oneDNN layouts)
    compile   torch.compile in its default mode (inductor); compiled at opt while the session opens

Always fp32 without TF32 and without bf16 shortcuts: the reference must not be approximate itself. On a host with a GPU that torch can
use it runs there: a GPU engine against a module on the CPU would flatter the engine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.base import no_layers
from pipeline.backends.checks import FeedCheck, HostTimer, closed, engine_digest, refuse_foreign
from pipeline.backends.torch_cuda import DEVICE, CudaTorchSession, why_not_cuda
from pipeline.backends.torch_module import (
    CPU_INSTEAD,
    array_from_tensor,
    first_line,
    leaves_of,
    load_module,
    run_module,
    tensor_from_array,
    torch_version,
)
from pipeline.core import (
    BuildOptions,
    Engine,
    ModelSource,
    Note,
    OnnxModel,
    Precision,
    Profile,
    Progress,
    Recipe,
    Refusal,
    Target,
    Tensors,
    silent,
)
from pipeline.errors import BackendUnavailable, HostError, ModelError, UnsupportedError
from pipeline.gpu import find_gpus
from pipeline.graph import draw_feeds
from pipeline.measure import cpu_name, usable_cores
from pipeline.source import digest_of_source

if TYPE_CHECKING:
    import torch

PRECISIONS = frozenset({Precision.FP32})
DISTRIBUTIONS: tuple[str, ...] = ("torch", "safetensors")
layers = no_layers
VARIANTS = ("eager", "traced", "compile")
FILE = "source.json"


def probe() -> Target:
    """This host as PyTorch should see it, without importing torch: its first GPU, or the CPU where there is none or torch is built without CUDA."""
    gpus = () if torch_version().endswith("+cpu") else find_gpus().devices
    if not gpus:
        return _cpu()
    first = gpus[0]
    return Target(backend="pytorch", version=torch_version(), device=first.name, compute_capability=first.compute_capability, driver=first.driver)


def _cpu() -> Target:
    return Target(backend="pytorch", version=torch_version(), device=cpu_name())


def check_recipe(recipe: Recipe, target: Target) -> NoReturn:
    """Always UnsupportedError: baselines are named under benchmark.baselines."""
    raise UnsupportedError("pytorch is a baseline, not a candidate: it runs the source, not a graph", "list it under benchmark.baselines")


def unsupported(model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()) -> tuple[Refusal, ...]:
    """None: it runs the module itself, not the graph."""
    return ()


def build(model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent) -> Engine:
    """Always UnsupportedError: a graph is not what PyTorch runs. `build_baseline` takes the source."""
    check_recipe(recipe, probe())


def build_baseline(source: ModelSource, model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent) -> Engine:
    """Write down what to load; `model` is the source's export, whose interface the engine shares.

    Nothing is loaded here: a traced or compiled module cannot be stored whole, so that happens in the process that runs it.
    """
    if recipe.variant not in VARIANTS or recipe.precision is not Precision.FP32:
        raise UnsupportedError(f"pytorch has no variant '{recipe.variant}' in {recipe.precision}", f"choose {', '.join(VARIANTS)}, in fp32")
    target, notes = _usable(probe())
    (out / FILE).write_text(source.model_dump_json(indent=1), encoding="utf-8")
    content = engine_digest(model, recipe, options, target) + source.digest  # other code may export to the same graph, and be slower
    return Engine(
        root=out,
        file=FILE,
        digest=hashlib.sha256(content.encode()).hexdigest(),
        target=target,
        recipe=recipe,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=options.profiles,
        threads=options.threads,
        size_bytes=sum(path.stat().st_size for path in (source.path, source.weights) if path is not None),
        notes=notes,
    )


def _usable(host: Target) -> tuple[Target, tuple[Note, ...]]:
    """The host, or its CPU with a note that says why this torch cannot use the GPU. OutOfDeviceMemory where that may pass: it must not be kept."""
    reason = why_not_cuda() if host.compute_capability else ""
    if not reason:
        return host, ()
    text = f"PyTorch runs on the CPU, because it cannot use {host.device}: {reason}; ratios to it compare other hardware"
    return _cpu(), (Note(stage="baseline", text=text),)


def load(engine: Engine, device: str = "") -> TorchLoaded:
    """The module in memory. Sets torch's process-wide thread count. ModelError if the user's files have changed since the build."""
    on_gpu = engine.target.compute_capability is not None
    refuse_foreign(engine, probe() if on_gpu else _cpu())
    if device not in ("", DEVICE if on_gpu else "cpu"):
        raise UnsupportedError(f"this PyTorch baseline runs on {engine.target.device}, not on '{device}'", "leave the device out")
    if on_gpu and (reason := why_not_cuda()):
        raise BackendUnavailable(f"PyTorch cannot use {engine.target.device}: {reason}", f"install a torch for this driver and GPU, or {CPU_INSTEAD}")
    import torch

    source = ModelSource.model_validate_json(engine.path.read_text(encoding="utf-8"))
    if digest_of_source(source) != source.digest:
        raise ModelError("the model's source or weights have changed since this baseline was built", "compile the plan again")
    torch.set_num_threads(engine.threads or usable_cores())
    place = DEVICE if on_gpu else "cpu"
    return TorchLoaded(engine, source, load_module(source, place), place)


class TorchLoaded:
    """One module in memory."""

    def __init__(self, engine: Engine, source: ModelSource, module: torch.nn.Module, device: str) -> None:
        self._engine, self._source, self._device = engine, source, device
        self._module: Any = module

    def session(self, profile: int = 0) -> TorchSession | CudaTorchSession:
        """Traces or compiles at this profile's opt, and runs there once, so that what cannot run fails here."""
        chosen = (self._engine.profiles or (Profile(),))[profile]
        feeds = draw_feeds(self._engine.inputs, chosen.sizes("opt"), 0, chosen.values_at("opt"))
        run_module(self._module, self._source, feeds, self._device)  # also tells torch how to flatten a dataclass, before anything is timed
        args = tuple(tensor_from_array(feeds[spec.name]).to(self._device) for spec in self._engine.inputs)
        module = _VARIANTS[self._engine.recipe.variant](self._module, args)
        return CudaTorchSession(self._engine, module) if self._device == DEVICE else TorchSession(self._engine, module)

    def close(self) -> None:
        self._module = closed
        if self._device == DEVICE:
            import torch

            torch.cuda.empty_cache()


def _eager(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    return module


def _traced(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    import torch

    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecation, and what tracing freezes: export checks that
        try:
            traced = torch.jit.trace(module, args, strict=False, check_trace=False)  # not strict: dicts may be returned
            traced = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
            traced(*args)
        except RuntimeError as error:
            raise ModelError(f"the model cannot be traced: {first_line(error)}", "drop the baseline `traced`") from error
    return traced


def _compiled(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
    import torch

    _check_compiler(on_gpu=any(arg.is_cuda for arg in args))
    compiled = torch.compile(module)
    try:
        with torch.inference_mode():
            compiled(*args)
    except torch._inductor.exc.InductorError as error:
        advice = "install a compiler (gcc, g++) and the headers of this Python, or drop the baseline `compile`"
        raise HostError(f"torch.compile cannot compile this model here: {first_line(error)}", advice) from error
    return compiled


def _check_compiler(on_gpu: bool) -> None:
    """HostError without what inductor needs: a C++ compiler for CPU code; Triton, and a C compiler for its launchers, for GPU code."""
    drop = "or drop the baseline `compile`"
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise HostError("torch.compile needs Triton for the GPU, and it is not installed", f"pip install triton, {drop}")
    usual = ("gcc", "clang") if on_gpu else ("g++",)
    named = os.environ.get("CC" if on_gpu else "CXX")
    if not any(shutil.which(compiler) for compiler in ([named] if named else usual)):
        language = "C" if on_gpu else "C++"
        raise HostError(f"torch.compile needs a {language} compiler, and there is no '{named or usual[0]}'", f"install {usual[0]}, {drop}")


_VARIANTS = {"eager": _eager, "traced": _traced, "compile": _compiled}


class TorchSession:
    """Runs one module on host tensors."""

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
        self._fetched = {name: array_from_tensor(tensor) for name, tensor in zip(self._names, leaves_of(self._result), strict=True)}

    def synchronize(self) -> None:
        """Nothing to wait for on the CPU."""

    def fetch(self) -> Mapping[str, NDArray[np.generic]]:
        return self._fetched

    def timer(self) -> HostTimer:
        return HostTimer()

    def close(self) -> None:
        self._module, self._feeds, self._args, self._result = closed, {}, (), None
