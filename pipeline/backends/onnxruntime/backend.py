"""ONNX Runtime on the CPU, and on a GPU by its CUDA and TensorRT providers if the build has them.

The GPU providers have only run in tests with a double, never with a real build.

The engine file is the converted ONNX graph itself, with its external data. The optimised graph
would contain this CPU's blocked layout (NCHWc), which a CPU with wider vectors reads wrongly; it
would save only 50 ms of the 110 ms for loading ResNet-50.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.base import Loaded, Session
from pipeline.backends.feed_checks import (
    FeedCheck,
    closed,
    engine_digest,
    installed_version,
    nothing_to_fetch,
    refuse_device,
    refuse_foreign,
    unreadable,
)
from pipeline.backends.layer_timing import HostTimer
from pipeline.backends.node_support import refused_nodes
from pipeline.backends.onnxruntime import layers as ort_layers
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Refusal, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import OrtProvider, Precision, Recipe
from pipeline.core.shapes import Point, Profile, Tensors, TensorSpec
from pipeline.errors import BackendUnavailable, DataError, ModelError, UnsupportedError
from pipeline.host.environment import cpu_flags, cpu_name, usable_cores
from pipeline.host.gpu import find_gpus
from pipeline.onnx_graph.files import copy_model, file_size
from pipeline.plan.baselines import AS_WRITTEN
from pipeline.results.layer_table import LayerTable

if TYPE_CHECKING:
    import onnxruntime

PRECISIONS = frozenset({Precision.FP32, Precision.INT8, Precision.INT4})
DISTRIBUTIONS: tuple[str, ...] = ("onnxruntime",)
PLAIN = Recipe(backend="onnxruntime", precision=Precision.FP32)
Provider = tuple[str, dict[str, str]]
"""An execution provider by the library's name, with its options."""

NOT_REALLY = {
    Precision.FP16: (
        "it has no fp16 kernel of Conv, MatMul or Gemm for this CPU, and would cast every one to"
        " fp32 and back"
    ),
    Precision.BF16: "it has no bf16 kernel of Conv, MatMul or Gemm for this CPU",
    Precision.TF32: "TF32 is a format of NVIDIA GPUs",
    Precision.FP8: "fp8 is a format of NVIDIA GPUs",
}
"""Why a precision is refused. A test looks the kernels up in the library's registry."""

PROVIDERS: Mapping[OrtProvider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}

SPIN_US = 1000
"""How long a thread spins while it waits for the next operator.

It bridges the gaps between operators and between runs. The library's own limit is 40 ms, for which
an engine that sleeps would take a core from the engine that is measured after it.
"""

SERVING_SPIN_US = 100
"""The same of a serving engine.

Medians of 16 convolutions on 2 cores with ten busy processes: 4.5 ms with this limit, 4.6 ms if
threads sleep at once, 10 ms if they spin without a limit.
"""

MAKES_FLOAT = ("MatMulAddFusion",)
"""Optimizers that int8 engines run without.

MatMulAddFusion replaces a MatMul and the Add of its bias by a Gemm, which the float bias keeps from
running in 8 bits.
"""


def probe() -> Target:
    """Return this CPU as a target. Imports nothing."""
    version = installed_version("onnxruntime", "pip install --force-reinstall onnxruntime")
    return Target(backend="onnxruntime", version=version, device=cpu_name(), cpu_flags=cpu_flags())


def provider_target() -> Target:
    """Return the first GPU of this host as a target. BackendUnavailable without a GPU."""
    gpus = find_gpus()
    if not gpus.devices:
        raise BackendUnavailable(
            f"ONNX Runtime's GPU providers need a GPU: {gpus.reason}",
            "take `provider: cpu`",
        )
    first = gpus.devices[0]
    return probe().model_copy(
        update={
            "device": first.name,
            "cpu_flags": (),
            "compute_capability": first.compute_capability,
            "driver": first.driver,
        }
    )


def gpu_providers() -> tuple[OrtProvider, ...]:
    """Return the GPU providers of the installed build. Imports ONNX Runtime."""
    import onnxruntime

    present = set(onnxruntime.get_available_providers())
    return tuple(name for name, known in PROVIDERS.items() if name != "cpu" and known in present)


def unsupported(
    model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
) -> tuple[Refusal, ...]:
    """Return every node without a kernel, or with a kernel that refuses it."""
    return refused_nodes(model, _load_error)


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Copy the graph and its external data to `out`, and open it once as a check.

    The graph must already be in the recipe's precision.
    """
    _check_precision(model, recipe)
    progress(None, "copying the graph")
    copy_model(model.path, out / model.path.name)
    progress(None, "optimising the graph")
    providers = providers_of(recipe, model.inputs, options.profiles)
    message = _load_error(str(out / model.path.name), recipe, providers)
    if message:
        raise ModelError(
            f"ONNX Runtime cannot open this model: {message}",
            "list every node with `crucible inspect MODEL --backend onnxruntime`",
        )
    target = _target_of(recipe)
    return Engine(
        root=out,
        file=model.path.name,
        digest=engine_digest(model, recipe, options, target),
        target=target,
        recipe=recipe,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=options.profiles,
        threads=options.threads,
        size_bytes=file_size(model.path),
    )


def _target_of(recipe: Recipe) -> Target:
    return probe() if recipe.provider == "cpu" else provider_target()


def layers(engine: Engine, feeds: Tensors, profile: int = 0) -> LayerTable | None:
    """Return every kernel of the engine from ONNX Runtime's own profile; None on a GPU.

    The profile is of a separate session with the same options.
    """
    if engine.recipe.provider != "cpu":
        return None
    with tempfile.TemporaryDirectory(prefix="crucible-profile-") as folder:
        profiled = open_profiled(engine, Path(folder))
        return ort_layers.layer_table(
            profiled, OrtSession(engine, profiled.run), engine.path, feeds
        )


def open_profiled(engine: Engine, folder: Path) -> onnxruntime.InferenceSession:
    """Open an engine on the CPU that writes a profile of every run into a folder.

    BackendUnavailable if it was built for another host.
    """
    refuse_foreign(engine, probe())
    try:
        return _open_engine(engine, folder)
    except _errors() as error:
        raise unreadable(engine, _sentence(error)) from error


def load(engine: Engine, device: str = "", serves: bool = False) -> Loaded:
    """Load the engine. BackendUnavailable if it was built for another host.

    `serves`: see `_open`.
    """
    refuse_foreign(engine, _target_of(engine.recipe))
    if engine.recipe.provider == "cpu":
        refuse_device(engine, device)
    try:
        return OrtLoaded(engine, _open_engine(engine, serves=serves))
    except _errors() as error:
        raise unreadable(engine, _sentence(error)) from error


class OrtLoaded:
    """One inference session of ONNX Runtime. Any number of our sessions share it."""

    def __init__(self, engine: Engine, session: onnxruntime.InferenceSession) -> None:
        self._engine = engine
        self._session: onnxruntime.InferenceSession | None = session

    def session(self, profile: int | None = None) -> Session:
        """Open a session. It accepts the shapes of all profiles and ignores `profile`."""
        if self._session is None:
            closed()
        return OrtSession(self._engine, self._session.run)

    def close(self) -> None:
        """Free the weights once the sessions are closed too."""
        self._session = None


Run = Callable[[Sequence[str], dict[str, NDArray[np.generic]]], Sequence[NDArray[np.generic]]]


class OrtSession:
    """A session on host arrays.

    ONNX Runtime reads contiguous inputs in place and allocates the outputs of each run.
    """

    def __init__(self, engine: Engine, run: Run) -> None:
        self.inputs: tuple[TensorSpec, ...] = engine.inputs
        self.outputs: tuple[TensorSpec, ...] = engine.outputs
        self._check: Callable[[Tensors], None] = FeedCheck(engine.inputs, engine.profiles)
        self._run, self._errors = run, _errors()
        self._names = [spec.name for spec in engine.outputs]
        self._passed_through = tuple({spec.name for spec in engine.inputs} & set(self._names))
        self._feeds: dict[str, NDArray[np.generic]] = {}
        self._results: Sequence[NDArray[np.generic]] = ()

    def bind(self, feeds: Tensors) -> None:
        self._check(feeds)
        self._feeds, self._results = dict(feeds), ()

    def upload(self) -> None:
        """Do nothing: the arrays are in host memory already."""

    def execute(self) -> None:
        try:
            self._results = self._run(self._names, self._feeds)
        except self._errors as error:
            raise DataError(
                f"ONNX Runtime cannot run on these inputs: {_sentence(error)}",
                "check the values, for example ids against their table",
            ) from error

    def download(self) -> None:
        """Do nothing, as for upload."""

    def synchronize(self) -> None:
        """Do nothing: a run is finished when `execute` returns."""

    def fetch(self) -> Tensors:
        if not self._results:
            nothing_to_fetch()
        fetched = dict(zip(self._names, self._results, strict=True))
        # an output that is an input is the caller's own array
        for name in self._passed_through:
            fetched[name] = fetched[name].copy()
        return fetched

    def timer(self) -> HostTimer:
        return HostTimer()

    def close(self) -> None:
        self._check = self._run = closed
        self._feeds, self._results = {}, ()


def check_recipe(recipe: Recipe, target: Target) -> None:
    """Raise UnsupportedError for a precision without kernels, or for a missing provider."""
    if recipe.provider != "cpu":
        _check_provider(recipe.provider)
        return
    if recipe.precision not in PRECISIONS:
        message = (
            f"ONNX Runtime on a CPU would only pretend to run {recipe.precision}:"
            f" {NOT_REALLY[recipe.precision]}"
        )
        raise UnsupportedError(message, "choose fp32 or int8, or openvino for bf16")
    if recipe.precision is Precision.INT4 and not recipe.weight_only:
        raise UnsupportedError("ONNX Runtime has int4 for weights only", "add `weight_only`")


def _check_provider(provider: OrtProvider) -> None:
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if PROVIDERS[provider] not in available:
        present = ", ".join(available)
        message = f"this build of ONNX Runtime has no {PROVIDERS[provider]}: it has {present}"
        raise UnsupportedError(
            message,
            "install onnxruntime-gpu in the place of onnxruntime, or take `provider: cpu`",
        )


def providers_of(
    recipe: Recipe,
    inputs: tuple[TensorSpec, ...],
    profiles: tuple[Profile, ...],
) -> list[Provider]:
    """Return the providers in order of priority, with their options.

    TensorRT gets the shapes of the profiles: otherwise it would build again for each new shape.
    """
    if recipe.provider == "cpu":
        return [(PROVIDERS["cpu"], {})]
    cuda: Provider = (PROVIDERS["cuda"], {"use_tf32": str(int(recipe.precision is Precision.TF32))})
    if recipe.provider == "cuda":
        return [cuda, (PROVIDERS["cpu"], {})]
    points: tuple[Point, ...] = ("min", "opt", "max")
    dynamic = [spec for spec in inputs if spec.symbols]
    tensorrt = {"trt_fp16_enable": str(int(recipe.precision is Precision.FP16))}
    if dynamic:
        for point in points:
            tensorrt[f"trt_profile_{point}_shapes"] = _shapes(dynamic, profiles, point)
    return [(PROVIDERS["tensorrt"], tensorrt), cuda, (PROVIDERS["cpu"], {})]


def _shapes(inputs: Sequence[TensorSpec], profiles: tuple[Profile, ...], point: Point) -> str:
    """Return `x:1x3x224x224,y:1x10`, once for each profile."""
    entries = []
    for profile in profiles:
        for spec in inputs:
            shape = "x".join(map(str, spec.resolve(profile.sizes(point))))
            entries.append(f"{spec.name}:{shape}")
    return ",".join(entries)


def _check_precision(model: OnnxModel, recipe: Recipe) -> None:
    check_recipe(recipe, probe())
    expected = Precision.FP32 if recipe.precision is Precision.TF32 else recipe.precision
    if model.precision != expected:
        message = (
            f"ONNX Runtime takes the precision from the graph: the recipe says {recipe.precision},"
            f" the graph is {model.precision}"
        )
        raise UnsupportedError(message, f"convert the graph to {expected} first")
    for spec in (*model.inputs, *model.outputs):
        if spec.dtype == "bfloat16":
            raise UnsupportedError(
                f"ONNX Runtime takes no bfloat16 arrays from Python, and '{spec.name}' is bfloat16",
                "make it float32, or choose openvino",
            )


def _open_engine(
    engine: Engine, profile: Path | None = None, serves: bool = False
) -> onnxruntime.InferenceSession:
    recipe = engine.recipe
    options = OpenOptions(
        engine.threads or usable_cores(),
        recipe,
        providers_of(recipe, engine.inputs, engine.profiles),
        profile,
        serves,
    )
    return _open(str(engine.path), options)


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """The options for opening a session."""

    threads: int
    recipe: Recipe
    providers: list[Provider]
    profile: Path | None = None  # the folder for a profile of every run
    serves: bool = False  # the engine shares the CPU with clients and the server


def _open(model: str | bytes, options: OpenOptions) -> onnxruntime.InferenceSession:
    """Open a session of ONNX Runtime.

    Its threads spin between operators, which is the default: 16 small convolutions take 0.31 ms,
    against 0.51 ms with sleeping threads (2 cores, AVX512). With more busy threads than cores,
    sleeping is faster. A serving engine shares the CPU with clients and the server: its threads
    spin for a shorter time between operators, and not at all between runs.

    BackendUnavailable if the library left the first provider out. It does so without an error if a
    library of CUDA is missing.
    """
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    settings.intra_op_num_threads = options.threads
    spin_us = SERVING_SPIN_US if options.serves else SPIN_US
    settings.add_session_config_entry("session.intra_op.spin_duration_us", str(spin_us))
    if options.serves:
        settings.add_session_config_entry("session.force_spinning_stop", "1")
    settings.add_session_config_entry(
        "session.disable_quant_qdq",
        "1" if options.recipe.variant == AS_WRITTEN else "0",
    )
    if options.recipe.precision is Precision.INT8:
        settings.add_session_config_entry(
            "optimization.disable_specified_optimizers",
            ";".join(MAKES_FLOAT),
        )
    if options.profile is not None:
        ort_layers.profile_into(settings, options.profile)
    settings.log_severity_level = 4  # fatal errors only: other errors come as exceptions
    session = onnxruntime.InferenceSession(model, settings, providers=options.providers)
    expected, actual = options.providers[0][0], session.get_providers()
    if expected not in actual:
        message = (
            f"ONNX Runtime cannot load {expected} and would run on {', '.join(actual)} instead"
        )
        raise BackendUnavailable(
            message,
            "install the CUDA, cuDNN or TensorRT that this onnxruntime was built for",
        )
    return session


def _load_error(
    model: str | bytes,
    recipe: Recipe = PLAIN,
    providers: list[Provider] | None = None,
) -> str:
    """Try to open a model. Return the library's error message, or ""."""
    try:
        _open(model, OpenOptions(1, recipe, providers or providers_of(PLAIN, (), ())))
    except _errors() as error:
        return _sentence(error)
    return ""


def _errors() -> tuple[type[Exception], ...]:
    """Return ONNX Runtime's exceptions, which have no base class of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return tuple(
        kind
        for kind in vars(state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    )


def _sentence(error: Exception) -> str:
    """Return the first line of the library's message, without codes and the path of its source."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    text = re.sub(r"^(Load model from .* failed:)?(Fatal error: )?|/onnxruntime_src/\S+ ", "", text)
    return text.strip().partition("\n")[0]
