"""The product of one request with quantised weights, in Triton.

Weights are read as words of 32 bits, so they take a quarter of the registers until they are used.
A GPU converts integers of 8 bits at a sixteenth of its other rates, which would take longer than
reading them. So their bits are put into those of fp32 numbers, by `and`, `or` and shifts. All sums
are in fp32.
"""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pipeline.llm.torch_engine.kernels import finish

HALF_OF_FP8 = tl.constexpr(2.0**60)


@triton.jit
def quantised_product(
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    rows_out: tl.tensor,
    words: tl.tensor,
    epsilon: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [rows_out] = weight [rows_out, words] @ x, with what the flags add, as `product` does.

    FORM: int8 or fp8, four values a word and a scale [rows_out] each; or int4, eight values, and
    scales (with ZERO zero points, too) [rows_out, groups].
    """
    if OVERLAP:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = rows < rows_out
    columns = tl.max_contiguous(tl.arange(0, COLUMNS), 1)
    GROUP_WORDS: tl.constexpr = GROUP // 8 if GROUP else 1
    row_groups = words // GROUP_WORDS
    gates = rows[:, None].to(tl.int64) * words + columns[None, :]
    ups = gates + rows_out.to(tl.int64) * words
    gate_groups = rows[:, None] * row_groups + (columns // GROUP_WORDS)[None, :]
    up_groups = gate_groups + rows_out * row_groups
    here = exists[:, None] & (columns < words)[None, :]
    part, scales, zeros = fetched(weight, scale, zero, gates, gate_groups, here, GROUP, ZERO)
    other_part, other_scales, other_zeros = part, scales, zeros
    if GATED:
        other_part, other_scales, other_zeros = fetched(
            weight, scale, zero, ups, up_groups, here, GROUP, ZERO
        )
    if OVERLAP:
        gdc_wait()
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    others = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    for begin in range(0, words, COLUMNS):
        after = begin + COLUMNS
        following = exists[:, None] & (after + columns < words)[None, :]
        groups = after // GROUP_WORDS
        next_part, next_scales, next_zeros = fetched(
            weight, scale, zero, gates + after, gate_groups + groups, following, GROUP, ZERO
        )
        places = begin + columns
        inside = places < words
        if GROUP:  # byte j of a group has value j, and value j + GROUP / 2
            values = 4 * (places + places // GROUP_WORDS * GROUP_WORDS)
            low, low_squares = four_of(x, norm, values, inside, NORM)
            high, high_squares = four_of(x, norm, values + GROUP // 2, inside, NORM)
            squares += low_squares + high_squares
            sums = of_int4(sums, part, scales, zeros, low, high, ZERO)
        else:
            low, low_squares = four_of(x, norm, 4 * places, inside, NORM)
            squares += low_squares
            sums = of_bytes(sums, part, low, FORM)
        part, scales, zeros = next_part, next_scales, next_zeros
        if GATED:
            next_part, next_scales, next_zeros = fetched(
                weight, scale, zero, ups + after, up_groups + groups, following, GROUP, ZERO
            )
            if GROUP:
                others = of_int4(others, other_part, other_scales, other_zeros, low, high, ZERO)
            else:
                others = of_bytes(others, other_part, low, FORM)
            other_part, other_scales, other_zeros = next_part, next_scales, next_zeros
    total = tl.sum(sums, 1)
    other = tl.sum(others, 1)
    if NORM:
        size = words * (8 if GROUP else 4)
        shrink = tl.rsqrt(tl.sum(squares, 0) / size + epsilon)
        total *= shrink
        other *= shrink
    if not GROUP:
        total *= tl.load(scale + rows, mask=exists, other=0.0)
        if GATED:
            other *= tl.load(scale + rows_out + rows, mask=exists, other=0.0)
    if FORM == "fp8":
        total *= HALF_OF_FP8
        other *= HALF_OF_FP8
    finish(total, other, bias, residual, out, rows, rows_out, BIAS, RESIDUAL, GATED)


@triton.jit
def fetched(
    weight: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    places: tl.tensor,
    groups: tl.tensor,
    mask: tl.tensor,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
) -> tl.tensor:
    """Words [ROWS, COLUMNS] with the scales and zero points of their groups, or themselves again
    for what there is not.
    """
    part = tl.load(weight + places, mask=mask, other=0)
    scales, zeros = part, part
    if GROUP:
        scales = tl.load(scale + groups, mask=mask, other=0.0)
    if ZERO:
        zeros = tl.load(zero + groups, mask=mask, other=0)
    return part, scales, zeros


@triton.jit
def four_of(
    x: tl.tensor, norm: tl.tensor, places: tl.tensor, inside: tl.tensor, NORM: tl.constexpr
) -> tl.tensor:
    """Four values of `x` from each place on, times the norm's weight, and their squares' sum."""
    fours = places[:, None] + tl.arange(0, 4)[None, :]
    mask = inside[:, None]
    values = tl.load(x + fours, mask=mask, other=0.0).to(tl.float32)
    squares = values * values
    if NORM:
        values *= tl.load(norm + fours, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(values.reshape(values.shape[0], 2, 2))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return (first, second, third, fourth), tl.sum(squares, 1)


@triton.jit
def of_bytes(sums: tl.tensor, part: tl.tensor, values: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Add the products of words [ROWS, COLUMNS] and the values of their four bytes, [COLUMNS] each.

    int8: as the last bits of 2^23, an integer from 0 on needs one subtraction to be a number. fp8:
    the bits of e4m3 in those of fp32 are 2^-120 of its value. `x` takes half of that, which leaves
    it inside of fp32, and the sum the other half.
    """
    if FORM == "int8":
        part ^= -0x7F7F7F80  # 0x80808080: from 0 on
    for number in tl.static_range(4):
        if FORM == "int8":
            bits = ((part >> (8 * number)) & 0xFF) | 0x4B000000
            weights = bits.to(tl.float32, bitcast=True) - (8388608.0 + 128.0)
            sums += weights * values[number][None, :]
        else:
            bits = ((part << (24 - 8 * number)) >> 4) & -0x78100000  # 0x87F00000
            weights = bits.to(tl.float32, bitcast=True)
            sums += weights * (values[number] * HALF_OF_FP8)[None, :]
    return sums


@triton.jit
def of_int4(
    sums: tl.tensor,
    part: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    ZERO: tl.constexpr,
) -> tl.tensor:
    """Add the products of words [ROWS, COLUMNS] and the values of their low and high bits.

    A code becomes the first bits after the point of a number from 1 to 2: 1 + low / 256 and
    1 + high / 16. What that is too much is the same for all rows.
    """
    lows = low[0] + low[1] + low[2] + low[3]
    highs = high[0] + high[1] + high[2] + high[3]
    if ZERO:
        found = -(lows * 256.0 + highs * 16.0)[None, :]
        found -= zeros.to(tl.float32) * (lows + highs)[None, :]
    else:
        found = tl.broadcast_to(-(lows * 264.0 + highs * 24.0)[None, :], part.shape)
    for number in tl.static_range(4):
        bits = part << (15 - 8 * number) if number < 2 else part >> (8 * number - 15)
        one = ((bits & 0x78000) | 0x3F800000).to(tl.float32, bitcast=True)
        other = ((bits & 0x780000) | 0x3F800000).to(tl.float32, bitcast=True)
        found += one * (low[number] * 256.0)[None, :]
        found += other * (high[number] * 16.0)[None, :]
    return sums + found * scales.to(tl.float32)
