"""Fold the stride of a convolution into its channels.

A plan names this surgery: `simplify.surgery: pipeline.folding:fold_strides`. A convolution of few
channels with a stride, such as the patch embedding of a ViT, becomes one of many channels without a
stride. docs/explain/tensorrt.md says for which models that is faster.
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

# TensorRT's int8 kernels take 32 channels at once, and compute with zeros for missing ones.
MAX_CHANNELS = 4
AXES = (2, 3)


def fold_strides(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fold the stride of every convolution of few channels: s x s pixels become channels of one.

    Products and sums stay the same, and zeros join them. The patches of a ViT become a plain matrix
    product (768 channels of one pixel), and the first 7 x 7 of a ResNet, with 3 channels, becomes a
    4 x 4 with 12. Dynamic, grouped, dilated and indivisible convolutions stay as they are.
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
    """Return the weight and stride of a convolution that can be folded, and its paddings in front.

    The result is None for any other convolution.
    """
    image, factor, *_ = operands(node)
    weight, shape = floats_of(factor), image.shape
    strides = node.attributes.get_ints("strides", (1,))
    if weight is None or weight.ndim != 4 or weight.shape[1] > MAX_CHANNELS:
        return None
    if not shape or not _is_plain(node) or len(set(strides)) > 1 or strides[0] == 1:
        return None
    stride, pads = strides[0], list(node.attributes.get_ints("pads", [0] * 4))
    for axis in AXES:
        size, begin, end = shape[axis], pads[axis - 2], pads[axis]
        if (
            not isinstance(size, int)
            or size % stride
            or (size + begin + end - weight.shape[axis]) // stride + 1 != size // stride
        ):
            return None
    return weight, stride, pads[:2]


def _is_plain(node: ir.Node) -> bool:
    """Return True for a convolution with explicit padding, and without groups and dilation."""
    attributes = node.attributes
    return (
        attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
        and attributes.get_int("group", 1) == 1
        and set(attributes.get_ints("dilations", (1,))) == {1}
    )


def folded_axis(kernel: int, stride: int, pad: int) -> tuple[int, int, int]:
    """Return, for one axis, which blocks of pixels the kernel reaches.

    That is the first block, relative to that of the output pixel, the number of blocks, and the
    offset of the kernel in the first block.
    """
    first, last = -pad // stride, (kernel - 1 - pad) // stride
    return first, last - first + 1, -pad - first * stride


def folded_weight(
    weight: np.ndarray, stride: int, folded: list[tuple[int, int, int]]
) -> np.ndarray:
    """Return the weight [out, in, k, l] as [out, stride * stride * in, k / stride, l / stride].

    Its channels are in the order of SpaceToDepth.
    """
    out, channels, *kernel = weight.shape
    padded = np.zeros((out, channels, *(size * stride for _, size, _ in folded)), weight.dtype)
    (_, rows, top), (_, columns, left) = folded
    padded[:, :, top : top + kernel[0], left : left + kernel[1]] = weight
    blocks = padded.reshape(out, channels, rows, stride, columns, stride)
    return np.ascontiguousarray(
        blocks.transpose(0, 3, 5, 1, 2, 4).reshape(out, stride * stride * channels, rows, columns)
    )
