"""PyTorch programs for delivery: the user's module as captured by torch.export.

Their files need none of the user's code.

    aoti       compiled by AOTInductor into a package of machine code
    exported   run operator by operator, as captured
    compile    compiled again by torch.compile at every load, in the recipe's mode

An engine of any form is code: loading it runs code from its files. The whole module is cast to the
recipe's precision; its inputs and outputs keep the dtypes of the reference.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.backends.base import no_layers
from pipeline.backends.feed_checks import closed, refuse_foreign, unreadable
from pipeline.backends.pytorch.cuda import DEVICE, CudaTorchSession, why_not_cuda
from pipeline.backends.pytorch.export import Job, Refused, captured
from pipeline.backends.pytorch.inductor import (
    CACHE,
    CACHE_DIR,
    compiled,
    cuda_headers,
    explained,
    fill_cache,
    gpu_turn,
    lack_of_tools,
    seed_cache,
)
from pipeline.backends.pytorch.module import (
    CPU_INSTEAD,
    allow_tf32,
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
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import (
    BackendUnavailable,
    ChildDied,
    ChildKilled,
    LoadCrashed,
    ModelError,
    UnsupportedError,
)
from pipeline.execution.child_process import Child
from pipeline.host.environment import usable_cores
from pipeline.measurement.clock import monotonic
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.preprocess import raw_specs

if TYPE_CHECKING:
    import torch

PRECISIONS = frozenset({Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16})
DISTRIBUTIONS: tuple[str, ...] = ("torch", "triton", "safetensors")
layers = no_layers
FILE = "program.pt2"
FORMS = ("aoti", "exported", "compile")
NATIVE = {Precision.BF16: {"avx512_bf16", "amx_bf16"}, Precision.FP16: {"avx512_fp16", "amx_fp16"}}
"""CPU flags. Any one of them computes in that precision; without one, PyTorch converts to fp32."""

PACKAGE = {"cpp.dynamic_threads": True}
"""AOTInductor's options: on the CPU a package uses the threads of the process that loads it."""

EXTRACTED = "/data/aotinductor/"
"""A part of the paths of files that torch extracts from a package."""


def probe() -> Target:
    """Return this host as a target, without importing torch."""
    host = host_target("torch")
    return host if host.compute_capability else cpu_target("torch", flags=True)


def check_recipe(recipe: Recipe, target: Target) -> None:
    """Raise UnsupportedError for a recipe that PyTorch or this host's compilers do not support."""
    if recipe.form not in FORMS:
        raise UnsupportedError(f"torch has no form '{recipe.form}'", f"choose {', '.join(FORMS)}")
    if recipe.mode and recipe.form != "compile":
        raise UnsupportedError(
            f"`mode` is torch.compile's, and this form is {recipe.form}",
            "leave `mode` out, or take `form: compile`",
        )
    if recipe.precision not in PRECISIONS:
        known = ", ".join(sorted(PRECISIONS))
        raise UnsupportedError(
            f"a PyTorch program is not made in {recipe.precision}",
            f"choose {known}, or tensorrt",
        )
    if recipe.keep_fp32:
        raise UnsupportedError(
            "a PyTorch program is cast as a whole: no node stays in fp32",
            "leave `keep_fp32` out, or take tensorrt",
        )
    if not target.compute_capability:
        _check_cpu(recipe, target)
    _check_tools(recipe, target)


def _check_cpu(recipe: Recipe, target: Target) -> None:
    if recipe.precision is Precision.TF32:
        raise UnsupportedError("TF32 is a format of NVIDIA GPUs", "choose fp32")
    needed = NATIVE.get(recipe.precision)
    if needed and not needed & set(target.cpu_flags):
        lacking = ", ".join(sorted(needed))
        message = f"this CPU computes in {recipe.precision} by way of fp32 only: it has none of"
        raise UnsupportedError(f"{message} {lacking}", "choose fp32")


def _check_tools(recipe: Recipe, target: Target) -> None:
    on_gpu, ahead = target.compute_capability is not None, recipe.form == "aoti"
    lack = lack_of_tools(on_gpu, ahead) if recipe.form != "exported" else None
    if lack:
        who = "AOTInductor" if ahead else "torch.compile"
        raise UnsupportedError(
            f"{who} needs {lack.what}",
            f"{lack.install}, or take `form: exported`",
        )


def unsupported(
    model: OnnxModel,
    target: Target,
    plugins: tuple[Path, ...] = (),
) -> tuple[Refusal, ...]:
    """Return no nodes: PyTorch runs the module itself, not the graph."""
    return ()


# -- building -----------------------------------------------------------------------------------


def build(
    model: OnnxModel,
    recipe: Recipe,
    options: BuildOptions,
    out: Path,
    progress: Progress = silent,
) -> Engine:
    """Capture the module of `options.source`, and compile it by the recipe.

    The engine has the interface of `model`, the export of the source. UnsupportedError without a
    PyTorch source, ModelError if torch.export or a compiler refuses it.
    """
    target = probe()
    check_recipe(recipe, target)
    source = _pytorch_source(options, recipe)
    device = _device_of(target)
    import torch

    torch.set_num_threads(options.threads or usable_cores())
    progress(None, "capturing the PyTorch model")
    program = _captured(source, model, recipe, options.profiles, device)
    progress(None, "writing the program")
    if recipe.form == "aoti":
        with gpu_turn(device == DEVICE, progress):
            _package(program, out, device, progress)
    else:
        torch.export.save(program, out / FILE)
    engine = Engine(
        root=out,
        file=FILE,
        digest=_digest(out / FILE, recipe, target),
        target=target,
        recipe=recipe,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=options.profiles,
        threads=options.threads,
        size_bytes=(out / FILE).stat().st_size,
    )
    if recipe.form == "compile":
        return _compiled_once(engine, progress)
    return _loaded_once(engine, progress) if recipe.form == "aoti" else engine


def _pytorch_source(options: BuildOptions, recipe: Recipe) -> ModelSource:
    source = options.source
    if source is None or source.kind == "onnx":
        raise UnsupportedError(
            "an ONNX file has no PyTorch program to deliver",
            "take another backend, or give the PyTorch model",
        )
    check_castable(source, recipe.precision)
    return source


def _device_of(target: Target) -> str:
    """Return torch's device for a target. BackendUnavailable if torch cannot use its GPU."""
    if not target.compute_capability:
        return "cpu"
    if reason := why_not_cuda():
        raise BackendUnavailable(
            f"PyTorch cannot use {target.device}: {reason}",
            f"install a torch for this driver and GPU, or {CPU_INSTEAD}",
        )
    return DEVICE


def _captured(
    source: ModelSource,
    model: OnnxModel,
    recipe: Recipe,
    profiles: tuple[Profile, ...],
    device: str,
) -> torch.export.ExportedProgram:
    """Capture the module in the recipe's precision, free in the dimensions that profiles vary."""
    inputs = raw_specs(source.inputs, source.preprocess)
    sizes = capture_sizes(inputs, profiles)
    values = profiles[0].values_at("opt") if profiles else None
    example = draw_feeds(inputs, sizes, 0, values)
    module = load_module(source, device)
    # torch then knows how to flatten a dataclass
    run_module(with_preprocessing(module, source, device), source, example, device)
    reduced = with_postprocessing(module, source, model.outputs)
    cast = in_precision(reduced, recipe.precision, model.outputs)
    cast = with_preprocessing(cast, source, device)
    fixed = tuple(_with_fixed(spec, profiles) for spec in inputs)
    source = source.model_copy(update={"inputs": fixed})
    try:
        return captured(Job(source, cast, (), 0, example, Path(), device, flat=True))
    except Refused as error:
        message = f"torch.export cannot capture this model: {error}"
        advice = "change what it names, or leave the candidates of torch out"
        raise ModelError(message, advice) from error


def capture_sizes(inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]) -> dict[str, int]:
    """Return the sizes for the capture: the usual ones, since kernels are tuned for them.

    They are distinct, so that no two dimensions look equal by chance. They are at least 3, since
    torch.export treats 0 and 1 as fixed, and `x[1:]` of 2 has size 1. A dimension that never varies
    keeps its size.
    """
    symbols = list(dict.fromkeys(symbol for spec in inputs for symbol in spec.symbols))
    fixed = [symbol for symbol in symbols if is_fixed(symbol, profiles)]
    sizes = {symbol: profiles[0].dims[symbol].max for symbol in fixed}
    taken = {dim for spec in inputs for dim in spec.shape if isinstance(dim, int)}
    taken |= set(sizes.values())
    for symbol in symbols:
        ranges = [profile.dims[symbol] for profile in profiles]
        largest = max(dim.max for dim in ranges)
        usual = [*(dim.opt for dim in ranges), *(dim.max for dim in ranges)]
        choices = itertools.chain(usual, range(3, largest), itertools.count(2))
        least = 3 if largest > 2 else 2
        free = (size for size in choices if size >= least and size not in taken)
        if symbol not in sizes:
            sizes[symbol] = next(free)
            taken.add(sizes[symbol])
    return sizes


def is_fixed(symbol: str, profiles: tuple[Profile, ...]) -> bool:
    """Return True if a symbol has only one size in all profiles."""
    ranges = [profile.dims[symbol] for profile in profiles]
    return len({size for dim in ranges for size in (dim.min, dim.max)}) == 1


def _with_fixed(spec: TensorSpec, profiles: tuple[Profile, ...]) -> TensorSpec:
    """Return the input with a number in the place of every symbol that never varies."""
    fixed = {name: profiles[0].dims[name].max for name in spec.symbols if is_fixed(name, profiles)}
    shape = tuple(fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape)
    return spec.model_copy(update={"shape": shape})


def _package(
    program: torch.export.ExportedProgram,
    out: Path,
    device: str,
    progress: Progress,
) -> None:
    """Write the program as a package of machine code to `out`."""
    import torch._inductor

    progress(None, "compiling ahead of time")
    if device == DEVICE and (headers := cuda_headers()):
        headers.use()
    with explained("AOTInductor cannot compile this model here"), torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(out / FILE),
            inductor_configs=PACKAGE if device == "cpu" else None,
        )


def _compiled_once(engine: Engine, progress: Progress) -> Engine:
    """Return the engine with inductor's cache for its profiles, and with its cold start."""
    progress(None, "compiling")
    with gpu_turn(engine.target.compute_capability is not None, progress):
        fill_cache(engine, load, ("opt", "max", "min"))
    progress(None, "measuring the cold start")
    seconds = cold_start_s(engine)
    cold = f"{seconds:.1f} s from the start of a process to its first answer"
    text = f"compiled again at every load: {cold}, with what the build has compiled"
    notes = (Note(stage="build", text=text, level="info"),)
    return engine.model_copy(update={"cold_start_s": seconds, "notes": notes})


def _loaded_once(engine: Engine, progress: Progress) -> Engine:
    """Return the engine with its cold start.

    LoadCrashed if the machine code crashes on this host, which built it.
    """
    progress(None, "loading the package")
    try:
        with gpu_turn(engine.target.compute_capability is not None, progress):
            return engine.model_copy(update={"cold_start_s": cold_start_s(engine)})
    except ChildKilled:  # this is no evidence on the package
        raise
    except ChildDied as error:
        message = "AOTInductor's package was built here, and the process that loaded it crashed"
        advice = "take `form: exported` or `form: compile`; see the log of this stage"
        raise LoadCrashed(f"{message}: {first_line(error)}", advice) from error


def cold_start_s(engine: Engine) -> float:
    """Return the seconds of a new process until its first output, with only the engine's files.

    Its temporary folder is its own: a package that crashes leaves its extracted files there.
    """
    started = monotonic()
    with tempfile.TemporaryDirectory(prefix="crucible-cold-") as empty:
        with Child(
            first_answer,
            engine,
            name="cold start",
            env={CACHE_DIR: empty, "TMPDIR": empty},
            conversation=False,
        ) as child:
            child.result()
        return monotonic() - started


def first_answer(engine: Engine, progress: Progress = silent) -> None:
    """Load an engine and run it once at its usual shape, as a new worker does."""
    load(engine).session().close()


def _digest(file: Path, recipe: Recipe, target: Target) -> str:
    with file.open("rb") as stream:
        content = hashlib.file_digest(stream, "sha256").hexdigest()
    parts = (content, recipe.model_dump_json(), target.model_dump_json())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


# -- running ------------------------------------------------------------------------------------


def load(engine: Engine, device: str = "") -> ProgramLoaded:
    """Load the program and run its code. Sets the process's threads and TF32."""
    refuse_foreign(engine, probe())
    module_device = _device_of(engine.target)
    if device not in ("", module_device):
        raise UnsupportedError(
            f"this engine runs on {engine.target.device}, not on '{device}'",
            "leave the device out",
        )
    import torch

    torch.set_num_threads(engine.threads or usable_cores())
    allow_tf32(engine.recipe.precision is Precision.TF32)
    seed_cache(engine.root / CACHE)
    load_form = _package_loaded if engine.recipe.form == "aoti" else _program_loaded
    return ProgramLoaded(engine, load_form(engine), module_device)


def _package_loaded(engine: Engine) -> Any:
    import torch._inductor

    try:
        package = torch._inductor.aoti_load_package(str(engine.path))
    except RuntimeError as error:
        raise unreadable(engine, first_line(error)) from error
    _drop_extracted()
    return package


def _drop_extracted() -> None:
    """Remove the libraries with the weights that torch has extracted and opened.

    A killed process, such as one of the benchmark, would leave them in the temporary folder.
    """
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    opened = {line.split(maxsplit=5)[-1] for line in maps if EXTRACTED in line}
    for file in opened:
        if file.endswith(".so"):
            Path(file).unlink(missing_ok=True)


def _program_loaded(engine: Engine) -> Any:
    import torch

    try:
        program = torch.export.load(engine.path)
    except Exception as error:  # a damaged file fails in many ways
        raise unreadable(engine, first_line(error)) from error
    module = program.module(check_guards=False)
    # Without the program's hooks: they check inputs again, in more time than a small model takes.
    return torch.fx.GraphModule(module, module.graph)


class ProgramLoaded:
    """One program in memory."""

    def __init__(self, engine: Engine, program: Any, device: str) -> None:
        self._engine, self._device = engine, device
        self._module: Any = program
        self._is_compiled = engine.recipe.form != "compile"

    def session(self, profile: int | None = None) -> TorchSession | CudaTorchSession:
        """Compile the program if its form needs it, and run it once at this profile's opt."""
        import torch

        args = example_args(self._engine, profile, self._device)
        if not self._is_compiled:
            self._module = compiled(self._module, args, self._engine.recipe.mode)
            self._is_compiled = True
        with explained("this program cannot run here"), torch.inference_mode():
            self._module(*args)
        return open_session(self._engine, self._module, self._device, self._module)

    def close(self) -> None:
        self._module = closed
        if self._device == DEVICE:
            import torch

            torch.cuda.empty_cache()
