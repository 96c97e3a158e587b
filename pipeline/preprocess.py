"""Preprocessing of images, as the plan declares it: the raw inputs, and the steps in numpy.

The steps in numpy stand before the reference. They share no code with the graph
(`onnx_graph/processing.py`) and with the PyTorch module (`backends/pytorch/preprocessing.py`)
that are compared with them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pipeline.core.processing import Preprocess
from pipeline.core.shapes import Dim, Tensors, TensorSpec
from pipeline.errors import PlanError

Steps = Mapping[str, Preprocess]
"""The preprocessing by input. Inputs that are not named come in as the model takes them."""

Floats = NDArray[np.float32]
KEY = "preprocess"
NODE_PREFIX = "plan_preprocess/"
"""Prefix of the names of the nodes and values in a graph, so that they differ from all others."""

COLOURS = 4  # most channels of an image with colours and transparency


# --- the raw inputs ---


def raw_specs(inputs: tuple[TensorSpec, ...], steps: Steps) -> tuple[TensorSpec, ...]:
    """Return the inputs of the engine: images as uint8 [N, H, W, C], the others unchanged.

    PlanError if the steps name an unknown input or do not fit its dtype, rank, channels or size.
    """
    names = [spec.name for spec in inputs]
    for name in steps:
        if name not in names:
            raise PlanError(
                f"{KEY} names '{name}', which is no input; the model has {', '.join(names)}",
                "name one of these",
            )
    return tuple(
        _raw_spec(spec, steps[spec.name]) if spec.name in steps else spec for spec in inputs
    )


def _raw_spec(spec: TensorSpec, step: Preprocess) -> TensorSpec:
    shown = f"input '{spec.name}' is {spec.dtype} [{', '.join(map(str, spec.shape))}]"
    if spec.dtype != "float32" or len(spec.shape) != 4:
        raise PlanError(
            f"{KEY}.{spec.name}: {shown}, expected float32 with 4 axes",
            f"leave '{spec.name}' out of `{KEY}`: it is for batches of images",
        )
    channels = _check_channels(f"{KEY}.{spec.name}", shown, step, spec.shape)
    size = spec.shape[2:] if step.layout == "NCHW" else spec.shape[1:3]
    if step.resize:
        if size != step.resize.target:
            raise PlanError(
                f"{KEY}.{spec.name}.resize.target is {list(step.resize.target)}, {shown}, in"
                f" {step.layout} an image of [{', '.join(map(str, size))}]",
                "give the height and width of the model's input, which must be fixed",
            )
        size = step.resize.source
    return spec.model_copy(update={"dtype": "uint8", "shape": (spec.shape[0], *size, channels)})


def _check_channels(where: str, shown: str, step: Preprocess, shape: tuple[Dim, ...]) -> Dim:
    """Return the channels. PlanError unless the layout and the numbers of each channel fit."""
    channels, other = shape[1], shape[3]
    if step.layout == "NHWC":
        channels, other = other, channels
    if not isinstance(channels, int) or (channels > COLOURS and other in range(1, COLOURS + 1)):
        raise PlanError(
            f"{where}: {shown}; in {step.layout}, axis {step.layout.index('C')} holds the channels,"
            f" and that is {channels}",
            "correct `layout`: it is the layout of the model's input, with a fixed number of"
            " channels",
        )
    for key, numbers in (("mean", step.mean), ("std", step.std)):
        if len(numbers) not in (1, channels):
            raise PlanError(
                f"{where}.{key} has {len(numbers)} numbers, and {shown}: {channels} channels in"
                f" {step.layout}",
                "give one number for each channel, or one for all",
            )
    return channels


def steps_in_words(step: Preprocess) -> str:
    """Return the steps in their order: "cast to float32, x 0.003922, - [0.5], / [0.5], ..."."""
    words = ["cast to float32"]
    if step.resize:
        (height, width), (new_height, new_width) = step.resize.source, step.resize.target
        words.append(
            f"resize from {height} x {width} to {new_height} x {new_width}"
            f" ({step.resize.filter}, not antialiased)"
        )
    words.append(f"x {step.scale:.6g}")
    if any(step.mean):
        words.append(f"- {list(step.mean)}")
    if set(step.std) != {1.0}:
        words.append(f"/ {list(step.std)}")
    if step.layout == "NCHW":
        words.append("transpose to NCHW")
    return ", ".join(words)


def inverse_in_numpy(name: str, step: Preprocess) -> str:
    """Return an expression that makes raw images of preprocessed ones, for messages."""
    image = f"{name}.transpose(0, 2, 3, 1)" if step.layout == "NCHW" else name
    scaled = f"({image} * {list(step.std)} + {list(step.mean)}) / {step.scale}"
    return f"numpy.rint({scaled}).astype('uint8')"


# --- the steps in numpy ---


def preprocessed(feeds: Tensors, steps: Steps) -> Tensors:
    """Return the feeds that the model itself takes, from raw ones."""
    return {
        name: _values_of(array, steps[name]) if name in steps else array
        for name, array in feeds.items()
    }


def _values_of(raw: NDArray[np.generic], step: Preprocess) -> Floats:
    values = raw.astype(np.float32)  # [N, H, W, C]
    if step.resize:
        for axis, size in enumerate(step.resize.target, start=1):
            values = _resized(values, axis, size)
    values = values * np.float32(step.scale) - np.array(step.mean, np.float32)
    values /= np.array(step.std, np.float32)
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if step.layout == "NCHW" else values


def _resized(values: Floats, axis: int, size: int) -> Floats:
    """Interpolate linearly along one axis. Outside the outermost centres, pixels are repeated."""
    length = values.shape[axis]
    centres = np.clip((np.arange(size) + 0.5) * length / size - 0.5, 0, length - 1)
    before = centres.astype(np.intp)
    after = np.minimum(before + 1, length - 1)
    shape = [size if number == axis else 1 for number in range(values.ndim)]
    share = (centres - before).astype(np.float32).reshape(shape)
    mixed: Floats = values.take(before, axis) * (1 - share) + values.take(after, axis) * share
    return mixed
