"""Export: the user's model as one ONNX file that provably computes the same.

torch.export first, the TorchScript exporter where that fails. Whatever comes out must agree with
PyTorch on real samples, zeros and sign-flipped inputs, at min, opt, max and one odd shape of every
profile: an exporter that bakes in the batch, or that keeps one branch of an `if` on data, succeeds
without a word.
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
from pipeline.backends.pytorch.qat import check_ranges, holds_fake_quantizers, scales_run
from pipeline.core import (
    ModelSource,
    Note,
    OnnxModel,
    Point,
    Profile,
    Progress,
    Tensors,
    TensorSpec,
    dtype_of,
    silent,
)
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
"""Largest difference from PyTorch in units of the output's largest magnitude. Sums of fp32 taken in
another order differed by 5e-7 at most in ResNet-50, MobileNetV2 and MiniLM; a wrong branch, axis or
constant differs by far more.
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
    """Write model.onnx under `out`, checked against PyTorch; an .onnx source is checked and adopted
    as it is.

    `samples` are a few real feeds, maybe none. ModelError names what each exporter said, or where
    its result differs; PlanError if the profiles do not fit the inputs.
    """
    if source.path is not None and source.kind == "onnx":
        return _adopt(source.path, profiles, out)
    profiles = check_profiles(source.inputs, profiles)
    progress(None, "loading the PyTorch model")
    example = _real(
        source.inputs, samples, example_sizes(source.inputs, profiles), profiles[0].values_at("opt")
    )
    job = _prepare(source, example, options, out)
    notes = (
        ()
        if samples
        else (
            Note(
                stage="export",
                text="no data: the export is checked on generated inputs only",
                level="info",
            ),
        )
    )
    refused: list[str] = []
    for exporter in _exporters(job, options):
        progress(None, f"exporting with the {exporter} exporter")
        try:
            warned = dynamo(job) if exporter == "dynamo" else torchscript(job)
            progress(None, "checking the export against PyTorch")
            fallback = tuple(
                Note(stage="export", text=f"fell back to the TorchScript exporter: {reason}")
                for reason in refused
            )
            cases = _cases(source.inputs, profiles, samples)
            return _checked(job, cases, (*notes, *fallback), warned)
        except Refused as error:
            refused.append(f"the {exporter} exporter: {error}")
    advice = (
        "change the operator or the line named above, or export by other means and give the .onnx"
        " file"
    )
    raise ModelError("; ".join(["the model cannot be exported faithfully", *refused]), advice)


def _prepare(source: ModelSource, example: Tensors, options: ExportConfig, out: Path) -> Job:
    """Load the model and run it once, which names its outputs and finds out whether it runs
    at all.
    """
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
        return ("dynamo",)  # a .pt2 is what that exporter starts from
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
    # whether the model's answer means anything here is not known, so a difference is only a note
    optional: bool = False
    odd: bool = False
    valued: bool = (
        False  # a value decides a shape, so that sizes do not tell which dimension is which
    )

    @property
    def where(self) -> str:
        sizes = ", ".join(f"{symbol}={size}" for symbol, size in self.sizes.items())
        return f"at {sizes or 'the fixed shapes'}, on {self.kind}"


def _cases(
    inputs: tuple[TensorSpec, ...], profiles: tuple[Profile, ...], samples: tuple[Tensors, ...]
) -> Iterator[_Case]:
    """Every shape once, the samples in turn; floats as they are, zero and sign-flipped.

    Zero ids and masks come apart: a mask that hides everything has no defined answer, and kernels
    differ there.
    """
    points = [
        ((profile.sizes(point), profile.values_at(point)), False)
        for profile in profiles
        for point in POINTS
    ]
    points += [((profile.odd_sizes(), profile.odd_values()), True) for profile in profiles]
    places = [
        (place, odd)
        for index, (place, odd) in enumerate(points)
        if place not in [earlier for earlier, _ in points[:index]]
    ]
    for turn, ((sizes, values), odd) in enumerate(places):
        real = _real(inputs, samples[turn % len(samples) :][:1] if samples else (), sizes, values)
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


def _real(
    inputs: tuple[TensorSpec, ...],
    samples: tuple[Tensors, ...],
    sizes: Mapping[str, int],
    values: Mapping[str, Sequence[int]],
) -> Tensors:
    """The first sample at these sizes; generated, with these values of inputs that decide a shape,
    where there is none.
    """
    return feeds_at(inputs, samples, sizes) if samples else draw_feeds(inputs, sizes, 0, values)


def _checked(
    job: Job, cases: Iterable[_Case], notes: tuple[Note, ...], warned: tuple[Note, ...]
) -> OnnxModel:
    """The exported model with its notes. Refused, with what is wrong, unless it has the plan's
    interface and agrees in every case.

    `warned`: the exporter's own warnings, which may explain a difference.
    """
    notes += warned
    model = onnx_model(job.path.parent, FILE)
    _check_interface(job, model)
    if model.opset != job.opset:
        notes += (
            Note(
                stage="export",
                text=f"asked for opset {job.opset}, the exporter wrote opset {model.opset}",
            ),
        )
    hint = "".join(f"; {note.text}" for note in warned[:3])
    run = _reference(job.path)
    notes += kept_scales(job)
    tolerance = QUANTISED_TOLERANCE if _is_quantised(job.path) else TOLERANCE
    unsure: list[Note] = []
    seen: list[tuple[Mapping[str, int], dict[str, tuple[int, ...]]]] = []
    for case in cases:
        try:
            expected = run_module(job.module, job.source, case.feeds)
        except ModelError as error:
            if not (case.odd or case.optional):
                raise
            unsure.append(
                Note(
                    stage="export",
                    text=f"{case.where}, the export could not be checked: {error.message}",
                )
            )
            continue
        if fault := _fault(run, case, expected, tolerance):
            if not case.optional:
                raise Refused(fault + hint)
            unsure.append(
                Note(
                    stage="export",
                    text=(
                        f"{fault}; this is no fault if the model's answer to such inputs has no"
                        " meaning"
                    ),
                )
            )
        if not case.valued:
            seen.append((case.sizes, {name: array.shape for name, array in expected.items()}))
    return _with_named_outputs(model, seen).model_copy(update={"notes": (*notes, *unsure[:1])})


def _check_interface(job: Job, model: OnnxModel) -> None:
    got = {spec.name: spec for spec in model.inputs}
    for spec in job.source.inputs:
        if spec.name not in got:
            raise Refused(f"input '{spec.name}' is gone from the graph: the model does not use it")
        if (got[spec.name].dtype, got[spec.name].shape) != (spec.dtype, spec.shape):
            raise Refused(
                f"input '{spec.name}' is {shown(spec)} in the plan and came out as"
                f" {shown(got[spec.name])}"
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


def kept_scales(job: Job) -> tuple[Note, ...]:
    """How many scales the module quantises with; Refused if the graph lacks one of them."""
    ran = scales_run(job.module, job.source, job.example)
    if not ran:
        return ()
    found = scales_of(read_proto(job.path).graph)
    has = Counter(
        {
            scale: len(tensors)
            for (operator, _, scale, _), tensors in found.items()
            if operator == QDQ[1]
        }
    )
    if lost := (ran - has).total():
        raise Refused(
            f"{lost} of the {ran.total()} scales that the model quantises with are not in the graph"
        )
    return (
        Note(
            stage="export",
            text=(
                f"the model quantises {ran.total()} tensors, and the graph holds the scale of each"
            ),
            level="info",
        ),
    )


def _is_quantised(path: Path) -> bool:
    return given_precision(read_proto(path, weights=False).graph) is not None


def _fault(run: compare.Runner, case: _Case, expected: Tensors, tolerance: float) -> str:
    """How ONNX Runtime differs from PyTorch, as one line; empty if it agrees."""
    try:
        fault = compare.compare_outputs(expected, run(case.feeds), tolerance)
    except ModelError as error:
        fault = _line(error)
    return f"{case.where}: {fault}" if fault else ""


def _line(error: ModelError) -> str:
    """An error of ONNX Runtime on one line; the path is that of a temporary file."""
    return re.sub(r"'\S+/model\.onnx'", "the exported model", " ".join(error.message.split()))


def _with_named_outputs(
    model: OnnxModel, seen: list[tuple[Mapping[str, int], dict[str, tuple[int, ...]]]]
) -> OnnxModel:
    """Name the output dimensions that an exporter left open, by the sizes they had; not where sizes
    depend on values.

    TorchScript writes `Reshapeoutput_0_dim_0` for what is the batch.
    """
    symbols = list(dict.fromkeys(symbol for spec in model.inputs for symbol in spec.symbols))
    if (
        all(set(spec.symbols) <= set(symbols) for spec in model.outputs)
        or len({str(sizes) for sizes, _ in seen}) < 2
    ):
        return model
    if SIZED_BY_VALUES & set(operator_histogram(model.path)):
        return model
    proto = onnx.load(model.path, load_external_data=False)
    for value in proto.graph.output:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            pairs = [(sizes, shapes[value.name][axis]) for sizes, shapes in seen]
            same = [
                symbol for symbol in symbols if all(sizes[symbol] == size for sizes, size in pairs)
            ]
            if dim.dim_param not in ("", *symbols) and len({size for _, size in pairs}) == 1:
                dim.dim_value = pairs[0][1]
            elif dim.dim_param not in ("", *symbols) and len(same) == 1:
                dim.dim_param = same[0]
    model.path.write_bytes(proto.SerializeToString())
    return onnx_model(model.root, model.file)


# --- ONNX files ---


def _adopt(path: Path, profiles: tuple[Profile, ...], out: Path) -> OnnxModel:
    """Check a user's ONNX file and write it anew, as one file up to 1.5 GB. Needs no torch.

    A link would not do, since the user may change the file in place; nor would external data as it
    is, where ONNX Runtime cannot read shapes.
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
