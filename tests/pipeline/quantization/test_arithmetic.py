"""The arithmetic of int8, against the formulas by hand."""

import numpy as np
import pytest

from pipeline.quantization.arithmetic import (
    bias_floor,
    bias_of,
    signed_activation,
    unsigned_activation,
    weight,
)


def test_signed_activation_follows_the_formula() -> None:
    affine = signed_activation(-2.0, 6.35)
    assert affine.scale == np.float32(6.35 / 127)  # s = max|x| / 127 = 0.05
    values = np.array([0.0, 0.05, 0.126, -2.0, 6.35, 7.0, -7.0], np.float32)
    assert affine.quantize(values).tolist() == [0, 1, 3, -40, 127, 127, -128]
    assert affine.quantize(values).dtype == np.int8
    assert affine.zero_point == 0


def test_rounding_is_half_to_even() -> None:
    affine = signed_activation(-127.0, 127.0)  # s = 1
    assert affine.quantize(np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)).tolist() == [
        0,
        2,
        2,
        0,
        -2,
        -2,
    ]


def test_unsigned_activation_follows_the_formula() -> None:
    affine = unsigned_activation(-1.0, 4.1)
    assert affine.scale == np.float32(5.1 / 255)  # 0.02
    assert affine.zero_point == 50
    assert affine.quantize(np.array([-1.0, 0.0, 0.02, 4.1, 9.0, -9.0], np.float32)).tolist() == [
        0,
        50,
        51,
        255,
        255,
        0,
    ]


@pytest.mark.parametrize(("low", "high", "zero"), [(2.0, 6.0, 0), (-6.0, -2.0, 255), (0.0, 0.0, 0)])
def test_unsigned_range_is_widened_to_hold_zero_exactly(low: float, high: float, zero: int) -> None:
    affine = unsigned_activation(low, high)
    assert affine.zero_point == zero
    assert affine.dequantize(affine.quantize(np.zeros(1, np.float32))).tolist() == [0.0]


def test_weights_are_quantised_per_channel() -> None:
    values = np.array([[1.27, -0.635], [0.0, 0.0], [12.7, 0.1]], np.float32)
    affine = weight(values, axis=0)
    assert affine.scale == pytest.approx([0.01, 1.0, 0.1])
    assert affine.quantize(values).tolist() == [[127, -64], [0, 0], [127, 1]]  # -63.5 to even
    assert weight(values, axis=1).scale == pytest.approx([0.1, 0.005])
    assert weight(values, axis=None).scale.shape == ()


def test_seven_bit_weights_stay_within_64() -> None:
    values = np.array([[0.63, -0.63, 0.2]], np.float32)
    affine = weight(values, axis=0, bits=7)
    assert affine.scale == pytest.approx([0.01])
    assert affine.quantize(values).tolist() == [[63, -63, 20]]
    assert affine.quantize(values * 9).tolist() == [[63, -64, 63]]


def test_half_scales_survive_float16_and_weights_use_them() -> None:
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32) * 1e-3
    affine = weight(values, axis=0, half=True)
    assert np.array_equal(affine.scale, affine.scale.astype(np.float16).astype(np.float32))
    error = np.abs(affine.dequantize(affine.quantize(values)) - values).max(axis=1)
    assert (error <= affine.scale).all()


def test_a_channel_of_dead_weights_does_not_overflow_its_bias() -> None:
    values, bias = np.array([[1e-20], [1.0]], np.float32), np.array([3.0, 3.0], np.float32)
    activation = unsigned_activation(0.0, 255.0)
    weights = weight(values, axis=0, floor=bias_floor(bias, activation))
    integer = bias_of(activation, weights)
    assert integer.dequantize(integer.quantize(bias)) == pytest.approx([3.0, 3.0])
    assert weights.scale[1] == np.float32(1 / 127)
