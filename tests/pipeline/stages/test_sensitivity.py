"""The ranking of nodes on real graphs: int8, fp16 and bf16."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from pipeline.core.recipe import Precision, Recipe
from pipeline.data.samples import SelectionSet, open_set
from pipeline.onnx_graph.activations import observe, open_probe
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.files import load_plan
from pipeline.quantization.sensitivity_graph import lift
from pipeline.results.candidates import NodeRanking
from pipeline.stages.convert import convert
from pipeline.stages.sensitivity import MAX_ERROR, overflows, rank_nodes, relative_error
from tests.builders.cli import overflowing_task
from tests.builders.convert import BF16, FP16, proto_from_text, table_of
from tests.builders.sensitivity import write_broken_task

FLOAT, HALF = np.dtype(np.float32), np.dtype(np.float16)
ONNXRUNTIME = Recipe(backend="onnxruntime", precision=Precision.INT8, activation="uint8")
TENSORRT = Recipe(backend="tensorrt", precision=Precision.INT8)


def ranked(folder: Path, plan: Path, recipe: Recipe, worst: tuple[int, ...] = ()) -> NodeRanking:
    """The nodes of a task's model as a recipe sees them."""
    loaded = load_plan(plan)
    model = onnx_model(folder, "model.onnx")
    samples = open_set(SelectionSet, loaded.data.selection or (), model.inputs, loaded.profiles)
    for subfolder in ("low", "rank"):
        (folder / subfolder).mkdir()
    ranges = observe(open_probe(model), samples.first(128))
    table = (
        table_of({name: (bounds.minimum, bounds.maximum) for name, bounds in ranges.items()})
        if recipe.precision is Precision.INT8
        else None
    )
    low = convert(model, recipe, table, samples.first(4), folder / "low")
    return rank_nodes(model, low, samples, worst, folder / "rank")


def names(ranking: NodeRanking) -> list[str]:
    return [node.node for node in ranking.nodes]


@pytest.mark.parametrize("recipe", [ONNXRUNTIME, TENSORRT], ids=["onnxruntime", "tensorrt"])
def test_every_node_in_8_bits_ranks_by_its_own_error_and_errors_gather(
    tmp_path: Path, recipe: Recipe
) -> None:
    ranking = ranked(tmp_path, write_broken_task(tmp_path, "stretched"), recipe)
    assert names(ranking)[0] == "broken"
    assert {"broken", "first", "third"} <= set(
        names(ranking)
    )  # for ONNX Runtime also what lies between and reads 8 bits
    by_name = {node.node: node for node in ranking.nodes}
    assert by_name["broken"].error > 0.5
    assert by_name["first"].error == pytest.approx(
        by_name["first"].accumulated
    )  # nothing stands before it
    assert by_name["third"].error < 0.1 < by_name["third"].accumulated
    assert not any(node.overflows for node in ranking.nodes)
    assert (
        list((tmp_path / "rank").iterdir()) == []
    )  # a graph with shadows is as large as the model


def test_a_kept_node_does_not_rank_and_what_follows_it_is_no_longer_hurt(tmp_path: Path) -> None:
    ranking = ranked(
        tmp_path,
        write_broken_task(tmp_path, "stretched"),
        ONNXRUNTIME.model_copy(update={"keep_fp32": ("broken",)}),
    )
    assert {"first", "third"} <= set(names(ranking))
    assert "broken" not in names(ranking)
    assert max(node.accumulated for node in ranking.nodes) < 0.1


def test_a_residual_block_ranks_what_computes_and_not_what_moves_bytes(tmp_path: Path) -> None:
    write_residual(tmp_path)
    samples = {"x": np.random.default_rng(2).normal(0, 1, (8, 3, 8, 8)).astype(np.float32)}
    np.savez(tmp_path / "selection.npz", **samples)  # type: ignore[arg-type]
    model = onnx_model(tmp_path, "model.onnx")
    ranges = observe(open_probe(model), [samples])
    (tmp_path / "low").mkdir()
    low = convert(
        model,
        ONNXRUNTIME,
        table_of({name: (bounds.minimum, bounds.maximum) for name, bounds in ranges.items()}),
        (),
        tmp_path / "low",
    )
    opened = open_set(SelectionSet, (tmp_path / "selection.npz",), model.inputs, ())
    ranking = rank_nodes(model, low, opened, (), tmp_path)
    assert sorted(names(ranking)) == [
        "add",
        "conv1",
        "conv2",
        "fc",
    ]  # fc is no int8 node, and reads what is 8 bits
    assert all(0 < node.error < 0.1 for node in ranking.nodes)


def write_residual(folder: Path) -> None:
    text = """
    <ir_version: 9, opset_import: ["" : 20]>
    net (float[N, 3, 8, 8] x) => (float[N, 5] y)
    <float[4, 3, 3, 3] w1, float[4] b1, float[4, 4, 3, 3] w2, float[16, 5] w3>
    {
        [conv1] c1 = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
        [relu1] r1 = Relu (c1)
        [pool] p = MaxPool <kernel_shape = [4, 4], strides = [4, 4]> (r1)
        [conv2] c2 = Conv <pads = [1, 1, 1, 1]> (p, w2)
        [add] s = Add (c2, p)
        [flat] f = Flatten (s)
        [fc] y = Gemm (f, w3)
    }
    """
    onnx.save_model(proto_from_text(text), str(folder / "model.onnx"))


def test_a_model_with_its_own_scales_is_not_ranked_and_says_why(tmp_path: Path) -> None:
    plan = write_broken_task(tmp_path, "stretched")
    ranked(tmp_path, plan, ONNXRUNTIME)
    quantised = onnx_model(tmp_path / "low", "model.onnx", Precision.INT8)
    samples = open_set(
        SelectionSet,
        load_plan(plan).data.selection or (),
        quantised.inputs,
        load_plan(plan).profiles,
    )
    ranking = rank_nodes(quantised, quantised, samples, (), tmp_path)
    assert ranking.nodes == ()
    assert "its own Q/DQ pairs" in ranking.failure


# --- 16 bits ---


def test_what_overflows_ranks_first_and_plain_layers_do_not_rank(tmp_path: Path) -> None:
    ranking = ranked(tmp_path, overflowing_task(tmp_path), FP16)
    assert [node.node for node in ranking.nodes if node.overflows] == [
        "up",
        "wide_relu",
        "down",
        "norm",
    ]  # the norm by its squares
    assert names(ranking) == ["up", "wide_relu", "down", "norm"]
    assert ranking.nodes[0].error == ranking.nodes[0].accumulated == MAX_ERROR
    assert ranking.samples == 128
    assert list((tmp_path / "rank").iterdir()) == []


def test_the_worst_samples_are_looked_at_wherever_they_lie(tmp_path: Path) -> None:
    assert ranked(tmp_path, overflowing_task(tmp_path), FP16, worst=(239,)).samples > 128


def test_bf16_holds_what_overflows_fp16_and_ranks_by_precision(tmp_path: Path) -> None:
    ranking = ranked(tmp_path, overflowing_task(tmp_path), BF16)
    assert "norm" in names(ranking)
    assert not any(node.overflows for node in ranking.nodes)
    assert all(0 < node.error <= node.accumulated < 0.2 for node in ranking.nodes)


@pytest.mark.parametrize(
    ("operator", "largest", "expected"),
    [
        ("MatMul", 20_000, True),
        ("MatMul", 3000, False),
        ("LayerNormalization", 3000, True),
        ("LayerNormalization", 100, False),
    ],
)
def test_a_sum_of_squares_overflows_long_before_its_values(
    operator: str, largest: float, expected: bool
) -> None:
    assert overflows(operator, largest) is expected


def test_all_casts_to_fp16_are_lifted_whatever_attribute_comes_first() -> None:
    casts = [
        helper.make_node("Cast", ["x"], [f"y{number}"], to=TensorProto.FLOAT16)
        for number in range(2)
    ]
    casts[1].attribute.insert(0, helper.make_attribute("saturate", 1))
    graph = helper.make_graph(casts, "casts", [], [])
    lift(proto := helper.make_model(graph))
    assert [helper.get_node_attr_value(node, "to") for node in proto.graph.node] == [
        TensorProto.FLOAT
    ] * 2


def test_the_error_is_relative_and_bounded() -> None:
    exact = np.asarray([3.0, 4.0], np.float32)
    assert relative_error(exact, exact, HALF) == 0.0
    assert relative_error(exact, exact * np.float32(1.25), HALF) == pytest.approx(0.25)
    assert relative_error(exact, exact * np.float32(1e5), HALF) == MAX_ERROR
    assert relative_error(exact, exact * np.float32(1e5), FLOAT) == pytest.approx(1e5, rel=1e-3)
    assert relative_error(exact * 0, exact, HALF) == MAX_ERROR
    assert (
        relative_error(
            np.asarray([np.inf, 1.0], np.float32), np.asarray([np.inf, 1.0], np.float32), HALF
        )
        == 0.0
    )


def test_a_mask_that_rounds_to_minus_infinity_is_no_loss() -> None:
    mask = np.asarray([np.finfo(np.float32).min, 2.0], np.float32)
    assert relative_error(mask, mask, np.dtype(ml_dtypes.bfloat16)) == 0.0
