"""Fewer nodes, the same function: onnxsim and GraphSurgeon in a child process, the result compared
with its input, or rolled back.

A simplifier may crash, hang, bake the batch of its example, or fold away what a backend needs
(Q/DQ). None of that reaches the next stage.

Before it comes the user's own surgery, where the plan names one: `module:function`, called as
`function(model)` with the whole `onnx.ModelProto`, returns the model with other nodes that compute
the same through the same inputs and outputs. Then attention is written plainly (attention.py),
where there is any; unlike the user's surgery, which was asked for, this is rolled back where it
changes an answer. It is tried again after simplification: TorchScript's exports know no shapes
before, and compute their constants.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import onnx

from pipeline.core import Note, OnnxModel, Point, Profile, Progress, Tensors
from pipeline.errors import ChildDied, DiskFull, InternalError, ModelError, PlanError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.attention import attentions, plain_attention
from pipeline.onnx_graph.compare import compare_graphs
from pipeline.onnx_graph.feeds import draw_feeds
from pipeline.onnx_graph.files import (
    copy_model,
    external_files,
    file_size,
    onnx_model,
    operator_histogram,
    read_proto,
    write_proto,
)
from pipeline.onnx_graph.inspect import changed_interface, graphs_of
from pipeline.plan.schema import SimplifyConfig
from pipeline.quantization.existing_qdq import (
    QDQ,
    QUANTISED_TOLERANCE,
    given_precision,
    lost_scales,
)

STAGE = "simplify"
TOLERANCE, HALF_TOLERANCE = (
    1e-4,
    8e-3,
)  # as compare_graphs takes it; the latter is what it allows outputs in fp16
HALF = frozenset({onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16})
FILE = "model.onnx"
OPERATED, ATTENDED, AT_LAST = (
    "operated",
    "attended",
    "at last",
)  # folders of a model around simplification
FOLD_LIMIT_BYTES = 2**20  # larger results of Tile, Expand and the like are computed at run time
GROWTH_LIMIT = 1.1  # file size after / before: folding that costs more is not worth its nodes
POINTS: tuple[Point, ...] = ("min", "opt", "max")
RANDOM = frozenset(
    {
        "RandomNormal",
        "RandomUniform",
        "RandomNormalLike",
        "RandomUniformLike",
        "Multinomial",
        "Bernoulli",
        "Dropout",
    }
)

Simplifier = Callable[[Path, Path, Progress], None]
"""Reads the first path, writes the second. Runs in a child process, so it must be importable by
name.
"""


def run_onnxsim(source: Path, target: Path, progress: Progress) -> None:
    """onnxsim with its own check off and every input shape left as it is. For a child process: it
    hides modules from the rest of it.
    """
    for unused in ("torch", "sympy"):
        sys.modules.setdefault(unused, None)  # type: ignore[arg-type]  # onnxsim tries to import both, for 5 s, and simplifies without
    import onnxsim

    skipped = [
        "fuse_matmul_add_bias_into_gemm_batched"
    ]  # wraps each product of rank 3 in Shape, Concat and two Reshape
    skipped += ["fuse_attention"]  # an operator of ONNX Runtime alone
    skipped += [
        "fuse_qkv"
    ]  # one product for queries, keys and values, which projections.py takes apart
    if set(QDQ) & set(operator_histogram(source)):
        skipped += [
            "eliminate_common_subexpression",
            "eliminate_duplicate_initializer",
        ]  # both merge equal Q/DQ
    onnxsim.simplify(
        str(source),
        check_n=0,
        skipped_optimizers=skipped,
        inline_functions=True,
        tensor_size_threshold=f"{FOLD_LIMIT_BYTES}B",
        output_path=str(target),
        external_data_threshold="1.5GB",
    )


def simplify(
    model: OnnxModel,
    profiles: tuple[Profile, ...],
    options: SimplifyConfig,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress,
    simplifier: Simplifier = run_onnxsim,
) -> OnnxModel:
    """A model under `out` that computes the same with fewer nodes, after the user's surgery, its
    attention plain; its notes say what happened.

    Equal on all samples and on generated inputs at min, opt, max and an odd size of every profile,
    with the same interface. Otherwise the input model itself, copied, with a warning that says why;
    surgery, which was asked for, then is a ModelError.
    """
    notes: tuple[Note, ...] = ()
    if options.surgery:
        model = operate(
            model, profiles, options, options.surgery, samples, out / OPERATED, progress
        )
        notes += model.notes
    attend = partial(
        _with_plain_attention,
        profiles=profiles,
        options=options,
        samples=samples,
        progress=progress,
    )
    wanted = options.plain_attention and attentions(read_proto(model.path, weights=False).graph)
    if wanted:
        model = attend(model, out=out / ATTENDED)
        notes += model.notes
    result = (
        _simplified(model, profiles, options, samples, out, progress, simplifier)
        if options.enabled
        else _copy(model, out)
    )
    if (
        wanted and options.enabled and all(note.level == "info" for note in model.notes)
    ):  # what was computed is constant now
        result = _taken_over(attend(result, out=out / AT_LAST), result, out)
    for folder in (out / OPERATED, out / ATTENDED, out / AT_LAST):
        shutil.rmtree(folder, ignore_errors=True)
    return result.model_copy(
        update={
            "notes": (*notes, *result.notes),
            "provisional": result.provisional or model.provisional,
        }
    )


def _simplified(
    model: OnnxModel,
    profiles: tuple[Profile, ...],
    options: SimplifyConfig,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress,
    simplifier: Simplifier,
) -> OnnxModel:
    target, may_pass = out / FILE, False
    try:
        call_in_child(
            _simplify_file,
            simplifier,
            model.path,
            target,
            name=STAGE,
            deadline_s=options.timeout_s,
            progress=progress,
        )
        progress(None, "comparing with the input model")
        fault = _lost(model, onnx_model(out, FILE, model.precision))
        fault = fault or compare_graphs(
            model.path, target, feeds_of(model, profiles, samples), _tolerance(model)
        )
    except (ChildDied, InternalError, ModelError) as error:
        fault, may_pass = error.message, error.may_pass
    if fault:
        text = (
            "rolled back, the graph goes on as it"
            f" was{', and the next compile tries again' * may_pass}: {fault}"
        )
        return _copy(model, out, Note(stage=STAGE, text=text)).model_copy(
            update={"provisional": may_pass}
        )
    before, after = (
        sum(operator_histogram(model.path).values()),
        sum(operator_histogram(target).values()),
    )
    text = (
        f"{before} nodes became {after}, {file_size(model.path):,} bytes became"
        f" {file_size(target):,}"
    )
    return onnx_model(out, FILE, model.precision, (Note(stage=STAGE, text=text, level="info"),))


# --- surgery ---


def operate(
    model: OnnxModel,
    profiles: tuple[Profile, ...],
    options: SimplifyConfig,
    surgery: str,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress,
) -> OnnxModel:
    """The model after one surgery, under `out`. ModelError with the reason unless it computes the
    same through the same interface.
    """
    out.mkdir()
    progress(None, f"surgery by {surgery}")
    arguments = (surgery, options.python_path, model.path, out / FILE)
    call_in_child(
        _operate_file, *arguments, name="surgery", deadline_s=options.timeout_s, progress=progress
    )
    progress(None, "comparing with the model before surgery")
    after = onnx_model(out, FILE, model.precision)
    if fault := changed_interface(model, after) or compare_graphs(
        model.path, after.path, feeds_of(model, profiles, samples), _tolerance(model)
    ):
        raise ModelError(
            f"surgery by '{surgery}' changed the model: {fault}",
            "correct the function, or leave `simplify.surgery` out",
        )
    text = (
        f"surgery by '{surgery}' changed {_changes(model, after) or 'no operator'}, and the model"
        " still computes the same"
    )
    return after.model_copy(update={"notes": (Note(stage=STAGE, text=text, level="info"),)})


def _changes(before: OnnxModel, after: OnnxModel) -> str:
    nodes = Counter(operator_histogram(after.path))
    nodes.subtract(operator_histogram(before.path))
    return ", ".join(f"{operator} {count:+d}" for operator, count in nodes.items() if count)


def _operate_file(
    surgery: str, python_path: Path, source: Path, target: Path, progress: Progress
) -> None:
    """The child's work: the user's function between reading and writing the model."""
    operation = _load_surgery(surgery, python_path)
    before = read_proto(source)
    try:
        after = operation(before)
    except (Exception, SystemExit) as error:  # the user's code: anything may come
        raise ModelError(
            f"surgery '{surgery}' raised {type(error).__name__}: {error}",
            "run the function on the model by itself",
        ) from error
    if not isinstance(after, onnx.ModelProto):
        raise ModelError(
            f"surgery '{surgery}' returned {type(after).__name__}, expected an onnx.ModelProto",
            "return the changed model",
        )
    _restore_names(read_proto(source, weights=False), after)
    try:
        write_proto(after, target)
    except ModelError as error:
        raise ModelError(
            f"surgery '{surgery}' left a faulty model: {error.message}", "correct the function"
        ) from error


def _load_surgery(surgery: str, python_path: Path) -> Callable[[onnx.ModelProto], object]:
    module, _, function = surgery.partition(":")
    sys.path.insert(
        0, str(python_path)
    )  # and it stays: the function may import more when it is called
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        advice = (
            "correct `simplify.surgery` or `simplify.python_path`, or install what the module"
            " imports"
        )
        raise PlanError(
            f"simplify.surgery '{surgery}' cannot be imported from '{python_path}': {error}", advice
        ) from error
    if not callable(found):
        raise PlanError(
            f"simplify.surgery '{surgery}' is of type {type(found).__name__}, expected a function",
            "correct `simplify.surgery`",
        )
    return found  # type: ignore[no-any-return]  # what the user wrote; its value is checked


# --- plain attention ---


def _with_plain_attention(
    model: OnnxModel,
    profiles: tuple[Profile, ...],
    options: SimplifyConfig,
    samples: tuple[Tensors, ...],
    out: Path,
    progress: Progress,
) -> OnnxModel:
    """The model with attention written plainly, under `out`; where that changes an answer without
    new masks, or not at all. Its notes say which.

    Generated inputs hide no row whole: what a model answers to that is no answer, and the samples
    tell whether somebody asks for it.
    """
    fault, may_pass = "", False
    for masks in (True, False):
        progress(None, "writing attention plainly")
        out.mkdir()
        try:
            call_in_child(
                _attend_file,
                masks,
                model.path,
                out / FILE,
                name="plain attention",
                deadline_s=options.timeout_s,
                progress=progress,
            )
            if not (out / FILE).is_file():
                break
            progress(None, "comparing with the model as it was written")
            after, feeds = (
                onnx_model(out, FILE, model.precision),
                chain(samples, feeds_of(model, profiles, (), seen=True)),
            )
            difference = _lost(model, after) or compare_graphs(
                model.path, after.path, feeds, _attended_tolerance(model)
            )
        except (ChildDied, DiskFull, InternalError, ModelError) as error:
            fault, may_pass = error.message, error.may_pass
            break
        if not difference:
            but = f", but for its masks and what they hide: with new ones {fault}" if fault else ""
            changes = _changes(model, after)
            text = (
                f"attention is written plainly{f' ({changes})' * bool(changes)} and computes the"
                f" same{but}"
            )
            return after.model_copy(update={"notes": (Note(stage=STAGE, text=text, level="info"),)})
        fault = fault or difference
        shutil.rmtree(out)
    shutil.rmtree(out, ignore_errors=True)
    text = (
        f"attention stays as it was written{', and the next compile tries again' * may_pass}:"
        f" {fault}"
    )
    return model.model_copy(
        update={"notes": (Note(stage=STAGE, text=text),) if fault else (), "provisional": may_pass}
    )


def _taken_over(last: OnnxModel, result: OnnxModel, out: Path) -> OnnxModel:
    """What the last try gave, under `out`; the result before it where that changed nothing, which
    the next compile tries again if it may pass.
    """
    changed = last.path != result.path
    if not changed and not last.provisional:
        return result
    notes, provisional = (*result.notes, *last.notes), result.provisional or last.provisional
    return (_copy(last, out) if changed else result).model_copy(
        update={"notes": notes, "provisional": provisional}
    )


def _attend_file(masks: bool, source: Path, target: Path, progress: Progress) -> None:
    """The child's work; nothing is written where no attention is written out."""
    plain = plain_attention(read_proto(source), masks)
    if plain is not None:
        _restore_names(read_proto(source, weights=False), plain)
        write_proto(plain, target)


def _attended_tolerance(model: OnnxModel) -> float:
    """Plain attention rounds elsewhere: what comes out in fp32 may have been in 16 bits before."""
    within = {
        tensor.data_type for tensor in read_proto(model.path, weights=False).graph.initializer
    }
    return max(_tolerance(model), HALF_TOLERANCE if within & HALF else 0.0)


# --- simplification ---


def _simplify_file(simplifier: Simplifier, source: Path, target: Path, progress: Progress) -> None:
    """The child's work: the simplifier, then GraphSurgeon, then the names of the interface put
    back.
    """
    draft = target.with_name("draft.onnx")
    progress(None, "simplifying")
    simplifier(source, draft, progress)
    progress(None, "folding constants")
    folded = _fold_constants(read_proto(draft))
    _restore_names(read_proto(source, weights=False), folded)
    write_proto(folded, target)
    for file in (*external_files(draft), draft):
        file.unlink()


def _fold_constants(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Compute what depends on constants only, and drop nodes that no output needs. Outputs stay,
    whatever they depend on.
    """
    import onnx_graphsurgeon

    _spell_out_constants(proto)
    graph = onnx_graphsurgeon.import_onnx(proto)
    graph.toposort()
    graph.fold_constants(
        size_threshold=FOLD_LIMIT_BYTES,
        partitioning="basic",  # what cannot be computed does not keep the rest from being computed
        should_exclude_node=lambda node: node.op in RANDOM,
        # a subgraph that uses constants of the graph around it sends GraphSurgeon into endless
        # recursion
        recurse_subgraphs=False,
    )
    graph.cleanup().toposort()
    return onnx_graphsurgeon.export_onnx(graph)


def _spell_out_constants(proto: onnx.ModelProto) -> None:
    """Rewrite `Constant<value_float = 2.0>` as a tensor of its dtype: GraphSurgeon would read a
    double.
    """
    bodies = [*graphs_of(proto.graph), *proto.functions]
    for attribute in (
        node.attribute[0]
        for body in bodies
        for node in body.node
        if node.op_type == "Constant" and len(node.attribute) == 1
    ):
        dtype = {
            "value_float": np.float32,
            "value_floats": np.float32,
            "value_int": np.int64,
            "value_ints": np.int64,
        }.get(attribute.name)
        if dtype is not None:
            array = np.asarray(onnx.helper.get_attribute_value(attribute), dtype)
            attribute.CopyFrom(
                onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(array))
            )


def _restore_names(source: onnx.ModelProto, result: onnx.ModelProto) -> None:
    """Give inputs and outputs the shapes that the source declares, but never hide a dynamic input
    dimension that became a number.
    """
    declared = {value.name: value for value in (*source.graph.input, *source.graph.output)}
    for values, may_be_fixed in (
        (result.graph.input, False),
        (result.graph.output, True),
    ):  # an output is judged by its values at many sizes
        for value in values:
            before = declared.get(value.name)
            same_type = (
                before is not None
                and before.type.tensor_type.elem_type == value.type.tensor_type.elem_type
            )
            if before is not None and same_type and (may_be_fixed or not _is_fixed(before, value)):
                value.CopyFrom(before)


def _is_fixed(before: onnx.ValueInfoProto, after: onnx.ValueInfoProto) -> bool:
    old, new = before.type.tensor_type.shape.dim, after.type.tensor_type.shape.dim
    return len(old) != len(new) or any(
        a.HasField("dim_value") and not b.HasField("dim_value")
        for a, b in zip(new, old, strict=True)
    )


def _lost(before: OnnxModel, after: OnnxModel) -> str:
    """What a simplified model lacks, by looking at it: interface, Q/DQ, operator domains, size.
    Empty if nothing.
    """
    if changed := changed_interface(before, after):
        return changed
    if lost := lost_scales(read_proto(before.path).graph, read_proto(after.path).graph):
        return lost
    foreign = {op for op in operator_histogram(after.path) if "::" in op} - set(
        operator_histogram(before.path)
    )
    if foreign:
        return f"operators outside the ONNX standard were put in: {', '.join(sorted(foreign))}"
    was, became = file_size(before.path), file_size(after.path)
    if became > GROWTH_LIMIT * was + FOLD_LIMIT_BYTES:
        return f"the file grew from {was:,} to {became:,} bytes"
    return ""


def _tolerance(model: OnnxModel) -> float:
    return (
        TOLERANCE
        if given_precision(read_proto(model.path, weights=False).graph) is None
        else QUANTISED_TOLERANCE
    )


def feeds_of(
    model: OnnxModel, profiles: tuple[Profile, ...], samples: Iterable[Tensors], seen: bool = False
) -> Iterator[Tensors]:
    """What a changed graph is compared on: the samples, then generated inputs at four sizes of
    every profile; `seen` as draw_feeds takes it.
    """
    yield from samples
    for profile in profiles or (Profile(),):
        places = [(profile.sizes(point), profile.values_at(point)) for point in POINTS]
        for seed, (sizes, values) in enumerate(
            (*places, (profile.odd_sizes(), profile.odd_values()))
        ):
            yield draw_feeds(model.inputs, sizes, seed, values, seen)


def _copy(model: OnnxModel, out: Path, *notes: Note) -> OnnxModel:
    """The input model with its external data, under `out`."""
    for file in out.glob("*.onnx*"):  # what a simplifier left half-written
        file.unlink()
    copy_model(model.path, out / FILE)
    return onnx_model(out, FILE, model.precision, notes)
