"""What really ran on a CPU: tables of real engines, the verdict on them, and the rules on what no
engine of this host shows.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from pipeline.backends.onnxruntime import layers as ort_layers
from pipeline.backends.openvino import backend as openvino_
from pipeline.backends.openvino import layers as openvino_layers
from pipeline.backends.openvino.layers import RuntimeLayer, layers_from_runtime, medians
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, Tensors
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.errors import BackendUnavailable, DataError, StoreError
from pipeline.execution.child_process import call_in_child
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.schema import CalibrationConfig
from pipeline.results.layer_table import Layer, LayerTable
from pipeline.results.precision_audit import fusions, mislabelled
from pipeline.stages.build import build
from pipeline.stages.convert import convert
from pipeline.stages.inspect_layers import prove
from tests.builders.convert import ATTENTION, RESIDUAL, model_from_text, ranges_on, table_of
from tests.pipeline.conformance.models import model

OPTIONS = BuildOptions(profiles=(Profile(dims={"N": [1, 4, 8]}),), threads=1)
FEEDS = {"x": np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)}
RANGES = dict.fromkeys(("x", "c1", "c2", "s", "c3", "p", "f", "y"), (-4.0, 4.0)) | dict.fromkeys(
    ("r1", "r2"), (0.0, 4.0)
)
LABELS = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)


@pytest.fixture(params=["onnxruntime", "openvino"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "openvino":
        pytest.importorskip("openvino")
    return str(request.param)


def recipe_of(backend: str, precision: Precision) -> Recipe:
    return Recipe(backend=backend, precision=precision, activation="uint8")


def proven(
    source: OnnxModel,
    recipe: Recipe,
    out: Path,
    feeds: Tensors = FEEDS,
    options: BuildOptions = OPTIONS,
) -> LayerTable:
    out.mkdir()
    table = prove(build(source, recipe, options, out), feeds, source).table
    assert table is not None
    return table


def residual(root: Path, backend: str, precision: Precision) -> OnnxModel:
    source, out = model_from_text(root / "fp32", RESIDUAL), root / "int8"
    out.mkdir()
    return (
        source
        if precision is Precision.FP32
        else convert(source, recipe_of(backend, precision), table_of(RANGES), (), out)
    )


# -- real engines ------------------------------------------------------------


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_real_engine_passes_its_own_label_only(
    tmp_path: Path, backend: str, precision: Precision
) -> None:
    table = proven(
        residual(tmp_path, backend, precision), recipe_of(backend, precision), tmp_path / "engine"
    )
    assert (table.sizes, table.runs >= 3) == ({"N": 4}, True)
    assert {label for label in LABELS if not mislabelled(label, table)} == {precision}
    convolutions = [layer for layer in table.layers if "Conv" in layer.operators]
    assert [(layer.precision, layer.evidence != "none", layer.heavy) for layer in convolutions] == [
        (precision, True, True)
    ] * 3
    assert [layer.nodes[0] for layer in convolutions] == ["conv1", "conv2", "conv3"]
    assert sum(layer.seconds or 0.0 for layer in table.layers) > 0
    assert not [layer for layer in table.layers if layer.precision == "unknown"]


def test_openvino_with_ranges_by_nncf_passes_as_int8_only(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    source = model_from_text(tmp_path / "fp32", RESIDUAL)
    np.savez(
        tmp_path / "set.npz",
        x=np.random.default_rng(0).standard_normal((40, 3, 8, 8)).astype(np.float32),
    )
    samples = open_set(CalibrationSet, (tmp_path / "set.npz",), source.inputs, OPTIONS.profiles)
    recipe, out = (
        Recipe(backend="openvino", precision=Precision.INT8, quantizer="nncf", weight_bits=7),
        tmp_path / "nncf",
    )
    out.mkdir()
    quantized = call_in_child(
        openvino_.quantize_with_nncf,
        source,
        samples,
        recipe,
        CalibrationConfig(samples=30),
        BuildOptions(profiles=()),
        out,
        name="nncf",
    )
    table = proven(quantized, recipe, tmp_path / "engine")
    assert {label for label in LABELS if not mislabelled(label, table)} == {Precision.INT8}


def test_an_fp32_graph_labelled_int8_is_found_out(tmp_path: Path, backend: str) -> None:
    source, recipe, out = (
        residual(tmp_path, backend, Precision.FP32),
        recipe_of(backend, Precision.INT8),
        tmp_path / "engine",
    )
    if backend == "onnxruntime":  # its build believes the label
        table = proven(source.model_copy(update={"precision": Precision.INT8}), recipe, out)
    else:  # whose build reads it back itself and refuses: so the engine, too, is labelled by hand
        out.mkdir()
        honest = build(source, recipe_of(backend, Precision.FP32), OPTIONS, out)
        layers = prove(honest.model_copy(update={"recipe": recipe}), FEEDS, source).table
        assert layers is not None
        table = layers
    assert mislabelled(Precision.INT8, table).startswith(
        "called int8, but its heavy layers run 0 % int8, 100 % fp32 by time; slowest: "
    )


def perceptron(shape: str, hidden: str) -> str:
    """Two matrix products of which the first, `hidden`, is quantised, and what stands between
    them.
    """
    return f"""
<ir_version: 9, opset_import: ["" : 20]>
net (float[{shape}, 16] x) => (float[{shape}, 4] y)
<float[16, 16] w1, float[16] b1, float[16, 4] w2>
{{
    {hidden}
    [classifier] y = MatMul (r, w2)
}}
"""


HIDDEN = {
    "MatMul and Relu": perceptron("N", "[hidden] h = MatMul (x, w1) [relu] r = Relu (h)"),
    "Gemm and Relu": perceptron("N", "[hidden] h = Gemm (x, w1, b1) [relu] r = Relu (h)"),
    "MatMul, bias and Gelu": perceptron(
        "N", "[hidden] h = MatMul (x, w1) [bias] a = Add (h, b1) [gelu] r = Gelu (a)"
    ),
    "a fixed shape": perceptron(
        "4, 5", "[hidden] h = MatMul (x, w1) [bias] a = Add (h, b1) [gelu] r = Gelu (a)"
    ),
    "a sum with the input": perceptron(
        "N", "[hidden] h = MatMul (x, w1) [gelu] g = Gelu (h) [sum] r = Add (g, x)"
    ),
    "two readers": perceptron(
        "N",
        "[hidden] h = MatMul (x, w1) [next] n = MatMul (h, w1) [tanh] t = Tanh (h) [mix] r = Mul"
        " (n, t)",
    ),
}


def hidden_in_int8(root: Path, text: str, feeds: Tensors, activation: str = "uint8") -> LayerTable:
    (root / "int8").mkdir()
    recipe = recipe_of("onnxruntime", Precision.INT8).model_copy(update={"activation": activation})
    source = model_from_text(root / "fp32", text)
    return proven(
        convert(source, recipe, ranges_on(source, feeds), (), root / "int8"),
        recipe,
        root / "engine",
        feeds,
    )


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN.keys())
def test_onnx_runtime_multiplies_in_int8_what_is_quantised(tmp_path: Path, text: str) -> None:
    """The optimiser leaves a product in fp32 that goes to a Relu in floats, that has a float bias
    as a Gemm, or whose readers differ.
    """
    shape = (4, 5, 16) if "4, 5" in text else (4, 16)
    table = hidden_in_int8(
        tmp_path, text, {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    )
    ran = {layer.nodes[0]: layer.precision for layer in table.layers if layer.heavy}
    assert ran.pop("classifier") is Precision.FP32
    assert set(ran.values()) == {Precision.INT8}
    assert "hidden" in ran


@pytest.mark.parametrize(
    ("hidden", "activation"),
    [
        (
            "[hidden] h = Gemm <beta = 0.5> (x, w1, b1) [tanh] r = Tanh (h)",
            "uint8",
        ),  # takes no bias but one of whole numbers
        (
            "[hidden] h = MatMul (x, w1) [relu] r = Relu (h)",
            "int8",
        ),  # the Q does the work of a Relu only if it has no negative numbers
    ],
)
def test_a_product_that_onnx_runtime_does_not_multiply_in_int8_is_told(
    tmp_path: Path, hidden: str, activation: str
) -> None:
    table = hidden_in_int8(
        tmp_path, perceptron("N", hidden), {"x": np.ones((4, 16), np.float32)}, activation
    )
    assert mislabelled(Precision.INT8, table).startswith(
        "called int8, but its heavy layers run 0 % int8, 100 % fp32 by time"
    )


def test_fused_nodes_are_found(tmp_path: Path, backend: str) -> None:
    table = proven(
        residual(tmp_path, backend, Precision.FP32),
        recipe_of(backend, Precision.FP32),
        tmp_path / "engine",
    )
    assert "Conv + Relu in one kernel: 1" in fusions(table)
    (first,) = [layer for layer in table.layers if "conv1" in layer.nodes]
    assert first.nodes == ("conv1", "relu1")


def test_an_encoder_in_fp32_passes(tmp_path: Path, backend: str) -> None:
    source = model_from_text(tmp_path / "model", ATTENTION)
    feeds = {"x": np.ones((2, 6, 8), np.float32), "mask": np.zeros((2, 1, 6), np.float32)}
    options = OPTIONS.model_copy(
        update={"profiles": (Profile(dims={"N": [1, 2, 4], "T": [1, 6, 8]}),)}
    )
    table = proven(source, recipe_of(backend, Precision.FP32), tmp_path / "engine", feeds, options)
    assert mislabelled(Precision.FP32, table) == ""
    assert mislabelled(Precision.INT8, table) != ""
    heavy = {node for layer in table.layers if layer.heavy for node in layer.nodes}
    assert heavy >= {"q", "k", "scores", "mix"}


def test_feeds_of_another_shape_are_refused(tmp_path: Path, backend: str) -> None:
    with pytest.raises(DataError, match="cannot time the layers: input 'x' has rank 2"):
        proven(
            residual(tmp_path, backend, Precision.FP32),
            recipe_of(backend, Precision.FP32),
            tmp_path / "engine",
            {"x": np.ones((4, 3), np.float32)},
        )


def test_an_engine_that_cannot_be_opened_is_an_error(tmp_path: Path, backend: str) -> None:
    out = tmp_path / "engine"
    out.mkdir()
    source = residual(tmp_path, backend, Precision.FP32)
    engine: Engine = build(source, recipe_of(backend, Precision.FP32), OPTIONS, out)
    elsewhere = engine.model_copy(
        update={
            "target": engine.target.model_copy(
                update={"cpu_flags": (*engine.target.cpu_flags, "of_another_cpu")}
            )
        }
    )
    with pytest.raises(BackendUnavailable):
        prove(elsewhere, FEEDS)
    engine.path.write_bytes(b"no model")
    with pytest.raises(StoreError):
        prove(engine, FEEDS)


def test_a_body_is_timed_once_and_not_with_its_loop(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    bodies = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("MatMul", ["x", "x"], [f"y_{name}"], name=f"{name}_product")],
            name,
            [],
            [value(f"y_{name}", 1, [64, 64])],
        )
        for name in ("then", "else")
    }
    choice = helper.make_node("If", ["flag"], ["y"], name="choice", **bodies)
    proto = model(
        [choice], [("flag", "bool", ()), ("x", "float32", (64, 64))], [("y", "float32", (64, 64))]
    )
    (tmp_path / "model").mkdir()
    onnx.save_model(proto, str(tmp_path / "model" / "m.onnx"))
    source = onnx_model(tmp_path / "model", "m.onnx")
    feeds = {"flag": np.array(True), "x": np.ones((64, 64), np.float32)}
    table = proven(
        source,
        recipe_of("onnxruntime", Precision.FP32),
        tmp_path / "engine",
        feeds,
        BuildOptions(profiles=(), threads=1),
    )
    assert {(layer.kind, str(layer.precision), layer.heavy) for layer in table.layers} == {
        ("If", "none", False),
        ("MatMul", "fp32", True),
    }


# -- ONNX Runtime's rules ----------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "inputs", "outputs", "level", "expected"),
    [
        ("Conv", ["fp32", "fp32"], ["fp32"], 0, ("fp32", "types")),
        ("FusedMatMul", ["fp32", "fp32"], ["fp32"], 0, ("fp32", "types")),
        ("MatMul", ["fp16", "fp16"], ["fp16"], 0, ("fp16", "types")),
        ("MatMul", ["double", "double"], ["double"], 0, ("unknown", "types")),
        ("QLinearConv", ["uint8", "fp32", "uint8", "int8"], ["uint8"], 0, ("int8", "tactic")),
        ("DynamicQuantizeMatMul", ["fp32", "int8", "fp32"], ["fp32"], 0, ("int8", "tactic")),
        ("MatMulInteger", ["uint8", "int8"], ["int32"], 0, ("int8", "tactic")),
        ("QLinearAdd", ["uint8", "fp32"], ["uint8"], 0, ("int8", "tactic")),
        ("MatMulNBits", ["fp32", "uint8", "fp32"], ["fp32"], 0, ("fp32", "types")),
        ("MatMulNBits", ["fp32", "uint8", "fp32"], ["fp32"], 4, ("int8", "tactic")),
        ("MaxPool", ["uint8"], ["uint8"], 0, ("int8", "types")),
        ("QuantizeLinear", ["fp32", "fp32", "uint8"], ["uint8"], 0, ("none", "none")),
        ("Cast", ["fp16"], ["fp32"], 0, ("none", "none")),
        ("Shape", ["fp32"], ["int64"], 0, ("integer", "types")),
        ("Add", ["int64", "int64"], ["int64"], 0, ("integer", "types")),
        ("Mystery", [], [], 0, ("unknown", "none")),
    ],
)
def test_a_kernel_of_onnx_runtime(
    operator: str, inputs: list[str], outputs: list[str], level: int, expected: tuple[str, str]
) -> None:
    assert ort_layers.precision_of(operator, inputs, outputs, level) == expected


def event(name: str, start: int, micros: int, operator: str = "") -> dict[str, object]:
    return {
        "name": name,
        "ts": start,
        "dur": micros,
        "args": {"op_name": operator, "input_type_shape": [{"float": [1]}]} if operator else {},
    }


def test_the_profile_gives_medians_after_the_first_runs() -> None:
    events = []
    for run, micros in enumerate((900, 30, 10, 20)):
        start = run * 10_000
        events += [
            event("loop_kernel_time", start, micros + 7, "Loop"),
            event("a_kernel_time", start + 1, micros, "MatMul"),
        ]
        events += [
            event("b_kernel_time", start + 2000, 4, "Add"),
            event("b_kernel_time", start + 2100, 2, "Add"),
            event("model_run", start, 5000),
        ]
    empty = helper.make_graph([], "g", [], [])
    layers = {
        layer.name: layer
        for layer in ort_layers.layers_from_profile(json.dumps(events), empty, empty, 1)
    }
    assert {name: round((layer.seconds or 0.0) * 1e6) for name, layer in layers.items()} == {
        "loop": 7,
        "a": 20,
        "b": 6,
    }


SHARED = """
<ir_version: 9, opset_import: ["" : 20]>
net (float[4] x) => (float[4] z)
{
    [neg] a = Neg (x)
    [abs] b = Abs (a)
    [add] z = Add (a, b)
}
"""


def test_a_kernel_has_no_nodes_that_need_more_than_it_reads() -> None:
    original = onnx.parser.parse_model(SHARED).graph
    graph = helper.make_graph([helper.make_node("Fused", ["x"], ["z"], name="Fused")], "g", [], [])
    assert ort_layers.nodes_by_kernel(graph, original) == {"Fused": ("neg", "abs", "add")}
    unclosed = helper.make_graph(
        [helper.make_node("Fused", ["made_by_the_optimiser"], ["z"], name="add/AddFusion/")],
        "g",
        [],
        [],
    )
    assert ort_layers.nodes_by_kernel(unclosed, original) == {"add/AddFusion/": ("add",)}


# -- OpenVINO's rules --------------------------------------------------------


def ran(
    kind: str,
    precision: str,
    primitive: str,
    inputs: tuple[str, ...] = ("f32",),
    nodes: tuple[str, ...] = (),
) -> Layer:
    layer = RuntimeLayer(
        name="layer",
        kind=kind,
        precision=precision,
        primitive=primitive,
        nodes=nodes,
        inputs=inputs,
        outputs=inputs[:1],
    )
    (result,) = layers_from_runtime([layer], {"layer": 1e-3}, {"product": "MatMul", "sum": "Add"})
    return result


@pytest.mark.parametrize(
    ("layer", "expected", "heavy"),
    [
        (
            ran("Convolution", "bf16", "brgconv_avx512_amx_bf16", ("bf16", "bf16")),
            ("bf16", "tactic"),
            True,
        ),
        (
            ran("FullyConnected", "f16", "brgemm_avx512_core_fp16_amx_f16", ("f16",)),
            ("fp16", "tactic"),
            True,
        ),
        (
            ran("Convolution", "u8", "brgconv_avx512_core_amx_I8", ("u8", "i8")),
            ("int8", "tactic"),
            True,
        ),
        (ran("MatMul", "bf16", "undef", ("f32",)), ("bf16", "types"), True),
        (ran("MatMul", "undef", "undef", ("f32",)), ("unknown", "none"), True),
        (
            ran("Subgraph", "u8", "jit_avx512_I8", ("u8", "f32"), ("product", "sum")),
            ("fp32", "types"),
            True,
        ),
        (ran("Subgraph", "f32", "jit_avx512_f32", ("f32",), ("sum",)), ("fp32", "types"), False),
        (ran("Eltwise", "u8", "jit_avx2_f32", ("f32", "u8")), ("fp32", "types"), False),
        (ran("Pooling", "u8", "jit_avx2_I8", ("u8",)), ("int8", "types"), False),
        (ran("Reorder", "u8", "jit_uni_I8", ("u8",)), ("none", "none"), False),
        (ran("FakeQuantize", "f32", "jit_avx2_f32"), ("none", "none"), False),
        (ran("Eltwise", "i32", "jit_avx2_i32", ("i32",)), ("integer", "types"), False),
        (ran("Mystery", "undef", "undef", ()), ("unknown", "none"), False),
    ],
)
def test_a_layer_of_openvino(layer: Layer, expected: tuple[str, str], heavy: bool) -> None:
    assert ((layer.precision, layer.evidence), layer.heavy) == (expected, heavy)


def test_an_fp32_engine_that_runs_bf16_must_carry_that_name() -> None:
    """As a CPU with AMX would run it without a hint; this host may have no bf16."""
    table = LayerTable(
        sizes={},
        runs=10,
        layers=(ran("Convolution", "bf16", "brgconv_avx512_amx_bf16", ("bf16", "bf16")),),
    )
    assert mislabelled(Precision.FP32, table).startswith(
        "called fp32, but its heavy layers run 0 % fp32, 100 % bf16 by time"
    )
    assert mislabelled(Precision.BF16, table) == ""


def test_openvinos_means_give_each_runs_time_back() -> None:
    runs = [
        {"a": 5000, "b": 3},
        {"a": 40, "b": 3},
        {"a": 60, "b": 3},
        {"a": 9000, "b": 3},
        {"a": 50, "b": 3},
    ]
    means = [
        {name: sum(run[name] for run in runs[:count]) // count for name in runs[0]}
        for count in range(1, 6)
    ]
    times = medians(means, 2)
    assert times["a"] == pytest.approx(60e-6, abs=5e-6)
    assert times["b"] == pytest.approx(3e-6)


def test_a_time_of_no_known_layer_is_not_lost() -> None:
    (lost,) = layers_from_runtime([], {"new": 1e-3}, {})
    assert (lost.name, lost.precision, lost.seconds) == ("new", "unknown", 1e-3)


def test_heavy_layers_are_told_before_they_have_run() -> None:
    layers = [
        RuntimeLayer("a", "Convolution", "f32", "undef"),
        RuntimeLayer("b", "Eltwise", "u8", "undef"),
    ]
    assert openvino_layers.heavy_precisions(layers) == ("f32",)
