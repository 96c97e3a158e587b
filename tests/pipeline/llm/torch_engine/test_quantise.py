"""Weights in fewer bits beside the ones they come from."""

import pytest
import torch

from pipeline.errors import UnsupportedError
from pipeline.llm.torch_engine.network import Matrix, product, unpacked
from pipeline.llm.torch_engine.quantise import (
    CLIPPINGS,
    LARGEST_INT4,
    Form,
    packed,
    quantised_matrix,
)


def drawn(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("form", ["int4_sym", "int4_asym"])
def test_int4_is_near_and_reads_half_a_byte_a_value(form: Form, group: int) -> None:
    weight = drawn(24, 256)
    matrix = quantised_matrix(Matrix(weight), form, group)
    assert (matrix.weight.shape, matrix.weight.dtype) == ((24, 128), torch.uint8)
    assert matrix.scale is not None
    assert matrix.scale.shape == (24, 256 // group)
    assert (matrix.zero is None) == (form == "int4_sym")
    assert matrix.group == group
    error = (unpacked(matrix) - weight).square().mean().sqrt()
    assert error < 0.12, "a step of 16 in a range of 5 deviations has an error of 0.09"


def test_no_clipping_has_a_smaller_error_than_the_chosen_one() -> None:
    weight = drawn(16, 64)
    chosen = (unpacked(quantised_matrix(Matrix(weight), "int4_sym", 64)) - weight).square().sum(1)
    high = weight.abs().amax(1, keepdim=True)
    for clipping in CLIPPINGS:
        scale = 2 * high * clipping / LARGEST_INT4
        back = (torch.round(weight / scale).clamp(-8, 7)) * scale
        assert bool((chosen <= (back - weight).square().sum(1) * 1.001).all())


def test_values_of_a_group_come_back_in_their_order() -> None:
    codes = torch.arange(128).remainder(16).to(torch.uint8).view(2, 2, 32)
    matrix = Matrix(packed(codes), torch.ones(2, 2), None, torch.zeros(2, 2, dtype=torch.uint8))
    assert torch.equal(unpacked(matrix), codes.flatten(1).float())


@pytest.mark.parametrize("form", ["int8", "fp8", "int4_sym", "int4_asym"])
def test_rows_of_zeros_and_of_one_value_stay(form: Form) -> None:
    weight = torch.stack([torch.zeros(64), torch.full((64,), 0.5), torch.full((64,), -0.5)])
    matrix = quantised_matrix(Matrix(weight), form, 32)
    found = product(torch.eye(64), matrix).T
    assert not found[0].any()
    assert torch.allclose(found, weight, rtol=0.07)


@pytest.mark.parametrize(("form", "limit"), [("int8", 0.01), ("fp8", 0.03), ("int4_asym", 0.1)])
def test_products_with_a_bias_are_near(form: Form, limit: float) -> None:
    weight, bias, x = drawn(40, 128), drawn(1, 40)[0], drawn(3, 128)
    wanted = x @ weight.T + bias
    found = product(x, quantised_matrix(Matrix(weight, bias=bias), form))
    assert found.shape == wanted.shape
    assert (found - wanted).std() / wanted.std() < limit


def test_many_rows_are_quantised_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantised_matrix(Matrix(drawn(10, 64)), "int4_asym", 32)
    monkeypatch.setattr("pipeline.llm.torch_engine.quantise.MAX_VALUES", 3 * 64)
    again = quantised_matrix(Matrix(drawn(10, 64)), "int4_asym", 32)
    assert torch.equal(unpacked(again), unpacked(whole))


@pytest.mark.parametrize(
    ("form", "size", "message"),
    [("int4_sym", 96, "groups of 64 needs products of a multiple of 64"), ("int8", 6, "of 4 ")],
)
def test_sizes_that_no_kernel_reads_are_refused(form: Form, size: int, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        quantised_matrix(Matrix(drawn(4, size)), form)
