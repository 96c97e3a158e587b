"""Rows run together only where the engine itself gave each row the same answer in all company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from pipeline.benchmark.batch_invariance import Rows, prove_batch, rows_of_specs
from pipeline.core.artifacts import Engine
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import TensorSpec
from pipeline.errors import CrucibleError
from pipeline.execution.child_process import call_in_child
from pipeline.serving_inputs import BatchSpec, Padding
from tests.pipeline.conformance.engines import build
from tests.pipeline.conformance.models import Case, model, profiles_of

BATCH = {"batch": [1, 4, 8]}
WEIGHTS = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
BACKENDS = pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])


def spec(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", shape=shape)


def proved(
    case: Case, folder: Path, padding: tuple[Padding, ...] = (), backend: str = "onnxruntime"
) -> BatchSpec:
    return prove_batch(build(backend, case, folder / "engine"), padding)


def linear(
    inputs: tuple[int | str, ...], outputs: tuple[int | str, ...], **sizes: list[int]
) -> Case:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    proto = model(nodes, [("x", "float32", inputs)], [("z", "float32", outputs)], {"w": WEIGHTS})
    return Case("linear", proto, profiles_of(sizes or BATCH), ())


@BACKENDS
def test_rows_of_a_plain_model_run_together(tmp_path: Path, backend: str) -> None:
    result = proved(linear(("batch", 6), ("batch", 5)), tmp_path, backend=backend)
    assert (result.axes, result.maximum, result.proved, result.reason) == (
        {"x": 0, "z": 0},
        8,
        True,
        "",
    )
    assert result.largest_error is not None
    assert result.largest_error < 1e-5


def test_it_runs_in_a_child(tmp_path: Path) -> None:
    engine = build("onnxruntime", linear(("batch", 6), ("batch", 5)), tmp_path / "engine")
    assert call_in_child(prove_batch, engine, (), name="batch proof") == prove_batch(engine, ())
    engine.path.write_bytes(b"torn")
    with pytest.raises(CrucibleError):
        call_in_child(prove_batch, engine, (), name="batch proof")


def test_rows_may_lie_along_axis_1(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("CumSum", ["y", "first"], ["z"]),
    ]  # over time: only `batch` counts rows
    constants = {"w": WEIGHTS, "first": np.array(0)}
    proto = model(
        nodes,
        [("x", "float32", ("time", "batch", 6))],
        [("z", "float32", ("time", "batch", 5))],
        constants,
    )
    result = proved(
        Case("time first", proto, profiles_of({"time": [1, 4, 6], **BATCH}), ()), tmp_path
    )
    assert (result.axes, result.maximum, result.proved) == ({"x": 1, "z": 1}, 8, True)


def test_a_scalar_is_shared_by_all_rows(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "scale"], ["y"])]
    proto = model(
        nodes,
        [("x", "float32", ("batch", 3)), ("scale", "float32", ())],
        [("y", "float32", ("batch", 3))],
    )
    result = proved(Case("scalar", proto, profiles_of(BATCH), ()), tmp_path)
    assert (result.axes, result.proved) == ({"x": 0, "scale": None, "y": 0}, True)


@pytest.mark.parametrize(("of", "agrees"), [("constant", True), ("x", False)])
def test_an_output_without_rows_must_not_depend_on_them(
    tmp_path: Path, of: str, agrees: bool
) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["y"]),
        helper.make_node("ReduceMean", [of], ["mean"], keepdims=0),
    ]
    outputs = [("y", "float32", ("batch", 3)), ("mean", "float32", ())]
    proto = model(nodes, [("x", "float32", ("batch", 3))], outputs, {"constant": WEIGHTS})
    result = proved(Case("mean", proto, profiles_of(BATCH), ()), tmp_path)
    assert (result.axes["mean"], result.proved) == (None, agrees)
    assert agrees or "differ in output 'mean'" in result.reason


def test_a_model_whose_outputs_have_no_rows_is_not_batched(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=0)],
        [("x", "float32", ("batch", 3))],
        [("mean", "float32", ())],
    )
    result = proved(Case("mean only", proto, profiles_of(BATCH), ()), tmp_path)
    assert result == BatchSpec(
        axes={"x": None, "mean": None},
        reason="inputs and outputs share no symbolic axis that could count rows",
    )


def test_a_scale_taken_over_the_batch_is_found(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["rounded"]),
        helper.make_node("MatMul", ["rounded", "w"], ["z"]),
    ]
    proto = model(
        nodes, [("x", "float32", ("batch", 6))], [("z", "float32", ("batch", 5))], {"w": WEIGHTS}
    )
    result = proved(Case("dynamic", proto, profiles_of(BATCH), ()), tmp_path)
    assert not result.proved
    assert result.maximum == 1
    assert "rows influence each other" in result.reason
    engine = build(
        "onnxruntime", Case("dynamic", proto, profiles_of(BATCH), ()), tmp_path / "as int8"
    )
    recipe = engine.recipe.model_copy(
        update={"precision": Precision.INT8}
    )  # whose tolerance is the widest
    assert not prove_batch(engine.model_copy(update={"recipe": recipe}), ()).proved


def test_a_scale_taken_over_a_batch_of_pixels_is_found(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["values", "mean"], ["centred"]),
        helper.make_node("DynamicQuantizeLinear", ["centred"], ["q", "scale", "zero"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["rounded"]),
        helper.make_node("MatMul", ["rounded", "w"], ["z"]),
    ]
    # so many that each row of random bytes would have the smallest and the largest
    weights = np.random.default_rng(0).standard_normal((4096, 5)).astype(np.float32)
    constants = {"w": weights, "mean": np.array(128, np.float32)}
    proto = model(
        nodes, [("x", "uint8", ("batch", 4096))], [("z", "float32", ("batch", 5))], constants
    )
    case = Case("dynamic", proto, profiles_of(BATCH), ())
    result = proved(case, tmp_path)
    assert not result.proved
    assert "rows influence each other" in result.reason


def test_an_output_that_is_no_number_proves_nothing(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "zero"], ["nothing"]),
        helper.make_node("Div", ["nothing", "nothing"], ["y"]),
    ]
    proto = model(
        nodes,
        [("x", "float32", ("batch", 3))],
        [("y", "float32", ("batch", 3))],
        {"zero": np.array(0, np.float32)},
    )
    result = proved(Case("nan", proto, profiles_of(BATCH), ()), tmp_path)
    assert (result.proved, "no finite value" in result.reason) == (False, True)


@pytest.mark.parametrize(("range_", "message"), [([1, 1, 1], "one row only"), ([4, 4, 4], "")])
def test_a_profile_of_one_size(tmp_path: Path, range_: list[int], message: str) -> None:
    result = proved(linear(("batch", 6), ("batch", 5), batch=range_), tmp_path)
    assert (result.proved, result.maximum) == (not message, range_[2])
    assert message in result.reason


def test_symbols_that_lead_are_tried_first() -> None:
    inputs = (spec("ids", "batch", "length"), spec("mask", "batch", "length"))
    rows = rows_of_specs(inputs, (spec("state", "batch", "length", 8), spec("pooled", "batch", 8)))
    assert rows[0] == Rows("batch", {"ids": 0, "mask": 0, "state": 0, "pooled": 0})
    assert rows[1].axes == {"ids": 1, "mask": 1, "state": 1, "pooled": None}
    assert rows_of_specs((spec("x", "n", "n"),), (spec("y", "n"),)) == ()
    assert rows_of_specs((spec("x", 8, 3),), (spec("y", 8),)) == ()


# -- padding of other axes ---------------------------------------------------

IDS, MASK = Padding(input="ids", axis=1), Padding(input="mask", axis=1)


def encoder(masked: bool) -> Case:
    """Like a sentence encoder: what is looked up, mixed along the length, and its mean over what
    the mask leaves.
    """
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["words"]),
        helper.make_node("Cast", ["mask"], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weights", "last"], ["columns"]),
        helper.make_node("Mul", ["words", "columns" if masked else "one"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "second"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["columns", "second"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["pooled"]),
    ]
    constants = {
        "table": WEIGHTS,
        "last": np.array([2]),
        "second": np.array([1]),
        "one": np.array(1, np.float32),
    }
    inputs = [("ids", "int64", ("batch", "length")), ("mask", "int64", ("batch", "length"))]
    outputs = [("pooled", "float32", ("batch", 5)), ("words", "float32", ("batch", "length", 5))]
    return Case(
        "encoder",
        model(nodes, inputs, outputs, constants),
        profiles_of({**BATCH, "length": [1, 8, 16]}),
        (),
    )


@BACKENDS
def test_mixed_lengths_are_padded_where_a_mask_hides_what_is_added(
    tmp_path: Path, backend: str
) -> None:
    result = proved(encoder(masked=True), tmp_path, (IDS, MASK), backend)
    assert (result.proved, result.padding, result.reason) == (True, (IDS, MASK), "")


@pytest.mark.parametrize(
    ("masked", "padding", "message"),
    [
        (
            False,
            (IDS, MASK),
            (
                "padding is off: row 0 alone with 'length' = 1 and padded to 16 differ in output"
                " 'pooled'"
            ),
        ),
        (
            True,
            (IDS,),
            (
                "padding is off: axis 1 of 'mask' has the size of axis 1 of 'ids', and no padding"
                " is declared for it"
            ),
        ),
        (True, (IDS, MASK.model_copy(update={"value": 1})), "differ in output 'pooled'"),
    ],
)
def test_padding_that_shows_in_the_answer_is_refused_and_rows_still_run_together(
    tmp_path: Path, masked: bool, padding: tuple[Padding, ...], message: str
) -> None:
    result = proved(encoder(masked), tmp_path, padding)
    assert (result.proved, result.maximum, result.padding) == (True, 8, ())
    assert message in result.reason


def test_an_axis_that_is_always_the_same_is_not_padded(tmp_path: Path) -> None:
    result = proved(linear(("batch", 6), ("batch", 5)), tmp_path, (Padding(input="x", axis=1),))
    assert result.reason == "padding is off: axis 1 of 'x' is always 6"


def test_no_padding_where_rows_do_not_run_together(tmp_path: Path) -> None:
    case = linear(("batch", 6), ("batch", 5), batch=[1, 1, 1])
    assert proved(case, tmp_path, (Padding(input="x", axis=1),)).padding == ()


def test_every_precision_has_a_tolerance(tmp_path: Path) -> None:
    engine: Engine = build("onnxruntime", linear(("batch", 6), ("batch", 5)), tmp_path / "engine")
    for precision in Precision:
        assert prove_batch(
            engine.model_copy(
                update={"recipe": Recipe(backend="onnxruntime", precision=precision)}
            ),
            (),
        ).proved


def test_indices_are_proved_by_the_values_beside_them(tmp_path: Path) -> None:
    """Scores of 1, which the other rows of the batch change by less than the tolerance."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "tiny"], ["change"]),
        helper.make_node("Mul", ["x", "zero"], ["none"]),
        helper.make_node("Add", ["none", "one"], ["same"]),
        helper.make_node("Add", ["same", "change"], ["scores"]),
        helper.make_node("TopK", ["scores", "k"], ["z_values", "z_indices"]),
    ]
    constants = {
        "tiny": np.array([1e-6, 0, 0, 0, 0, -1e-6], np.float32),
        "zero": np.array(0, np.float32),
        "one": np.array(1, np.float32),
        "k": np.array([3]),
    }
    values, indices = ("z_values", "float32", ("batch", 3)), ("z_indices", "int64", ("batch", 3))
    x = [("x", "float32", ("batch", 6))]
    both = Case("both", model(nodes, x, [indices, values], constants), profiles_of(BATCH), ())
    assert proved(both, tmp_path / "both").proved
    alone = Case("alone", model(nodes, x, [indices], constants), profiles_of(BATCH), ())
    assert "differ in output 'z_indices'" in proved(alone, tmp_path / "alone").reason
