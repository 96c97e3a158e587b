"""The kernels of quantised weights beside plain torch, on a GPU."""

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.llm.torch_engine.decoder import Decoder
from pipeline.llm.torch_engine.network import Matrix, matrices_of, product, unpacked
from pipeline.llm.torch_engine.products import product_of_rows
from pipeline.llm.torch_engine.quantise import Form, quantised, quantised_matrix
from pipeline.llm.torch_engine.weights import network_of
from tests.pipeline.llm.models import write_model
from tests.pipeline.llm.torch_engine.test_decoder import module_of

pytestmark = [
    pytest.mark.gpu,
    # of torch's own import of inductor
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

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
    torch._dynamo.reset()  # each form and size is compiled anew
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
    for split in (*fused.splits_of(matrix), fused.UNTUNED):
        out = torch.zeros(rows, device="cuda")
        extras = fused.Extras(norm, residual[:rows], gated, epsilon=1e-5)
        fused.multiply(x, matrix, out, split, extras)
        assert (out - wanted).abs().max() < 1e-3 * wanted.abs().max(), split


def test_weights_outlive_the_steps_that_were_recorded(tmp_path: Path) -> None:
    """Scratch of a step that was free again became scales, and the step wrote into them."""
    network = network_of(module_of(write_model(tmp_path)).to("cuda", torch.bfloat16))
    prompt = np.arange(5, 21)
    Decoder(network, 64).generate_together([prompt], 4)
    gc.collect()
    narrow = quantised(network, "int8")
    weights = [part for layer in narrow.layers for each in matrices_of(layer) for part in each]
    kept = [part.clone() for part in weights if part is not None]
    others = [Decoder(each, 64) for each in (network, narrow)]
    for _ in range(20):
        for decoder in others:
            decoder.generate_together([prompt], 32)
            decoder.generate_together([prompt, prompt[::-1].copy()], 8)
    now = [part for part in weights if part is not None]
    assert all(map(torch.equal, now, kept))
