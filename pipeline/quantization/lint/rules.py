"""What of a graph's own Q/DQ pairs keeps a backend from running it in 8 bits, or costs accuracy: a
finding each. Pure.

The rules are those by which Crucible places pairs itself (docs/explain/int8-arithmetic.md). They
are read off the graph without its pairs, where what fuses, what is a residual and what is the
classifier can be seen as in any other graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx
from onnx import numpy_helper

from pipeline.core.artifacts import Note, NoteCode
from pipeline.core.frozen import Frozen
from pipeline.onnx_graph.inspect import type_name
from pipeline.quantization.existing_qdq import QDQ
from pipeline.quantization.lint.qdq_view import (
    View,
    around_movers,
    can_pass,
    can_precede,
    equal_quantizers,
    folded_bias,
    moved_pair,
    norms_behind,
    only_pairs,
    relus_in_floats,
    repeated,
)
from pipeline.quantization.placement import (
    FUSED_AFTER,
    WEIGHTED,
    fused_input,
    is_classifier,
    is_residual_add,
)

TENSORRT = ("tensorrt", "tensorrt_rtx")
EVERYWHERE = ("onnxruntime", "openvino", *TENSORRT)
MIN_FP16 = 2.0**-14  # normal
USED_LEAST = 16  # of 127 steps; a weight that reaches no further has a scale 8 times too large


class Finding(Frozen):
    """A violation of one rule."""

    rule: str
    nodes: tuple[str, ...]
    why: str
    cost: str
    fixable: bool = False  # `crucible lint --fix` mends it without a change of the arithmetic


MAX_IN_7_BITS = 64

Rule = Callable[[View], Iterator[Finding]]


def lint(graph: onnx.GraphProto, backend: str) -> tuple[Finding, ...]:
    """Return all findings for one backend, in the order of the rules.

    There are none for a graph without Q/DQ. Node names must be unique.
    """
    if not any(node.op_type in QDQ for node in graph.node):
        return ()
    view = View(graph)
    findings: list[Finding] = []
    for rule, backends in RULES.items():
        if backend in backends:
            findings += rule(view)
    return tuple(findings)


def finding_notes(findings: tuple[Finding, ...], backend: str) -> tuple[Note, ...]:
    """Return one warning per violated rule, with the command that shows more."""
    notes = []
    for rule in dict.fromkeys(finding.rule for finding in findings):
        first, *others = (finding for finding in findings if finding.rule == rule)
        more = f", and {len(others)} more" if others else ""
        text = (
            f"{rule}: {first.why} ({', '.join(first.nodes)}{more}): {first.cost}; `crucible lint"
            f" MODEL --backend {backend}` lists all"
        )
        notes.append(Note(stage="lint", text=text))
    return tuple(notes)


def saturation_notes(graph: onnx.GraphProto) -> tuple[Note, ...]:
    """Warn of weights that use the eighth bit, for a CPU without an 8-bit dot product.

    Node names must be unique.
    """
    view = View(graph)
    names: list[str] = []
    for node in view.weighted():
        for dq in _weights_of(view, node):
            if _reach(view, dq) > MAX_IN_7_BITS:
                names.append(dq.name)
    if not names:
        return ()
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    text = (
        f"weights of more than 7 bits ({names[0]}{more}): their products can saturate on this CPU,"
        " which adds two products of 8-bit numbers in 16 bits"
    )
    return (Note(stage="lint", text=text, code=NoteCode.SATURATES),)


def _weights_of(view: View, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Return the DQs of constants that a weighted operator multiplies by."""
    return [view.weights[name] for name in node.input[:2] if name in view.weights]


def _reach(view: View, dq: onnx.NodeProto) -> float:
    """Return the largest magnitude of a weight in steps of its scale; 0 if it is unknown."""
    weight, scale, zero = view.weight(dq), view.scale(dq), view.zero(dq)
    if weight is None or scale is None:
        return 0.0
    values = numpy_helper.to_array(weight).astype(np.float64)
    integers = {attribute.name: attribute.i for attribute in dq.attribute}
    axis = integers.get("axis", 1) if scale.size > 1 else 0
    if scale.size not in (1, *values.shape[axis:][:1]):
        return 0.0  # in blocks
    channels = [-1 if dim == axis else 1 for dim in range(max(values.ndim, 1))]
    is_integer = weight.name == dq.input[0]
    steps = values - zero.reshape(channels) if is_integer else values / scale.reshape(channels)
    return float(np.abs(steps).max(initial=0.0))


# --- numbers ---


def bad_scale(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        scale = view.scale(node) if node.op_type in QDQ else None
        if scale is None:
            continue
        is_usable = np.isfinite(scale) & (scale >= np.finfo(np.float32).tiny)
        if not is_usable.all():
            yield Finding(
                rule="bad-scale",
                nodes=(node.name,),
                why=f"a scale is {scale[~is_usable].flat[0]:.3g}",
                cost="all values of the channel become 0 or NaN",
            )


def small_scale(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        scale = view.scale(node) if node.op_type == QDQ[1] else None
        if scale is None:
            continue
        is_denormal = (scale < MIN_FP16) & (scale >= np.finfo(np.float32).tiny)
        if is_denormal.any():
            cost = (
                "beside operators in fp16 the scale is rounded to fp16, which has few bits left"
                " there"
            )
            yield Finding(
                rule="small-scale",
                nodes=(node.name,),
                why=f"a scale is {scale.min():.3g}, below fp16's normal numbers",
                cost=cost,
            )


def zero_point(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        if node.op_type != QDQ[1] or view.dtype(node) not in ("int8", "uint8"):
            continue
        zero, unsigned = view.zero(node), view.dtype(node) == "uint8"
        if unsigned or zero.any():
            why = f"quantised to {view.dtype(node)} with zero point {zero.flat[0]:.0f}"
            cost = "TensorRT takes int8 with zero point 0 only, and refuses this"
            yield Finding(
                rule="zero-point",
                nodes=(node.name,),
                why=why,
                cost=cost,
                fixable=unsigned and bool((zero == 128).all()),
            )


def per_tensor_weight(view: View) -> Iterator[Finding]:
    for node in view.weighted():
        for dq in _weights_of(view, node):
            scale = view.scale(dq)
            if scale is not None and scale.size == 1 and max(view.dims(dq), default=1) > 1:
                cost = (
                    "channels with small weights get few of the 255 steps: accuracy; no time is"
                    " saved"
                )
                yield Finding(
                    rule="per-tensor-weight",
                    nodes=(node.name, dq.name),
                    why="one scale for the whole weight",
                    cost=cost,
                )


def unused_range(view: View) -> Iterator[Finding]:
    for dq in view.weights.values():
        weight = view.constants.get(dq.input[0])
        if weight is not None and type_name(weight.data_type) == "int8" and weight.dims:
            reached = int(np.abs(numpy_helper.to_array(weight).astype(np.int16)).max(initial=0))
            if 0 < reached < USED_LEAST:
                cost = "most of the 8 bits are not used: accuracy"
                yield Finding(
                    rule="unused-range",
                    nodes=(dq.name,),
                    why=f"the weight reaches {reached} of 127 steps",
                    cost=cost,
                )


# --- what runs in floats ---


def float_weight(view: View) -> Iterator[Finding]:
    for node in view.weighted():
        weight = next((name for name in node.input[:2] if name in view.constants), "")
        paired = [name for name in node.input[:2] if name in view.pairs]
        if weight and paired and not _returns_8_bits(view, paired[0]):
            why = (
                f"its input is quantised, and its weight '{weight}' is in floats: the weight's DQ"
                " was folded, or never there"
            )
            yield Finding(
                rule="float-weight",
                nodes=(node.name,),
                why=why,
                cost="the operator runs in floats, and its input is rounded for nothing",
            )


def _returns_8_bits(view: View, name: str) -> bool:
    """Return True if a pair is the result of a quantised operator with an activation.

    ONNX Runtime computes that in 8 bits only with the pair, whoever reads it.
    """
    maker = view.makers.get(view.before(name))
    if maker is None or maker.op_type not in FUSED_AFTER:
        return False
    operator = view.makers.get(maker.input[0])
    return operator is not None and view.quantised(operator)


def float_input(view: View) -> Iterator[Finding]:
    for node, name in _unquantised_inputs(view):
        if moved_pair(view, name) is None:
            cost = "the operator runs in floats, and its weight is rounded for nothing"
            yield Finding(
                rule="float-input",
                nodes=(node.name,),
                why="its weight is quantised, and its input is not",
                cost=cost,
            )


def pair_before_mover(view: View) -> Iterator[Finding]:
    for node, name in _unquantised_inputs(view):
        pair = moved_pair(view, name)
        if pair is not None:
            nodes, between = (node.name, pair.dq.name), view.makers[name].op_type
            cost = (
                "ONNX Runtime looks for the pair right before the operator, and runs it in floats"
            )
            yield Finding(
                rule="pair-before-mover",
                nodes=nodes,
                why=f"{between} stands between its pair and it",
                cost=cost,
                fixable=True,
            )


def _unquantised_inputs(view: View) -> Iterator[tuple[onnx.NodeProto, str]]:
    """Return weighted operators with a quantised weight, and the input that no pair produces."""
    for node in view.weighted():
        floats = [
            name
            for name in node.input[:2]
            if not (name in view.weights or name in view.pairs or name in view.constants)
        ]
        if floats and any(name in view.weights for name in node.input[:2]):
            yield node, floats[0]


def float_result(view: View) -> Iterator[Finding]:
    for node in view.weighted():
        name = node.output[0]
        readers = view.readers[name]
        if len(readers) == 1 and readers[0].op_type in FUSED_AFTER:
            name = readers[0].output[0]
        if _is_normed(view, node):  # a finding of its own
            continue
        is_float = name not in view.outputs and not view.pairs_on(name)
        if is_float and node.op_type == "Conv" and view.quantised(node):
            cost = (
                "ONNX Runtime's int8 convolution gives 8 bits; without, it runs in floats, often"
                " slower than the fp32 model"
            )
            yield Finding(
                rule="float-result",
                nodes=(node.name,),
                why="its result is not quantised",
                cost=cost,
            )


def _is_normed(view: View, node: onnx.NodeProto) -> bool:
    """Return True if a batch norm follows an operator."""
    return any(norm.op_type == "BatchNormalization" for norm in norms_behind(view, node))


def signed_relu(view: View) -> Iterator[Finding]:
    for node, relu, pair in relus_in_floats(view):
        why = f"the pair behind its {relu.op_type} reaches below zero"
        cost = (
            "ONNX Runtime drops a Relu only where the lowest integer is zero, and else runs the"
            " convolution in floats"
        )
        yield Finding(
            rule="signed-relu",
            nodes=(node.name, relu.name, pair.q.name),
            why=why,
            cost=cost,
            fixable=can_precede(view, relu, pair),
        )


def signed_shared(view: View) -> Iterator[Finding]:
    for name, pair in view.pairs.items():
        if len(view.readers[name]) > 1 and view.dtype(pair.q) == "int8":
            nodes = (pair.q.name, *(node.name for node in view.readers[name]))
            cost = (
                "ONNX Runtime on x86 makes uint8 of int8 only where one operator reads it; its"
                " readers here run in floats"
            )
            yield Finding(
                rule="signed-shared",
                nodes=nodes,
                why="several operators read one int8 pair",
                cost=cost,
                fixable=only_pairs(view, pair),
            )


def clip_between(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        if node.op_type != QDQ[0]:
            continue
        clips = [reader for reader in view.readers[node.output[0]] if reader.op_type == "Clip"]
        if clips:
            cost = (
                "no backend knows the pattern, and what stands around it runs in floats; train with"
                " limits of the whole dtype"
            )
            yield Finding(
                rule="clip-between",
                nodes=(node.name, clips[0].name),
                why="a Clip of integers stands between Q and DQ",
                cost=cost,
            )


def lone_q(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        if node.op_type != QDQ[0]:
            continue
        operators = {reader.op_type for reader in view.readers[node.output[0]]}
        if operators.isdisjoint((QDQ[1], "Clip")):
            yield Finding(
                rule="lone-q",
                nodes=(node.name,),
                why="no DequantizeLinear follows",
                cost="backends fuse pairs only",
            )


# --- what fuses ---


def between_fused(view: View) -> Iterator[Finding]:
    for node in view.weighted():
        for pair in view.pairs_on(node.output[0]):
            followers = [
                reader
                for reader in view.readers[pair.dq.output[0]]
                if reader.op_type in FUSED_AFTER | {"BatchNormalization"}
            ]
            if followers:
                why = (
                    f"a pair stands between it and the {followers[0].op_type} that belongs into its"
                    " kernel"
                )
                cost = "two kernels in the place of one, and a value more in memory"
                nodes = (node.name, pair.q.name, followers[0].name)
                yield Finding(
                    rule="between-fused",
                    nodes=nodes,
                    why=why,
                    cost=cost,
                    fixable=can_pass(view, pair, followers[0]),
                )


def norm_after(view: View) -> Iterator[Finding]:
    for node in view.weighted():
        if view.quantised(node) and _is_normed(view, node):
            chain = norms_behind(view, node)
            why = (
                f"{', '.join(norm.op_type for norm in chain)} on its result: a batch norm that"
                " training with Q/DQ left unfolded"
            )
            cost = "nothing fuses over it, so that ONNX Runtime runs the convolution in floats"
            nodes = (node.name, *(norm.name for norm in chain))
            is_exact = folded_bias(view, node) is not None
            yield Finding(rule="norm-after", nodes=nodes, why=why, cost=cost, fixable=is_exact)


def residual_both(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        if node.op_type != "Add" or not all(name in view.pairs for name in node.input):
            continue
        add = next(other for other in view.floats.nodes if other.name == node.name)
        fused = fused_input(add, view.floats) if is_residual_add(add, view.floats) else None
        if fused is not None:
            why = (
                f"both inputs of a residual Add are quantised, and '{fused[1]}' adds in its own"
                " kernel"
            )
            cost = (
                "the Add becomes a kernel of its own, with layout copies: ResNet-18 took 0.287 ms"
                " in int8 and 0.215 in fp16 on an H200"
            )
            yield Finding(rule="residual-both", nodes=(node.name, fused[1]), why=why, cost=cost)


def residual_one(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        if node.op_type != "Add":
            continue
        has_pair = [name in view.pairs for name in node.input]
        add = next((other for other in view.floats.nodes if other.name == node.name), None)
        if add is None or all(has_pair) or not any(has_pair):
            continue
        if is_residual_add(add, view.floats):
            cost = "the Add runs in floats, and what comes from 8 bits is converted for it and back"
            yield Finding(
                rule="residual-one",
                nodes=(node.name,),
                why="only one input of a residual Add is quantised",
                cost=cost,
            )


# --- what should stay in floats ---


def classifier(view: View) -> Iterator[Finding]:
    last = {
        node.name
        for node in view.floats.nodes
        if node.op_type in WEIGHTED and is_classifier(node, view.floats)
    }
    for node in view.weighted():
        if node.name in last and any(name in view.weights for name in node.input[:2]):
            cost = "its error goes straight into the answer, and it is a small part of the work"
            yield Finding(
                rule="classifier", nodes=(node.name,), why="the last layer is quantised", cost=cost
            )


def matmul_activations(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        if node.op_type == "MatMul" and all(name in view.pairs for name in node.input):
            cost = "both ranges vary with the sample: accuracy"
            yield Finding(
                rule="matmul-activations",
                nodes=(node.name,),
                why="a product of two activations is quantised",
                cost=cost,
            )


def quantised_bias(view: View) -> Iterator[Finding]:
    for node in view.weighted():
        if len(node.input) > 2 and node.input[2] in view.weights:
            nodes = (node.name, view.weights[node.input[2]].name)
            yield Finding(
                rule="quantised-bias",
                nodes=nodes,
                why="its bias is quantised",
                cost="TensorRT takes a bias in floats only",
                fixable=True,
            )


def rest_in_fp32(view: View) -> Iterator[Finding]:
    takes_floats = any(
        value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT for value in view.graph.input
    )
    casts = [node for node in view.graph.node if node.op_type == "Cast"]
    dtypes = [onnx.helper.get_node_attr_value(node, "to") for node in casts]
    dtypes += [tensor.data_type for tensor in view.graph.initializer]  # scales of DQs too
    if takes_floats and onnx.TensorProto.FLOAT16 not in dtypes:
        cost = (
            "strongly typed, such a graph ran slower than plain fp16 (ResNet-50, H200); `crucible"
            " compile` lowers the rest to fp16"
        )
        yield Finding(rule="rest-fp32", nodes=(), why="what is not quantised is in fp32", cost=cost)


# --- scales that should agree ---


def concat_scales(view: View) -> Iterator[Finding]:
    for node in view.graph.node:
        if node.op_type != "Concat":
            continue
        branches = [view.pairs[name].dq for name in node.input if name in view.pairs]
        if not all(view.same(branches[0], branch) for branch in branches):
            cost = "each branch is converted to one scale before they can be joined"
            yield Finding(
                rule="concat-scales",
                nodes=(node.name, *(branch.name for branch in branches)),
                why="its branches have different scales",
                cost=cost,
            )


def moved_scales(view: View) -> Iterator[Finding]:
    for node, first, second in around_movers(view):
        if not view.same(first.dq, second.q):
            why = (
                f"the scales before and behind {node.op_type} differ, which moves values and"
                " changes none"
            )
            nodes = (node.name, first.dq.name, second.q.name)
            yield Finding(
                rule="moved-scales",
                nodes=nodes,
                why=why,
                cost="values are rounded twice, and a kernel converts them",
            )


def duplicate_pair(view: View) -> Iterator[Finding]:
    for name, pair in view.pairs.items():
        before = repeated(view, pair)
        if before is not None:
            why = "quantises again what was quantised with the same scale"
            yield Finding(
                rule="duplicate-pair",
                nodes=(before.dq.name, pair.q.name),
                why=why,
                cost="nodes for nothing",
                fixable=name not in view.outputs,
            )


def split_q(view: View) -> Iterator[Finding]:
    for twins in equal_quantizers(view):
        nodes = tuple(node.name for node in twins)
        yield Finding(
            rule="split-q",
            nodes=nodes,
            why="one tensor is quantised several times alike",
            cost="each is a kernel",
            fixable=True,
        )


def weight_in_floats(view: View) -> Iterator[Finding]:
    for dq in view.weights.values():
        q = view.makers.get(dq.input[0])
        if q is not None and q.op_type == QDQ[0] and q.input[0] in view.constants:
            cost = "the file holds four times the bytes"
            yield Finding(
                rule="weight-in-floats",
                nodes=(q.name,),
                why="a weight is quantised when the model is loaded",
                cost=cost,
                fixable=True,
            )


RULES: dict[Rule, tuple[str, ...]] = {
    bad_scale: EVERYWHERE,
    small_scale: TENSORRT,
    zero_point: TENSORRT,
    per_tensor_weight: EVERYWHERE,
    unused_range: EVERYWHERE,
    float_weight: EVERYWHERE,
    float_input: EVERYWHERE,
    pair_before_mover: ("onnxruntime",),
    float_result: ("onnxruntime",),
    signed_relu: ("onnxruntime",),
    signed_shared: ("onnxruntime",),
    clip_between: EVERYWHERE,
    lone_q: EVERYWHERE,
    between_fused: ("openvino", *TENSORRT),
    norm_after: EVERYWHERE,
    residual_both: TENSORRT,
    residual_one: ("onnxruntime", "openvino"),
    classifier: EVERYWHERE,
    matmul_activations: EVERYWHERE,
    quantised_bias: TENSORRT,
    rest_in_fp32: TENSORRT,
    concat_scales: EVERYWHERE,
    moved_scales: EVERYWHERE,
    # ONNX Runtime wants one on each side of what moves values
    duplicate_pair: ("openvino", *TENSORRT),
    split_q: EVERYWHERE,
    weight_in_floats: EVERYWHERE,
}
"""Every rule, and the backends that it is about."""
