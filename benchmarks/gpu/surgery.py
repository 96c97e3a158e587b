"""Surgeries, each by a function that a plan can name. `plain_attention`: attention as TensorRT's fused kernels know it. The others: below.

Plain attention is one transposition of the keys, one scale after their product, a mask of one row, Softmax, product.

torch.export writes out scaled_dot_product_attention with the root of the scale on both sides, the keys through three dimensions, and a Where
against rows without any token (NaN). With a mask that adds the smallest finite number there are none, and the other two are the same numbers.
That number does not fit fp16, which would keep every Softmax in fp32 between two casts; a smaller one hides as well (but for rows without a token).
It also writes the mask out for every query, by an And with a column of nothing but true: 8 MB at 2,048 tokens, which each head would read again.
For the plan: `--set simplify.surgery=surgery:plain_attention --set simplify.python_path=benchmarks/gpu`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

HIDDEN = -1e4  # added to a score, it makes e to that power 0 in every float type


def plain_attention(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every written-out attention in its plain form; what does not look like it stays."""
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(model)
    for node in [node for node in graph.nodes if node.op == "Softmax"]:
        without_nan(node)
        made = chain(node.inputs[0], "MatMul") or chain(node.inputs[0], "Add", "MatMul")
        if len(made) > 1:
            alike_for_all_queries(made[0].inputs[1])
            in_reach_of_fp16(made[0].inputs[1])
        if made:
            scaled_after(graph, made[-1])
            transposed_once(made[-1])
    return gs.export_onnx(graph.cleanup().toposort())


def chain(tensor: Any, *operators: str) -> list[Any]:
    """The nodes of these operators that made a tensor, the last first, by their first inputs; empty if it was made otherwise."""
    nodes: list[Any] = []
    for operator in operators:
        node = tensor.inputs[0] if tensor.inputs else None
        if node is None or node.op != operator:
            return []
        nodes, tensor = [*nodes, node], node.inputs[0]
    return nodes


def without_nan(softmax: Any) -> None:
    """Softmax -> IsNaN -> Where(it, 0, Softmax): the Softmax alone."""
    (answer,) = softmax.outputs
    for test in [node for node in answer.outputs if node.op == "IsNaN"]:
        for choice in [node for node in test.outputs[0].outputs if node.op == "Where" and node.inputs[2] is answer]:
            for reader in list(choice.outputs[0].outputs):
                reader.inputs[reader.inputs.index(choice.outputs[0])] = answer


def alike_for_all_queries(mask: Any) -> None:
    """Where(And(column, row), two numbers) of a column of nothing but true: Where(row, the same), which the Add repeats."""
    made = chain(mask, "Where", "And")
    if not made:
        return
    choice, both = made
    values = [_value(each) for each in choice.inputs[1:]]
    if any(value is None or value.size > 1 for value in values):
        return
    for column, row in (both.inputs, both.inputs[::-1]):
        value = _value(column)
        if value is not None and value.all() and row.shape and len(row.shape) >= value.ndim:
            choice.inputs[0] = row
            choice.outputs[0].shape = row.shape if choice.outputs[0].shape else None


def in_reach_of_fp16(mask: Any) -> None:
    """A mask that adds the smallest number of fp32 adds HIDDEN instead: fp16 holds it, so that scores and Softmax need not stay in fp32."""
    import onnx_graphsurgeon as gs

    for choice in chain(mask, "Where"):
        for place in (1, 2):
            value = _value(choice.inputs[place])
            if value is not None and value.size == 1 and float(value.reshape(())) < HIDDEN:
                constant = np.full_like(value, HIDDEN)
                choice.inputs[place] = gs.Constant(f"{choice.outputs[0].name}_hidden_{place}", constant)


def scaled_after(graph: Any, scores: Any) -> None:
    """(a * s) @ (b * t): (a @ b) * (s * t)."""
    import onnx_graphsurgeon as gs

    factors = [_factor(tensor) for tensor in scores.inputs]
    if None in factors:
        return
    scale = np.asarray(np.prod([factor[1] for factor in factors], dtype=np.float64), np.float32)
    scores.inputs = [factor[0] for factor in factors]
    (product,) = scores.outputs
    plain = gs.Variable(f"{product.name}_plain", dtype=product.dtype, shape=product.shape)
    scores.outputs = [plain]
    constant = gs.Constant(f"{product.name}_scale", scale)
    graph.nodes.append(gs.Node("Mul", f"{product.name}_scaled", inputs=[plain, constant], outputs=[product]))


def _factor(tensor: Any) -> tuple[Any, float] | None:
    """What a tensor is before it is multiplied by one number, and the number."""
    import onnx_graphsurgeon as gs

    node = tensor.inputs[0] if tensor.inputs else None
    if node is None or node.op != "Mul":
        return None
    for one, other in (node.inputs, node.inputs[::-1]):
        value = _value(other)
        if value is not None and value.size == 1 and not isinstance(one, gs.Constant):
            return one, float(value.reshape(()))
    return None


def _value(tensor: Any) -> np.ndarray | None:
    """The array of a constant, however the exporter wrote it."""
    import onnx_graphsurgeon as gs

    if isinstance(tensor, gs.Constant):
        return tensor.values
    made = tensor.inputs[0] if tensor.inputs else None
    return made.attrs["value"].values if made is not None and made.op == "Constant" and "value" in made.attrs else None


def transposed_once(scores: Any) -> None:
    """Keys [b, t, h, d] -> [b, h, t, d] -> [b * h, t, d] -> [b * h, d, t] -> [b, h, d, t]: at once."""
    found = chain(scores.inputs[1], "Reshape", "Transpose", "Reshape", "Transpose")
    if [list(node.attrs["perm"]) for node in found[1::2]] != [[0, 2, 1], [0, 2, 1, 3]]:
        return
    last, first = found[0], found[-1]
    last.op, last.attrs = "Transpose", {"perm": [0, 2, 3, 1]}
    last.inputs = [first.inputs[0]]


# -- a mask in the keys ------------------------------------------------------------------------------------------------

MORE = 16  # dimensions: kernels take them by 16


def mask_in_keys(model: onnx.ModelProto) -> onnx.ModelProto:
    """Plain attention without an Add: the mask is one more dimension of the keys, and that of the queries is 1; what fills up to MORE is 0.

    The product q @ k + 1 * mask is scaled with the rest: HIDDEN hides as well. An attention whose shapes are not all known stays plain.
    """
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(onnx.shape_inference.infer_shapes(plain_attention(model)))
    for softmax in [node for node in graph.nodes if node.op == "Softmax"]:
        made = chain(softmax.inputs[0], "Add", "Mul", "MatMul")
        if made and (shape := made[2].inputs[0].shape) and len(shape) == 4 and all(isinstance(size, int) for size in shape):
            add, scale, scores = made
            (queries, keys), name = scores.inputs, scores.name
            one = np.eye(1, MORE, dtype=np.float32)
            more_keys = _made(graph, "Mul", f"{name}_row", [add.inputs[1], gs.Constant(f"{name}_one", one.reshape(1, 1, MORE, 1))])
            of_all = gs.Constant(f"{name}_of_all", np.array([*shape[:2], 1, 1], np.int64))
            more_keys = _made(graph, "Expand", f"{name}_rows", [more_keys, of_all])
            more_queries = gs.Constant(f"{name}_ones", np.broadcast_to(one, (*shape[:3], MORE)).copy())
            longer = _made(graph, "Concat", f"{name}_keys", [keys, more_keys], axis=2)
            scores.inputs = [_made(graph, "Concat", f"{name}_queries", [queries, more_queries], axis=3), longer]
            softmax.inputs = [scale.outputs[0]]
    return gs.export_onnx(graph.cleanup().toposort())


def _made(graph: Any, operator: str, name: str, inputs: list[Any], **attributes: Any) -> Any:
    """The one output of a node that is added to the graph."""
    import onnx_graphsurgeon as gs

    output = gs.Variable(f"{name}_made", dtype=inputs[0].dtype)
    graph.nodes.append(gs.Node(operator, name, attributes, inputs, [output]))
    return output


# -- strides of the first convolution ----------------------------------------------------------------------------------

FEW = 4  # channels: TensorRT's int8 kernels take 32 at once, and compute with what is missing as zeros
AXES = (2, 3)


def fold_strides(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the stride of every convolution of few channels folded into these: what s x s pixels held are channels of one.

    The products and sums stay what they were, and zeros join them. A ViT's patches become a plain product of matrices (768 channels of one
    pixel), a ResNet's first 7 x 7 of 3 channels a 4 x 4 of 12. What is dynamic, grouped, dilated or not divisible stays.
    """
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(model)
    for node in [node for node in graph.nodes if node.op == "Conv"]:
        if strided := _strided(node):
            stride, pads = strided
            folded = [folded_axis(size, stride, pad) for size, pad in zip(_value(node.inputs[1]).shape[2:], pads, strict=True)]
            (image, weight, *bias), name = node.inputs, node.outputs[0].name
            blocks = gs.Variable(f"{name}_blocks", dtype=image.dtype)
            graph.nodes.append(gs.Node("SpaceToDepth", f"{name}_to_depth", {"blocksize": stride}, [image], [blocks]))
            node.inputs = [blocks, gs.Constant(f"{name}_weight", folded_weight(_value(weight), stride, folded)), *bias]
            begins, sizes = [-first for first, _, _ in folded], [size for _, size, _ in folded]
            ends = [size - 1 - begin for begin, size in zip(begins, sizes, strict=True)]
            node.attrs = {"kernel_shape": sizes, "strides": [1, 1], "pads": [*begins, *ends], "dilations": [1, 1], "group": 1}
    return gs.export_onnx(graph.cleanup().toposort())


def _strided(node: Any) -> tuple[int, list[int]] | None:
    """The stride of a convolution that can be folded, and its paddings at the beginning; None for any other."""
    weight, shape = _value(node.inputs[1]), node.inputs[0].shape
    strides, kept = node.attrs.get("strides", [1]), node.attrs.get("auto_pad", "NOTSET") == "NOTSET"
    plain = kept and node.attrs.get("group", 1) == 1 and set(node.attrs.get("dilations", [1])) == {1}
    if weight is None or weight.ndim != 4 or weight.shape[1] > FEW or not shape or not plain or len(set(strides)) > 1 or strides[0] == 1:
        return None
    stride, pads = strides[0], list(node.attrs.get("pads", [0] * 4))
    for axis in AXES:
        size, begin, end = shape[axis], pads[axis - 2], pads[axis]
        if not isinstance(size, int) or size % stride or (size + begin + end - weight.shape[axis]) // stride + 1 != size // stride:
            return None
    return stride, pads[:2]


def folded_axis(kernel: int, stride: int, pad: int) -> tuple[int, int, int]:
    """Of one axis: the first block that the kernel reaches, counted from the answer's own, how many it reaches, and where in the first it begins."""
    first, last = -pad // stride, (kernel - 1 - pad) // stride
    return first, last - first + 1, -pad - first * stride


def folded_weight(weight: np.ndarray, stride: int, folded: list[tuple[int, int, int]]) -> np.ndarray:
    """[out, in, k, l] -> [out, stride * stride * in, k / stride, l / stride], in the order of channels of SpaceToDepth."""
    out, channels, *kernel = weight.shape
    whole = np.zeros((out, channels, *(size * stride for _, size, _ in folded)), weight.dtype)
    (_, rows, top), (_, columns, left) = folded
    whole[:, :, top : top + kernel[0], left : left + kernel[1]] = weight
    blocks = whole.reshape(out, channels, rows, stride, columns, stride)
    return np.ascontiguousarray(blocks.transpose(0, 3, 5, 1, 2, 4).reshape(out, stride * stride * channels, rows, columns))
