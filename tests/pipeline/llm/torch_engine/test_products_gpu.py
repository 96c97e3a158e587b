"""The kernels of quantised weights beside plain torch, on a GPU."""

import pytest
import torch

from pipeline.llm.torch_engine.network import Matrix, product, unpacked
from pipeline.llm.torch_engine.products import product_of_rows
from pipeline.llm.torch_engine.quantise import Form, quantised_matrix

pytestmark = pytest.mark.gpu

FORMS = [("int8", 64), ("fp8", 64), ("int4_sym", 32), ("int4_sym", 128), ("int4_asym", 64)]
ROWS = (1, 2, 8, 33, 64)


def drawn(rows: int, size: int) -> torch.Tensor:
    made = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))
    return made.to("cuda", torch.bfloat16)


def numbers_of(matrix: Matrix) -> torch.Tensor:
    """The weights that a quantised matrix stands for, fp64."""
    assert matrix.scale is not None
    if matrix.group:
        on_cpu = (part if part is None else part.cpu() for part in matrix)
        exact = Matrix(*on_cpu)._replace(scale=matrix.scale.double().cpu())
        return unpacked(exact).cuda()
    return matrix.weight.double() * matrix.scale.double()[:, None]


@pytest.mark.parametrize(("form", "group"), FORMS)
@pytest.mark.parametrize(("channels", "size"), [(200, 1152), (4096, 2048)])
def test_few_rows_are_multiplied_as_by_torch(
    form: Form, group: int, channels: int, size: int
) -> None:
    if form == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    matrix = quantised_matrix(Matrix(drawn(channels, size)), form, group)
    assert matrix.scale is not None
    compiled = torch.compile(product, fullgraph=True, dynamic=False)
    for rows in ROWS:
        x = drawn(rows, size)
        wanted = x.double() @ numbers_of(matrix).T
        largest = wanted.abs().max()
        parts = product_of_rows(x, matrix.weight, matrix.scale, matrix.zero)
        assert (parts.sum(0) - wanted).abs().max() < 1e-4 * largest, rows
        again = product_of_rows(x, matrix.weight, matrix.scale, matrix.zero)
        assert torch.equal(parts, again), "sums have one order"
        assert (compiled(x, matrix) - wanted).abs().max() < 1e-2 * largest, rows
    many = drawn(200, size)  # the weights become numbers in memory first
    wanted = many.double() @ numbers_of(matrix).T
    assert (product(many, matrix) - wanted).abs().max() < 1e-2 * wanted.abs().max()


@pytest.mark.parametrize(("form", "group"), FORMS)
@pytest.mark.parametrize("gated", [False, True])
def test_one_row_is_multiplied_as_by_torch(form: Form, group: int, gated: bool) -> None:
    from pipeline.llm.torch_engine import fused

    size, channels = 1152, 200
    weight, bias = drawn(channels, size), drawn(1, channels)[0]
    matrix = quantised_matrix(Matrix(weight, bias=bias), form, group)
    x, norm = drawn(3, size)[0].float(), drawn(2, size)[0]
    residual = drawn(1, channels)[0].float()
    rows = channels // 2 if gated else channels
    shrink = torch.rsqrt(x.double().square().mean() + 1e-5)
    wanted = numbers_of(matrix) @ (x.double() * norm.double() * shrink)
    if gated:
        gate, up = wanted.chunk(2)
        wanted = torch.nn.functional.silu(gate) * up
    else:
        wanted = wanted + bias.double()
    wanted = wanted + residual[:rows].double()
    if gated:
        matrix = matrix._replace(bias=None)
    for split in (*fused.WORD_SPLITS, fused.UNTUNED):
        out = torch.zeros(rows, device="cuda")
        extras = fused.Extras(norm, residual[:rows], gated, epsilon=1e-5)
        fused.multiply(x, matrix, out, split, extras)
        assert (out - wanted).abs().max() < 1e-3 * wanted.abs().max(), split
