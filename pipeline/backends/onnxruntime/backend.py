"""ONNX Runtime on the CPU; on a GPU by its providers CUDA and TensorRT where the build has them.

The GPU's providers were not run: there was no such build where this was made. A test runs them on
a double.

The engine file is the converted ONNX graph itself, with its external data. Saving the optimised
graph instead would bake in this CPU's blocked layout (NCHWc), which a CPU with wider vectors reads
wrongly, to save 50 ms of the 110 ms that loading ResNet-50 takes.
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
from pipeline.backends.node_support import REMEDY, refused_nodes
from pipeline.backends.onnxruntime import layers as ort_layers
from pipeline.core import (
    BuildOptions,
    Engine,
    OnnxModel,
    OrtProvider,
    Point,
    Precision,
    Profile,
    Progress,
    Recipe,
    Refusal,
    Target,
    Tensors,
    TensorSpec,
    silent,
)
from pipeline.errors import BackendUnavailable, DataError, ModelError, UnsupportedError
from pipeline.host.gpu import find_gpus
from pipeline.measurement.measure import cpu_flags, cpu_name, usable_cores
from pipeline.onnx_graph.files import copy_model, file_size
from pipeline.results.layer_table import LayerTable

if TYPE_CHECKING:
    import onnxruntime

PRECISIONS = frozenset({Precision.FP32, Precision.INT8, Precision.INT4})
DISTRIBUTIONS: tuple[str, ...] = ("onnxruntime",)
PLAIN = Recipe(backend="onnxruntime", precision=Precision.FP32)
Provider = tuple[str, dict[str, str]]
"""An execution provider by the library's name, with its options."""

AS_WRITTEN = "as written"
"""Variant of a recipe: Q/DQ are computed where they stand, in fp32. The int8 kernels that ONNX
Runtime would put in their place can saturate.
"""

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

SPIN_US = 100
"""How long a thread of an engine that serves waits awake for the next operator.

16 convolutions on 2 cores that ten processes wanted, medians: 4.5 ms with it, 4.6 ms where threads
sleep at once, 10 ms where they spin.
"""

MAKES_FLOAT = ("MatMulAddFusion",)
"""Left out of int8 engines: a MatMul and the Add of its bias become a Gemm whose float bias keeps
it from running in 8 bits.
"""


def probe() -> Target:
    """This CPU; nothing is imported."""
    version = installed_version("onnxruntime", "pip install --force-reinstall onnxruntime")
    return Target(backend="onnxruntime", version=version, device=cpu_name(), cpu_flags=cpu_flags())


def provider_target() -> Target:
    """The first GPU of this host, for the providers that use one; BackendUnavailable without."""
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
    """The providers of the installed build that use a GPU. Imports ONNX Runtime."""
    import onnxruntime

    present = set(onnxruntime.get_available_providers())
    return tuple(name for name, known in PROVIDERS.items() if name != "cpu" and known in present)


def unsupported(
    model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
) -> tuple[Refusal, ...]:
    """Every node without a kernel, or that its kernel refuses. The whole model is tried first: if
    it loads, there is none.
    """
    complaint = _complaint(str(model.path))
    if not complaint:
        return ()
    refusals = refused_nodes(model, _complaint)
    return refusals or (
        Refusal(
            node="(the whole model)",
            operator="",
            opset=model.opset,
            reason=complaint,
            remedy=REMEDY,
        ),
    )


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Copy the graph and its external data to `out` and open it once; the graph must already be in
    the recipe's precision.
    """
    _check_precision(model, recipe)
    progress(None, "copying the graph")
    copy_model(model.path, out / model.path.name)
    progress(None, "optimising the graph")
    providers = providers_of(recipe, model.inputs, options.profiles)
    if complaint := _complaint(str(out / model.path.name), recipe, providers):
        raise ModelError(
            f"ONNX Runtime cannot open this model: {complaint}",
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
    """Every kernel of the engine by ONNX Runtime's own profile; None on a GPU.

    The profiled session is one of its own, with the same options.
    """
    if engine.recipe.provider != "cpu":
        return None
    refuse_foreign(engine, probe())
    with tempfile.TemporaryDirectory(prefix="crucible-profile-") as folder:
        try:
            profiled = _open_engine(engine, Path(folder))
        except _errors() as error:
            raise unreadable(engine, _sentence(error)) from error
        return ort_layers.layer_table(
            profiled, OrtSession(engine, profiled.run), engine.path, feeds
        )


def load(engine: Engine, device: str = "", serves: bool = False) -> Loaded:
    """The engine in memory. BackendUnavailable if it was built for another host.

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
    """One inference session of ONNX Runtime, which any number of our sessions may share."""

    def __init__(self, engine: Engine, session: onnxruntime.InferenceSession) -> None:
        self._engine = engine
        self._session: onnxruntime.InferenceSession | None = session

    def session(self, profile: int = 0) -> Session:
        """A session that takes the shapes of all profiles, whichever is named."""
        if self._session is None:
            closed()
        return OrtSession(self._engine, self._session.run)

    def close(self) -> None:
        """Frees the weights once the sessions are closed too."""
        self._session = None


Run = Callable[[Sequence[str], dict[str, NDArray[np.generic]]], Sequence[NDArray[np.generic]]]


class OrtSession:
    """Runs on host arrays: ONNX Runtime reads contiguous inputs in place, and allocates outputs for
    each run.
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
        """Nothing to do: the arrays are where they are needed."""

    def execute(self) -> None:
        try:
            self._results = self._run(self._names, self._feeds)
        except self._errors as error:
            raise DataError(
                f"ONNX Runtime cannot run on these inputs: {_sentence(error)}",
                "check the values, for example ids against their table",
            ) from error

    def download(self) -> None:
        """Nothing to do, as for upload."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def fetch(self) -> Tensors:
        if not self._results:
            nothing_to_fetch()
        fetched = dict(zip(self._names, self._results, strict=True))
        for (
            name
        ) in self._passed_through:  # an output that is an input comes as the caller's own array
            fetched[name] = fetched[name].copy()
        return fetched

    def timer(self) -> HostTimer:
        return HostTimer()

    def close(self) -> None:
        self._check = self._run = closed
        self._feeds, self._results = {}, ()


def check_recipe(recipe: Recipe, target: Target) -> None:
    """UnsupportedError for a precision that it would only pretend to run, or an absent provider."""
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
    """The providers in their order, with their options.

    TensorRT gets the shapes of the profiles: it would build again for each new shape otherwise.
    """
    if recipe.provider == "cpu":
        return [(PROVIDERS["cpu"], {})]
    cuda: Provider = (PROVIDERS["cuda"], {"use_tf32": str(int(recipe.precision is Precision.TF32))})
    if recipe.provider == "cuda":
        return [cuda, (PROVIDERS["cpu"], {})]
    points: tuple[Point, ...] = ("min", "opt", "max")
    dynamic = [spec for spec in inputs if spec.symbols]
    shapes = (
        {
            f"trt_profile_{point}_shapes": _shapes(
                dynamic,
                profiles,
                point,
            )
            for point in points
        }
        if dynamic
        else {}
    )
    tensorrt = {"trt_fp16_enable": str(int(recipe.precision is Precision.FP16)), **shapes}
    return [(PROVIDERS["tensorrt"], tensorrt), cuda, (PROVIDERS["cpu"], {})]


def _shapes(inputs: Sequence[TensorSpec], profiles: tuple[Profile, ...], point: Point) -> str:
    """`x:1x3x224x224,y:1x10`, once for each profile."""
    found = []
    for profile in profiles:
        for spec in inputs:
            shape = "x".join(map(str, spec.resolve(profile.sizes(point))))
            found.append(f"{spec.name}:{shape}")
    return ",".join(found)


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
    """How a session is opened."""

    threads: int
    recipe: Recipe
    providers: list[Provider]
    profile: Path | None = None  # a folder: every run is profiled there
    serves: bool = False  # shares the CPU with whoever asks


def _open(model: str | bytes, options: OpenOptions) -> onnxruntime.InferenceSession:
    """Threads spin between operators, as is the default: 16 small convolutions take 0.31 ms, and
    0.51 ms where they sleep (2 cores, AVX512).

    Where more threads want the CPU than there are cores, it is the other way round. What serves
    shares the CPU with whoever asks: its threads spin for SPIN_US, which bridges the gaps between
    operators, and not at all between runs.
    BackendUnavailable where the library leaves the first provider out. It does so without an error
    if a library of CUDA's is missing.
    """
    import onnxruntime

    given = onnxruntime.SessionOptions()
    given.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    given.intra_op_num_threads = options.threads
    if options.serves:
        given.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        given.add_session_config_entry("session.force_spinning_stop", "1")
    given.add_session_config_entry(
        "session.disable_quant_qdq",
        "1" if options.recipe.variant == AS_WRITTEN else "0",
    )
    if options.recipe.precision is Precision.INT8:
        given.add_session_config_entry(
            "optimization.disable_specified_optimizers",
            ";".join(MAKES_FLOAT),
        )
    if options.profile is not None:
        ort_layers.profile_into(given, options.profile)
    given.log_severity_level = 4  # only what is fatal: errors come as exceptions
    session = onnxruntime.InferenceSession(model, given, providers=options.providers)
    wanted, present = options.providers[0][0], session.get_providers()
    if wanted not in present:
        instead = ", ".join(present)
        message = f"ONNX Runtime left {wanted} out, and would run on {instead}: it cannot be loaded"
        raise BackendUnavailable(
            message,
            "install the CUDA, cuDNN or TensorRT that this onnxruntime was built for",
        )
    return session


def _complaint(
    model: str | bytes,
    recipe: Recipe = PLAIN,
    providers: list[Provider] | None = None,
) -> str:
    try:
        _open(model, OpenOptions(1, recipe, providers or providers_of(PLAIN, (), ())))
    except _errors() as error:
        return _sentence(error)
    return ""


def _errors() -> tuple[type[Exception], ...]:
    """ONNX Runtime's exceptions, which have no base of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return tuple(
        kind
        for kind in vars(state).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    )


def _sentence(error: Exception) -> str:
    """The library's message without its codes and the path of its source file."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    return (
        re.sub(r"^(Load model from .* failed:)?(Fatal error: )?|/onnxruntime_src/\S+ ", "", text)
        .strip()
        .partition("\n")[0]
    )
