"""The user's PyTorch module as the accuracy reference, and the baselines eager, traced and compile.

    eager     the unchanged module in inference mode
    traced    torch.jit.trace at opt, frozen, optimize_for_inference (folds batch norms, picks
              oneDNN layouts)
    compile   torch.compile (inductor) in the recipe's mode; it is compiled during the build, and
              every process that loads it gets inductor's cache

The reference is eager in fp32, without TF32 and without bf16: it must not be approximate itself. A
baseline in another precision is the whole module cast, with the inputs and outputs of the
reference. On a host with a GPU that torch can use, all run on the GPU: the comparison of a GPU
engine with a module on the CPU would flatter the engine.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.backends.base import no_layers
from pipeline.backends.feed_checks import closed, engine_digest, refuse_foreign
from pipeline.backends.pytorch.cuda import DEVICE, CudaTorchSession, why_not_cuda
from pipeline.backends.pytorch.inductor import (
    CACHE,
    compiled,
    fill_cache,
    gpu_turn,
    lack_of_tools,
    seed_cache,
)
from pipeline.backends.pytorch.module import (
    CPU_INSTEAD,
    array_from_tensor,
    call_module,
    check_castable,
    first_line,
    in_precision,
    load_module,
    run_module,
)
from pipeline.backends.pytorch.postprocessing import with_postprocessing
from pipeline.backends.pytorch.preprocessing import with_preprocessing
from pipeline.backends.pytorch.session import (
    TorchSession,
    cpu_target,
    example_args,
    host_target,
    open_session,
)
from pipeline.core.artifacts import (
    BuildOptions,
    Engine,
    ModelSource,
    Note,
    OnnxModel,
    Refusal,
    Target,
)
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import CompileMode, Precision, Recipe
from pipeline.errors import BackendUnavailable, ModelError, UnsupportedError
from pipeline.host.environment import usable_cores
from pipeline.plan.source import digest_of_source

if TYPE_CHECKING:
    import torch

PRECISIONS = frozenset({Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16})
DISTRIBUTIONS: tuple[str, ...] = ("torch", "triton", "safetensors")
layers = no_layers
VARIANTS = ("eager", "traced", "compile")
FILE = "source.json"


def probe() -> Target:
    """Return this host as a target, without importing torch: its first GPU, or the CPU."""
    return host_target("pytorch")


def _cpu() -> Target:
    return cpu_target("pytorch")


def check_recipe(recipe: Recipe, target: Target) -> NoReturn:
    """Raise UnsupportedError: baselines belong under benchmark.baselines."""
    raise UnsupportedError(
        "pytorch is a baseline, not a candidate: it runs the source, not a graph",
        "list it under benchmark.baselines",
    )


def unsupported(
    model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
) -> tuple[Refusal, ...]:
    """Return no nodes: PyTorch runs the module itself, not the graph."""
    return ()


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Raise UnsupportedError: PyTorch does not run graphs. `build_baseline` takes the source."""
    check_recipe(recipe, probe())


def build_baseline(
    source: ModelSource,
    model: OnnxModel,
    recipe: Recipe,
    options: BuildOptions,
    out: Path,
    progress: Progress = silent,
) -> Engine:
    """Write the source of a baseline as its engine file.

    `model` is the export of the source; the engine has the same interface. The process that runs
    the baseline loads, traces or compiles the module. The variant `compile` is compiled here too,
    to fill inductor's cache.
    """
    if recipe.variant not in VARIANTS or recipe.precision not in PRECISIONS:
        known = ", ".join(VARIANTS)
        raise UnsupportedError(
            f"pytorch has no variant '{recipe.variant}' in {recipe.precision}",
            f"choose {known}, in fp32, tf32, fp16 or bf16",
        )
    check_castable(source, recipe.precision)
    target, notes = usable_target()
    (out / FILE).write_text(source.model_dump_json(indent=1), encoding="utf-8")
    # Other code may export to the same graph and be slower.
    content = engine_digest(model, recipe, options, target) + source.digest
    engine = Engine(
        root=out,
        file=FILE,
        digest=hashlib.sha256(content.encode()).hexdigest(),
        target=target,
        recipe=recipe,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=options.profiles,
        threads=options.threads,
        size_bytes=sum(
            path.stat().st_size for path in (source.path, source.weights) if path is not None
        ),
        notes=notes,
    )
    if recipe.variant == "compile":
        progress(None, "compiling")
        with gpu_turn(target.compute_capability is not None, progress):
            fill_cache(engine, load, ("opt",))
    return engine


def usable_target() -> tuple[Target, tuple[Note, ...]]:
    """Return this host, or its CPU with a note on why this torch cannot use the GPU.

    OutOfDeviceMemory if the GPU is full: that may pass, so the result must not be stored.
    """
    host = probe()
    reason = why_not_cuda() if host.compute_capability else ""
    if not reason:
        return host, ()
    text = (
        f"PyTorch runs on the CPU, because it cannot use {host.device}: {reason}; ratios to it"
        " compare other hardware"
    )
    return _cpu(), (Note(stage="baseline", text=text),)


def load(engine: Engine, device: str = "") -> TorchLoaded:
    """Load the module. Sets torch's process-wide thread count.

    ModelError if the user's files have changed since the build.
    """
    on_gpu = engine.target.compute_capability is not None
    refuse_foreign(engine, probe() if on_gpu else _cpu())
    if device not in ("", DEVICE if on_gpu else "cpu"):
        raise UnsupportedError(
            f"this PyTorch baseline runs on {engine.target.device}, not on '{device}'",
            "leave the device out",
        )
    reason = why_not_cuda() if on_gpu else ""
    if reason:
        raise BackendUnavailable(
            f"PyTorch cannot use {engine.target.device}: {reason}",
            f"install a torch for this driver and GPU, or {CPU_INSTEAD}",
        )
    import torch

    source = ModelSource.model_validate_json(engine.path.read_text(encoding="utf-8"))
    if digest_of_source(source) != source.digest:
        raise ModelError(
            "the model's source or weights have changed since this baseline was built",
            "compile the plan again",
        )
    torch.set_num_threads(engine.threads or usable_cores())
    seed_cache(engine.root / CACHE)
    module_device = DEVICE if on_gpu else "cpu"
    return TorchLoaded(engine, source, load_module(source, module_device), module_device)


class TorchLoaded:
    """One module in memory."""

    def __init__(
        self, engine: Engine, source: ModelSource, module: torch.nn.Module, device: str
    ) -> None:
        self._engine, self._source, self._device = engine, source, device
        self._module: Any = module
        self._is_cast = False

    def session(self, profile: int | None = None) -> TorchSession | CudaTorchSession:
        """Trace or compile the module at this profile's opt, and run it there once as a check."""
        recipe = self._engine.recipe
        args = example_args(self._engine, profile, self._device)
        if not self._is_cast:
            names = [spec.name for spec in self._engine.inputs]
            arrays = [array_from_tensor(arg) for arg in args]
            feeds = dict(zip(names, arrays, strict=True))
            # This also registers a dataclass with torch before anything is timed.
            module = with_preprocessing(self._module, self._source, self._device)
            run_module(module, self._source, feeds, self._device)
            own = with_postprocessing(self._module, self._source, self._engine.outputs)
            if recipe.precision is not Precision.FP32:
                own = in_precision(own, recipe.precision, self._engine.outputs)
            if own is not self._module:
                module = with_preprocessing(own, self._source, self._device)
                # This fails if the module's code holds tensors that are not cast.
                call_module(module, self._source, feeds, self._device)
            self._module = module
            self._is_cast = True
        module = _VARIANTS[recipe.variant](self._module, args, recipe.mode)
        return open_session(self._engine, module, self._device, self._module)

    def close(self) -> None:
        self._module = closed
        if self._device == DEVICE:
            import torch

            torch.cuda.empty_cache()


def _eager(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    mode: CompileMode | None,
) -> Any:
    return module


def _traced(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    mode: CompileMode | None,
) -> Any:
    import torch

    with torch.inference_mode(), warnings.catch_warnings():
        # deprecations, and values that tracing freezes, which the export checks
        warnings.simplefilter("ignore")
        try:
            # not strict: the module may return dicts
            traced = torch.jit.trace(module, args, strict=False, check_trace=False)
            traced = torch.jit.optimize_for_inference(torch.jit.freeze(traced))
            traced(*args)
        except RuntimeError as error:
            raise ModelError(
                f"the model cannot be traced: {first_line(error)}", "drop the baseline `traced`"
            ) from error
    return traced


def _compiled(
    module: torch.nn.Module,
    args: tuple[torch.Tensor, ...],
    mode: CompileMode | None,
) -> Any:
    lack = lack_of_tools(on_gpu=any(arg.is_cuda for arg in args))
    if lack:
        raise BackendUnavailable(
            f"torch.compile needs {lack.what}",
            f"{lack.install}, or drop the baseline `compile`",
        )
    return compiled(module, args, mode)


_VARIANTS = {"eager": _eager, "traced": _traced, "compile": _compiled}
