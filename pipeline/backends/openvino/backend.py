"""OpenVINO on the CPU.

The engine file is OpenVINO's IR, fp32 or with its quantisation, which any version of the CPU plugin
compiles for the CPU it finds: ResNet-50 loads in 0.3 s, against 0.5 s from ONNX. An exported blob
would load an int8 model 0.5 s faster, but is fixed to the CPU that made it. Precision is a hint to
the compiler: without "f32" said in words, a CPU with bf16 runs an fp32 model in bf16.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
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
from pipeline.backends.node_support import REMEDY, refused_nodes
from pipeline.backends.openvino import layers as openvino_layers
from pipeline.backends.openvino.nncf import quantize_with_nncf as quantize_with_nncf
from pipeline.core import (
    BuildOptions,
    Engine,
    Note,
    OnnxModel,
    Precision,
    Progress,
    Recipe,
    Refusal,
    Target,
    Tensors,
    TensorSpec,
    silent,
)
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, DataError, ModelError, UnsupportedError
from pipeline.host.amx import tiles_described
from pipeline.measurement.measure import cpu_flags, cpu_name, usable_cores
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
"""Any one of these computes in that precision; without, OpenVINO converts to fp32 and back, or
ignores the hint.
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
"""What the CPU plugin computes these in: an int64 value beyond 31 bits comes out wrong."""


def probe() -> Target:
    """This CPU; nothing is imported. AMX flags are left out where OpenVINO cannot use them."""
    version = installed_version("openvino", INSTALL)
    flags = tuple(flag for flag in cpu_flags() if not flag.startswith("amx") or tiles_described())
    return Target(backend="openvino", version=version, device=cpu_name(), cpu_flags=flags)


def unsupported(
    model: OnnxModel, target: Target, plugins: tuple[Path, ...] = ()
) -> tuple[Refusal, ...]:
    """Every node that OpenVINO cannot convert, or has no kernel for. The whole model is tried
    first: if it converts, there is none.
    """
    ov = _library()
    core = ov.Core()

    def complaint_about(source: str | bytes) -> str:
        return _complaint(core, source)

    complaint = complaint_about(str(model.path))
    if not complaint:
        return ()
    refusals = refused_nodes(model, complaint_about)
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
    """Write the IR to `out` and compile it once, to see that the heavy layers run in the recipe's
    precision.
    """
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
        if shutil.disk_usage(out).free < file_size(
            model.path
        ):  # all it says is "iostream error", and it removes what it wrote
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
    """Every layer of the engine by OpenVINO's own counters, in a model compiled once more with the
    same options.
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
    session = OpenVinoSession(engine, ov, compiled)
    operators = {op.get_friendly_name(): op.get_type_name() for op in model.get_ordered_ops()}
    return openvino_layers.layer_table(compiled, session.request, session, operators, feeds)


def load(engine: Engine, device: str = "") -> Loaded:
    """The engine in memory, on the CPU. BackendUnavailable if it was built for another host."""
    refuse_foreign(engine, probe())
    refuse_device(engine, device)
    ov = _library()
    try:
        return OpenVinoLoaded(
            engine,
            ov,
            ov.Core().compile_model(
                str(engine.path), "CPU", _config(engine.recipe, engine.threads)
            ),
        )
    except RuntimeError as error:
        raise unreadable(engine, _sentence(error)) from error


class OpenVinoLoaded:
    """One compiled model; each session has an infer request of its own."""

    def __init__(self, engine: Engine, ov: ModuleType, compiled: Any) -> None:
        self._engine, self._ov, self._compiled = engine, ov, compiled

    def session(self, profile: int = 0) -> Session:
        """A session that takes the shapes of all profiles, whichever is named."""
        if self._compiled is None:
            closed()
        return OpenVinoSession(self._engine, self._ov, self._compiled)

    def close(self) -> None:
        """Frees the weights once the sessions are closed too."""
        self._compiled = None


class OpenVinoSession:
    """Runs on host arrays: inputs are read in place, outputs are copied out of the request's own
    memory.
    """

    def __init__(self, engine: Engine, ov: ModuleType, compiled: Any) -> None:
        self.inputs: tuple[TensorSpec, ...] = engine.inputs
        self.outputs: tuple[TensorSpec, ...] = engine.outputs
        self._check: Callable[[Tensors], None] = FeedCheck(engine.inputs, engine.profiles)
        self._ov, self.request = ov, compiled.create_infer_request()
        self._infer: Callable[[], object] = partial(
            self.request.infer, share_outputs=True
        )  # views, copied by download
        self._in_ports = {spec.name: compiled.input(spec.name) for spec in engine.inputs}
        self._out_ports = {spec.name: compiled.output(spec.name) for spec in engine.outputs}
        self._feeds: dict[str, NDArray[np.generic]] = {}
        self._results: dict[str, NDArray[np.generic]] = {}

    def bind(self, feeds: Tensors) -> None:
        self._check(feeds)
        self._feeds, self._results = (
            {name: _readable_in_place(array) for name, array in feeds.items()},
            {},
        )

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
        """Nothing to wait for."""

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
        if (
            array.dtype == ml_dtypes.bfloat16
        ):  # numpy's own dtypes are all that OpenVINO knows by name
            return self._ov.Tensor(array.view(np.uint16), array.shape, self._ov.Type.bf16)
        return self._ov.Tensor(array, shared_memory=True)


def _readable_in_place(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """The array itself if OpenVINO can share its memory, else a copy."""
    return array if array.flags.c_contiguous and array.flags.writeable else array.copy(order="C")


def _owned(tensor: Any, port: Any) -> NDArray[np.generic]:
    copy: NDArray[np.generic] = np.array(tensor.data)
    return copy.view(ml_dtypes.bfloat16) if port.element_type.to_string() == "bf16" else copy


def check_recipe(recipe: Recipe, target: Target) -> None:
    """UnsupportedError for what OpenVINO would only pretend to do on this CPU."""
    asked = recipe.precision
    if asked not in PRECISIONS:
        raise UnsupportedError(
            f"OpenVINO on a CPU has no {asked}, a format of NVIDIA GPUs",
            "choose fp32, bf16 or int8",
        )
    if asked is Precision.INT4 and not recipe.weight_only:
        raise UnsupportedError("OpenVINO has int4 for weights only", "add `weight_only`")
    needed = NEEDED_FLAGS.get(recipe.rest if asked in INTEGERS else asked, set())
    if needed and not needed & set(target.cpu_flags):
        flags = " or ".join(sorted(needed))
        message = (
            f"OpenVINO would only pretend to run {asked} on this CPU ({target.device}): it needs"
            f" {flags}, and has {', '.join(target.cpu_flags)}"
        )
        raise UnsupportedError(message, "choose fp32 or int8")
    if asked in NEEDED_FLAGS and recipe.keep_fp32:
        message = (
            f"OpenVINO runs the whole model in {asked}, so it cannot keep nodes"
            f" {', '.join(recipe.keep_fp32)} in fp32"
        )
        raise UnsupportedError(message, "leave keep_fp32 out, or choose fp32 or int8")


def _check_precision(model: OnnxModel, recipe: Recipe, target: Target) -> None:
    check_recipe(recipe, target)
    in_graph = recipe.precision in INTEGERS or recipe.realised_in == "graph"
    wanted = recipe.precision if in_graph else Precision.FP32
    if model.precision != wanted:
        message = (
            f"OpenVINO needs a graph in {wanted} for {recipe.label}, and this one is"
            f" {model.precision}"
        )
        raise UnsupportedError(message, f"convert the graph to {wanted} first")


def _config(recipe: Recipe, threads: int) -> dict[str, str]:
    """Properties of the compiled model: one stream, for latency, and the precision said in
    words.
    """
    words = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _hint(recipe),
        "INFERENCE_NUM_THREADS": str(threads or usable_cores()),
    }
    if (
        recipe.weight_only
    ):  # by itself OpenVINO quantises the activations too, where the CPU is fit for it
        words["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    return words


def _hint(recipe: Recipe) -> str:
    return HINTS[recipe.rest if recipe.precision in INTEGERS else recipe.precision]


def check_runs_as(compiled: Any, recipe: Recipe) -> None:
    """UnsupportedError if the precision read back is not the one set, or if heavy layers exist and
    not one runs in the recipe's.
    """
    if (taken := compiled.get_property("INFERENCE_PRECISION_HINT").to_string()) != _hint(recipe):
        message = (
            f"OpenVINO would only pretend to run {recipe.precision}: inference_precision was set to"
            f" {_hint(recipe)} and reads back as {taken}"
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
    for wide, narrow in NARROWED.items():
        if names := [
            f"'{spec.name}'" for spec in (*model.inputs, *model.outputs) if spec.dtype == wide
        ]:
            text = (
                f"OpenVINO computes {wide} in {narrow} on a CPU: what does not fit comes out wrong"
                f" ({', '.join(names)})"
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
    """OpenVINO, kept from AMX where it would kill the process: oneDNN reads the variable when it is
    first used.
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


def _complaint(core: Any, source: str | bytes) -> str:
    """What OpenVINO says against a model; empty if it can run all of it."""
    try:
        model = core.read_model(source)
        runs = core.query_model(model, "CPU")
    except RuntimeError as error:
        return _sentence(error)
    left = [op for op in model.get_ordered_ops() if op.get_friendly_name() not in runs]
    return (
        f"the CPU plugin has no kernel for {', '.join(sorted({op.get_type_name() for op in left}))}"
        if left
        else ""
    )


CHATTER = (
    "Exception from ",
    "Check '",
    "FrontEnd API failed",
    "Model wasn't fully",
    "Summary:",
    "While validating",
)


def _sentence(error: Exception) -> str:
    """The library's message without the places in its source files."""
    lines = (line.strip().removeprefix("-- ") for line in str(error).splitlines())
    return (
        "; ".join(line for line in lines if line and not line.startswith(CHATTER))
        or str(error).strip().splitlines()[-1]
    )
