"""A surgery that a plan can name: `simplify.surgery: pipeline.folding:fold_strides`.
docs/tensorrt.md says for which models it pays.

A convolution of few channels with a stride, as a ViT's patches are made, becomes one of many
channels without.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from pipeline.onnx_graph.rewriting import (
    exported,
    floats_of,
    imported,
    initializer,
    operands,
    successor,
)

# channels: TensorRT's int8 kernels take 32 at once, and compute with what is missing as zeros
FEW = 4
AXES = (2, 3)


def fold_strides(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the stride of every convolution of few channels folded into these: what s x s
    pixels held are channels of one.

    The products and sums stay what they were, and zeros join them. A ViT's patches become a plain
    product of matrices (768 channels of one pixel), a ResNet's first 7 x 7 of 3 channels a 4 x 4 of
    12. What is dynamic, grouped, dilated or not divisible stays.
    """
    folded_model = imported(model)
    graph = folded_model.graph
    for node in [node for node in graph if node.op_type == "Conv"]:
        if strided := _strided(node):
            weight, stride, pads = strided
            folded = [
                folded_axis(size, stride, pad)
                for size, pad in zip(weight.shape[2:], pads, strict=True)
            ]
            image, _, *bias = operands(node)
            name = node.outputs[0].name
            blocks = ir.Value(name=f"{name}_blocks", type=image.type)
            to_depth = ir.node("SpaceToDepth", [image], {"blocksize": stride}, outputs=[blocks])
            to_depth.name = f"{name}_to_depth"
            blocks_weight = folded_weight(weight, stride, folded)
            inputs = [blocks, initializer(graph, f"{name}_weight", blocks_weight), *bias]
            begins, sizes = [-first for first, _, _ in folded], [size for _, size, _ in folded]
            ends = [size - 1 - begin for begin, size in zip(begins, sizes, strict=True)]
            attributes = {
                "kernel_shape": sizes,
                "strides": [1, 1],
                "pads": [*begins, *ends],
                "dilations": [1, 1],
                "group": 1,
            }
            output = successor(node.outputs[0])
            conv = ir.node("Conv", inputs, attributes, outputs=[output], name=node.name)
            graph.extend([to_depth, conv])
    return exported(folded_model)


def _strided(node: ir.Node) -> tuple[np.ndarray, int, list[int]] | None:
    """The weight and the stride of a convolution that can be folded, and its paddings at the
    beginning; None for any other.
    """
    image, factor, *_ = operands(node)
    weight, shape, attributes = floats_of(factor), image.shape, node.attributes
    strides = attributes.get_ints("strides", (1,))
    plain = (
        attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
        and attributes.get_int("group", 1) == 1
        and set(attributes.get_ints("dilations", (1,))) == {1}
    )
    if (
        weight is None
        or weight.ndim != 4
        or weight.shape[1] > FEW
        or not shape
        or not plain
        or len(set(strides)) > 1
        or strides[0] == 1
    ):
        return None
    stride, pads = strides[0], list(attributes.get_ints("pads", [0] * 4))
    for axis in AXES:
        size, begin, end = shape[axis], pads[axis - 2], pads[axis]
        if (
            not isinstance(size, int)
            or size % stride
            or (size + begin + end - weight.shape[axis]) // stride + 1 != size // stride
        ):
            return None
    return weight, stride, pads[:2]


def folded_axis(kernel: int, stride: int, pad: int) -> tuple[int, int, int]:
    """Of one axis: the first block that the kernel reaches, counted from the answer's own, how many
    it reaches, and where in the first it begins.
    """
    first, last = -pad // stride, (kernel - 1 - pad) // stride
    return first, last - first + 1, -pad - first * stride


def folded_weight(
    weight: np.ndarray, stride: int, folded: list[tuple[int, int, int]]
) -> np.ndarray:
    """[out, in, k, l] -> [out, stride * stride * in, k / stride, l / stride], in the order of
    channels of SpaceToDepth.
    """
    out, channels, *kernel = weight.shape
    whole = np.zeros((out, channels, *(size * stride for _, size, _ in folded)), weight.dtype)
    (_, rows, top), (_, columns, left) = folded
    whole[:, :, top : top + kernel[0], left : left + kernel[1]] = weight
    blocks = whole.reshape(out, channels, rows, stride, columns, stride)
    return np.ascontiguousarray(
        blocks.transpose(0, 3, 5, 1, 2, 4).reshape(out, stride * stride * channels, rows, columns)
    )
