"""Where Q/DQ pairs go in a graph. Pure; `insert_qdq.py` writes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from pipeline.core import Placement


@dataclass(frozen=True, slots=True)
class ActivationSite:
    """An input of a node that reads a quantised activation."""

    node: str
    index: int
    tensor: str


@dataclass(frozen=True, slots=True)
class WeightSite:
    """An input of a node that reads a quantised weight, and where its bias and its activation are
    if the bias is int32.
    """

    node: str
    index: int
    tensor: str
    axis: int
    bias: str = ""
    activation: str = ""


@dataclass(frozen=True, slots=True)
class Sites:
    """All places that read quantised values, in graph order."""

    activations: tuple[ActivationSite, ...]
    weights: tuple[WeightSite, ...]
    same_scale: dict[str, str]  # tensor -> the tensor whose range it must share
    unseen: tuple[str, ...]  # nodes left out, for calibration has no range for their input

    @property
    def tensors(self) -> frozenset[str]:
        """The quantised activations."""
        return frozenset(site.tensor for site in self.activations)


FUSED_AFTER = frozenset({"Relu", "Clip"})  # computed in the kernel of the operator before them
WEIGHTED = frozenset({"Conv", "Gemm", "MatMul"})
RESHAPES = frozenset(
    {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Slice"}
)
TO_NEXT_LAYER = RESHAPES | {
    "Relu",
    "Clip",
    "BatchNormalization",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "ReduceMean",
    "Dropout",
}
SAME_SCALE = RESHAPES | {"MaxPool"}
MOVES_BYTES = SAME_SCALE | {"Concat", "AveragePool"}
INT8_KERNELS = SAME_SCALE | {
    "GlobalAveragePool",
    "AveragePool",
    "Concat",
    "Mul",
    "Sigmoid",
    "LeakyRelu",
    "Resize",
}
"""What ONNX Runtime computes in 8 bits if both sides are quantised; between quantised operators
they keep the data in 8 bits.
"""

EPILOGUE = frozenset({"Add", "BatchNormalization"})
"""With constants on their other inputs: a bias or a norm, part of the kernel of the weighted
operator before them.
"""

SHAPE_ONLY = frozenset({"Shape", "Size"})  # read no values
MOVES_INPUT = RESHAPES | {
    "Cast",
    "Pad",
    "Resize",
    "Expand",
    "Gather",
    "Split",
    "SpaceToDepth",
    "DepthToSpace",
}
"""The first input in another place, size or dtype. A table that ids are looked up in is a constant,
so what it gives is no input of the model.
"""

SCALES_INPUT = frozenset(
    {"Add", "Sub", "Mul", "Div", "BatchNormalization"}
)  # with constants: the normalisation of an image
AFTER_CLASSIFIER = RESHAPES | {
    "Softmax",
    "LogSoftmax",
    "Sigmoid",
    "Cast",
    "Add",
    "Mul",
    "Resize",
    "ArgMax",
    "TopK",
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a backend's 8-bit kernels are like, as far as it decides where pairs go."""

    integer_io: bool = False
    """8 bits in and out, so results, int32 biases and what lies between are quantised too.
    Elsewhere a pair stands only before an operator, so that nothing comes between an operator and
    what fuses into it.
    """
    add_in_conv: bool = False
    """A convolution or matrix product adds a residual of 8 bits inside its own kernel and gives 8
    bits: its own result is never quantised.
    """


KERNELS = {
    "onnxruntime": Kernels(integer_io=True),
    "tensorrt": Kernels(add_in_conv=True),
    "tensorrt_rtx": Kernels(add_in_conv=True),
}


class Wiring:
    """Who makes and who reads each tensor of a graph's top level. Node names must be unique."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.order = {node.name: place for place, node in enumerate(self.nodes)}
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        for value in graph.input:  # an initializer that the caller may replace is no constant
            self.constants.pop(value.name, None)
        self.inputs = {value.name for value in graph.input}
        self.outputs = {value.name for value in graph.output}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                self.readers[name].append(node)

    def after(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        for name in node.output:
            yield from self.readers[name]

    def weight_index(self, node: onnx.NodeProto) -> int | None:
        """Which input of a Conv, Gemm or MatMul is a constant of rank 2 or more."""
        return next((i for i in (1, 0) if len(self.constants.get(node.input[i], ())) >= 2), None)

    def is_activation(self, name: str) -> bool:
        return bool(name) and name not in self.constants

    def is_weighted(self, node: onnx.NodeProto) -> bool:
        return node.op_type in WEIGHTED and self.weight_index(node) is not None

    def weighted_behind(self, name: str) -> onnx.NodeProto | None:
        """The weighted operator in whose kernel this tensor is made, if nothing but one node reads
        it; None where there is no such operator.
        """
        maker = self.makers.get(name)
        if maker is None or name in self.outputs or len(self.readers[name]) != 1:
            return None
        activations = [each for each in maker.input if self.is_activation(each)]
        if maker.op_type in EPILOGUE and len(activations) == 1:
            return self.weighted_behind(activations[0])
        return maker if self.is_weighted(maker) else None

    def feeds_weighted(self, node: onnx.NodeProto) -> bool:
        """Whether a weighted operator follows, with nothing but activations, pooling and reshaping
        in between.
        """
        return any(
            self.is_weighted(n) or (n.op_type in TO_NEXT_LAYER and self.feeds_weighted(n))
            for n in self.after(node)
        )


def place(
    graph: onnx.GraphProto,
    rules: Placement,
    ranged: frozenset[str],
    kept: frozenset[str],
    kernels: Kernels,
) -> Sites:
    """Where Q/DQ pairs go. `ranged` = float activations with a known range, `kept` = nodes to leave
    alone.
    """
    wiring = Wiring(graph)
    kept = kept if rules.first_layer else kept | up_to_first_layer(wiring)
    wanted = [
        node for node in wiring.nodes if node.name not in kept and _is_wanted(node, rules, wiring)
    ]
    unseen = [
        node
        for node in wanted
        if not all(name in ranged for name in node.input[:2] if wiring.is_activation(name))
    ]
    chosen = [node for node in wanted if node not in unseen]
    names, inner = {node.name for node in chosen}, ranged - wiring.outputs
    sites: list[ActivationSite] = []
    for node in chosen:
        residual = kernels.add_in_conv and node.op_type == "Add"
        sites += _residual(node, names, wiring, inner, kept) if residual else _inputs(node, wiring)
    same_scale: dict[str, str] = {}
    if kernels.integer_io:
        more, same_scale = _between(chosen, {site.tensor for site in sites}, wiring, ranged, kept)
        sites += more
    activations = tuple(sorted(set(sites), key=lambda site: (wiring.order[site.node], site.index)))
    weighted = [
        node for node in chosen if node.op_type != "Add" and wiring.weight_index(node) is not None
    ]
    weights = tuple(_weight(node, wiring, rules, kernels.integer_io) for node in weighted)
    return Sites(activations, weights, same_scale, tuple(node.name for node in unseen))


def _is_wanted(node: onnx.NodeProto, rules: Placement, wiring: Wiring) -> bool:
    if node.domain not in ("", "ai.onnx") or node.op_type not in ("Conv", "Gemm", "MatMul", "Add"):
        return False
    if node.op_type == "Add":
        return rules.residual_add and is_residual_add(node, wiring)
    index = wiring.weight_index(node)
    if index is None:
        return (
            rules.matmul_activations
            and node.op_type == "MatMul"
            and all(map(wiring.is_activation, node.input))
        )
    if not (rules.conv if node.op_type == "Conv" else rules.matmul_weight):
        return False
    if node.op_type == "Conv" and index != 1:
        return False
    return wiring.is_activation(node.input[1 - index]) and (
        rules.last_layer or not is_classifier(node, wiring)
    )


def is_residual_add(node: onnx.NodeProto, wiring: Wiring) -> bool:
    """An Add of two activations whose sum goes on to a weighted operator: not a bias, not an
    attention mask, not a sum that is normalised next.
    """
    return all(map(wiring.is_activation, node.input)) and wiring.feeds_weighted(node)


def up_to_first_layer(wiring: Wiring) -> frozenset[str]:
    """The weighted operators that read an input of the model, with what moves and scales it before
    them; empty where there is no such operator.
    """
    inputs, before, first = set(wiring.inputs), set[str](), set[str]()
    for node in wiring.nodes:  # in the order in which they run
        if wiring.is_weighted(node):
            if inputs.intersection(node.input[:2]):
                first.add(node.name)
        elif _passes_input(node, inputs, wiring):
            inputs.update(node.output)
            before.add(node.name)
    return frozenset(first | before if first else ())


def _passes_input(node: onnx.NodeProto, inputs: set[str], wiring: Wiring) -> bool:
    if node.op_type in SCALES_INPUT | {"Concat"}:
        activations = [name for name in node.input if wiring.is_activation(name)]
        return inputs.issuperset(activations) and (
            len(activations) == 1 or node.op_type == "Concat"
        )
    return node.op_type in MOVES_INPUT and node.input[0] in inputs


def is_classifier(node: onnx.NodeProto, wiring: Wiring) -> bool:
    """A weighted operator that makes the model's answer: only bias, softmax and reshaping lie
    between it and an output.
    """
    if wiring.outputs.intersection(node.output):
        return True
    return any(
        _is_answering(after, wiring) and is_classifier(after, wiring)
        for after in wiring.after(node)
    )


def _is_answering(node: onnx.NodeProto, wiring: Wiring) -> bool:
    scalar_like = sum(map(wiring.is_activation, node.input)) == 1 or node.op_type not in (
        "Add",
        "Mul",
    )
    return node.op_type in AFTER_CLASSIFIER and scalar_like


def _inputs(node: onnx.NodeProto, wiring: Wiring) -> list[ActivationSite]:
    return [
        ActivationSite(node.name, i, name)
        for i, name in enumerate(node.input[:2])
        if wiring.is_activation(name)
    ]


def fused_input(add: onnx.NodeProto, wiring: Wiring) -> tuple[str, str] | None:
    """The input of a residual Add that is made in the same kernel as the sum, and by which weighted
    operator; None where there is no such.

    Of two such inputs it is the later in the graph.
    """
    made = {
        name: maker.name
        for name in add.input
        if (maker := wiring.weighted_behind(name)) is not None
    }
    return max(made.items(), key=lambda item: wiring.order[item[1]], default=None)


def _residual(
    add: onnx.NodeProto,
    chosen: set[str],
    wiring: Wiring,
    inner: frozenset[str],
    kept: frozenset[str],
) -> list[ActivationSite]:
    """What a residual Add reads in 8 bits, and who reads its sum so, where a weighted operator adds
    it in its own kernel.

    That kernel reads the residual and writes the sum in 8 bits, so a sum that no quantised operator
    reads is quantised too. A weighted operator that is not quantised itself adds floats.
    """
    fused = fused_input(add, wiring)
    if fused is None:
        return _inputs(add, wiring)
    if fused[1] not in chosen:
        return []
    total = _result(add, wiring, kept)
    readers = [node for node in wiring.readers[total] if node.op_type not in SHAPE_ONLY]
    able = total in inner and all(
        node.op_type in TO_NEXT_LAYER | WEIGHTED and node.name not in kept for node in readers
    )
    forced = readers if able and not _reaches(total, chosen, wiring) else []
    sum_sites = [
        ActivationSite(node.name, index, name)
        for node in forced
        for index, name in enumerate(node.input)
        if name == total
    ]
    return [site for site in _inputs(add, wiring) if site.tensor != fused[0]] + sum_sites


def _reaches(name: str, chosen: set[str], wiring: Wiring) -> bool:
    """Whether a quantised operator reads this tensor, directly or behind what a Q moves through."""
    return any(
        n.name in chosen or (n.op_type in SAME_SCALE and _reaches(n.output[0], chosen, wiring))
        for n in wiring.readers[name]
    )


def _weight(node: onnx.NodeProto, wiring: Wiring, rules: Placement, integer_io: bool) -> WeightSite:
    index = wiring.weight_index(node)
    assert index is not None
    flags = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Conv":
        axis = 0
    elif node.op_type == "Gemm":
        transposed = (
            bool(flags["transB" if index else "transA"].i)
            if ("transB" if index else "transA") in flags
            else False
        )
        axis = int(not transposed) if index else int(transposed)
    else:
        axis = len(wiring.constants[node.input[index]]) - (1 if index else 2)
    bias = node.input[2] if len(node.input) > 2 and node.op_type in ("Conv", "Gemm") else ""
    whole = node.op_type == "Conv" or (
        index == 1 and ("beta" not in flags or flags["beta"].f == 1.0)
    )
    if not (integer_io and whole and len(wiring.constants.get(bias, ())) == 1):
        bias = ""
    return WeightSite(
        node.name,
        index,
        node.input[index],
        axis if rules.per_channel else -1,
        bias,
        node.input[1 - index] if bias else "",
    )


def _between(
    chosen: list[onnx.NodeProto],
    quantised: set[str],
    wiring: Wiring,
    ranged: frozenset[str],
    kept: frozenset[str],
) -> tuple[list[ActivationSite], dict[str, str]]:
    """What ONNX Runtime should also read in 8 bits: results of quantised operators, and all between
    two of them.

    A matrix product gives floats as well, but not to a Relu or Clip: with one behind it that no Q
    follows, it runs in fp32.
    """
    inner = ranged - wiring.outputs
    giving = [
        node
        for node in chosen
        if node.op_type in ("Conv", "Add") or _relu_after(node, wiring) is not None
    ]
    results = {_result(node, wiring, kept) for node in giving} & inner
    tensors = quantised | results
    able = [node for node in wiring.nodes if node.op_type in INT8_KERNELS and node.name not in kept]
    # what only moves bytes goes on in 8 bits; in floats, each Concat would dequantise all its
    # inputs again
    for node in able:
        if (
            node.op_type in MOVES_BYTES
            and tensors.issuperset(_data(node))
            and node.output[0] in inner
        ):
            tensors.add(node.output[0])
    for node in reversed(able):
        if node.output[0] in tensors and ranged.issuperset(_data(node)):
            tensors.update(_data(node))
    kernels = {
        node.name: _data(node)
        for node in able
        if tensors.issuperset([*_data(node), node.output[0]])
    }
    products = (
        {node.output[0] for node in chosen} & tensors & inner
    )  # a kernel gives 8 bits to all its readers or to none
    held = (
        results | products | {node.output[0] for node in able if node.name in kernels}
    )  # their float form is never made
    sites = [
        ActivationSite(node.name, index, name)
        for node in wiring.nodes
        for index, name in enumerate(node.input)
        if node.name not in kept and (name in held or name in kernels.get(node.name, ()))
    ]
    same_scale: dict[str, str] = {}
    for node in able:
        if node.op_type in SAME_SCALE and node.name in kernels:
            same_scale[node.output[0]] = same_scale.get(node.input[0], node.input[0])
    return sites, same_scale


def _data(node: onnx.NodeProto) -> list[str]:
    """The inputs of an operator of INT8_KERNELS that hold data, not shapes."""
    return list(node.input[:1] if node.op_type in SAME_SCALE | {"Resize"} else node.input)


def _result(node: onnx.NodeProto, wiring: Wiring, kept: frozenset[str]) -> str:
    """The tensor that leaves the kernel of this node: behind the Relu or Clip that fuses into
    it.
    """
    relu = _relu_after(node, wiring)
    return str(node.output[0] if relu is None or relu.name in kept else relu.output[0])


def _relu_after(node: onnx.NodeProto, wiring: Wiring) -> onnx.NodeProto | None:
    """The Relu or Clip that alone reads what this node makes."""
    readers = wiring.readers[node.output[0]]
    alone = len(readers) == 1 and node.output[0] not in wiring.outputs
    return readers[0] if alone and readers[0].op_type in FUSED_AFTER else None
