"""Fold the stride of a convolution into its channels.

A plan names this surgery: `simplify.surgery: pipeline.folding:fold_strides`. A convolution of few
channels with a stride, such as the patch embedding of a ViT, becomes one of many channels without a
stride. docs/tensorrt.md says for which models that is faster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from pipeline.onnx_graph.graphsurgeon import exported, floats_of

# TensorRT's int8 kernels take 32 channels at once, and compute with zeros for missing ones.
MAX_CHANNELS = 4
AXES = (2, 3)


def fold_strides(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fold the stride of every convolution of few channels: s x s pixels become channels of one.

    Products and sums stay the same, and zeros join them. The patches of a ViT become a plain matrix
    product (768 channels of one pixel), and the first 7 x 7 of a ResNet, with 3 channels, becomes a
    4 x 4 with 12. Dynamic, grouped, dilated and indivisible convolutions stay as they are.
    """
    import onnx_graphsurgeon as gs

    graph = gs.import_onnx(model)
    for node in [node for node in graph.nodes if node.op == "Conv"]:
        if strided := _strided(node):
            weight, stride, pads = strided
            folded = [
                folded_axis(size, stride, pad)
                for size, pad in zip(weight.shape[2:], pads, strict=True)
            ]
            (image, _, *bias), name = node.inputs, node.outputs[0].name
            blocks = gs.Variable(f"{name}_blocks", dtype=image.dtype)
            graph.nodes.append(
                gs.Node(
                    "SpaceToDepth", f"{name}_to_depth", {"blocksize": stride}, [image], [blocks]
                )
            )
            node.inputs = [
                blocks,
                gs.Constant(f"{name}_weight", folded_weight(weight, stride, folded)),
                *bias,
            ]
            begins, sizes = [-first for first, _, _ in folded], [size for _, size, _ in folded]
            ends = [size - 1 - begin for begin, size in zip(begins, sizes, strict=True)]
            node.attrs = {
                "kernel_shape": sizes,
                "strides": [1, 1],
                "pads": [*begins, *ends],
                "dilations": [1, 1],
                "group": 1,
            }
    return exported(graph, model)


def _strided(node: Any) -> tuple[np.ndarray, int, list[int]] | None:
    """Return the weight and stride of a convolution that can be folded, and its paddings in front.

    The result is None for any other convolution.
    """
    weight, shape = floats_of(node.inputs[1]), node.inputs[0].shape
    if weight is None or weight.ndim != 4 or weight.shape[1] > MAX_CHANNELS:
        return None
    strides = node.attrs.get("strides", [1])
    if not shape or not _is_plain(node) or len(set(strides)) > 1 or strides[0] == 1:
        return None
    stride, pads = strides[0], list(node.attrs.get("pads", [0] * 4))
    for axis in AXES:
        size, begin, end = shape[axis], pads[axis - 2], pads[axis]
        if (
            not isinstance(size, int)
            or size % stride
            or (size + begin + end - weight.shape[axis]) // stride + 1 != size // stride
        ):
            return None
    return weight, stride, pads[:2]


def _is_plain(node: Any) -> bool:
    """Return True for a convolution with explicit padding, and without groups and dilation."""
    attributes = node.attrs
    return (
        attributes.get("auto_pad", "NOTSET") == "NOTSET"
        and attributes.get("group", 1) == 1
        and set(attributes.get("dilations", [1])) == {1}
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
