"""Triton kernels that make one token of one request: vectors instead of matrices.

Each reads its weights once, in long rows. Norms come before a product and scale its result, so no
kernel is needed for them: `sum(w * (n * x)) / rms(x)`. All sums are in fp32.

OVERLAP: the next kernel begins while this one still runs, and waits before it reads what this one
writes (programmatic dependent launch, compute capability 9.0 and later).
"""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def embed(
    tokens: tl.tensor, embedding: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """out [size] fp32 = embedding[tokens[0]]."""
    token = tl.load(tokens)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    row = tl.load(embedding + token * size + columns, mask=inside, other=0.0)
    tl.store(out + columns, row.to(tl.float32), mask=inside)


@triton.jit
def product(
    x: tl.tensor,
    norm: tl.tensor,
    weight: tl.tensor,
    scale: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    rows_out: tl.tensor,
    size: tl.tensor,
    epsilon: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    """out [rows_out] = weight [rows_out, size] @ x [size], with what the flags add.

    GATED: the weight has twice the rows, gates before values, and out = silu(gate) * value. Weights
    of the next turn are on their way while those of this one are used; with OVERLAP, those of the
    first turn are while the kernel before still runs.
    """
    if OVERLAP:
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = rows < rows_out
    columns = tl.arange(0, COLUMNS)
    gates = weight + rows.to(tl.int64)[:, None] * size + columns[None, :]
    ups = gates + rows_out.to(tl.int64) * size
    here = exists[:, None] & (columns < size)[None, :]
    part = tl.load(gates, mask=here, other=0.0)
    other_part = part
    if GATED:
        other_part = tl.load(ups, mask=here, other=0.0)
    if OVERLAP:
        gdc_wait()
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    others = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([COLUMNS], dtype=tl.float32)
    for begin in range(0, size, COLUMNS):
        inside = begin + columns < size
        values = tl.load(x + begin + columns, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(norm + begin + columns, mask=inside, other=0.0).to(tl.float32)
        after = begin + COLUMNS
        following = exists[:, None] & (after + columns < size)[None, :]
        next_part = tl.load(gates + after, mask=following, other=0.0)
        sums += part.to(tl.float32) * values[None, :]
        part = next_part
        if GATED:
            next_part = tl.load(ups + after, mask=following, other=0.0)
            others += other_part.to(tl.float32) * values[None, :]
            other_part = next_part
    total = tl.sum(sums, 1)
    other = tl.sum(others, 1)
    if NORM:
        shrink = tl.rsqrt(tl.sum(squares, 0) / size + epsilon)
        total *= shrink
        other *= shrink
    if SCALE:
        total *= tl.load(scale + rows, mask=exists, other=0.0)
        if GATED:
            other *= tl.load(scale + rows_out + rows, mask=exists, other=0.0)
    finish(total, other, bias, residual, out, rows, rows_out, BIAS, RESIDUAL, GATED)


@triton.jit
def finish(
    total: tl.tensor,
    other: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    rows_out: tl.tensor,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
) -> None:
    """Write the sums of a product with what the flags add."""
    exists = rows < rows_out
    if BIAS:
        total += tl.load(bias + rows, mask=exists, other=0.0).to(tl.float32)
    if GATED:
        total = total * tl.sigmoid(total) * other
    if RESIDUAL:
        total += tl.load(residual + rows, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + rows, total.to(out.dtype.element_ty), mask=exists)


@triton.jit
def normalised_halves(
    first: tl.tensor,
    second: tl.tensor,
    norm: tl.tensor,
    half: tl.tensor,
    epsilon: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:
    """The two halves of a head, divided by its root mean square, times a weight."""
    mean = (tl.sum(first * first, 0) + tl.sum(second * second, 0)) / (2 * HALF)
    shrink = tl.rsqrt(mean + epsilon)
    first = first * shrink * tl.load(norm + half).to(tl.float32)
    second = second * shrink * tl.load(norm + HALF + half).to(tl.float32)
    return first, second


@triton.jit
def attention(
    qkv: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    positions: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    epsilon: tl.tensor,
    factor: tl.tensor,
    context: tl.tensor,
    HEADS: tl.constexpr,
    CACHE_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One head of queries: rotate, write key and value at the position, attend to all before it.

    qkv [(HEADS + 2 CACHE_HEADS) x head] fp32; keys, values [CACHE_HEADS, context, head]; out
    [HEADS x head]; cosines, sines [context, head]. The heads of a group share a key: the first one
    writes it, and each uses the one that it computed itself.
    """
    if OVERLAP:
        gdc_launch_dependents()
    head = tl.program_id(0)
    shared = head // (HEADS // CACHE_HEADS)
    position = tl.load(positions)
    half = tl.arange(0, HALF)
    whole = tl.arange(0, 2 * HALF)
    cosine = tl.load(cosines + position * 2 * HALF + half)
    sine = tl.load(sines + position * 2 * HALF + half)
    if OVERLAP:
        gdc_wait()
    query = qkv + head * 2 * HALF
    first, second = tl.load(query + half), tl.load(query + HALF + half)
    key = qkv + (HEADS + shared) * 2 * HALF
    key_first, key_second = tl.load(key + half), tl.load(key + HALF + half)
    if NORMS:
        first, second = normalised_halves(first, second, query_norm, half, epsilon, HALF)
        key_first, key_second = normalised_halves(
            key_first, key_second, key_norm, half, epsilon, HALF
        )
    turned_first = (first * cosine - second * sine) * factor
    turned_second = (second * cosine + first * sine) * factor
    new_first = (key_first * cosine - key_second * sine).to(keys.dtype.element_ty)
    new_second = (key_second * cosine + key_first * sine).to(keys.dtype.element_ty)
    value = tl.load(qkv + (HEADS + CACHE_HEADS + shared) * 2 * HALF + whole)
    value = value.to(values.dtype.element_ty)
    base = shared * context * 2 * HALF
    if head % (HEADS // CACHE_HEADS) == 0:
        tl.store(keys + base + position * 2 * HALF + half, new_first)
        tl.store(keys + base + position * 2 * HALF + HALF + half, new_second)
        tl.store(values + base + position * 2 * HALF + whole, value)
    highest = tl.sum(
        turned_first * new_first.to(tl.float32) + turned_second * new_second.to(tl.float32), 0
    )
    seen = value.to(tl.float32)
    weights = highest * 0.0 + 1.0
    for begin in range(0, position, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < position
        rows = base + columns[:, None] * 2 * HALF
        mask = inside[:, None]
        part_first = tl.load(keys + rows + half[None, :], mask=mask, other=0.0)
        part_second = tl.load(keys + rows + HALF + half[None, :], mask=mask, other=0.0)
        part_values = tl.load(values + rows + whole[None, :], mask=mask, other=0.0)
        scores = tl.sum(
            part_first.to(tl.float32) * turned_first[None, :]
            + part_second.to(tl.float32) * turned_second[None, :],
            1,
        )
        scores = tl.where(inside, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 0))
        shrink = tl.exp(highest - higher)
        shares = tl.exp(scores - higher)
        seen = seen * shrink + tl.sum(shares[:, None] * part_values.to(tl.float32), 0)
        weights = weights * shrink + tl.sum(shares, 0)
        highest = higher
    tl.store(out + head * 2 * HALF + whole, (seen / weights).to(out.dtype.element_ty))


@triton.jit
def best_of_parts(
    scores: tl.tensor,
    best: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Of each block of scores [size]: the largest, its place, the sum of exp(score - largest)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.program_id(0)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(scores + columns, mask=columns < size, other=float("-inf"))
    highest = tl.max(found, 0)
    tl.store(best + part, highest)
    tl.store(places + part, part * BLOCK + tl.argmax(found, 0))
    tl.store(sums + part, tl.sum(tl.exp(found - highest), 0))


@triton.jit
def choice(
    best: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,
    log_probs: tl.tensor,
    positions: tl.tensor,
    parts: tl.tensor,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Write the likeliest token and its log-probability, and move the position on."""
    if OVERLAP:
        gdc_wait()
    columns = tl.arange(0, BLOCK)
    inside = columns < parts
    found = tl.load(best + columns, mask=inside, other=float("-inf"))
    highest = tl.max(found, 0)
    part = tl.argmax(found, 0)
    total = tl.sum(tl.load(sums + columns, mask=inside, other=0.0) * tl.exp(found - highest), 0)
    tl.store(tokens, tl.load(places + part).to(tl.int64))
    tl.store(log_probs, -tl.log(total))
    tl.store(positions, tl.load(positions) + 1)
