"""The two exporters from a PyTorch module to an ONNX file.

Neither is trusted: `stages.export` checks their files.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.backends.pytorch.module import load_program, tensor_from_array
from pipeline.core.artifacts import ModelSource, Note
from pipeline.core.shapes import Profile, Tensors, TensorSpec
from pipeline.errors import ModelError
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.onnx_graph.files import EXTERNAL_ABOVE_BYTES

if TYPE_CHECKING:
    import torch

TORCHSCRIPT_NEWEST_OPSET = 20


class Refused(Exception):
    """The reason, in one line, why an exporter failed or its file was refused."""


@dataclass(frozen=True, slots=True)
class Job:
    """The input of an exporter."""

    source: ModelSource
    module: torch.nn.Module
    outputs: tuple[str, ...]
    opset: int
    example: Tensors
    path: Path
    device: str = "cpu"  # of the module
    flat: bool = False  # the module takes its inputs as *args

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        arrays = [self.example[spec.name] for spec in self.source.inputs]
        return tuple(tensor_from_array(array).to(self.device) for array in arrays)

    @property
    def input_names(self) -> list[str]:
        return [spec.name for spec in self.source.inputs]

    @property
    def axes(self) -> tuple[dict[int, str], ...]:
        """For each input, the symbols of its symbolic axes."""
        return tuple(
            {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
            for spec in self.source.inputs
        )


# --- shapes and feeds ---


def example_sizes(inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...]) -> dict[str, int]:
    """Return the sizes for tracing.

    They are distinct, so that no two dimensions look equal by chance. They are at least 2, since
    exporters treat 1 as fixed, and 3 if possible, so that `x[1:]` does not have size 1. The
    profiles' own sizes come first, since a model may not accept every size in between.
    """
    taken = {dim for spec in inputs for dim in spec.shape if isinstance(dim, int)}
    sizes: dict[str, int] = {}
    for symbol in dict.fromkeys(symbol for spec in inputs for symbol in spec.symbols):
        ranges = [profile.dims[symbol] for profile in profiles]
        named = sorted({size for dim in ranges for size in (dim.min, dim.opt, dim.max)})
        choices = itertools.chain(named, range(named[0], named[-1] + 1), [2], itertools.count(3))
        sizes[symbol] = next(
            size for size in choices if size not in taken and (size > 2 or size == 2 == named[-1])
        )
        taken.add(sizes[symbol])
    return sizes


def feeds_at(
    inputs: tuple[TensorSpec, ...], samples: tuple[Tensors, ...], sizes: Mapping[str, int]
) -> Tensors:
    """Return the first sample at these sizes, or generated inputs if there is no sample."""
    if not samples:
        return draw_feeds(inputs, sizes, seed=0)
    return {spec.name: _resized(samples[0][spec.name], spec, sizes) for spec in inputs}


def _resized(
    array: NDArray[np.generic], spec: TensorSpec, sizes: Mapping[str, int]
) -> NDArray[np.generic]:
    """Repeat or cut an array along its symbolic axes.

    All values are those of the sample, so that ids and masks stay valid.
    """
    for axis, dim in enumerate(spec.shape):
        if isinstance(dim, str):
            array = np.take(array, np.arange(sizes[dim]) % array.shape[axis], axis=axis)
    return array


# --- the two exporters ---


def dynamo(job: Job) -> tuple[Note, ...]:
    """Export with torch.export, then translate the program to ONNX.

    The two steps are separate: torch.onnx would retry a failed capture with fixed dimensions.
    """
    import torch

    program = load_program(job.source) if job.source.kind == "pt2" else captured(job)
    try:
        with _quiet():
            result = torch.onnx.export(
                program,
                job.args,
                dynamo=True,
                opset_version=job.opset,
                input_names=job.input_names,
                output_names=list(job.outputs),
                dynamic_shapes=job.axes,  # only the names: the program has the axes already
                verbose=False,
            )
    except (torch.onnx.OnnxExporterError, RuntimeError, ValueError, TypeError) as error:
        raise Refused(reason_of(error)) from error
    _tidy(result, {*job.input_names, *job.outputs})
    size = sum(
        tensor.numel() * tensor.element_size()
        for tensor in (*job.module.parameters(), *job.module.buffers())
    )
    result.save(job.path, external_data=size > EXTERNAL_ABOVE_BYTES)
    return ()


def _tidy(result: torch.onnx.ONNXProgram, public: set[str]) -> None:
    """Remove the stack traces, and rename inner tensors with the name of an input or output.

    Stack traces contain the user's paths and make equal graphs differ.
    """
    inner = result.model.graph
    for value in inner.initializers.values():
        value.metadata_props.clear()
    for node in inner.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
            # the exporter names inner tensors after operators, for example "embedding"
            if value.name in public and not value.is_graph_output():
                value.name = f"{value.name}_inner"


def captured(job: Job) -> torch.export.ExportedProgram:
    """Capture the module with torch.export, with free symbolic axes.

    Refused, with one line, if torch.export fails. ModelError for a branch on data.
    """
    import torch
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    dynamic = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in job.axes)
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(
                job.module,
                job.args,
                dynamic_shapes=(dynamic,) if job.flat else dynamic,
                strict=False,
            )
    except GuardOnDataDependentSymNode as error:
        # No fallback: the TorchScript exporter keeps the branch that the example took, and a few
        # samples cannot prove that right.
        advice = "write it with torch.where, or with torch.cond, which exports both branches"
        raise ModelError(
            "data-dependent control flow, which one exported graph cannot follow:"
            f" {_user_line(error)}",
            advice,
        ) from error
    except Exception as error:  # the user's code under a tracer may raise anything
        raise Refused(_fixed_dimension(job, error) or reason_of(error)) from error


def _fixed_dimension(job: Job, error: Exception) -> str:
    """Return a message with the symbol that torch.export reports as a constant, or "".

    Example sizes are distinct, so that the constant identifies the symbol.
    """
    constant = re.search(r"specialized it to be a constant \((\d+)\)", str(error))
    if constant is None:
        return ""
    pairs = [
        (symbol, job.example[spec.name].shape[axis])
        for spec, axes in zip(job.source.inputs, job.axes, strict=True)
        for axis, symbol in axes.items()
    ]
    return "; ".join(
        f"the model's code fixes '{symbol}' at its example's {size}"
        for symbol, size in dict(pairs).items()
        if str(size) == constant[1]
    )


def torchscript(job: Job) -> tuple[Note, ...]:
    """Export with torch.jit.trace and its translation to ONNX.

    Return the tracer's warnings as notes: it freezes values that it cannot follow.
    """
    import torch

    opset = min(job.opset, TORCHSCRIPT_NEWEST_OPSET)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused operators have no ONNX form
    try:
        with _quiet() as caught, torch.no_grad():
            torch.onnx.export(
                job.module,
                job.args,
                job.path,
                dynamo=False,
                opset_version=opset,
                input_names=job.input_names,
                output_names=list(job.outputs),
                dynamic_axes=dict(zip(job.input_names, job.axes, strict=True)),
                verbose=False,
            )
    except Exception as error:  # the user's code under a tracer may raise anything
        raise Refused(reason_of(error)) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    warned = dict.fromkeys(
        _tracer_warning(item)
        for item in caught
        if issubclass(item.category, torch.jit.TracerWarning)
    )
    return tuple(Note(stage="export", text=text) for text in warned)


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Hide the exporters' output and warnings from the user. The list holds the warnings."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        yield caught


def _tracer_warning(item: warnings.WarningMessage) -> str:
    place, text = f"{Path(item.filename).name}:{item.lineno}", str(item.message).partition(". ")[0]
    if "Python boolean" in text:  # the tracer's warnings share one class
        text = (
            "a branch on a tensor's value or size; tracing keeps the one that its example took (use"
            " torch.where or torch.cond)"
        )
    return f"traced, {place}: {text}"


def reason_of(error: BaseException) -> str:
    """Return the informative line of an exporter's error: the innermost cause, or the violated
    constraints.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    constraints = [
        line.removeprefix("- ").partition(". ")[0] for line in lines if line.startswith("- ")
    ]
    return "; ".join(constraints[:3]) or (lines[0] if lines else type(error).__name__)


def _user_line(error: BaseException) -> str:
    """Return the innermost frame in torch.export's message.

    For example `model.py:78 in forward: if x.sum() < 0:`.
    """
    frames = re.findall(r'File "(.+)", line (\d+), in (\w+)\n\s+(.+)', str(error))
    if not frames:
        return reason_of(error)
    file, line, function, text = frames[-1]
    return f"{Path(file).name}:{line} in {function}: {text.strip()}"


def check_program(program: torch.export.ExportedProgram, source: ModelSource) -> None:
    """Raise ModelError unless a .pt2 has the plan's inputs with their dtypes and free dimensions.

    A dimension must be free exactly where it is symbolic in the plan.
    """
    names = program.graph_signature.user_inputs
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.name in names}

    def described(name: str) -> str:
        dtype = str(values[name].dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, values[name].shape))}]"

    taken = [described(name) for name in names]
    advice = (
        f"'{source.path}' takes {'; '.join(taken)}: correct model.inputs, or export it again with"
        " these dimensions dynamic"
    )
    if len(names) != len(source.inputs):
        raise ModelError(
            f"the plan names {len(source.inputs)} inputs, the exported program has {len(names)}",
            advice,
        )
    for spec, name, have in zip(source.inputs, names, taken, strict=True):
        pairs = tuple(zip(spec.shape, values[name].shape, strict=False))
        same = len(pairs) == len(spec.shape) == len(values[name].shape) and all(
            isinstance(dim, str) != isinstance(size, int) for dim, size in pairs
        )
        if not same or not have.startswith(f"{spec.dtype}["):
            raise ModelError(
                f"input '{spec.name}' is {shown(spec)} in the plan, {have} in the exported program",
                advice,
            )


def shown(spec: TensorSpec) -> str:
    """Return `float32[batch, 3]`."""
    return f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"
