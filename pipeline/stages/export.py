"""Export the user's model as one ONNX file, and check that it computes the same.

torch.export is tried first, then the TorchScript exporter. The result must agree with PyTorch on
real samples, zeros and sign-flipped inputs, at min, opt, max and one odd shape of every profile. An
exporter that fixes the batch, or keeps one branch of an `if` on data, reports no error: only this
comparison finds it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from pipeline.backends.pytorch.export import (
    Job,
    Refused,
    check_program,
    dynamo,
    example_sizes,
    feeds_at,
    reason_of,
    shown,
    torchscript,
)
from pipeline.backends.pytorch.module import load_module, load_program, run_module
from pipeline.backends.pytorch.quantize_aware.frozen import (
    check_ranges,
    holds_fake_quantizers,
    scales_run,
)
from pipeline.core.artifacts import ModelSource, Note, OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Point, Profile, Tensors, TensorSpec, dtype_of
from pipeline.errors import ModelError
from pipeline.onnx_graph import compare
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.onnx_graph.files import onnx_model, operator_histogram, read_proto, write_proto
from pipeline.onnx_graph.inspect import SIZED_BY_VALUES, specs_of
from pipeline.plan.schema import ExportConfig
from pipeline.plan.source import check_profiles
from pipeline.quantization.existing_qdq import QDQ, QUANTISED_TOLERANCE, given_precision, scales_of

FILE = "model.onnx"
TOLERANCE = 1e-4
"""Largest difference from PyTorch, in units of the output's largest magnitude.

fp32 sums in another order differed by at most 5e-7 in ResNet-50, MobileNetV2 and MiniLM. A wrong
branch, axis or constant differs by far more.
"""
POINTS: tuple[Point, ...] = ("min", "opt", "max")


def export(
    source: ModelSource,
    profiles: tuple[Profile, ...],
    options: ExportConfig,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress = silent,
) -> OnnxModel:
    """Write model.onnx under `out` and check it against PyTorch. An .onnx source is adopted.

    `samples` are a few real feeds, or none. ModelError gives the message of each exporter, or where
    its result differs. PlanError if the profiles do not fit the inputs.
    """
    if source.path is not None and source.kind == "onnx":
        return _adopt(source.path, profiles, out)
    profiles = check_profiles(source.inputs, profiles)
    progress(None, "loading the PyTorch model")
    sizes = example_sizes(source.inputs, profiles)
    example = _sample_feeds(source.inputs, samples, sizes, profiles[0].values_at("opt"))
    job = _prepare(source, example, options, out)
    notes: list[Note] = []
    if not samples:
        text = "no data: the export is checked on generated inputs only"
        notes.append(Note(stage="export", text=text, level="info"))
    reasons: list[str] = []
    for exporter in _exporters(job, options):
        progress(None, f"exporting with the {exporter} exporter")
        try:
            warnings = dynamo(job) if exporter == "dynamo" else torchscript(job)
            progress(None, "checking the export against PyTorch")
            fallback = tuple(
                Note(stage="export", text=f"fell back to the TorchScript exporter: {reason}")
                for reason in reasons
            )
            cases = _cases(source.inputs, profiles, samples)
            return _checked_model(job, cases, (*notes, *fallback), warnings)
        except Refused as error:
            reasons.append(f"the {exporter} exporter: {error}")
    advice = (
        "change the operator or the line named above, or export by other means and give the .onnx"
        " file"
    )
    raise ModelError("; ".join(["the model cannot be exported faithfully", *reasons]), advice)


def _prepare(source: ModelSource, example: Tensors, options: ExportConfig, out: Path) -> Job:
    """Load the model and run it once, for the names of its outputs and to see that it runs."""
    module = load_module(source)
    if source.kind == "pt2":
        program = load_program(source)
        check_program(program, source)
        check_ranges(program)
    return Job(
        source,
        module,
        tuple(run_module(module, source, example)),
        options.opset,
        example,
        out / FILE,
    )


def _exporters(job: Job, options: ExportConfig) -> tuple[str, ...]:
    if job.source.kind == "pt2":
        return ("dynamo",)  # that exporter converts exported programs, and a .pt2 holds one
    if options.exporter == "auto" and holds_fake_quantizers(job.module):
        return ("torchscript",)  # torch.export cannot trace a fake quantiser
    return ("dynamo", "torchscript") if options.exporter == "auto" else (options.exporter,)


# --- the check ---


@dataclass(frozen=True, slots=True)
class _Case:
    """One set of inputs on which export and PyTorch must agree."""

    sizes: Mapping[str, int]
    kind: str
    feeds: Tensors
    # The output for such inputs may have no meaning, so a difference is only a note.
    optional: bool = False
    odd: bool = False
    # A value decides a shape, so output dimensions cannot be named by their sizes.
    valued: bool = False

    @property
    def where(self) -> str:
        sizes = ", ".join(f"{symbol}={size}" for symbol, size in self.sizes.items())
        return f"at {sizes or 'the fixed shapes'}, on {self.kind}"


def _cases(
    inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...], samples: tuple[Tensors, ...]
) -> Iterator[_Case]:
    """Yield every shape once, with the samples in turn: floats as given, zero and sign-flipped.

    Zeros in ids and masks are cases of their own: for a mask that hides everything no output is
    defined, and kernels differ there.
    """
    for turn, (sizes, values, odd) in enumerate(_distinct_shapes(profiles)):
        sample = (samples[turn % len(samples)],) if samples else ()
        real = _sample_feeds(inputs, sample, sizes, values)
        zeros = {
            name: array if name in values else np.zeros_like(array) for name, array in real.items()
        }
        floats = {
            name
            for name, array in real.items()
            if dtype_of("bfloat16") == array.dtype or array.dtype.kind == "f"
        }
        case = partial(_Case, sizes, odd=odd, valued=bool(values))
        yield case("samples" if samples else "generated inputs", real)
        if floats:
            yield case("zeros", {**real, **{name: zeros[name] for name in floats}})
            yield case(
                "sign-flipped inputs",
                {**real, **{name: np.negative(real[name]) for name in floats}},
            )
        if len(floats) < len(real):
            yield case("zeros in every input", zeros, optional=True)


_Shape = tuple[dict[str, int], dict[str, tuple[int, ...]], bool]
"""Sizes, values that decide shapes, and whether the sizes are the odd ones of a profile."""


def _distinct_shapes(profiles: tuple[Profile, ...]) -> list[_Shape]:
    """Return min, opt and max of every profile, then the odd sizes, without repetitions."""
    shapes: list[_Shape] = []
    for profile in profiles:
        for point in POINTS:
            shapes.append((profile.sizes(point), profile.values_at(point), False))
    for profile in profiles:
        shapes.append((profile.odd_sizes(), profile.odd_values(), True))
    distinct: list[_Shape] = []
    for shape in shapes:
        if shape[:2] not in [earlier[:2] for earlier in distinct]:
            distinct.append(shape)
    return distinct


def _sample_feeds(
    inputs: tuple[TensorSpec, ...],
    samples: tuple[Tensors, ...],
    sizes: Mapping[str, int],
    values: Mapping[str, Sequence[int]],
) -> Tensors:
    """Return the first sample at these sizes; generated feeds if there is no sample.

    Generated inputs that decide a shape have these `values`.
    """
    return feeds_at(inputs, samples, sizes) if samples else draw_feeds(inputs, sizes, 0, values)


def _checked_model(
    job: Job, cases: Iterable[_Case], notes: tuple[Note, ...], warnings: tuple[Note, ...]
) -> OnnxModel:
    """Return the exported model with its notes.

    `warnings` are the exporter's own, which may explain a difference. Refused, with the reason,
    unless it has the plan's interface and agrees in every case.
    """
    notes += warnings
    model = onnx_model(job.path.parent, FILE)
    _check_interface(job, model)
    if model.opset != job.opset:
        notes += (
            Note(
                stage="export",
                text=f"requested opset {job.opset}, but the exporter wrote opset {model.opset}",
            ),
        )
    hint = "".join(f"; {note.text}" for note in warnings[:3])
    run = _reference(job.path)
    notes += scale_notes(job)
    tolerance = QUANTISED_TOLERANCE if _is_quantised(job.path) else TOLERANCE
    doubts: list[Note] = []
    observed: list[_Observed] = []
    for case in cases:
        try:
            expected = run_module(job.module, job.source, case.feeds)
        except ModelError as error:
            if not (case.odd or case.optional):
                raise
            doubts.append(
                Note(
                    stage="export",
                    text=f"{case.where}, the export could not be checked: {error.message}",
                )
            )
            continue
        if fault := _fault(run, case, expected, tolerance):
            if not case.optional:
                raise Refused(fault + hint)
            doubts.append(
                Note(
                    stage="export",
                    text=(
                        f"{fault}; this is no fault if the model's output for such inputs has no"
                        " meaning"
                    ),
                )
            )
        if not case.valued:
            observed.append((case.sizes, {name: array.shape for name, array in expected.items()}))
    return _with_named_outputs(model, observed).model_copy(update={"notes": (*notes, *doubts[:1])})


def _check_interface(job: Job, model: OnnxModel) -> None:
    exported = {spec.name: spec for spec in model.inputs}
    for spec in job.source.inputs:
        if spec.name not in exported:
            raise Refused(f"input '{spec.name}' is gone from the graph: the model does not use it")
        actual = exported[spec.name]
        if (actual.dtype, actual.shape) != (spec.dtype, spec.shape):
            raise Refused(
                f"input '{spec.name}' is {shown(spec)} in the plan and came out as {shown(actual)}"
            )
    if tuple(spec.name for spec in model.outputs) != job.outputs:
        raise Refused(
            f"expected the outputs {', '.join(job.outputs)}, got"
            f" {', '.join(spec.name for spec in model.outputs)}"
        )


def _reference(path: Path) -> compare.Runner:
    try:
        return compare.open_reference(path)
    except ModelError as error:
        raise Refused(_line(error)) from error


def scale_notes(job: Job) -> tuple[Note, ...]:
    """Return a note with the number of scales that the module quantises with, if it has any.

    Refused if the graph lacks one of them.
    """
    used = scales_run(job.module, job.source, job.example)
    if not used:
        return ()
    exported: Counter[bytes] = Counter()
    for (operator, _, scale, _), tensors in scales_of(read_proto(job.path).graph).items():
        if operator == QDQ[1]:
            exported[scale] += len(tensors)
    missing = (used - exported).total()
    if missing:
        raise Refused(
            f"{missing} of the {used.total()} scales that the model quantises with are not in the"
            " graph"
        )
    return (
        Note(
            stage="export",
            text=(
                f"the model quantises {used.total()} tensors, and the graph holds the scale of each"
            ),
            level="info",
        ),
    )


def _is_quantised(path: Path) -> bool:
    return given_precision(read_proto(path, weights=False).graph) is not None


def _fault(run: compare.Runner, case: _Case, expected: Tensors, tolerance: float) -> str:
    """Describe the difference of ONNX Runtime from PyTorch in one line; "" if there is none."""
    try:
        fault = compare.compare_outputs(expected, run(case.feeds), tolerance)
    except ModelError as error:
        fault = _line(error)
    return f"{case.where}: {fault}" if fault else ""


def _line(error: ModelError) -> str:
    """Return an error of ONNX Runtime as one line, without the path of the temporary file."""
    return re.sub(r"'\S+/model\.onnx'", "the exported model", " ".join(error.message.split()))


_Observed = tuple[Mapping[str, int], dict[str, tuple[int, ...]]]
"""The sizes of a case, and the shape of each output."""


def _with_named_outputs(model: OnnxModel, observed: list[_Observed]) -> OnnxModel:
    """Name output dimensions that the exporter did not name, by their sizes in the cases.

    Dimensions stay unnamed where sizes depend on values. TorchScript writes
    `Reshapeoutput_0_dim_0` for the batch.
    """
    symbols = list(dict.fromkeys(symbol for spec in model.inputs for symbol in spec.symbols))
    if all(set(spec.symbols) <= set(symbols) for spec in model.outputs):
        return model
    if len({str(sizes) for sizes, _ in observed}) < 2:
        return model
    if SIZED_BY_VALUES & set(operator_histogram(model.path)):
        return model
    proto = onnx.load(model.path, load_external_data=False)
    for value in proto.graph.output:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            pairs = [(sizes, shapes[value.name][axis]) for sizes, shapes in observed]
            if dim.dim_param in ("", *symbols):
                continue
            equal = [
                symbol for symbol in symbols if all(sizes[symbol] == size for sizes, size in pairs)
            ]
            if len({size for _, size in pairs}) == 1:
                dim.dim_value = pairs[0][1]
            elif len(equal) == 1:
                dim.dim_param = equal[0]
    model.path.write_bytes(proto.SerializeToString())
    return onnx_model(model.root, model.file)


# --- ONNX files ---


def _adopt(path: Path, profiles: tuple[Profile, ...], out: Path) -> OnnxModel:
    """Check a user's ONNX file and write it again, as one file up to 1.5 GB. Needs no torch.

    It is no link, because the user may change the file in place. External data is taken into the
    file, because ONNX Runtime cannot read shapes from it.
    """
    proto = read_proto(path)
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ModelError(
            f"'{path}' is not a valid ONNX model: {reason_of(error)}", "export the model again"
        ) from error
    check_profiles(specs_of(proto)[0], profiles)
    write_proto(proto, out / FILE)
    return onnx_model(out, FILE)
