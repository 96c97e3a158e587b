"""Where Q/DQ pairs go in a graph. Pure; `insert_qdq.py` writes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass

import onnx

from pipeline.core.recipe import Placement


@dataclass(frozen=True, slots=True)
class ActivationSite:
    """An input of a node that reads a quantised activation."""

    node: str
    index: int
    tensor: str


@dataclass(frozen=True, slots=True)
class WeightSite:
    """An input of a node that reads a quantised weight.

    It also holds the position of its bias and its activation, if the bias is int32.
    """

    node: str
    index: int
    tensor: str
    axis: int
    bias: str = ""
    activation: str = ""


@dataclass(frozen=True, slots=True)
class Sites:
    """All inputs that read quantised values, in graph order."""

    activations: tuple[ActivationSite, ...]
    weights: tuple[WeightSite, ...]
    same_scale: dict[str, str]  # tensor -> the tensor whose range it must share
    unseen: tuple[str, ...]  # nodes left out, for calibration has no range for their input

    @property
    def tensors(self) -> frozenset[str]:
        """Return the quantised activations."""
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
QUANTIZABLE_READERS = TO_NEXT_LAYER | WEIGHTED
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
    """The properties of a backend's 8-bit kernels that decide where pairs go."""

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
    """The producer and the readers of each tensor of a graph's top level.

    Node names must be unique.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.order = {node.name: index for index, node in enumerate(self.nodes)}
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
        """Return the input of a Conv, Gemm or MatMul that is a constant of rank 2 or more."""
        return next((i for i in (1, 0) if len(self.constants.get(node.input[i], ())) >= 2), None)

    def is_activation(self, name: str) -> bool:
        return bool(name) and name not in self.constants

    def activations(self, node: onnx.NodeProto) -> list[str]:
        """Return the inputs of a node that are no constants."""
        return [name for name in node.input if self.is_activation(name)]

    def is_weighted(self, node: onnx.NodeProto) -> bool:
        return node.op_type in WEIGHTED and self.weight_index(node) is not None

    def weighted_behind(self, name: str) -> onnx.NodeProto | None:
        """Return the weighted operator whose kernel computes this tensor.

        The result is None if there is no such operator, or if several nodes read it.
        """
        maker = self.makers.get(name)
        if maker is None or name in self.outputs or len(self.readers[name]) != 1:
            return None
        activations = self.activations(maker)
        if maker.op_type in EPILOGUE and len(activations) == 1:
            return self.weighted_behind(activations[0])
        return maker if self.is_weighted(maker) else None

    def feeds_weighted(self, node: onnx.NodeProto) -> bool:
        """Return True if a weighted operator follows.

        Only activations, pooling and reshaping may be in between.
        """
        for reader in self.after(node):
            if self.is_weighted(reader):
                return True
            if reader.op_type in TO_NEXT_LAYER and self.feeds_weighted(reader):
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Scope:
    """The inputs of every step of one placement."""

    wiring: Wiring
    operators: tuple[onnx.NodeProto, ...]  # the ones to quantise, in graph order
    operator_names: frozenset[str]
    fp32_nodes: frozenset[str]  # names of the nodes to leave alone
    ranges: frozenset[str]  # float activations with a known range
    inner: frozenset[str]  # those of them that are no output of the model


def place(
    graph: onnx.GraphProto,
    rules: Placement,
    ranges: frozenset[str],
    fp32_nodes: frozenset[str],
    kernels: Kernels,
) -> Sites:
    """Return where Q/DQ pairs go.

    `ranges`: float activations with a known range. `fp32_nodes`: nodes that stay in floats.
    """
    wiring = Wiring(graph)
    if not rules.first_layer:
        fp32_nodes |= up_to_first_layer(wiring)
    operators: list[onnx.NodeProto] = []
    nodes_without_range: list[str] = []
    for node in wiring.nodes:
        if node.name in fp32_nodes or not _is_wanted(node, rules, wiring):
            continue
        if ranges.issuperset(site.tensor for site in _inputs(node, wiring)):
            operators.append(node)
        else:
            nodes_without_range.append(node.name)
    names = frozenset(node.name for node in operators)
    scope = _Scope(
        wiring, tuple(operators), names, fp32_nodes, ranges, ranges.difference(wiring.outputs)
    )
    sites = _operator_sites(scope, kernels)
    same_scale: dict[str, str] = {}
    if kernels.integer_io:
        region = Int8Region(scope, {site.tensor for site in sites})
        sites += region.sites()
        same_scale = region.shared_scales()
    activations = sorted(set(sites), key=lambda site: (wiring.order[site.node], site.index))
    weights = [
        _weight(node, wiring, rules, kernels.integer_io)
        for node in operators
        if wiring.is_weighted(node)
    ]
    return Sites(tuple(activations), tuple(weights), same_scale, tuple(nodes_without_range))


def _is_wanted(node: onnx.NodeProto, rules: Placement, wiring: Wiring) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "Add":
        return rules.residual_add and is_residual_add(node, wiring)
    if node.op_type not in WEIGHTED:
        return False
    index = wiring.weight_index(node)
    if index is None:
        return _is_activation_product(node, wiring) and rules.matmul_activations
    if node.op_type == "Conv" and index != 1:
        return False
    is_allowed = rules.conv if node.op_type == "Conv" else rules.matmul_weight
    if not is_allowed or not wiring.is_activation(node.input[1 - index]):
        return False
    return rules.last_layer or not is_classifier(node, wiring)


def _is_activation_product(node: onnx.NodeProto, wiring: Wiring) -> bool:
    return node.op_type == "MatMul" and all(map(wiring.is_activation, node.input))


def is_residual_add(node: onnx.NodeProto, wiring: Wiring) -> bool:
    """Return True for an Add of two activations whose sum a weighted operator reads.

    A bias, an attention mask, and a sum that is normalised next are no such Add.
    """
    return all(map(wiring.is_activation, node.input)) and wiring.feeds_weighted(node)


def up_to_first_layer(wiring: Wiring) -> frozenset[str]:
    """Return the weighted operators that read an input of the model, and the nodes before them.

    The nodes before them only move and scale values. The result is empty if there is no such
    operator.
    """
    inputs = set(wiring.inputs)
    before: set[str] = set()
    first: set[str] = set()
    for node in wiring.nodes:  # in the order in which they run
        if wiring.is_weighted(node):
            if inputs.intersection(node.input[:2]):
                first.add(node.name)
        elif _passes_input(node, inputs, wiring):
            inputs.update(node.output)
            before.add(node.name)
    if not first:
        return frozenset()
    return frozenset(first | before)


def _passes_input(node: onnx.NodeProto, inputs: set[str], wiring: Wiring) -> bool:
    """Return True if a node only moves, scales or joins values of the model's inputs."""
    if node.op_type == "Concat":
        return inputs.issuperset(wiring.activations(node))
    if node.op_type in SCALES_INPUT:
        activations = wiring.activations(node)
        return len(activations) == 1 and activations[0] in inputs
    return node.op_type in MOVES_INPUT and node.input[0] in inputs


def is_classifier(node: onnx.NodeProto, wiring: Wiring) -> bool:
    """Return True for a weighted operator that computes the model's output.

    Only bias, softmax and reshaping may be between it and an output.
    """
    if wiring.outputs.intersection(node.output):
        return True
    return any(
        _is_answering(reader, wiring) and is_classifier(reader, wiring)
        for reader in wiring.after(node)
    )


def _is_answering(node: onnx.NodeProto, wiring: Wiring) -> bool:
    """Return True if a node may be between the classifier and the output.

    It joins no other branch.
    """
    if node.op_type in ("Add", "Mul"):
        return len(wiring.activations(node)) == 1
    return node.op_type in AFTER_CLASSIFIER


# --- what an operator reads ---


def _operator_sites(scope: _Scope, kernels: Kernels) -> list[ActivationSite]:
    """Return the inputs of the quantised operators."""
    sites: list[ActivationSite] = []
    for node in scope.operators:
        if node.op_type == "Add" and kernels.add_in_conv:
            sites += _residual_sites(node, scope)
        else:
            sites += _inputs(node, scope.wiring)
    return sites


def _inputs(node: onnx.NodeProto, wiring: Wiring) -> list[ActivationSite]:
    """Return the activations that an operator multiplies or adds, without the bias."""
    return [
        ActivationSite(node.name, index, name)
        for index, name in enumerate(node.input[:2])
        if wiring.is_activation(name)
    ]


def _sites_among(node: onnx.NodeProto, tensors: Set[str]) -> list[ActivationSite]:
    """Return the inputs of a node that are among these tensors."""
    return [
        ActivationSite(node.name, index, name)
        for index, name in enumerate(node.input)
        if name in tensors
    ]


# --- a residual Add in the kernel of a weighted operator ---


def fused_input(add: onnx.NodeProto, wiring: Wiring) -> tuple[str, str] | None:
    """Return the input of a residual Add that the kernel of the sum computes, and its operator.

    Of two such inputs it is the later in the graph. The result is None if there is none.
    """
    operators: dict[str, str] = {}
    for name in add.input:
        operator = wiring.weighted_behind(name)
        if operator is not None:
            operators[name] = operator.name
    return max(operators.items(), key=lambda item: wiring.order[item[1]], default=None)


def _residual_sites(add: onnx.NodeProto, scope: _Scope) -> list[ActivationSite]:
    """Return what a residual Add in the kernel of a weighted operator reads in 8 bits.

    Readers of its sum are included. That kernel reads the residual and writes the sum in 8 bits, so
    a sum that no quantised operator reads is quantised too. A weighted operator that is not
    quantised itself adds floats.
    """
    fused = fused_input(add, scope.wiring)
    if fused is None:
        return _inputs(add, scope.wiring)
    fused_tensor, weighted_operator = fused
    if weighted_operator not in scope.operator_names:
        return []
    sites = [site for site in _inputs(add, scope.wiring) if site.tensor != fused_tensor]
    total = _result(add, scope)
    if _needs_own_pair(total, scope):
        for reader in scope.wiring.readers[total]:
            if reader.op_type not in SHAPE_ONLY:
                sites += _sites_among(reader, {total})
    return sites


def _needs_own_pair(total: str, scope: _Scope) -> bool:
    """Return True if a sum is quantised although no quantised operator reads it."""
    if total not in scope.inner or not _has_only_quantizable_readers(total, scope):
        return False
    return not _is_read_in_8_bits(total, scope)


def _has_only_quantizable_readers(name: str, scope: _Scope) -> bool:
    """Return True if all readers of a tensor can read 8 bits."""
    return all(
        node.op_type in QUANTIZABLE_READERS and node.name not in scope.fp32_nodes
        for node in scope.wiring.readers[name]
        if node.op_type not in SHAPE_ONLY
    )


def _is_read_in_8_bits(name: str, scope: _Scope) -> bool:
    """Return True if a quantised operator reads this tensor.

    It reads it directly, or behind operators that a Q passes.
    """
    for node in scope.wiring.readers[name]:
        if node.name in scope.operator_names:
            return True
        if node.op_type in SAME_SCALE and _is_read_in_8_bits(node.output[0], scope):
            return True
    return False


# --- weights ---


def _weight(node: onnx.NodeProto, wiring: Wiring, rules: Placement, integer_io: bool) -> WeightSite:
    index = wiring.weight_index(node)
    assert index is not None
    axis = _output_axis(node, index, wiring) if rules.per_channel else -1
    bias = _integer_bias(node, index, wiring) if integer_io else ""
    activation = node.input[1 - index] if bias else ""
    return WeightSite(node.name, index, node.input[index], axis, bias, activation)


def _output_axis(node: onnx.NodeProto, index: int, wiring: Wiring) -> int:
    """Return the axis of the output channels of a weight, which is input `index` of the node."""
    if node.op_type == "Conv":
        return 0
    if node.op_type == "Gemm":
        integers = {attribute.name: attribute.i for attribute in node.attribute}
        if index == 1:
            return 0 if integers.get("transB") else 1
        return 1 if integers.get("transA") else 0
    rank = len(wiring.constants[node.input[index]])
    return rank - 1 if index == 1 else rank - 2


def _integer_bias(node: onnx.NodeProto, index: int, wiring: Wiring) -> str:
    """Return the bias that an int8 kernel adds to its int32 accumulator; "" if it cannot."""
    if node.op_type not in ("Conv", "Gemm") or len(node.input) < 3:
        return ""
    bias = str(node.input[2])
    if len(wiring.constants.get(bias, ())) != 1:
        return ""
    if node.op_type == "Gemm":
        floats = {attribute.name: attribute.f for attribute in node.attribute}
        if index != 1 or floats.get("beta", 1.0) != 1.0:
            return ""
    return bias


# --- what lies between quantised operators ---


class Int8Region:
    """The tensors that ONNX Runtime keeps in 8 bits, from one quantised operator to the next.

    Its kernels take and give 8 bits, so a pair stands on both sides of each. Both Conv are
    quantised here:

        x - conv1 - c -+- Sigmoid - s -+
                       +---------------+- Mul - m -+- conv2 - y
                                                   +- MaxPool - p - Abs - z

        seed             x, m    the operators read them
                         c       the result of conv1
        grow_forward     p       MaxPool moves the bytes of m
        grow_backward    c, s    Mul gives m in 8 bits if it reads 8 bits
    """

    def __init__(self, scope: _Scope, operator_inputs: Set[str]) -> None:
        self.scope = scope
        self.nodes = [
            node
            for node in scope.wiring.nodes
            if node.op_type in INT8_KERNELS and node.name not in scope.fp32_nodes
        ]
        self.results: set[str] = set()  # of quantised operators that give 8 bits
        self.tensors: set[str] = set()
        self.seed(operator_inputs)
        self.grow_forward()
        self.grow_backward()
        self.kernels = [
            node for node in self.nodes if self.tensors.issuperset([*_data(node), node.output[0]])
        ]

    def seed(self, operator_inputs: Set[str]) -> None:
        """Add the inputs of the quantised operators, and their results.

        A matrix product can also return floats, but not to a Relu or Clip: with one behind it that
        no Q follows, it runs in fp32.
        """
        for node in self.scope.operators:
            has_relu = _relu_after(node, self.scope.wiring) is not None
            if has_relu or node.op_type in ("Conv", "Add"):
                self.results.add(_result(node, self.scope))
        self.results &= self.scope.inner
        self.tensors.update(operator_inputs, self.results)

    def grow_forward(self) -> None:
        """Let operators that only move bytes stay in 8 bits.

        In floats, each Concat would dequantise all its inputs again.
        """
        for node in self.nodes:
            moves_8_bits = node.op_type in MOVES_BYTES and self.tensors.issuperset(_data(node))
            if moves_8_bits and node.output[0] in self.scope.inner:
                self.tensors.add(node.output[0])

    def grow_backward(self) -> None:
        """Let a kernel that returns 8 bits read 8 bits."""
        for node in reversed(self.nodes):
            if node.output[0] in self.tensors and self.scope.ranges.issuperset(_data(node)):
                self.tensors.update(_data(node))

    def sites(self) -> list[ActivationSite]:
        """Return the readers of 8 bits.

        They are the kernels of the region, and all readers of tensors without a float form.
        """
        integers = self._without_float_form()
        kernel_inputs = {node.name: set(_data(node)) for node in self.kernels}
        sites: list[ActivationSite] = []
        for node in self.scope.wiring.nodes:
            if node.name not in self.scope.fp32_nodes:
                sites += _sites_among(node, integers)
                sites += _sites_among(node, kernel_inputs.get(node.name, set()))
        return sites

    def _without_float_form(self) -> set[str]:
        """Return the results of kernels. A kernel returns 8 bits to all its readers or to none."""
        products = {node.output[0] for node in self.scope.operators}
        products &= self.tensors & self.scope.inner
        return self.results | products | {node.output[0] for node in self.kernels}

    def shared_scales(self) -> dict[str, str]:
        """Return each kernel result that has the values of its input.

        Beside it is the tensor whose range it takes.
        """
        sources: dict[str, str] = {}
        for node in self.kernels:
            if node.op_type in SAME_SCALE:
                sources[node.output[0]] = sources.get(node.input[0], node.input[0])
        return sources


def _data(node: onnx.NodeProto) -> list[str]:
    """Return the inputs of an operator of INT8_KERNELS that hold data, not shapes."""
    if node.op_type == "Resize" or node.op_type in SAME_SCALE:
        return list(node.input[:1])
    return list(node.input)


def _result(node: onnx.NodeProto, scope: _Scope) -> str:
    """Return the tensor that leaves the kernel of this node.

    It is behind a Relu or Clip that fuses into the kernel.
    """
    relu = _relu_after(node, scope.wiring)
    if relu is None or relu.name in scope.fp32_nodes:
        return str(node.output[0])
    return str(relu.output[0])


def _relu_after(node: onnx.NodeProto, wiring: Wiring) -> onnx.NodeProto | None:
    """Return the Relu or Clip that is the only reader of this node."""
    readers = wiring.readers[node.output[0]]
    if len(readers) != 1 or node.output[0] in wiring.outputs:
        return None
    return readers[0] if readers[0].op_type in FUSED_AFTER else None
