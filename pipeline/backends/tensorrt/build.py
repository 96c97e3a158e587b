"""From a parsed network to a serialized engine: functions that take the imported library, shared by
every flavour of TensorRT.

parse -> configure -> serialize
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
from pipeline.core import (
    BuildOptions,
    Note,
    OnnxModel,
    Point,
    Precision,
    Profile,
    Progress,
    Recipe,
    TensorSpec,
)
from pipeline.errors import BackendUnavailable, CrucibleError, PlanError, UnsupportedError

POINTS: tuple[Point, ...] = ("min", "opt", "max")
CHATTER = (
    "Int64 binding",
    "logger passed into",
    "Converting conv",
)  # warnings that tell a user of ours nothing
TRIALS = (
    "Skipping tactic",
    "Tactic Device request",
    "catchCudaError",
)  # a kernel that was tried and left out: others are taken
NO_MEMORY = re.compile(
    r"out ?of ?memory|could not be allocated|insufficient memory|memory is insufficient",
    re.IGNORECASE,
)
FULL_BYTES = (
    2**30
    # with less left of a large GPU's memory TensorRT fails without a word about memory (seen with
    # 0.4 GB: "Cask")
)
MAX_WARNINGS = 8  # implicit int8 warns of every tensor

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shapes, or values, of one input at min, opt and max."""


# -- profiles ----------------------------------------------------------------


def shapes_of(
    inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]
) -> tuple[dict[str, Shapes], ...]:
    """Per profile, the shapes of every dynamic input; PlanError names a symbol that a profile
    leaves open.
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
    smallest, usual, largest = (spec.resolve(profile.sizes(point)) for point in POINTS)
    return smallest, usual, largest


def shape_tensors(network: Any) -> tuple[str, ...]:
    """The inputs whose values decide a shape: TensorRT reads them on the CPU."""
    return tuple(tensor.name for tensor in _inputs(network) if tensor.is_shape_tensor)


def with_locations(specs: tuple[TensorSpec, ...], parsed: Parsed) -> tuple[TensorSpec, ...]:
    """The inputs as the engine takes them: those whose values decide a shape lie on the host."""
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
    """The values of every shape tensor; PlanError for one that the profile gives no values, or not
    as many as it holds.
    """
    shapes = {spec.name: spec.shape for spec in inputs}
    for name in names:
        count = shapes[name][0] if shapes[name] else 1
        given = profile.values.get(name)
        if given is None or len(given.min) != count:
            got = (
                ""
                if given is None
                else f" has {count} numbers, the profile gives {len(given.min)}, and"
            )
            example = ", ".join(f"[{each}]" for each in POINTS)
            raise PlanError(
                f"input '{name}'{got} decides a shape by its values",
                f"give `values: {{{name}: [{example}]}}` in the profile",
            )
    return {
        name: (profile.values[name].min, profile.values[name].opt, profile.values[name].max)
        for name in names
    }


def add_profiles(
    parsed: Parsed, config: Any, inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]
) -> list[Any]:
    """One optimisation profile of TensorRT's for each of ours, with the values of shape tensors;
    none where nothing is dynamic.
    """
    names = shape_tensors(parsed.network)
    shapes = shapes_of(inputs, profiles)
    if not names and not any(shapes):
        return []
    if not profiles:
        values_of(inputs, names, Profile())  # raises: there is a shape tensor
    made = []
    known = {
        tensor.name for tensor in _inputs(parsed.network)
    }  # an input that is an output too is called `__x` in the network
    for ours, ranges in zip(profiles, shapes, strict=True):
        profile = parsed.builder.create_optimization_profile()
        for name, (smallest, usual, largest) in ranges.items():
            profile.set_shape(name if name in known else f"__{name}", smallest, usual, largest)
        for name, (smallest, usual, largest) in values_of(inputs, names, ours).items():
            profile.set_shape_input(name, smallest, usual, largest)
        config.add_optimization_profile(profile)
        made.append(profile)
    return made


# -- configuration -----------------------------------------------------------


def configure(
    trt: Any, parsed: Parsed, recipe: Recipe, options: BuildOptions, inputs: tuple[TensorSpec, ...]
) -> Any:
    """What TensorRT's builder may do for this recipe. The recipe is one that
    `trt_library.check_recipe` passed.
    """
    config = parsed.builder.create_builder_config()
    allowed = options.tensorrt
    config.profiling_verbosity = (
        trt.ProfilingVerbosity.DETAILED
    )  # without it the inspector knows no types and tactics: no proof of precision
    config.builder_optimization_level = allowed.optimization_level
    config.avg_timing_iterations = allowed.timing_iterations
    if allowed.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, allowed.workspace_bytes)
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
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # both end with TensorRT 11, where a recipe with flags is refused
        for name in flags_of(recipe):
            config.set_flag(getattr(trt.BuilderFlag, name))
        if "INT8" in flags_of(recipe) and profiles:
            config.set_calibration_profile(profiles[0])  # at its opt shapes
    return config


def flags_of(recipe: Recipe) -> tuple[str, ...]:
    """The precisions that TensorRT may choose from, by the names of their builder flags; TensorRT
    10 only.
    """
    if recipe.realised_in != "flags":
        return ()
    return ("INT8", "FP16") if recipe.precision is Precision.INT8 else (recipe.precision.name,)


# -- building ----------------------------------------------------------------

CANNOT = "TensorRT cannot build this model"


def serialize(
    trt: Any, parsed: Parsed, config: Any, progress: Progress, cannot: str = CANNOT
) -> bytes:
    """Build the engine; `cannot` begins the sentence where that fails (`build_error`).

    No fraction is told: a progress monitor, which TensorRT calls between the runs of a kernel,
    makes it choose worse (`trt_messages`).
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
    """Why there is no engine, from what TensorRT said and the GPU's free and total bytes afterwards
    (0, 0: no GPU).

    OutOfDeviceMemory: out of the GPU's memory. BackendUnavailable: TensorRT is not whole.
    UnsupportedError: all else, in TensorRT's own sentences.
    """
    lines = [
        text.partition("\n")[0] for _, text in messages
    ]  # what comes behind may be another's, printed to the same log
    said = [text for severity, text in messages if severity != "WARNING" and not _is(TRIALS, text)]
    trials = [line for line in lines if _is(TRIALS, line)]
    if any("find any implementation" in text for text in said) and any(
        NO_MEMORY.search(text) for text in trials
    ):
        why = "its kernels need more of the GPU's memory than they may use"
        return OutOfDeviceMemory(
            f"{cannot}: {why}",
            "raise `tensorrt.workspace_mib` or leave it out, or take a smaller max in the profile",
        )
    free, total = memory
    if any(NO_MEMORY.search(text.partition("\n")[0]) for text in said) or free < min(
        FULL_BYTES, total // 16
    ):
        asked = max(
            (int(found) for line in lines for found in re.findall(r"(\d{7,}) bytes", line)),
            default=0,
        )
        wanted = f"it asked for {asked / 2**30:.1f} GiB at once, " if asked else ""
        why = (
            f"out of the GPU's memory: {wanted}{free / 2**30:.1f} of {total / 2**30:.1f} GiB are"
            " free now"
        )
        advice = (
            "limit it by `tensorrt.workspace_mib`, take a smaller max in the profile, or stop what"
            " else uses the GPU (nvidia-smi lists it)"
        )
        return OutOfDeviceMemory(f"{cannot}: {why}", advice)
    sentences = "; ".join(dict.fromkeys(map(sentence, said))) or "it does not say why"
    if found := re.search(r"Unable to load library: ([\w.+-]+)", sentences):
        advice = (
            "install TensorRT whole and in one version, with the folder of its libraries in"
            " LD_LIBRARY_PATH"
        )
        return BackendUnavailable(
            f"{cannot}: its library {found[1]} is missing on this host", advice
        )
    return UnsupportedError(
        f"{cannot}: {sentences}", "try another precision, or compile this model for onnxruntime"
    )


def device_memory() -> tuple[int, int]:
    """Free and total bytes of the GPU's memory as CUDA tells them; 0, 0 where it does not."""
    try:
        rt = cuda.runtime()
    except (
        BackendUnavailable
    ):  # TensorRT builds without cuda-python, and this only explains why it did not
        return 0, 0
    error, free, total = rt.cudaMemGetInfo()
    return (0, 0) if error else (free, total)


def warnings_of(trt: Any, model: OnnxModel, whom: str = "TensorRT") -> tuple[Note, ...]:
    """What TensorRT warned of since the model was parsed, for the engine's notes."""
    said = dict.fromkeys(
        sentence(text)
        for severity, text in messages_of(trt)
        if severity == "WARNING" and not _is((*CHATTER, *TRIALS), text)
    )
    texts = list(said)
    if len(texts) > MAX_WARNINGS:
        texts[MAX_WARNINGS:] = [f"and {len(texts) - MAX_WARNINGS} more warnings"]
    if narrowed := count_float64(model):
        texts.append(f"{narrowed} tensors inside the model are float64 and are computed in float32")
    return tuple(Note(stage="build", text=f"{whom}: {text}") for text in texts)


def _is(kinds: Sequence[str], text: str) -> bool:
    return any(kind in text for kind in kinds)
