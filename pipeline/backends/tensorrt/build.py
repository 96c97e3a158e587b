"""Build a serialized engine from a parsed network: parse -> configure -> serialize.

The functions take the imported library, so that TensorRT and TensorRT-RTX share them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

from pipeline.backends import cuda
from pipeline.backends.cuda import OutOfDeviceMemory
from pipeline.backends.tensorrt.messages import listening, messages_of
from pipeline.backends.tensorrt.parser import Parsed, count_float64, sentence
from pipeline.core.artifacts import BuildOptions, Note, OnnxModel
from pipeline.core.progress import Progress
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Point, Profile, TensorSpec
from pipeline.errors import BackendUnavailable, CrucibleError, PlanError, UnsupportedError

POINTS: tuple[Point, ...] = ("min", "opt", "max")
# Warnings that do not help a user of Crucible.
CHATTER = ("Int64 binding", "logger passed into", "Converting conv")
# Messages on a kernel that was tried and skipped in favour of others.
TRIALS = ("Skipping tactic", "Tactic Device request", "catchCudaError")
NO_MEMORY = re.compile(
    r"out ?of ?memory|could not be allocated|insufficient memory|memory is insufficient",
    re.IGNORECASE,
)
# With less free memory on a large GPU, TensorRT fails without a message about memory (seen with
# 0.4 GB: "Cask").
FULL_BYTES = 2**30
MAX_WARNINGS = 8  # implicit int8 warns of every tensor

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shapes, or values, of one input at min, opt and max."""


# -- profiles ----------------------------------------------------------------


def shapes_of(
    inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]
) -> tuple[dict[str, Shapes], ...]:
    """Return for each profile the shapes of every dynamic input.

    PlanError names a symbol for which a profile gives no sizes.
    """
    dynamic = [spec for spec in inputs if spec.symbols]
    for spec in dynamic:
        for profile in profiles or (Profile(),):
            missing = [symbol for symbol in spec.symbols if symbol not in profile.dims]
            if missing:
                raise PlanError(
                    f"input '{spec.name}' {list(spec.shape)} is dynamic, and a profile gives no"
                    f" sizes for {', '.join(missing)}",
                    f"add them to `profiles:`, for example {{{missing[0]}: [1, 8, 64]}}",
                )
    return tuple(
        {spec.name: _min_opt_max(spec, profile) for spec in dynamic} for profile in profiles
    )


def _min_opt_max(spec: TensorSpec, profile: Profile) -> Shapes:
    return (
        spec.resolve(profile.sizes("min")),
        spec.resolve(profile.sizes("opt")),
        spec.resolve(profile.sizes("max")),
    )


def shape_tensors(network: Any) -> tuple[str, ...]:
    """Return the inputs with values that decide a shape. TensorRT reads them on the CPU."""
    return tuple(tensor.name for tensor in _inputs(network) if tensor.is_shape_tensor)


def with_locations(specs: tuple[TensorSpec, ...], parsed: Parsed) -> tuple[TensorSpec, ...]:
    """Return the engine's inputs: shape tensors have the location `host`."""
    names = shape_tensors(parsed.network)
    return tuple(
        spec.model_copy(update={"location": "host"}) if spec.name in names else spec
        for spec in specs
    )


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(i) for i in range(network.num_inputs)]


def values_of(
    inputs: tuple[TensorSpec, ...], names: Sequence[str], profile: Profile
) -> dict[str, Shapes]:
    """Return the values of every shape tensor.

    PlanError for a shape tensor without values in the profile, or with a wrong number of values.
    """
    shapes = {spec.name: spec.shape for spec in inputs}
    for name in names:
        count = shapes[name][0] if shapes[name] else 1
        values = profile.values.get(name)
        if values is None or len(values.min) != count:
            mismatch = ""
            if values is not None:
                mismatch = f" has {count} numbers, the profile gives {len(values.min)}, and"
            example = ", ".join(f"[{point}]" for point in POINTS)
            raise PlanError(
                f"input '{name}'{mismatch} decides a shape by its values",
                f"give `values: {{{name}: [{example}]}}` in the profile",
            )
    return {
        name: (profile.values[name].min, profile.values[name].opt, profile.values[name].max)
        for name in names
    }


def add_profiles(
    parsed: Parsed, config: Any, inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]
) -> list[Any]:
    """Add an optimisation profile of TensorRT for each of ours, with the values of shape tensors.

    Return them; none if nothing is dynamic.
    """
    names = shape_tensors(parsed.network)
    shapes = shapes_of(inputs, profiles)
    if not names and not any(shapes):
        return []
    if not profiles:
        values_of(inputs, names, Profile())  # raises: there is a shape tensor
    added = []
    # an input that is an output too has the name `__x` in the network
    known = {tensor.name for tensor in _inputs(parsed.network)}
    for ours, ranges in zip(profiles, shapes, strict=True):
        profile = parsed.builder.create_optimization_profile()
        for name, (smallest, usual, largest) in ranges.items():
            profile.set_shape(name if name in known else f"__{name}", smallest, usual, largest)
        for name, (smallest, usual, largest) in values_of(inputs, names, ours).items():
            profile.set_shape_input(name, smallest, usual, largest)
        config.add_optimization_profile(profile)
        added.append(profile)
    return added


# -- configuration -----------------------------------------------------------


def configure(
    trt: Any, parsed: Parsed, recipe: Recipe, options: BuildOptions, inputs: tuple[TensorSpec, ...]
) -> Any:
    """Return the builder's configuration for a recipe that `library.check_recipe` accepts."""
    config = parsed.builder.create_builder_config()
    allowed = options.tensorrt
    # without it the inspector gives no types and tactics, which prove the precision
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.builder_optimization_level = allowed.optimization_level
    config.avg_timing_iterations = allowed.timing_iterations
    if allowed.workspace_mib is not None:
        workspace = allowed.workspace_mib * 2**20
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default: fp32 would not be fp32
    if recipe.precision is Precision.TF32:
        config.set_flag(trt.BuilderFlag.TF32)
    if recipe.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if recipe.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    with listening(trt):
        profiles = add_profiles(parsed, config, inputs, options.profiles)
    with warnings.catch_warnings():
        # TensorRT 11 has neither, and there a recipe with flags is refused
        warnings.simplefilter("ignore", DeprecationWarning)
        for name in flags_of(recipe):
            config.set_flag(getattr(trt.BuilderFlag, name))
        if "INT8" in flags_of(recipe) and profiles:
            config.set_calibration_profile(profiles[0])  # at its opt shapes
    return config


def flags_of(recipe: Recipe) -> tuple[str, ...]:
    """Return the builder flags of the precisions that TensorRT 10 may choose from."""
    if recipe.realised_in != "flags":
        return ()
    return ("INT8", "FP16") if recipe.precision is Precision.INT8 else (recipe.precision.name,)


# -- building ----------------------------------------------------------------

CANNOT = "TensorRT cannot build this model"


def serialize(
    trt: Any, parsed: Parsed, config: Any, progress: Progress, cannot: str = CANNOT
) -> bytes:
    """Build the engine. If that fails, `cannot` begins the message (`build_error`).

    Reports no fraction: TensorRT calls a progress monitor between the runs of a kernel, and then
    chooses worse kernels (see the module `messages`).
    """
    progress(None, "timing kernels")
    with listening(trt):
        plan = parsed.builder.build_serialized_network(parsed.network, config)
    if plan is None:
        raise build_error(messages_of(trt), device_memory(), cannot)
    return bytes(plan)


def build_error(
    messages: list[tuple[str, str]], memory: tuple[int, int], cannot: str = CANNOT
) -> CrucibleError:
    """Return the exception for a failed build, from TensorRT's messages and the GPU's memory.

    `memory` is the GPU's free and total bytes afterwards; 0, 0 without a GPU. OutOfDeviceMemory:
    out of the GPU's memory. BackendUnavailable: a library of TensorRT is missing. UnsupportedError:
    anything else, with TensorRT's own sentences.
    """
    # Later lines of a message may come from another writer to the same log.
    lines = [text.partition("\n")[0] for _, text in messages]
    errors = [
        text for severity, text in messages if severity != "WARNING" and not _is(TRIALS, text)
    ]
    trials = [line for line in lines if _is(TRIALS, line)]
    lacks_kernel = any("find any implementation" in text for text in errors)
    if lacks_kernel and any(NO_MEMORY.search(text) for text in trials):
        why = "its kernels need more of the GPU's memory than they may use"
        return OutOfDeviceMemory(
            f"{cannot}: {why}",
            "raise `tensorrt.workspace_mib` or leave it out, or take a smaller max in the profile",
        )
    free, total = memory
    names_memory = any(NO_MEMORY.search(text.partition("\n")[0]) for text in errors)
    if names_memory or free < min(FULL_BYTES, total // 16):
        return _full_gpu(lines, memory, cannot)
    sentences = "; ".join(dict.fromkeys(map(sentence, errors))) or "it does not say why"
    missing = re.search(r"Unable to load library: ([\w.+-]+)", sentences)
    if missing:
        advice = (
            "install all libraries of TensorRT in one version, with their folder in LD_LIBRARY_PATH"
        )
        return BackendUnavailable(
            f"{cannot}: its library {missing[1]} is missing on this host", advice
        )
    return UnsupportedError(
        f"{cannot}: {sentences}", "try another precision, or compile this model for onnxruntime"
    )


def _full_gpu(lines: Sequence[str], memory: tuple[int, int], cannot: str) -> OutOfDeviceMemory:
    free, total = memory
    sizes = [int(size) for size in re.findall(r"(\d{7,}) bytes", "\n".join(lines))]
    largest = max(sizes, default=0)
    request = f"it asked for {largest / 2**30:.1f} GiB at once, " if largest else ""
    why = (
        f"out of the GPU's memory: {request}{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
        " now"
    )
    advice = (
        "limit it by `tensorrt.workspace_mib`, take a smaller max in the profile, or stop other"
        " processes on the GPU (nvidia-smi lists them)"
    )
    return OutOfDeviceMemory(f"{cannot}: {why}", advice)


def device_memory() -> tuple[int, int]:
    """Return the free and total bytes of the GPU's memory; 0, 0 if CUDA does not report them."""
    try:
        rt = cuda.runtime()
    # TensorRT builds without cuda-python too; the numbers only explain a failed build.
    except BackendUnavailable:
        return 0, 0
    error, free, total = rt.cudaMemGetInfo()
    return (0, 0) if error else (free, total)


def warnings_of(trt: Any, model: OnnxModel, library: str = "TensorRT") -> tuple[Note, ...]:
    """Return the warnings of TensorRT since the model was parsed, as notes of the engine."""
    sentences = dict.fromkeys(
        sentence(text)
        for severity, text in messages_of(trt)
        if severity == "WARNING" and not _is((*CHATTER, *TRIALS), text)
    )
    texts = list(sentences)
    if len(texts) > MAX_WARNINGS:
        texts[MAX_WARNINGS:] = [f"and {len(texts) - MAX_WARNINGS} more warnings"]
    narrowed = count_float64(model)
    if narrowed:
        texts.append(f"{narrowed} tensors inside the model are float64 and are computed in float32")
    return tuple(Note(stage="build", text=f"{library}: {text}") for text in texts)


def _is(kinds: Sequence[str], text: str) -> bool:
    return any(kind in text for kind in kinds)
