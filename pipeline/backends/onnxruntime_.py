"""ONNX Runtime on the CPU.

The engine file is the converted ONNX graph itself, with its external data. Saving the optimised graph instead would bake in this CPU's
blocked layout (NCHWc), which a CPU with wider vectors reads wrongly, to save 50 ms of the 110 ms that loading ResNet-50 takes.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.backends import ort_layers
from pipeline.backends.base import Loaded, Session
from pipeline.backends.checks import (
    FeedCheck,
    HostTimer,
    closed,
    engine_digest,
    installed_version,
    nothing_to_fetch,
    refuse_device,
    refuse_foreign,
    unreadable,
)
from pipeline.backends.nodes import REMEDY, refused_nodes
from pipeline.core import BuildOptions, Engine, OnnxModel, Precision, Progress, Recipe, Refusal, Target, Tensors, TensorSpec, silent
from pipeline.errors import DataError, ModelError, UnsupportedError
from pipeline.graph import copy_model, file_size
from pipeline.layers import LayerTable
from pipeline.measure import cpu_flags, cpu_name, usable_cores

if TYPE_CHECKING:
    import onnxruntime

PRECISIONS = frozenset({Precision.FP32, Precision.INT8, Precision.INT4})
DISTRIBUTIONS: tuple[str, ...] = ("onnxruntime",)
AS_WRITTEN = "as written"
"""Variant of a recipe: Q/DQ are computed where they stand, in fp32. The int8 kernels that ONNX Runtime would put in their place can saturate."""

NOT_REALLY = {
    Precision.FP16: "it has no fp16 kernel of Conv, MatMul or Gemm for this CPU, and would cast every one to fp32 and back",
    Precision.BF16: "it has no bf16 kernel of Conv, MatMul or Gemm for this CPU",
    Precision.TF32: "TF32 is a format of NVIDIA GPUs",
    Precision.FP8: "fp8 is a format of NVIDIA GPUs",
}
"""Why a precision is refused. A test looks the kernels up in the library's registry."""

SPIN_US = 100
"""How long a thread of an engine that serves waits awake for the next operator.

16 convolutions on 2 cores that ten processes wanted, medians: 4.5 ms with it, 4.6 ms where threads sleep at once, 10 ms where they spin.
"""

MAKES_FLOAT = ("MatMulAddFusion",)
"""Left out of int8 engines: a MatMul and the Add of its bias become a Gemm whose float bias keeps it from running in 8 bits."""


def probe() -> Target:
    """This CPU; nothing is imported."""
    version = installed_version("onnxruntime", "pip install --force-reinstall onnxruntime")
    return Target(backend="onnxruntime", version=version, device=cpu_name(), cpu_flags=cpu_flags())


def unsupported(model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()) -> tuple[Refusal, ...]:
    """Every node without a kernel, or that its kernel refuses. The whole model is tried first: if it loads, there is none."""
    complaint = _complaint(str(model.path))
    if not complaint:
        return ()
    refusals = refused_nodes(model, _complaint)
    return refusals or (Refusal(node="(the whole model)", operator="", opset=model.opset, reason=complaint, remedy=REMEDY),)


def build(model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent) -> Engine:
    """Copy the graph and its external data to `out` and open it once; the graph must already be in the recipe's precision."""
    _check_precision(model, recipe)
    progress(None, "copying the graph")
    copy_model(model.path, out / model.path.name)
    progress(None, "optimising the graph")
    if complaint := _complaint(str(out / model.path.name), recipe.precision):
        raise ModelError(f"ONNX Runtime cannot open this model: {complaint}", "list every node with `crucible inspect MODEL --backend onnxruntime`")
    target = probe()
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


def layers(engine: Engine, feeds: Tensors) -> LayerTable:
    """Every kernel of the engine by ONNX Runtime's own profile, in a session of its own with the same options."""
    refuse_foreign(engine, probe())
    with tempfile.TemporaryDirectory(prefix="crucible-profile-") as folder:
        try:
            profiled = _open_engine(engine, Path(folder))
        except _errors() as error:
            raise unreadable(engine, _sentence(error)) from error
        return ort_layers.layer_table(profiled, OrtSession(engine, profiled.run), engine.path, feeds)


def load(engine: Engine, device: str = "", serves: bool = False) -> Loaded:
    """The engine in memory, on the CPU. BackendUnavailable if it was built for another host. `serves`: see `_open`."""
    refuse_foreign(engine, probe())
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
    """Runs on host arrays: ONNX Runtime reads contiguous inputs in place, and allocates outputs for each run."""

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
                f"ONNX Runtime cannot run on these inputs: {_sentence(error)}", "check the values, for example ids against their table"
            ) from error

    def download(self) -> None:
        """Nothing to do, as for upload."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def fetch(self) -> Tensors:
        if not self._results:
            nothing_to_fetch()
        fetched = dict(zip(self._names, self._results, strict=True))
        for name in self._passed_through:  # an output that is an input comes as the caller's own array
            fetched[name] = fetched[name].copy()
        return fetched

    def timer(self) -> HostTimer:
        return HostTimer()

    def close(self) -> None:
        self._check = self._run = closed
        self._feeds, self._results = {}, ()


def check_recipe(recipe: Recipe, target: Target) -> None:
    """UnsupportedError for a precision that ONNX Runtime would only pretend to run on a CPU."""
    if recipe.precision not in PRECISIONS:
        said = f"ONNX Runtime on a CPU would only pretend to run {recipe.precision}: {NOT_REALLY[recipe.precision]}"
        raise UnsupportedError(said, "choose fp32 or int8, or openvino for bf16")
    if recipe.precision is Precision.INT4 and not recipe.weight_only:
        raise UnsupportedError("ONNX Runtime has int4 for weights only", "add `weight_only`")


def _check_precision(model: OnnxModel, recipe: Recipe) -> None:
    check_recipe(recipe, probe())
    if model.precision != recipe.precision:
        said = f"ONNX Runtime takes the precision from the graph: the recipe says {recipe.precision}, the graph is {model.precision}"
        raise UnsupportedError(said, f"convert the graph to {recipe.precision} first")
    for spec in (*model.inputs, *model.outputs):
        if spec.dtype == "bfloat16":
            raise UnsupportedError(
                f"ONNX Runtime takes no bfloat16 arrays from Python, and '{spec.name}' is bfloat16", "make it float32, or choose openvino"
            )


def _open_engine(engine: Engine, profile: Path | None = None, serves: bool = False) -> onnxruntime.InferenceSession:
    recipe = engine.recipe
    return _open(str(engine.path), engine.threads or usable_cores(), recipe.precision, profile, recipe.variant == AS_WRITTEN, serves)


def _open(
    model: str | bytes,
    threads: int,
    precision: Precision = Precision.FP32,
    profile: Path | None = None,
    as_written: bool = False,
    serves: bool = False,
) -> onnxruntime.InferenceSession:
    """Threads spin between operators, as is the default: 16 small convolutions take 0.31 ms, and 0.51 ms where they sleep (2 cores, AVX512).

    Where more threads want the CPU than there are cores, it is the other way round. What `serves` shares the CPU with whoever asks: its threads
    spin for SPIN_US, which bridges the gaps between operators, and not at all between runs.
    With a folder for `profile`, every run is profiled.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    if serves:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.disable_quant_qdq", "1" if as_written else "0")
    if precision is Precision.INT8:
        options.add_session_config_entry("optimization.disable_specified_optimizers", ";".join(MAKES_FLOAT))
    if profile is not None:
        ort_layers.profile_into(options, profile)
    options.log_severity_level = 4  # only what is fatal: errors come as exceptions
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _complaint(model: str | bytes, precision: Precision = Precision.FP32) -> str:
    try:
        _open(model, threads=1, precision=precision)
    except _errors() as error:
        return _sentence(error)
    return ""


def _errors() -> tuple[type[Exception], ...]:
    """ONNX Runtime's exceptions, which have no base of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return tuple(kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception))


def _sentence(error: Exception) -> str:
    """The library's message without its codes and the path of its source file."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    return re.sub(r"^(Load model from .* failed:)?(Fatal error: )?|/onnxruntime_src/\S+ ", "", text).strip().partition("\n")[0]
