"""From a parsed network to a serialized engine: functions that take the imported library, shared by every flavour of TensorRT.

parse -> configure -> serialize
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.backends import cuda
from pipeline.backends.cuda import OutOfDeviceMemory
from pipeline.backends.trt_parser import Parsed, count_float64, messages_of, sentence
from pipeline.core import BuildOptions, Note, OnnxModel, Point, Precision, Profile, Progress, Recipe, TensorSpec
from pipeline.errors import BackendUnavailable, CrucibleError, PlanError, UnsupportedError
from pipeline.measure import monotonic

POINTS: tuple[Point, ...] = ("min", "opt", "max")
CHATTER = ("Int64 binding", "logger passed into", "Converting conv")  # warnings that tell a user of ours nothing
TRIALS = ("Skipping tactic", "Tactic Device request", "catchCudaError")  # a kernel that was tried and left out: others are taken
NO_MEMORY = re.compile(r"out ?of ?memory|could not be allocated|insufficient memory|memory is insufficient", re.IGNORECASE)
FULL_BYTES = 2**30  # with less left of a large GPU's memory TensorRT fails without a word about memory (seen with 0.4 GB: "Cask")
MOST_WARNINGS = 8  # implicit int8 warns of every tensor
EVENTS_PER_S = 10.0

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Shapes, or values, of one input at min, opt and max."""


# -- profiles ----------------------------------------------------------------------------------------------------------


def shapes_of(inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]) -> tuple[dict[str, Shapes], ...]:
    """Per profile, the shapes of every dynamic input; PlanError names a symbol that a profile leaves open."""
    dynamic = [spec for spec in inputs if spec.symbols]
    for spec in dynamic:
        for profile in profiles or (Profile(),):
            missing = [symbol for symbol in spec.symbols if symbol not in profile.dims]
            if missing:
                raise PlanError(
                    f"input '{spec.name}' {list(spec.shape)} is dynamic, and a profile gives no sizes for {', '.join(missing)}",
                    f"add them to `profiles:`, for example {{{missing[0]}: [1, 8, 64]}}",
                )
    return tuple({spec.name: _min_opt_max(spec, profile) for spec in dynamic} for profile in profiles)


def _min_opt_max(spec: TensorSpec, profile: Profile) -> Shapes:
    smallest, usual, largest = (spec.resolve(profile.sizes(point)) for point in POINTS)
    return smallest, usual, largest


def shape_tensors(network: Any) -> tuple[str, ...]:
    """The inputs whose values decide a shape: TensorRT reads them on the CPU."""
    return tuple(tensor.name for tensor in _inputs(network) if tensor.is_shape_tensor)


def with_locations(specs: tuple[TensorSpec, ...], parsed: Parsed) -> tuple[TensorSpec, ...]:
    """The inputs as the engine takes them: those whose values decide a shape lie on the host."""
    names = shape_tensors(parsed.network)
    return tuple(spec.model_copy(update={"location": "host"}) if spec.name in names else spec for spec in specs)


def _inputs(network: Any) -> list[Any]:
    return [network.get_input(i) for i in range(network.num_inputs)]


def values_of(inputs: tuple[TensorSpec, ...], names: Sequence[str], profile: Profile) -> dict[str, Shapes]:
    """The values of every shape tensor; PlanError for one that the profile gives no values, or not as many as it holds."""
    shapes = {spec.name: spec.shape for spec in inputs}
    for name in names:
        count = shapes[name][0] if shapes[name] else 1
        given = profile.values.get(name)
        if given is None or len(given.min) != count:
            got = "" if given is None else f" has {count} numbers, the profile gives {len(given.min)}, and"
            example = ", ".join(f"[{each}]" for each in POINTS)
            raise PlanError(f"input '{name}'{got} decides a shape by its values", f"give `values: {{{name}: [{example}]}}` in the profile")
    return {name: (profile.values[name].min, profile.values[name].opt, profile.values[name].max) for name in names}


def add_profiles(parsed: Parsed, config: Any, inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]) -> list[Any]:
    """One optimisation profile of TensorRT's for each of ours, with the values of shape tensors; none where nothing is dynamic."""
    names = shape_tensors(parsed.network)
    shapes = shapes_of(inputs, profiles)
    if not names and not any(shapes):
        return []
    if not profiles:
        values_of(inputs, names, Profile())  # raises: there is a shape tensor
    made = []
    known = {tensor.name for tensor in _inputs(parsed.network)}  # an input that is an output too is called `__x` in the network
    for ours, ranges in zip(profiles, shapes, strict=True):
        profile = parsed.builder.create_optimization_profile()
        for name, (smallest, usual, largest) in ranges.items():
            profile.set_shape(name if name in known else f"__{name}", smallest, usual, largest)
        for name, (smallest, usual, largest) in values_of(inputs, names, ours).items():
            profile.set_shape_input(name, smallest, usual, largest)
        config.add_optimization_profile(profile)
        made.append(profile)
    return made


# -- configuration -----------------------------------------------------------------------------------------------------


def configure(trt: Any, parsed: Parsed, recipe: Recipe, options: BuildOptions, inputs: tuple[TensorSpec, ...]) -> Any:
    """What TensorRT's builder may do for this recipe. The recipe is one that `trt_library.check_recipe` passed."""
    config = parsed.builder.create_builder_config()
    allowed = options.tensorrt
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # without it the inspector knows no types and tactics: no proof of precision
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
    profiles = add_profiles(parsed, config, inputs, options.profiles)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # both end with TensorRT 11, where a recipe with flags is refused
        for name in flags_of(recipe):
            config.set_flag(getattr(trt.BuilderFlag, name))
        if "INT8" in flags_of(recipe) and profiles:
            config.set_calibration_profile(profiles[0])  # at its opt shapes
    return config


def flags_of(recipe: Recipe) -> tuple[str, ...]:
    """The precisions that TensorRT may choose from, by the names of their builder flags; TensorRT 10 only."""
    if recipe.realised_in != "flags":
        return ()
    return ("INT8", "FP16") if recipe.precision is Precision.INT8 else (recipe.precision.name,)


# -- progress ----------------------------------------------------------------------------------------------------------

SHARES = {
    "Building engine": (0.0, 0.0),
    "Cloning network graph": (0.0, 0.0),
    "Preparing graph for optimization": (0.0, 0.0),
    "Building engine from subgraph": (0.0, 0.0),
    "Optimizing graph": (0.0, 0.02),
    "Computing profile costs": (0.02, 0.02),
    "Timing tactics": (0.02, 0.02),
    "Timing graph nodes": (0.02, 0.90),
    "Timing tensor reformats": (0.90, 0.97),
    "Determining refit engines": (0.97, 1.0),
}
"""Where a phase lies in a whole build. From a ResNet-18 in fp32 on an H200 (3.8 s of 4.3 s time graph nodes); TensorRT 10.6 and RTX 1.7 name them
alike. By counting steps alone the first 10 ms would be two thirds of the build."""

PER_PROFILE = "Timing graph nodes"  # comes once for every optimisation profile
ON_THE_CLOCK = "Measuring tactic time"  # one step per run of a kernel that is on the clock: its calls return at once, whoever listens


@dataclass(slots=True)
class _Phase:
    name: str
    parent: _Phase | None
    steps: int
    done: int = 0
    best: float = 0.0  # of the step at work

    @property
    def fraction(self) -> float:
        return min(1.0, (self.done + self.best) / self.steps)


@dataclass(slots=True)
class Phases:
    """TensorRT's nested phases as one fraction that never goes back. Phases of unknown names count as steps of the phase around them."""

    profiles: int = 1
    fraction: float = 0.0
    _live: dict[str, _Phase] = field(default_factory=dict)
    _rounds: int = 0

    @property
    def innermost(self) -> str:
        return next(reversed(self._live), "")

    def start(self, name: str, parent: str | None, steps: int) -> None:
        self._rounds += name == PER_PROFILE
        self._live.pop(name, None)
        self._live[name] = _Phase(name, self._live.get(parent or ""), max(1, steps))

    def step(self, name: str, step: int) -> None:
        if phase := self._live.get(name):
            phase.done, phase.best = max(phase.done, step + 1), 0.0
            self._rise(phase)

    def finish(self, name: str) -> None:
        if phase := self._live.pop(name, None):
            phase.done, phase.best = phase.steps, 0.0
            self._rise(phase)

    def _rise(self, phase: _Phase) -> None:
        """From a phase outwards to the first whose place in the build is known."""
        while phase.name not in SHARES and phase.parent:
            phase.parent.best = max(phase.parent.best, phase.fraction)
            phase = phase.parent
        low, high = SHARES.get(phase.name, (0.0, 1.0))
        now = low + (high - low) * phase.fraction
        if self.profiles > 1 and phase.name in SHARES:
            now = (min(self._rounds, self.profiles) - 1 + now) / self.profiles
        self.fraction = max(self.fraction, now)


def monitor(trt: Any, progress: Progress, profiles: int = 1) -> Any:
    """A progress monitor for a builder's config, at most EVENTS_PER_S events a second. TensorRT calls it from several threads."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.phases, self.lock, self.last_s, self.alive = Phases(profiles), threading.Lock(), 0.0, True

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if phase_name == ON_THE_CLOCK:
                return
            with self.lock:
                self.phases.start(phase_name, parent_phase, num_steps)
                self.tell()

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == ON_THE_CLOCK:
                return self.alive
            with self.lock:
                self.phases.step(phase_name, step)
                self.tell()
                return self.alive

        def phase_finish(self, phase_name: str) -> None:
            if phase_name == ON_THE_CLOCK:
                return
            with self.lock:
                self.phases.finish(phase_name)

        def tell(self) -> None:
            now = monotonic()
            if now - self.last_s < 1 / EVENTS_PER_S:
                return
            self.last_s = now
            try:
                progress(self.phases.fraction, self.phases.innermost)
            except OSError:  # nobody listens any more: an exception here would end the process, False ends the build
                self.alive = False

    return Monitor()


# -- building ----------------------------------------------------------------------------------------------------------

CANNOT = "TensorRT cannot build this model"


def serialize(trt: Any, parsed: Parsed, config: Any, progress: Progress, cannot: str = CANNOT) -> bytes:
    """Build the engine; `cannot` begins the sentence where that fails (`build_error`)."""
    watching = monitor(trt, progress, config.num_optimization_profiles)
    config.progress_monitor = watching
    plan = parsed.builder.build_serialized_network(parsed.network, config)
    config.progress_monitor = None  # before `watching` goes
    if plan is None:
        raise build_error(messages_of(trt), device_memory(), cannot)
    return bytes(plan)


def build_error(messages: list[tuple[str, str]], memory: tuple[int, int], cannot: str = CANNOT) -> CrucibleError:
    """Why there is no engine, from what TensorRT said and the GPU's free and total bytes afterwards (0, 0: no GPU).

    OutOfDeviceMemory: out of the GPU's memory. BackendUnavailable: TensorRT is not whole. UnsupportedError: all else, in TensorRT's own sentences.
    """
    said = [text for severity, text in messages if severity != "WARNING" and not _is(TRIALS, text)]
    trials = [text for _, text in messages if _is(TRIALS, text)]
    if any("find any implementation" in text for text in said) and any(NO_MEMORY.search(text) for text in trials):
        why = "its kernels need more of the GPU's memory than they may use"
        return OutOfDeviceMemory(f"{cannot}: {why}", "raise `tensorrt.workspace_mib` or leave it out, or take a smaller max in the profile")
    free, total = memory
    if any(NO_MEMORY.search(text) for text in said) or free < min(FULL_BYTES, total // 16):
        asked = max((int(found) for _, text in messages for found in re.findall(r"(\d{7,}) bytes", text)), default=0)
        wanted = f"it asked for {asked / 2**30:.1f} GiB at once, " if asked else ""
        why = f"out of the GPU's memory: {wanted}{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free now"
        advice = "limit it by `tensorrt.workspace_mib`, take a smaller max in the profile, or stop what else uses the GPU (nvidia-smi lists it)"
        return OutOfDeviceMemory(f"{cannot}: {why}", advice)
    sentences = "; ".join(dict.fromkeys(map(sentence, said))) or "it does not say why"
    if found := re.search(r"Unable to load library: ([\w.+-]+)", sentences):
        advice = "install TensorRT whole and in one version, with the folder of its libraries in LD_LIBRARY_PATH"
        return BackendUnavailable(f"{cannot}: its library {found[1]} is missing on this host", advice)
    return UnsupportedError(f"{cannot}: {sentences}", "try another precision, or compile this model for onnxruntime")


def device_memory() -> tuple[int, int]:
    """Free and total bytes of the GPU's memory as CUDA tells them; 0, 0 where it does not."""
    try:
        rt = cuda.runtime()
    except BackendUnavailable:  # TensorRT builds without cuda-python, and this only explains why it did not
        return 0, 0
    error, free, total = rt.cudaMemGetInfo()
    return (0, 0) if error else (free, total)


def warnings_of(trt: Any, model: OnnxModel, whom: str = "TensorRT") -> tuple[Note, ...]:
    """What TensorRT warned of since the model was parsed, for the engine's notes."""
    said = dict.fromkeys(sentence(text) for severity, text in messages_of(trt) if severity == "WARNING" and not _is((*CHATTER, *TRIALS), text))
    texts = list(said)
    if len(texts) > MOST_WARNINGS:
        texts[MOST_WARNINGS:] = [f"and {len(texts) - MOST_WARNINGS} more warnings"]
    if narrowed := count_float64(model):
        texts.append(f"{narrowed} tensors inside the model are float64 and are computed in float32")
    return tuple(Note(stage="build", text=f"{whom}: {text}") for text in texts)


def _is(kinds: Sequence[str], text: str) -> bool:
    return any(kind in text for kind in kinds)
