"""The classes of operators, and the parts of a run, against counting by hand."""

from __future__ import annotations

import pytest

from pipeline.results.time_shares import (
    OperatorClass,
    Overhead,
    class_of,
    overhead,
    scaled,
    time_by_class,
)
from tests.builders.layers import layer, table
from tests.builders.report import benchmark


@pytest.mark.parametrize(
    ("operators", "heavy", "precision", "expected"),
    [
        (("MatMul", "Add"), True, "fp32", OperatorClass.PRODUCT),
        (("Add", "LayerNormalization"), False, "fp32", OperatorClass.NORMALISATION),
        (("Softmax",), False, "fp32", OperatorClass.NORMALISATION),
        (("Add", "Reshape", "Relu"), False, "fp32", OperatorClass.ELEMENTWISE),
        (("Transpose", "Reshape"), False, "fp32", OperatorClass.LAYOUT),
        (("Relu",), False, "none", OperatorClass.LAYOUT),
        (("TopK",), False, "fp32", OperatorClass.OTHER),
        (("", ""), False, "unknown", OperatorClass.OTHER),
        ((), False, "fp32", OperatorClass.OTHER),
    ],
)
def test_a_layer_has_the_first_class_that_fits(
    operators: tuple[str, ...], heavy: bool, precision: str, expected: OperatorClass
) -> None:
    nodes = tuple(f"n{index}" for index in range(len(operators)))
    found = layer(precision, 1.0, nodes=nodes, operators=operators, heavy=heavy)
    assert class_of(found) is expected


def test_a_layer_without_operators_has_the_class_of_its_kind() -> None:
    kinds = {
        "MVN": OperatorClass.NORMALISATION,
        "Eltwise": OperatorClass.ELEMENTWISE,
        "Pooling": OperatorClass.OTHER,
    }
    for kind, expected in kinds.items():
        found = layer("fp32", 1.0, nodes=("n",), operators=("",), kind=kind, heavy=False)
        assert class_of(found) is expected


def test_shares_of_all_classes_add_up_to_one() -> None:
    layers = (
        layer("fp32", 3.0, nodes=("a",), operators=("MatMul",)),
        layer("none", 1.0, nodes=("b",), heavy=False),
        layer("fp32", None, nodes=("c",), operators=("Relu",), heavy=False),
    )
    shares = time_by_class(layers)
    assert shares[OperatorClass.PRODUCT] == 0.75
    assert shares[OperatorClass.LAYOUT] == 0.25
    assert sum(shares.values()) == 1.0
    assert list(shares) == list(OperatorClass)
    assert time_by_class(layers[2:]) == {}


def test_times_that_profiling_made_longer_are_scaled_and_gaps_are_not() -> None:
    slow = Overhead(wall_s=10.0, compute_s=8.0, kernels_s=16.0)
    assert (slow.host_s, slow.gaps_s, slow.factor) == (2.0, -8.0, 0.5)
    gap = Overhead(wall_s=10.0, compute_s=8.0, kernels_s=6.0)
    assert (gap.gaps_s, gap.factor) == (2.0, 1.0)
    timed = table(layer("fp32", 4.0, nodes=("a",)), layer("fp32", None, nodes=("b",)))
    assert [each.seconds for each in scaled(timed, 0.5).layers] == [2.0, None]
    assert scaled(timed, 1.0) is timed


def test_the_overhead_is_known_at_the_sizes_of_the_layers_only() -> None:
    rows = benchmark("e", 2.0, None).rows
    timed = table(layer("fp32", 1e-3, nodes=("a",))).model_copy(update={"sizes": rows[0].sizes})
    found = overhead(timed, rows)
    assert found is not None
    assert found.wall_s == rows[0].end_to_end.median_s
    assert found.kernels_s == 1e-3
    assert overhead(timed.model_copy(update={"sizes": {"batch": 99}}), rows) is None
    assert overhead(timed.model_copy(update={"layers": ()}), rows) is None
