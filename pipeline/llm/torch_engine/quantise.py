"""Weights in fewer bits: int8, fp8 and int4, each matrix by itself, without texts."""

from __future__ import annotations

from typing import Literal

import torch

from pipeline.errors import UnsupportedError
from pipeline.llm.torch_engine.network import Matrix, Network

Form = Literal["int8", "fp8", "int4_sym", "int4_asym"]

LARGEST_INT8 = 127
LARGEST_FP8 = float(torch.finfo(torch.float8_e4m3fn).max)
LARGEST_INT4 = 15
MIDDLE = 8
"""The zero point of int4 without one of its own."""

GROUP = 64
CLIPPINGS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Parts of a group's range that four bits may cover: the one with the least squared error is taken.
Smaller ones gain nothing for normally distributed weights.
"""

WORD = 4
"""Values that kernels read at once, at the least."""

MAX_VALUES = 1 << 26
"""Values that are quantised at once: some temporaries of 256 MiB."""


def quantised(
    network: Network, form: Form, group: int = GROUP, device: torch.device | str | None = None
) -> Network:
    """Return the network with all products in fewer bits; embedding and norms stay.

    int4: this number of input values shares a scale, and the output head is int8, because its
    errors go straight into the scores. `device`: where it is computed, unless where the weights
    are. UnsupportedError for a matrix whose inputs are no multiple of the group.
    """

    def made(matrix: Matrix, form: Form = form) -> Matrix:
        return quantised_matrix(matrix, form, group, device)

    layers = tuple(
        layer._replace(
            qkv=made(layer.qkv),
            output=made(layer.output),
            gate_up=made(layer.gate_up),
            down=made(layer.down),
        )
        for layer in network.layers
    )
    head = made(network.logits, "int8" if form in ("int4_sym", "int4_asym") else form)
    return network._replace(layers=layers, logits=head)


def quantised_matrix(
    matrix: Matrix, form: Form, group: int = GROUP, device: torch.device | str | None = None
) -> Matrix:
    """Return a linear layer in fewer bits. UnsupportedError as of `quantised`."""
    weight = matrix.weight
    size = weight.shape[1]
    if form in ("int4_sym", "int4_asym") and size % group:
        raise UnsupportedError(
            f"int4 in groups of {group} needs products of a multiple of {group} inputs, and one of"
            f" this model has {size}",
            "choose another group_size, or int8",
        )
    if size % WORD:
        raise UnsupportedError(
            f"expected products of a multiple of {WORD} inputs for {form}, and one of this model"
            f" has {size}",
            "take bf16",
        )
    found = list[Matrix]()
    for rows in weight.split(max(MAX_VALUES // size, 1)):
        wide = rows.to(device or weight.device).float()
        if form == "int8":
            part = _in_int8(wide)
        elif form == "fp8":
            part = _in_fp8(wide)
        else:
            part = _in_int4(wide, group, weight.dtype, has_zeros=form == "int4_asym")
        found.append(part)
    weights, scales, _, zeros = zip(*found, strict=True)
    return Matrix(
        torch.cat(weights).to(weight.device),
        torch.cat(scales).to(weight.device),
        matrix.bias,
        None if zeros[0] is None else torch.cat(zeros).to(weight.device),
    )


def _in_int8(wide: torch.Tensor) -> Matrix:
    scale = _positive(wide.abs().amax(1) / LARGEST_INT8)
    return Matrix(torch.round(wide / scale[:, None]).to(torch.int8), scale)


def _in_fp8(wide: torch.Tensor) -> Matrix:
    scale = _positive(wide.abs().amax(1) / LARGEST_FP8)
    return Matrix((wide / scale[:, None]).to(torch.float8_e4m3fn), scale)


def _in_int4(wide: torch.Tensor, group: int, dtype: torch.dtype, *, has_zeros: bool) -> Matrix:
    """Scales are rounded to `dtype` before they are used, so that nothing is lost by storing them
    so.
    """
    grouped = wide.view(len(wide), -1, group)
    if has_zeros:
        low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    else:  # the range of codes ends at -8 and 7, of which 7.5 is the mean
        high = grouped.abs().amax(-1)
        low = -high
    scale = torch.zeros_like(high, dtype=dtype)
    zero, codes = torch.zeros_like(high), torch.zeros_like(grouped)
    error = torch.full_like(high, float("inf"))
    for clipping in CLIPPINGS:
        new_scale = _positive(((high - low) * (clipping / LARGEST_INT4)).to(dtype))
        new_zero = torch.full_like(low, MIDDLE)
        if has_zeros:
            new_zero = torch.round(-low * clipping / new_scale).clamp_(0, LARGEST_INT4)
        new_codes = torch.round(grouped / new_scale[..., None] + new_zero[..., None])
        new_codes.clamp_(0, LARGEST_INT4)
        back = (new_codes - new_zero[..., None]) * new_scale[..., None]
        new_error = (back - grouped).square_().sum(-1)
        better = new_error < error
        error = torch.where(better, new_error, error)
        scale = torch.where(better, new_scale, scale)
        zero = torch.where(better, new_zero, zero)
        codes = torch.where(better[..., None], new_codes, codes)
    zeros = zero.to(torch.uint8) if has_zeros else None
    return Matrix(packed(codes.to(torch.uint8)), scale, None, zeros)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes of 4 bits a byte, [out, in / 2], of [out, groups, group] uint8: byte j of a
    group has value j in its low bits, and value j + group / 2 in its high ones.
    """
    low, high = codes.chunk(2, -1)
    return (low | (high << 4)).flatten(1)


def _positive(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp_min(torch.finfo(scale.dtype).tiny)
