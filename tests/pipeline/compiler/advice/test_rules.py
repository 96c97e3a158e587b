"""Each rule on an engine with a known flaw, and on one without it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from pipeline.compiler.advice.rules import (
    Change,
    Subject,
    attention,
    changes_for,
    check_rules,
    narrow_weights,
    one_shape,
    rewrites,
    share_of,
)
from pipeline.compiler.context import open_context
from pipeline.core.recipe import Precision, Recipe
from pipeline.errors import PlanError
from pipeline.execution.stage_runner import Runner
from pipeline.execution.store import Store
from pipeline.onnx_graph.files import onnx_model
from pipeline.onnx_graph.rewrites import Rewrite
from pipeline.plan.files import load_plan, override_plan
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.results.layer_work import LayerWork, Limit
from tests.builders.cli import write_task
from tests.builders.layers import layer, table
from tests.builders.report import engine
from tests.pipeline.onnx_graph.rewrites.graphs import model as named_model

FP32 = Recipe(backend="onnxruntime", precision=Precision.FP32)
ATTENTION = """g (float[batch, 4, 8] q) => (float[batch, 4, 8] o)
  { k = Transpose<perm=[0, 2, 1]>(q)  s = MatMul(q, k)  p = Softmax<axis=-1>(s)
    o = MatMul(p, q) }"""


def subject(
    folder: Path,
    *layers: Layer,
    works: tuple[LayerWork, ...] = (),
    sizes: dict[str, int] | None = None,
    rewritable: dict[Rewrite, tuple[str, ...]] | None = None,
    labels: frozenset[str] = frozenset(),
    overrides: tuple[str, ...] = (),
    graph: str = "",
) -> Subject:
    """Return an engine of the small task with these layers, at batch 4."""
    plan = override_plan(load_plan(write_task(folder / "task")), overrides)
    context = open_context(plan, Runner(Store(folder / "home")))
    if graph:
        (folder / "graph").mkdir()
        onnx.save(named_model(graph, {}), folder / "graph" / "model.onnx")
    model = onnx_model(folder / ("graph" if graph else "task"), "model.onnx")
    made = engine(FP32, 1, folder).model_copy(update={"profiles": context.plan.profiles})
    timed: LayerTable | None = table(*layers) if layers else None
    where = {"batch": 4} if sizes is None else sizes
    return Subject(context, model, made, timed, works, where, rewritable or {}, labels)


def test_a_rewrite_that_fits_is_proposed_until_the_plan_names_it(tmp_path: Path) -> None:
    found = {Rewrite.EARLY_ROWS: ("a", "b"), Rewrite.ALIGNED_PRODUCTS: ()}
    none = ("simplify.rewrites=[]",)
    (change,) = rewrites(subject(tmp_path, rewritable=found, overrides=none))
    assert change.rule == "early_rows"
    assert change.nodes == ("a", "b")
    assert change.how == 'simplify.rewrites=["early_rows"]'
    assert "2 nodes" in change.reason
    named = ('simplify.rewrites=["early_rows"]',)
    both: dict[Rewrite, tuple[str, ...]] = {
        Rewrite.EARLY_ROWS: ("a",),
        Rewrite.MERGED_PRODUCTS: ("c",),
    }
    (other,) = rewrites(subject(tmp_path / "named", rewritable=both, overrides=named))
    assert other.how == 'simplify.rewrites=["early_rows", "merged_products"]'


@pytest.mark.parametrize(("rewrite", "wanted"), [("true", "false"), ("false", "true")])
def test_attention_in_several_kernels_gets_the_other_form(
    tmp_path: Path, rewrite: str, wanted: str
) -> None:
    apart = [
        layer("fp32", nodes=(name,), operators=(operator,), heavy=operator == "MatMul")
        for name, operator in (("s", "MatMul"), ("p", "Softmax"), ("o", "MatMul"))
    ]
    plan = (f"simplify.rewrite_attention={rewrite}",)
    found = subject(tmp_path, *apart, overrides=plan, graph=ATTENTION)
    (change,) = attention(found)
    assert change.how == f"simplify.rewrite_attention={wanted}"
    assert "0 of 1" in change.reason


def test_fused_attention_and_a_model_without_any_get_nothing(tmp_path: Path) -> None:
    whole = layer("fp32", nodes=("s", "p", "o"), operators=("MatMul", "Softmax", "MatMul"))
    assert list(attention(subject(tmp_path, whole, graph=ATTENTION))) == []
    assert list(attention(subject(tmp_path / "none", whole))) == []


def test_a_wide_profile_gets_an_engine_for_one_shape(tmp_path: Path) -> None:
    (change,) = one_shape(subject(tmp_path))
    assert change.overrides == ('profiles=[{"batch": [4, 4, 4]}]',)
    fixed = ("profiles=[{batch: [4, 4, 4]}]",)
    assert list(one_shape(subject(tmp_path / "fixed", overrides=fixed))) == []
    assert list(one_shape(subject(tmp_path / "none", sizes={}))) == []
    assert list(one_shape(subject(tmp_path / "empty", sizes={"batch": 0}))) == []


BOUND = LayerWork(flops=1.0, moved_bytes=100.0, weight_bytes=90.0, least_s=1.0, limit=Limit.MEMORY)


@pytest.mark.parametrize(
    ("work", "is_bound"),
    [
        (BOUND, True),
        (LayerWork(flops=1.0, moved_bytes=100.0, weight_bytes=90.0, limit=Limit.ARITHMETIC), False),
        (LayerWork(flops=1.0, moved_bytes=100.0, weight_bytes=10.0, limit=Limit.MEMORY), False),
    ],
)
def test_products_that_wait_for_their_weights_get_narrow_ones(
    tmp_path: Path, work: LayerWork, is_bound: bool
) -> None:
    changes = [*narrow_weights(subject(tmp_path, layer("fp32", nodes=("m",)), works=(work,)))]
    recipes = [found.recipe for found in changes if found.recipe]
    assert [recipe.activation for recipe in recipes] == ["int8", "float"] * is_bound
    assert all(recipe.weight_only for recipe in recipes)
    assert ['"activation": "int8"' in found.how for found in changes] == [True, False] * is_bound
    measured = frozenset(recipe.label for recipe in recipes)
    layers = layer("fp32", nodes=("m",))
    again = subject(tmp_path / "again", layers, works=(work,), labels=measured)
    assert is_bound == bool(measured)
    assert list(narrow_weights(again)) == [], "the compile has measured them"


def test_a_small_layer_is_not_worth_narrow_weights(tmp_path: Path) -> None:
    small = layer("fp32", 0.01, name="small", nodes=("m",))
    large = layer("fp32", 1.0, name="large", nodes=("n",))
    works = (BOUND, LayerWork(limit=Limit.ARITHMETIC))
    assert list(narrow_weights(subject(tmp_path, small, large, works=works))) == []


def test_rules_are_chosen_by_name(tmp_path: Path) -> None:
    found = subject(tmp_path, rewritable={Rewrite.FOLDED_STRIDES: ("a",)})
    assert [change.rule for change in changes_for(found)] == ["folded_strides", "one_shape"]
    assert [change.rule for change in changes_for(found, ["one_shape"])] == ["one_shape"]
    check_rules(["batch", "early_rows"])
    with pytest.raises(PlanError, match="got 'speed'"):
        check_rules(["speed"])


def test_the_share_of_nodes_is_that_of_the_layers_that_name_them() -> None:
    timed = table(
        layer("fp32", 3.0, name="l", nodes=("a", "b")), layer("fp32", 1.0, name="k", nodes=("c",))
    )
    assert share_of(timed, ("b", "x")) == 0.75
    assert share_of(timed, ("x",)) is None
    assert share_of(timed, ("k",), by_name=True) == 0.25
    assert share_of(None, ("a",)) is None
    assert Change("r", "why", ("a=1", "b=2")).how == "a=1, b=2"
