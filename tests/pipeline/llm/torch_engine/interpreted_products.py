"""Compare the product of few rows with plain torch on a CPU, in Triton's interpreter, and print the
largest errors as JSON, in parts of the largest value. TRITON_INTERPRET must be 1 before Triton is
imported.
"""

from __future__ import annotations

import json

import torch

from pipeline.llm.torch_engine.network import Matrix, product, unpacked
from pipeline.llm.torch_engine.products import product_of_rows, unpacked_by_kernel
from pipeline.llm.torch_engine.quantise import Form, quantised_matrix

FORMS: tuple[tuple[Form, int], ...] = (
    ("int8", 0),
    ("fp8", 0),
    ("int4_sym", 32),
    ("int4_asym", 64),
    ("int4_asym", 128),
)
CHANNELS, INPUTS = 72, 384
"""Neither is a multiple of what a program takes."""


def error_of(form: Form, group: int, rows: int) -> float:
    drawn = torch.Generator().manual_seed(0)
    matrix = quantised_matrix(Matrix(torch.randn(CHANNELS, INPUTS, generator=drawn)), form, group)
    x = torch.randn(rows, INPUTS, generator=drawn)
    assert matrix.scale is not None
    compiled = torch.compile(product_of_rows, fullgraph=True, backend="aot_eager")
    parts = compiled(x, matrix.weight, matrix.scale, matrix.zero)
    assert parts.shape == (2, rows, CHANNELS)
    if group:
        numbers = unpacked_by_kernel(matrix.weight, matrix.scale, matrix.zero)
        assert torch.equal(numbers, unpacked(matrix))
    wanted = product(x, matrix)
    return float((parts.sum(0) - wanted).abs().max() / wanted.abs().max())


def main() -> None:
    found = {
        f"{form} g{group} {rows} rows": error_of(form, group, rows)
        for form, group in FORMS
        for rows in (2, 33)
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
