"""OpenVINO on the CPU.

The engine file is OpenVINO's IR, fp32 or quantised. Any version of the CPU plugin compiles it for
its CPU: ResNet-50 loads in 0.3 s, against 0.5 s from ONNX. An exported blob would load an int8
model 0.5 s faster, but only runs on the CPU that exported it. Precision is a hint to the compiler:
without an explicit "f32", a CPU with bf16 runs an fp32 model in bf16.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
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
from pipeline.backends.openvino import layers as openvino_layers
from pipeline.backends.openvino.nncf import quantize_with_nncf as quantize_with_nncf
from pipeline.core.artifacts import BuildOptions, Engine, Note, OnnxModel, Refusal, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Tensors, TensorSpec
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, DataError, ModelError, UnsupportedError
from pipeline.host.amx import tiles_described
from pipeline.host.environment import cpu_flags, cpu_name, usable_cores
from pipeline.onnx_graph.files import file_size
from pipeline.results.layer_table import LayerTable

PRECISIONS = frozenset(
    {Precision.FP32, Precision.FP16, Precision.BF16, Precision.INT8, Precision.INT4}
)
DISTRIBUTIONS: tuple[str, ...] = ("openvino",)
INSTALL = install_command("openvino")
FILE = "model.xml"

NEEDED_FLAGS = {
    Precision.BF16: {"avx512_bf16", "amx_bf16"},
    Precision.FP16: {"avx512_fp16", "amx_fp16"},
}
"""CPU flags. Any one of them computes in that precision; without one, OpenVINO converts to fp32 and
back, or ignores the hint.
"""

HINTS = {Precision.FP32: "f32", Precision.FP16: "f16", Precision.BF16: "bf16"}
RUNS_AS = {
    Precision.FP32: {"f32"},
    Precision.FP16: {"f16"},
    Precision.BF16: {"bf16"},
    Precision.INT8: {"i8", "u8"},
    Precision.INT4: {"i4", "u4"},
}
INTEGERS = (Precision.INT8, Precision.INT4)
NARROWED = {"int64": "int32", "uint64": "int32", "float64": "float32"}
"""Dtypes that the CPU plugin computes in another one: int64 values beyond 31 bits become wrong."""


def probe() -> Target:
    """Return this CPU as a target. Imports nothing.

    AMX flags are left out if OpenVINO cannot use AMX.
    """
    version = installed_version("openvino", INSTALL)
    flags = tuple(flag for flag in cpu_flags() if not flag.startswith("amx") or tiles_described())
    return Target(backend="openvino", version=version, device=cpu_name(), cpu_flags=flags)


def unsupported(
    model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
) -> tuple[Refusal, ...]:
    """Return every node that OpenVINO cannot convert, or has no kernel for."""
    core = _library().Core()
    return refused_nodes(model, lambda source: _load_error(core, source))


def build(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Write the IR to `out`, and compile it once to check the precision of the heavy layers."""
    target = probe()
    _check_precision(model, recipe, target)
    ov = _library()
    progress(None, "converting to OpenVINO's IR")
    try:
        ov.save_model(
            ov.Core().read_model(str(model.path)), str(out / FILE), compress_to_fp16=False
        )
        progress(None, "compiling for this CPU")
        compiled = ov.Core().compile_model(str(out / FILE), "CPU", _config(recipe, options.threads))
    except RuntimeError as error:
        # On a full disk OpenVINO only reports "iostream error", and removes its partial files.
        if shutil.disk_usage(out).free < file_size(model.path):
            raise OSError(errno.ENOSPC, "No space left on device", str(out / FILE)) from error
        message = f"OpenVINO cannot build this model: {_sentence(error)}"
        raise ModelError(
            message, "list every node with `crucible inspect MODEL --backend openvino`"
        ) from error
    check_runs_as(compiled, recipe)
    return Engine(
        root=out,
        file=FILE,
        digest=engine_digest(model, recipe, options, target),
        target=target,
        recipe=recipe,
        inputs=model.inputs,
        outputs=model.outputs,
        profiles=options.profiles,
        threads=options.threads,
        size_bytes=sum(
            (out / FILE).with_suffix(suffix).stat().st_size for suffix in (".xml", ".bin")
        ),
        notes=tuple(_notes(model)),
    )


def layers(engine: Engine, feeds: Tensors, profile: int = 0) -> LayerTable:
    """Return every layer of the engine, with times from OpenVINO's own counters.

    The model is compiled once more with the same options and the counters.
    """
    counting = open_counting(engine)
    session = counting.session
    return openvino_layers.layer_table(
        counting.compiled, session.request, session, counting.operators, feeds
    )


@dataclass(frozen=True, slots=True)
class Counting:
    """A model that is compiled with OpenVINO's counters."""

    compiled: Any
    session: OpenVinoSession
    operators: dict[str, str]  # OpenVINO's operators by node name


def open_counting(engine: Engine) -> Counting:
    """Compile an engine's model with the same options and the counters.

    BackendUnavailable if it was built for another host.
    """
    refuse_foreign(engine, probe())
    ov = _library()
    try:
        model = ov.Core().read_model(str(engine.path))
        compiled = ov.Core().compile_model(
            model, "CPU", {**_config(engine.recipe, engine.threads), "PERF_COUNT": "YES"}
        )
    except RuntimeError as error:
        raise unreadable(engine, _sentence(error)) from error
    operators = {op.get_friendly_name(): op.get_type_name() for op in model.get_ordered_ops()}
    return Counting(compiled, OpenVinoSession(engine, ov, compiled), operators)


def load(engine: Engine, device: str = "") -> Loaded:
    """Load the engine on the CPU. BackendUnavailable if it was built for another host."""
    refuse_foreign(engine, probe())
    refuse_device(engine, device)
    ov = _library()
    config = _config(engine.recipe, engine.threads)
    try:
        compiled = ov.Core().compile_model(str(engine.path), "CPU", config)
    except RuntimeError as error:
        raise unreadable(engine, _sentence(error)) from error
    return OpenVinoLoaded(engine, ov, compiled)


class OpenVinoLoaded:
    """One compiled model. Each session has an infer request of its own."""

    def __init__(self, engine: Engine, ov: ModuleType, compiled: Any) -> None:
        self._engine, self._ov, self._compiled = engine, ov, compiled

    def session(self, profile: int | None = None) -> Session:
        """Open a session. It accepts the shapes of all profiles and ignores `profile`."""
        if self._compiled is None:
            closed()
        return OpenVinoSession(self._engine, self._ov, self._compiled)

    def close(self) -> None:
        """Free the weights once the sessions are closed too."""
        self._compiled = None


class OpenVinoSession:
    """A session on host arrays.

    Inputs are read in place. Outputs are copied from the memory of the request.
    """

    def __init__(self, engine: Engine, ov: ModuleType, compiled: Any) -> None:
        self.inputs: tuple[TensorSpec, ...] = engine.inputs
        self.outputs: tuple[TensorSpec, ...] = engine.outputs
        self._check: Callable[[Tensors], None] = FeedCheck(engine.inputs, engine.profiles)
        self._ov, self.request = ov, compiled.create_infer_request()
        # the outputs are views, which download copies
        self._infer: Callable[[], object] = partial(self.request.infer, share_outputs=True)
        self._in_ports = {spec.name: compiled.input(spec.name) for spec in engine.inputs}
        self._out_ports = {spec.name: compiled.output(spec.name) for spec in engine.outputs}
        self._feeds: dict[str, NDArray[np.generic]] = {}
        self._results: dict[str, NDArray[np.generic]] = {}

    def bind(self, feeds: Tensors) -> None:
        self._check(feeds)
        self._feeds = {name: _readable_in_place(array) for name, array in feeds.items()}
        self._results = {}

    def upload(self) -> None:
        for name, array in self._feeds.items():
            self.request.set_tensor(self._in_ports[name], self._tensor(array))

    def execute(self) -> None:
        try:
            self._infer()
        except RuntimeError as error:
            message = f"OpenVINO cannot run on these inputs: {_sentence(error)}"
            raise DataError(
                message, "check the values, for example ids against their table"
            ) from error

    def download(self) -> None:
        self._results = {
            name: _owned(self.request.get_tensor(port), port)
            for name, port in self._out_ports.items()
        }

    def synchronize(self) -> None:
        """Do nothing: a run is finished when `execute` returns."""

    def fetch(self) -> Tensors:
        if not self._results:
            nothing_to_fetch()
        return self._results

    def timer(self) -> HostTimer:
        return HostTimer()

    def close(self) -> None:
        self._check = self._infer = closed
        self.request, self._feeds, self._results = None, {}, {}

    def _tensor(self, array: NDArray[np.generic]) -> Any:
        # OpenVINO knows only numpy's own dtypes by name.
        if array.dtype == ml_dtypes.bfloat16:
            return self._ov.Tensor(array.view(np.uint16), array.shape, self._ov.Type.bf16)
        return self._ov.Tensor(array, shared_memory=True)


def _readable_in_place(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """Return the array itself if OpenVINO can share its memory, else a copy."""
    return array if array.flags.c_contiguous and array.flags.writeable else array.copy(order="C")


def _owned(tensor: Any, port: Any) -> NDArray[np.generic]:
    copy: NDArray[np.generic] = np.array(tensor.data)
    return copy.view(ml_dtypes.bfloat16) if port.element_type.to_string() == "bf16" else copy


def check_recipe(recipe: Recipe, target: Target) -> None:
    """Raise UnsupportedError for a precision that OpenVINO would not compute in on this CPU."""
    precision = recipe.precision
    if precision not in PRECISIONS:
        raise UnsupportedError(
            f"OpenVINO on a CPU has no {precision}, a format of NVIDIA GPUs",
            "choose fp32, bf16 or int8",
        )
    if precision is Precision.INT4 and not recipe.weight_only:
        raise UnsupportedError("OpenVINO has int4 for weights only", "add `weight_only`")
    needed = NEEDED_FLAGS.get(recipe.rest if precision in INTEGERS else precision, set())
    if needed and not needed & set(target.cpu_flags):
        flags = " or ".join(sorted(needed))
        message = (
            f"OpenVINO would only pretend to run {precision} on this CPU ({target.device}): it"
            f" needs {flags}, and has {', '.join(target.cpu_flags)}"
        )
        raise UnsupportedError(message, "choose fp32 or int8")
    if precision in NEEDED_FLAGS and recipe.keep_fp32:
        message = (
            f"OpenVINO runs the whole model in {precision}, so it cannot keep nodes"
            f" {', '.join(recipe.keep_fp32)} in fp32"
        )
        raise UnsupportedError(message, "leave keep_fp32 out, or choose fp32 or int8")


def _check_precision(model: OnnxModel, recipe: Recipe, target: Target) -> None:
    check_recipe(recipe, target)
    in_graph = recipe.precision in INTEGERS or recipe.realised_in == "graph"
    expected = recipe.precision if in_graph else Precision.FP32
    if model.precision != expected:
        message = (
            f"OpenVINO needs a graph in {expected} for {recipe.label}, and this one is"
            f" {model.precision}"
        )
        raise UnsupportedError(message, f"convert the graph to {expected} first")


def _config(recipe: Recipe, threads: int) -> dict[str, str]:
    """Return the properties of a compiled model: a latency stream and its precision."""
    properties = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _hint(recipe),
        "INFERENCE_NUM_THREADS": str(threads or usable_cores()),
    }
    # By default OpenVINO quantises the activations too, if the CPU supports it.
    if recipe.weight_only:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    return properties


def _hint(recipe: Recipe) -> str:
    return HINTS[recipe.rest if recipe.precision in INTEGERS else recipe.precision]


def check_runs_as(compiled: Any, recipe: Recipe) -> None:
    """Raise UnsupportedError if OpenVINO does not use the recipe's precision.

    The precision hint must read back as it was set. If there are heavy layers, at least one must
    run in the recipe's precision.
    """
    actual = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    if actual != _hint(recipe):
        message = (
            f"OpenVINO would only pretend to run {recipe.precision}: inference_precision was set to"
            f" {_hint(recipe)} and reads back as {actual}"
        )
        raise UnsupportedError(message, "choose fp32 or int8")
    heavy = openvino_layers.heavy_precisions(openvino_layers.runtime_layers(compiled))
    if heavy and not RUNS_AS[recipe.precision] & set(heavy):
        message = (
            f"OpenVINO would only pretend to run {recipe.precision}: its {len(heavy)} heavy layers"
            f" run in {', '.join(sorted(set(heavy)))}"
        )
        raise UnsupportedError(message, "choose fp32, or for int8 another placement of Q/DQ")


def _notes(model: OnnxModel) -> Iterator[Note]:
    specs = (*model.inputs, *model.outputs)
    for wide, narrow in NARROWED.items():
        names = [f"'{spec.name}'" for spec in specs if spec.dtype == wide]
        if names:
            text = (
                f"OpenVINO computes {wide} in {narrow} on a CPU: values that do not fit become"
                f" wrong ({', '.join(names)})"
            )
            yield Note(stage="build", text=text, level="info")
    if _amx_is_hidden():
        text = (
            "this virtual machine hides how AMX is laid out (CPUID leaf 0x1D), so OpenVINO runs"
            " without AMX, which would crash it"
        )
        yield Note(stage="build", text=text)


def _amx_is_hidden() -> bool:
    return "amx_tile" in cpu_flags() and not tiles_described()


def _library() -> ModuleType:
    """Import OpenVINO, without AMX if AMX would crash the process.

    oneDNN reads the environment variable on its first use.
    """
    installed_version("openvino", INSTALL)
    if _amx_is_hidden():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    try:
        return importlib.import_module("openvino")
    except (ImportError, OSError) as error:
        raise BackendUnavailable(
            f"the library `openvino` cannot be loaded: {error}", f"{INSTALL} --force-reinstall"
        ) from error


def _load_error(core: Any, source: str | bytes) -> str:
    """Try to read a model. Return OpenVINO's error message; "" if it can run the whole model."""
    try:
        model = core.read_model(source)
        supported = core.query_model(model, "CPU")
    except RuntimeError as error:
        return _sentence(error)
    kinds = {
        op.get_type_name()
        for op in model.get_ordered_ops()
        if op.get_friendly_name() not in supported
    }
    return f"the CPU plugin has no kernel for {', '.join(sorted(kinds))}" if kinds else ""


CHATTER = (
    "Exception from ",
    "Check '",
    "FrontEnd API failed",
    "Model wasn't fully",
    "Summary:",
    "While validating",
)


def _sentence(error: Exception) -> str:
    """Return the library's message without references to its source files."""
    lines = (line.strip().removeprefix("-- ") for line in str(error).splitlines())
    text = "; ".join(line for line in lines if line and not line.startswith(CHATTER))
    return text or str(error).strip().splitlines()[-1]
