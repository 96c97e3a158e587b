"""The arithmetic of int8: scales, zero points and rounding. Pure.

Activations are quantised per tensor, weights per output channel. With s the scale:

    signed    s = max|x| / 127          q = round_half_even(clip(x / s, -128, 127))
    unsigned  s = (high - low) / 255    q = round_half_even(x / s) + z, clipped to 0..255
    7 bits    s = max|w| / 63           q = round_half_even(clip(w / s, -64, 63))

The zero point is 0, but for unsigned values: there low <= 0 <= high, and
z = round_half_even(-low / s).

Seven bits are for x86 CPUs without VNNI: their dot product adds two products of u8 and s8 in 16
bits, which 2 * 255 * 127 overflows and 2 * 255 * 64 does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Integers = NDArray[np.integer[Any]]
Scale = NDArray[np.float32]

MIN_FP16 = 2.0**-24  # a denormal
MAX_FP16 = 65504.0


@dataclass(frozen=True, slots=True)
class Affine:
    """The quantisation x = (q - zero_point) * scale.

    `axis` is the axis of the channels, or None per tensor.
    """

    scale: Scale  # [] or [channels]
    zero_point: Integers  # of the quantised dtype, shaped like scale
    axis: int | None = None
    least: int = -128
    most: int = 127

    def quantize(self, values: Array) -> Integers:
        scale, zero_point = self._along(self.scale, values), self._along(self.zero_point, values)
        rounded = np.rint(values.astype(np.float32) / scale) + zero_point  # half to even
        clipped = np.clip(rounded.astype(np.float64), self.least, self.most)
        return np.asarray(clipped.astype(self.zero_point.dtype))

    def dequantize(self, values: Integers) -> Scale:
        scale, zero_point = self._along(self.scale, values), self._along(self.zero_point, values)
        return np.asarray((values.astype(np.float32) - zero_point) * scale, np.float32)

    def _along(self, parameter: Array, values: Array) -> Scale:
        """Return values as float32, in a shape that fits the channels of `values`."""
        floats = parameter.astype(np.float32)
        if self.axis is None:
            return floats.reshape(parameter.shape)
        return floats.reshape([-1 if dim == self.axis else 1 for dim in range(values.ndim)])


def signed_activation(low: float, high: float, half: bool = False) -> Affine:
    """Return symmetric int8 for values in [low, high]. `half` is that of `weight`."""
    magnitude = max(abs(low), abs(high))
    return Affine(_scale(np.asarray(magnitude / 127), half), np.zeros((), np.int8))


def unsigned_activation(low: float, high: float) -> Affine:
    """Return asymmetric uint8 for values in [low, high].

    The range is widened to contain zero, which padding and Relu need exactly.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    scale = _scale(np.asarray((high - low) / 255), half=False)
    zero_point = np.clip(np.rint(-low / scale.astype(np.float64)), 0, 255)
    return Affine(scale, np.asarray(zero_point, np.uint8), least=0, most=255)


def weight(
    values: Array,
    axis: int | None,
    bits: int = 8,
    half: bool = False,
    floor: NDArray[np.float64] | None = None,
) -> Affine:
    """Return symmetric int8 per channel of `axis` (None: per tensor).

    Scales are at least `floor`. `half` rounds them to float16, for a graph that stores them so. The
    weights are then quantised by the rounded scale.
    """
    most = 2 ** (bits - 1) - 1
    magnitudes = np.abs(values.astype(np.float64))
    if axis is None:
        exact = magnitudes.max() / most
        least_scale = None if floor is None else floor.max()
    else:
        others = tuple(dim for dim in range(values.ndim) if dim != axis)
        exact = magnitudes.max(axis=others) / most
        least_scale = floor
    if least_scale is not None:
        exact = np.maximum(exact, least_scale)
    scale = _scale(exact, half)
    return Affine(scale, np.zeros(scale.shape, np.int8), axis, -most - 1, most)


def bias_floor(bias: Array, activation: Affine) -> NDArray[np.float64]:
    """Return the smallest weight scales at which this bias fits int32.

    A channel of weights near zero would overflow it.
    """
    return np.abs(bias.astype(np.float64)) / (activation.scale.astype(np.float64) * (2**31 - 1024))


def bias_of(activation: Affine, weights: Affine) -> Affine:
    """Return the int32 of a bias that is added to the accumulator of activation times weights."""
    scale = np.atleast_1d(np.asarray(activation.scale * weights.scale, np.float32))
    axis = None if weights.axis is None else 0
    return Affine(scale, np.zeros(scale.shape, np.int32), axis, -(2**31), 2**31 - 1)


def _scale(values: NDArray[np.float64], half: bool) -> Scale:
    """Return float32 scales, never zero or infinite. A tensor of zeros gets scale 1."""
    if half:
        safe = np.where(values == 0, 1.0, np.clip(values, MIN_FP16, MAX_FP16))
        return np.asarray(safe.astype(np.float16), np.float32)
    smallest = float(np.finfo(np.float32).tiny)
    return np.asarray(np.where(values == 0, 1.0, np.clip(values, smallest, None)), np.float32)
