"""The product of few rows with quantised weights as an operator of torch: its kernel needs Triton,
which torch.compile does not look into.
"""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

import torch

MAX_ROWS = 64
"""Rows up to which quantised weights are multiplied as they are. Of more, the weights become those
of the activations first, which takes less time than the product itself.
"""

LEAST_ROWS = 16
"""Of a product on tensor cores: fewer rows are filled up."""

FORMS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}

MAX_PARTS = 8
PROGRAMS = 4
"""Programs for each multiprocessor of a GPU that keep enough reads on their way."""

CHANNELS = 64
"""Output channels of a program, about."""

INPUTS_PER_ROW = 16
"""Inputs of a part for each row: sums of parts take less room than the weights, then."""


def parts_of(rows: int, channels: int, size: int, device: torch.device) -> int:
    """Return into how many parts the inputs of a product are split, so that there are enough
    programs.
    """
    if device.type != "cuda":
        return 2
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = PROGRAMS * processors * CHANNELS // channels
    return max(min(int(wanted), size // (INPUTS_PER_ROW * rows), MAX_PARTS), 1)


@torch.library.custom_op("crucible::product_of_rows", mutates_args=())
def product_of_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
) -> torch.Tensor:
    """Return the products of `x` [rows, in] and a quantised matrix, [parts, rows, out] fp32, of
    parts of the inputs: their sum is the product, always in the same order.
    """
    import triton

    from pipeline.llm.torch_engine import row_kernels

    x = x.contiguous()
    rows, size = x.shape
    channels = weight.shape[0]
    is_packed = weight.dtype == torch.uint8
    parts = parts_of(rows, channels, size, x.device)
    out = torch.empty((parts, rows, channels), dtype=torch.float32, device=x.device)
    row_kernels.product_of_rows[lambda chosen: (triton.cdiv(channels, chosen["CHANNELS"]), parts)](
        x,
        weight if is_packed else weight.view(torch.int8),
        scale,
        scale if zero is None else zero,
        out,
        rows,
        channels,
        size,
        ROWS=max(triton.next_power_of_2(rows), LEAST_ROWS),
        FORM=FORMS[weight.dtype],
        GROUP=size // scale.shape[1] if is_packed else 0,
        ZERO=zero is not None,
    )
    return out


@product_of_rows.register_fake
def _shape_of_products(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    rows, size = x.shape
    parts = parts_of(rows, weight.shape[0], size, x.device)
    return x.new_empty((parts, rows, weight.shape[0]), dtype=torch.float32)


@torch.library.custom_op("crucible::unpacked", mutates_args=())
def unpacked_by_kernel(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    """Return weights of int4 as numbers, [out, in] as the scales, in one pass over the memory."""
    import triton

    from pipeline.llm.torch_engine import row_kernels

    channels, groups = scale.shape
    out = scale.new_empty((channels, 2 * weight.shape[1]))
    row_kernels.unpack[(triton.cdiv(channels, CHANNELS), groups)](
        weight,
        scale,
        scale if zero is None else zero,
        out,
        channels,
        groups,
        CHANNELS=CHANNELS,
        GROUP=out.shape[1] // groups,
        ZERO=zero is not None,
    )
    return out


@unpacked_by_kernel.register_fake
def _shape_of_numbers(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> torch.Tensor:
    return scale.new_empty((weight.shape[0], 2 * weight.shape[1]))
