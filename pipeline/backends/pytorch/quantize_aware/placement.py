"""Put fake quantisers into a PyTorch module, where Crucible puts Q/DQ pairs into a graph.

torch.fx writes the module down as a graph. Its batch norms are folded into the convolutions before
them, as every backend does; then the rules of pipeline/quantization/placement.py, which place the
pairs of int8 after training, choose the tensors. So a trained model passes `crucible lint` as it
is. What fx cannot trace is refused.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import onnx
import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from pipeline.backends.pytorch.quantize_aware.fake_quantizer import FakeQuantizer
from pipeline.core.recipe import Placement
from pipeline.errors import ModelError, PlanError
from pipeline.quantization.lint.rules import EVERYWHERE
from pipeline.quantization.placement import KERNELS, Kernels, Sites, place

BY_HAND = (
    "take the part that fx cannot trace out of the forward method, or place fake quantisers of"
    " torch.ao by hand and give the module as its `prepare_qat` left it"
)
QUANTIZERS = "fake_quantizers"  # submodule of the result that holds those of the activations

MODULES: dict[type[nn.Module], str] = {
    nn.Conv1d: "Conv",
    nn.Conv2d: "Conv",
    nn.Conv3d: "Conv",
    nn.Linear: "Gemm",
    nn.ReLU: "Relu",
    nn.ReLU6: "Clip",
    nn.Hardtanh: "Clip",
    nn.LeakyReLU: "LeakyRelu",
    nn.Sigmoid: "Sigmoid",
    nn.Softmax: "Softmax",
    nn.LogSoftmax: "LogSoftmax",
    nn.MaxPool1d: "MaxPool",
    nn.MaxPool2d: "MaxPool",
    nn.AvgPool1d: "AveragePool",
    nn.AvgPool2d: "AveragePool",
    nn.AdaptiveAvgPool2d: "AveragePool",
    nn.Flatten: "Flatten",
    nn.Dropout: "Dropout",
    nn.Dropout2d: "Dropout",
    nn.Identity: "Identity",
    nn.Upsample: "Resize",
}
FUNCTIONS: dict[Any, str] = {
    operator.add: "Add",
    operator.iadd: "Add",
    torch.add: "Add",
    operator.mul: "Mul",
    torch.mul: "Mul",
    operator.matmul: "MatMul",
    torch.matmul: "MatMul",
    torch.bmm: "MatMul",
    torch.cat: "Concat",
    torch.relu: "Relu",
    functional.relu: "Relu",
    functional.relu6: "Clip",
    functional.leaky_relu: "LeakyRelu",
    torch.sigmoid: "Sigmoid",
    functional.softmax: "Softmax",
    torch.softmax: "Softmax",
    functional.log_softmax: "LogSoftmax",
    functional.max_pool2d: "MaxPool",
    functional.avg_pool2d: "AveragePool",
    functional.adaptive_avg_pool2d: "AveragePool",
    functional.interpolate: "Resize",
    functional.dropout: "Dropout",
    torch.flatten: "Flatten",
    torch.reshape: "Reshape",
    torch.transpose: "Transpose",
    torch.permute: "Transpose",
    torch.squeeze: "Squeeze",
    torch.unsqueeze: "Unsqueeze",
    torch.mean: "ReduceMean",
    operator.getitem: "Slice",
}
METHODS: dict[str, str] = {
    "add": "Add",
    "add_": "Add",
    "mul": "Mul",
    "matmul": "MatMul",
    "relu": "Relu",
    "relu_": "Relu",
    "sigmoid": "Sigmoid",
    "softmax": "Softmax",
    "flatten": "Flatten",
    "view": "Reshape",
    "reshape": "Reshape",
    "transpose": "Transpose",
    "permute": "Transpose",
    "squeeze": "Squeeze",
    "unsqueeze": "Unsqueeze",
    "mean": "ReduceMean",
    "contiguous": "Identity",
    "size": "Shape",
}
"""ONNX's names of what fx calls. Every other call keeps its name, and no pair goes through it."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def quantize_aware(
    module: nn.Module,
    backend: str = "onnxruntime",
    keep_fp32: Sequence[str] = (),
    first_layer: bool = True,
    last_layer: bool = False,
) -> fx.GraphModule:
    """See pipeline.api.quantize_aware."""
    if backend not in EVERYWHERE:
        raise PlanError(
            f"no rules for the backend '{backend}'", f"expected one of {', '.join(EVERYWHERE)}"
        )
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"expected a torch.nn.Module, got {type(module).__name__}", "give a trained module"
        )
    traced = _traced(module)
    _fold_norms(traced)
    skeleton = _skeleton(traced)
    placement = Placement(first_layer=first_layer, last_layer=last_layer)
    sites = place(
        skeleton.graph,
        placement,
        frozenset(skeleton.activations),
        _kept(traced, keep_fp32),
        KERNELS.get(backend, Kernels()),
    )
    if not sites.weights:
        raise ModelError(
            "nothing can be quantised: fx found no convolution or matrix product with a weight"
            " that the rules take",
            "quantise `last_layer` too, keep fewer modules in fp32, or leave the model as it is",
        )
    _quantize(traced, sites)
    return traced.train(module.training)


def _traced(module: nn.Module) -> fx.GraphModule:
    if any(isinstance(child, FakeQuantizer) for child in module.modules()):
        message = "the module has fake quantisers already"
        raise ModelError(message, "give the module as it was before `quantize_aware`")
    try:
        return fx.symbolic_trace(copy.deepcopy(module).eval())
    except Exception as error:  # the user's forward runs on stand-ins, and may raise anything
        text = f"torch.fx cannot trace the model: {type(error).__name__}: {error}"
        raise ModelError(text, BY_HAND) from error


def _fold_norms(traced: fx.GraphModule) -> None:
    """Fold each batch norm into the convolution or linear layer before it."""
    modules = dict(traced.named_modules())
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    for node in list(traced.graph.nodes):
        if node.op != "call_module" or not isinstance(modules[node.target], NORMS):
            continue
        (before,) = node.all_input_nodes
        if before.op != "call_module" or len(before.users) > 1 or calls.count(before.target) > 1:
            continue
        layer, norm = modules[before.target], modules[node.target]
        if isinstance(layer, CONVOLUTIONS):
            folded = fuse_conv_bn_eval(layer, norm)
        elif isinstance(layer, nn.Linear):
            folded = fuse_linear_bn_eval(layer, norm)
        else:
            continue
        assert isinstance(folded.bias, nn.Parameter)
        folded.bias.requires_grad_(folded.weight.requires_grad)  # a new bias is not trained yet
        traced.set_submodule(before.target, folded)
        node.replace_all_uses_with(before)
        traced.graph.erase_node(node)
    traced.delete_all_unused_submodules()
    traced.recompile()


@dataclass
class _Skeleton:
    """The traced graph in ONNX's words, without data: what the rules of placement read."""

    graph: onnx.GraphProto
    activations: set[str] = field(default_factory=set)

    def constant(self, name: str, dims: Iterable[int]) -> str:
        self.graph.initializer.append(onnx.TensorProto(name=name, dims=list(dims)))
        return name


def _skeleton(traced: fx.GraphModule) -> _Skeleton:
    skeleton = _Skeleton(onnx.GraphProto(name="skeleton"))
    modules = dict(traced.named_modules())
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            skeleton.graph.input.append(onnx.ValueInfoProto(name=node.name))
            skeleton.activations.add(node.name)
        elif node.op == "output":
            names = [each.name for each in node.all_input_nodes]
            skeleton.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        elif node.op == "get_attr":
            value = operator.attrgetter(node.target)(traced)
            skeleton.constant(node.name, value.shape if isinstance(value, torch.Tensor) else ())
        else:
            _add_call(skeleton, node, modules)
    return skeleton


def _add_call(skeleton: _Skeleton, node: fx.Node, modules: dict[str, nn.Module]) -> None:
    layer = modules[node.target] if node.op == "call_module" else None
    kind = _kind(node, layer)
    has_two = kind in ("Add", "Mul", "MatMul") and len(node.args) > 1
    given: Sequence[Any] = node.args[:2] if has_two else node.all_input_nodes
    names = [  # a number has a place among the two inputs
        each.name if isinstance(each, fx.Node) else skeleton.constant(f"{node.name}.{index}", ())
        for index, each in enumerate(given)
    ]
    if kind in ("Conv", "Gemm"):
        for parameter in ("weight", "bias"):
            values = getattr(layer, parameter)
            if values is not None:
                names.append(skeleton.constant(f"{node.name}.{parameter}", values.shape))
    call = onnx.helper.make_node(kind, names, [node.name], name=node.name)
    if kind == "Gemm":
        call.attribute.append(onnx.helper.make_attribute("transB", 1))
    skeleton.graph.node.append(call)
    skeleton.activations.add(node.name)


def _kind(node: fx.Node, layer: nn.Module | None) -> str:
    if layer is not None:
        return MODULES.get(type(layer), "Module")
    if node.op == "call_method":
        return METHODS.get(str(node.target), f"method_{node.target}")
    return FUNCTIONS.get(node.target, getattr(node.target, "__name__", "function"))


def _kept(traced: fx.GraphModule, patterns: Sequence[str]) -> frozenset[str]:
    """Return the calls that stay in floats. ModelError for a pattern that no module matches."""
    kept: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = {
            node.name
            for node in traced.graph.nodes
            if node.op == "call_module" and fnmatchcase(node.target, pattern)
        }
        if not found:
            names = sorted({str(n.target) for n in traced.graph.nodes if n.op == "call_module"})
            raise ModelError(
                f"keep_fp32: no module matches '{pattern}'", f"expected one of {', '.join(names)}"
            )
        kept |= found
    return frozenset(kept)


def _quantize(traced: fx.GraphModule, sites: Sites) -> None:
    """Insert the fake quantisers that the rules ask for."""
    nodes = {node.name: node for node in traced.graph.nodes}
    device = next((each.device for each in traced.parameters()), torch.device("cpu"))
    last_input = [node for node in traced.graph.nodes if node.op == "placeholder"][-1:]
    made = nn.ModuleDict()
    traced.add_module(QUANTIZERS, made)
    quantised: dict[str, fx.Node] = {}
    for site in sites.activations:
        if site.tensor not in quantised:
            name = _first(site.tensor, sites.same_scale)
            if name not in made:
                made[name] = FakeQuantizer().to(device)
            source = nodes[site.tensor]
            is_input = source.op == "placeholder"
            with traced.graph.inserting_after(last_input[0] if is_input else source):
                quantised[site.tensor] = traced.graph.call_module(f"{QUANTIZERS}.{name}", (source,))
        nodes[site.node].replace_input_with(nodes[site.tensor], quantised[site.tensor])
    for weight in sites.weights:
        node = nodes[weight.node]
        if node.op == "call_module":
            layer = traced.get_submodule(str(node.target))
        else:
            layer = _held(traced, made, node, nodes[weight.tensor])
        if not parametrize.is_parametrized(layer, "weight"):
            fake = FakeQuantizer(axis=weight.axis).to(device)
            parametrize.register_parametrization(layer, "weight", fake)
    traced.graph.lint()
    traced.recompile()


class HeldWeight(nn.Module):  # type: ignore[misc]  # torch is not looked into
    """A parameter that a forward method reads by itself, as a module that can be parametrised."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self) -> torch.Tensor:
        return self.weight


def _held(
    traced: fx.GraphModule, made: nn.ModuleDict, reader: fx.Node, source: fx.Node
) -> HeldWeight:
    """Let `reader` read the parameter of `source` from a module in `made`, and return that."""
    made[source.name] = held = HeldWeight(operator.attrgetter(source.target)(traced))
    with traced.graph.inserting_after(source):
        call = traced.graph.call_module(f"{QUANTIZERS}.{source.name}", ())
    reader.replace_input_with(source, call)
    if not source.users:
        traced.graph.erase_node(source)
        owner, _, name = str(source.target).rpartition(".")
        delattr(traced.get_submodule(owner), name)
    return held


def _first(tensor: str, same_scale: dict[str, str]) -> str:
    """Return the tensor whose scale this one shares, or itself."""
    while tensor in same_scale and same_scale[tensor] != tensor:
        tensor = same_scale[tensor]
    return tensor
