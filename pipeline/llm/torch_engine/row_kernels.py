"""Products of 2 to 64 rows with quantised weights, in Triton: on the way to the tensor cores,
weights become numbers in registers, so memory is read for their bits only.

Rows are the columns of the product, because they are few: a GPU multiplies 64 rows of weights at
once. All sums are in fp32.
"""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl


def tile(channels: int, inputs: int, warps: int, stages: int) -> triton.Config:
    """Return what one program multiplies at once. `inputs`: of int8 and fp8; int4: one group.
    `stages`: turns whose weights are on their way.
    """
    sizes = {"CHANNELS": channels, "INPUTS": inputs}
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


TILES = (
    tile(32, 256, 2, 4),
    tile(32, 128, 2, 6),
    tile(64, 128, 4, 5),
    tile(64, 256, 4, 3),
    tile(16, 256, 1, 4),
    tile(128, 128, 8, 4),
)
"""The fastest one is measured for each size. A CPU, in Triton's interpreter, has nothing to
measure.
"""


@triton.autotune(
    configs=list(TILES if torch.cuda.is_available() else TILES[:1]),
    key=["channels", "size", "ROWS", "FORM"],
    do_bench=partial(triton.testing.do_bench, warmup=5, rep=20),
)
@triton.jit
def product_of_rows(
    x: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    channels: tl.tensor,
    size: tl.tensor,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
) -> None:
    """out [parts, rows, channels] fp32 = x [rows, size] @ weight [channels, size], of parts of the
    inputs. A turn takes INPUTS of them, or a group.
    """
    part = tl.program_id(1)
    columns = tl.arange(0, ROWS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = channel < channels
    is_row = columns < rows
    BYTES: tl.constexpr = GROUP // 2 if GROUP else INPUTS
    width = size // 2 if GROUP else size
    inputs = tl.arange(0, BYTES)
    line = weight + channel.to(tl.int64)[:, None] * width + inputs[None, :]
    sums = tl.zeros([CHANNELS, ROWS], dtype=tl.float32)
    all_turns = tl.cdiv(width, BYTES)
    turns = tl.cdiv(all_turns, tl.num_programs(1))
    last = tl.minimum((part + 1) * turns, all_turns)
    groups = channel * (size // GROUP if GROUP else 1)
    first_group = tl.minimum(part * turns, all_turns - 1) if GROUP else 0
    scales, middle = scales_of(scale, zero, groups + first_group, exists, ZERO)
    for turn in range(part * turns, last):
        inside = turn * BYTES + inputs < width
        codes = tl.load(line + turn * BYTES, mask=exists[:, None] & inside[None, :], other=0)
        # byte j of a group has value j, and value j + GROUP / 2
        first = turn * (GROUP if GROUP else INPUTS)
        here = x + columns[None, :] * size + first + inputs[:, None]
        mask = is_row[None, :] & inside[:, None]
        low = tl.load(here, mask=mask, other=0.0)
        if GROUP:
            high = tl.load(here + BYTES, mask=mask, other=0.0)
            lows = of_four_bits(codes & 15, middle, low.dtype, ZERO)
            highs = of_four_bits(codes >> 4, middle, low.dtype, ZERO)
            found = tl.dot(lows, low, input_precision="ieee")
            found = tl.dot(highs, high, found, input_precision="ieee")
            sums += found * scales.to(tl.float32)[:, None]
            following = tl.minimum(turn + 1, last - 1)
            scales, middle = scales_of(scale, zero, groups + following, exists, ZERO)
        else:
            sums = tl.dot(of_bytes(codes, FORM, low.dtype), low, sums, input_precision="ieee")
    if not GROUP:
        sums *= scales[:, None]
    place = out + (part * rows + columns)[None, :] * channels + channel[:, None]
    tl.store(place, sums, mask=exists[:, None] & is_row[None, :])


@triton.jit
def scales_of(
    scale: tl.tensor,
    zero: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    ZERO: tl.constexpr,
) -> tl.tensor:
    """Scales of channels, and their codes of zero. They are loaded a turn ahead by hand: Triton
    does that for loads of 4 bytes or more only.
    """
    scales = tl.load(scale + at, mask=mask, other=0.0)
    middle = scales
    if ZERO:
        middle = tl.load(zero + at, mask=mask, other=0)
    return scales, middle


@triton.jit
def of_four_bits(
    codes: tl.tensor, middle: tl.tensor, dtype: tl.constexpr, ZERO: tl.constexpr
) -> tl.tensor:
    """Codes from 0 to 15 [CHANNELS, BYTES] less that of zero, exact. As the last bits of 128 in
    bf16, which are its ones, they need no slow conversion.
    """
    if dtype == tl.bfloat16:
        numbers = (codes.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        if ZERO:
            return numbers - (middle.to(tl.float32) + 128.0).to(tl.bfloat16)[:, None]
        return numbers - tl.full([1, 1], 136.0, tl.bfloat16)
    if ZERO:
        return codes.to(dtype) - middle.to(dtype)[:, None]
    return codes.to(dtype) - tl.full([1, 1], 8.0, dtype)


@triton.jit
def of_bytes(codes: tl.tensor, FORM: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Values of int8 or of the bits of fp8, exact. fp8 becomes fp32 first: the direct way to bf16
    has a slow instruction.
    """
    if FORM == "int8":
        return codes.to(dtype)
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def unpack(
    weight: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    groups: tl.tensor,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
) -> None:
    """out [channels, groups x GROUP] = int4 as numbers, a group of some channels."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    group = tl.program_id(1)
    mask = (channel < channels)[:, None]
    half = tl.arange(0, GROUP // 2)
    at = channel.to(tl.int64) * groups + group
    codes = tl.load(weight + at[:, None] * (GROUP // 2) + half[None, :], mask=mask, other=0)
    scales, middle = scales_of(scale, zero, at, channel < channels, ZERO)
    lows = of_four_bits(codes & 15, middle, scales.dtype, ZERO) * scales[:, None]
    highs = of_four_bits(codes >> 4, middle, scales.dtype, ZERO) * scales[:, None]
    place = out + at[:, None] * GROUP + half[None, :]
    tl.store(place, lows.to(out.dtype.element_ty), mask=mask)
    tl.store(place + GROUP // 2, highs.to(out.dtype.element_ty), mask=mask)
