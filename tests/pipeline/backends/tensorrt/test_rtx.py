"""TensorRT-RTX builds for a GPU that is not here; nothing below needs one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.backends.tensorrt import parser as trt_parser
from pipeline.backends.tensorrt import rtx as tensorrt_rtx_
from pipeline.core.artifacts import BuildOptions, OnnxModel, Refusal
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, ValueRange
from pipeline.errors import BackendUnavailable, PlanError, UnsupportedError
from pipeline.host.gpu import Gpu, Gpus
from pipeline.onnx_graph.files import onnx_model
from tests.pipeline.backends.tensorrt.builders import Value, save, save_product

FLOAT, INT64, UINT8 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8
PROFILE = Profile(dims={"n": DimRange(min=1, opt=4, max=9)})
OPTIONS = BuildOptions(profiles=(PROFILE,))
RTX_4090 = Gpu(
    name="RTX 4090", compute_capability="8.9", driver="580.65.06", memory_bytes=24 * 2**30
)


def constant(name: str, array: object) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(array), name)


def linear(folder: Path, dtype: int = FLOAT, precision: Precision = Precision.FP32) -> OnnxModel:
    """x float32 [n, 3] -> y float32 [n, 5], multiplied in `dtype`."""
    weight = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
    return save_product(folder, weight, dtype, precision)


def recipe(precision: Precision = Precision.FP32, compute_capability: str | None = "8.9") -> Recipe:
    return Recipe(
        backend="tensorrt_rtx", precision=precision, compute_capability=compute_capability
    )


def refusals(model: OnnxModel) -> tuple[Refusal, ...]:
    return tensorrt_rtx_.unsupported(model, tensorrt_rtx_.probe())


def test_three_unsupported_nodes_are_three_refusals(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu"),
        helper.make_node("Det", ["x"], ["d"], name="determinant"),
        helper.make_node("Fancy", ["a"], ["b"], name="fancy", domain="com.acme"),
        helper.make_node("Tanh", ["b"], ["y"], name="tanh"),
        helper.make_node("BitShift", ["u", "u"], ["v"], name="shift", direction="LEFT"),
    ]
    inputs: list[Value] = [("x", FLOAT, ["n", 3, 3]), ("u", UINT8, ["n"])]
    results = refusals(
        save(
            tmp_path,
            nodes,
            inputs,
            [("y", FLOAT, ["n", 3, 3]), ("d", FLOAT, ["n"]), ("v", UINT8, ["n"])],
        )
    )
    named = [(refusal.node, refusal.operator, refusal.opset) for refusal in results]
    assert named == [
        ("determinant", "Det", 20),
        ("fancy", "com.acme::Fancy", 3),
        ("shift", "BitShift", 20),
    ]
    assert "no importer" in results[0].reason
    assert "no plugin" in results[1].reason
    assert all("onnxruntime" in refusal.remedy for refusal in results)


def test_nodes_at_which_the_parser_would_stop_are_all_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("MatMul", ["x", "w"], ["b"], name="second"),
        helper.make_node("Add", ["x", "half"], ["c"]),
        helper.make_node("Det", ["square"], ["d"], name="determinant"),
        helper.make_node("Relu", ["d"], ["e"], name="after"),
    ]
    inputs: list[Value] = [("x", FLOAT, ["n", 3]), ("square", FLOAT, ["n", 3, 3])]
    outputs: list[Value] = [
        ("a", FLOAT, ["n", 5]),
        ("b", FLOAT, ["n", 5]),
        ("c", FLOAT, ["n", 3]),
        ("e", FLOAT, ["n"]),
    ]
    constants = [
        constant("w", np.ones((4, 5), np.float32)),
        constant("half", np.ones(3, np.float16)),
    ]
    by_node = {
        refusal.node: refusal
        for refusal in refusals(save(tmp_path, nodes, inputs, outputs, constants))
    }
    assert list(by_node) == ["first", "second", "c", "determinant"]
    assert by_node["first"].reason.startswith("last dimension of input0 = 3")
    assert "Cast" in by_node["c"].remedy
    assert not any(
        "CUDA" in refusal.reason or "/_src/" in refusal.reason for refusal in by_node.values()
    )


def test_nodes_inside_branches_are_named_with_their_place(tmp_path: Path) -> None:
    def branch(operator: str, name: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Relu", ["x"], [f"{name}_in"]),
            helper.make_node(operator, [f"{name}_in"], [f"{name}_out"], name=f"{name}_node"),
        ]
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(f"{name}_out", FLOAT, None)]
        )

    choice = helper.make_node(
        "If",
        ["flag"],
        ["y"],
        name="choice",
        then_branch=branch("Det", "yes"),
        else_branch=branch("Unique", "no"),
    )
    inputs: list[Value] = [("x", FLOAT, ["n", 3, 3]), ("flag", TensorProto.BOOL, [])]
    results = refusals(save(tmp_path, [choice], inputs, [("y", FLOAT, ["n"])]))
    assert {(refusal.node, refusal.operator) for refusal in results} == {
        ("choice/yes/yes_node", "Det"),
        ("choice/no/no_node", "Unique"),
    }


def test_nodes_of_one_name_are_all_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["y"], name="same"),
        helper.make_node("Det", ["x"], ["z"], name="same"),
    ]
    results = refusals(
        save(
            tmp_path, nodes, [("x", FLOAT, ["n", 3, 3])], [("y", FLOAT, ["n"]), ("z", FLOAT, ["n"])]
        )
    )
    assert [refusal.node for refusal in results] == ["same", "same"]


def test_nodes_inside_functions_are_named_with_their_place(tmp_path: Path) -> None:
    model = save(
        tmp_path,
        [helper.make_node("Twice", ["x"], ["y"], name="call", domain="com.acme")],
        [("x", FLOAT, ["n", 3, 3])],
        [("y", FLOAT, ["n"])],
    )
    proto = onnx.load(model.path)
    body = [
        helper.make_node("Det", ["a"], ["b"], name="det"),
        helper.make_node("Unique", ["b"], ["c"], name="unique"),
    ]
    proto.functions.append(
        helper.make_function("com.acme", "Twice", ["a"], ["c"], body, [helper.make_opsetid("", 20)])
    )
    onnx.save(proto, model.path)
    assert [(refusal.node, refusal.operator) for refusal in refusals(model)] == [
        ("call/det", "Det"),
        ("call/unique", "Unique"),
    ]


def test_dtypes_that_the_engine_could_not_keep_are_refused_by_name(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Neg", ["x"], ["y"]),
        helper.make_node("Neg", ["small"], ["z"]),
        helper.make_node("Det", ["square"], ["d"], name="det"),
    ]
    inputs: list[Value] = [
        ("x", TensorProto.DOUBLE, ["n"]),
        ("small", TensorProto.INT16, ["n"]),
        ("square", FLOAT, ["n", 3, 3]),
    ]
    outputs: list[Value] = [
        ("y", TensorProto.DOUBLE, ["n"]),
        ("z", TensorProto.INT16, ["n"]),
        ("d", FLOAT, ["n"]),
    ]
    reasons = {
        (refusal.operator, refusal.node): refusal.reason
        for refusal in refusals(save(tmp_path, nodes, inputs, outputs))
    }
    assert {
        ("input", "x"),
        ("input", "small"),
        ("output", "y"),
        ("output", "z"),
        ("Det", "det"),
    } <= set(reasons)
    assert "silently narrow to float32" in reasons["input", "x"]
    assert "int16" in reasons["input", "small"]


@pytest.mark.parametrize(
    "zero_point", [np.array(128, np.uint8), np.array(0, np.uint8), np.array(3, np.int8)]
)
def test_asymmetric_quantisation_is_refused(tmp_path: Path, zero_point: np.ndarray) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], name="quantize"),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], name="dequantize"),
    ]
    constants = [constant("scale", np.float32(0.01)), constant("zero", zero_point)]
    results = refusals(
        save(tmp_path, nodes, [("x", FLOAT, ["n", 3])], [("y", FLOAT, ["n", 3])], constants)
    )
    assert [refusal.node for refusal in results] == ["quantize", "dequantize"]
    assert {refusal.remedy for refusal in results} == {
        "quantise to int8 with zero point 0 (activation: int8)"
    }


def top(folder: Path) -> OnnxModel:
    """The k largest of each row of x float32 [n, 30]."""
    inputs: list[Value] = [("x", FLOAT, ["n", 30]), ("k", INT64, [1])]
    node = helper.make_node("TopK", ["x", "k"], ["values", "indices"])
    return save(
        folder, [node], inputs, [("values", FLOAT, ["n", "m"]), ("indices", INT64, ["n", "m"])]
    )


def test_an_input_whose_values_decide_a_shape_builds_with_its_values(tmp_path: Path) -> None:
    model = top(tmp_path)
    assert refusals(model) == ()
    profile = PROFILE.model_copy(
        update={"values": {"k": ValueRange(min=(1,), opt=(5,), max=(10,))}}
    )
    engine = tensorrt_rtx_.build(model, recipe(), BuildOptions(profiles=(profile,)), tmp_path)
    assert [spec.location for spec in engine.inputs] == ["device", "host"]


def test_a_k_that_no_kernel_has_is_refused(tmp_path: Path) -> None:
    inputs: list[Value] = [("x", FLOAT, ["n", 5000])]
    outputs: list[Value] = [("values", FLOAT, ["n", "m"]), ("indices", INT64, ["n", "m"])]
    node = helper.make_node("TopK", ["x", "k"], ["values", "indices"], name="top")
    found = {}
    for k in (3840, 3841):
        (tmp_path / str(k)).mkdir()
        model = save(tmp_path / str(k), [node], inputs, outputs, [constant("k", np.array([k]))])
        found[k] = [(refusal.node, refusal.reason) for refusal in refusals(model)]
    assert found == {3840: [], 3841: [("top", "its k is 3841, TensorRT's largest is 3840")]}


def test_an_input_whose_values_decide_a_shape_needs_them_in_the_profile(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"input 'k' decides a shape by its values\n  next: give `values: {k: "
    ):
        tensorrt_rtx_.build(top(tmp_path), recipe(), OPTIONS, tmp_path)


@pytest.mark.parametrize(
    ("operator", "domain", "remedy"),
    [
        ("Det", "", "simplifying folds it where its inputs are constant"),
        (
            "Fancy",
            "com.acme",
            (
                "load the library of its plugin (backend tensorrt: `tensorrt.plugins`, or"
                " `--plugin` of inspect)"
            ),
        ),
        ("ImageDecoder", "", "export with opset 19"),
    ],
)
def test_the_remedy_fits_the_operator(
    tmp_path: Path, operator: str, domain: str, remedy: str
) -> None:
    node = helper.make_node(operator, ["x"], ["y"], domain=domain)
    (refusal,) = refusals(
        save(tmp_path, [node], [("x", UINT8, ["n"])], [("y", UINT8, ["n", 3, 3])])
    )
    assert remedy in refusal.remedy


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot open shared object file"),
        (b"no library", "file too short|invalid ELF header"),
    ],
)
def test_a_plugin_library_that_cannot_be_loaded_is_named(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    import tensorrt_rtx

    plugin = tmp_path / "libplugin.so"
    if content is not None:
        plugin.write_bytes(content)
    with pytest.raises(
        PlanError, match=rf"the plugin library '.*libplugin.so' cannot be loaded: .*({reason})"
    ):
        trt_parser.new_builder(tensorrt_rtx, (plugin,))


def test_an_input_passed_through_is_refused(tmp_path: Path) -> None:
    model = save(
        tmp_path,
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", FLOAT, ["n", 3])],
        [("y", FLOAT, ["n", 3]), ("x", FLOAT, ["n", 3])],
    )
    (refusal,) = refusals(model)
    assert (refusal.node, refusal.operator) == ("x", "output")


def test_a_supported_model_has_no_refusals(tmp_path: Path) -> None:
    assert refusals(linear(tmp_path)) == ()


@pytest.mark.parametrize("capability", tensorrt_rtx_.CAPABILITIES)
def test_builds_for_every_generation_without_a_gpu(tmp_path: Path, capability: str) -> None:
    model = linear(tmp_path, TensorProto.FLOAT16, Precision.FP16)
    engine = tensorrt_rtx_.build(model, recipe(Precision.FP16, capability), OPTIONS, tmp_path)
    assert engine.target.compute_capability == capability
    assert engine.target.version == tensorrt_rtx_.probe().version
    assert engine.path.stat().st_size == engine.size_bytes > 0
    assert (engine.inputs, engine.outputs, engine.profiles) == (
        model.inputs,
        model.outputs,
        (PROFILE,),
    )


def test_capabilities_are_those_of_the_library() -> None:
    import tensorrt_rtx

    members = tensorrt_rtx.ComputeCapability.__members__
    assert {f"SM{capability.replace('.', '')}" for capability in tensorrt_rtx_.CAPABILITIES} == set(
        members
    ) - {"NONE", "CURRENT"}


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(TensorProto.FLOAT, "fp32"), (TensorProto.FLOAT16, "fp16"), (TensorProto.BFLOAT16, "bf16")],
)
def test_builds_the_precision_that_the_graph_holds(
    tmp_path: Path, dtype: int, precision: str
) -> None:
    engine = tensorrt_rtx_.build(
        linear(tmp_path, dtype, Precision(precision)),
        recipe(Precision(precision)),
        OPTIONS,
        tmp_path,
    )
    assert (engine.recipe.precision, engine.notes) == (precision, ())


def test_builds_int8_from_symmetric_q_dq(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x_q"]),
        helper.make_node("DequantizeLinear", ["x_q", "scale", "zero"], ["x_d"]),
        helper.make_node("DequantizeLinear", ["w", "scales", "zeros"], ["w_d"], axis=0),
        helper.make_node("Conv", ["x_d", "w_d"], ["y"]),
    ]
    constants = [
        constant("scale", np.float32(0.01)),
        constant("zero", np.int8(0)),
        constant("w", np.arange(288, dtype=np.int64).reshape(8, 4, 3, 3).astype(np.int8)),
        constant("scales", np.full(8, 0.02, np.float32)),
        constant("zeros", np.zeros(8, np.int8)),
    ]
    model = save(
        tmp_path,
        nodes,
        [("x", FLOAT, ["n", 4, 8, 8])],
        [("y", FLOAT, ["n", 8, 6, 6])],
        constants,
        Precision.INT8,
    )
    assert refusals(model) == ()
    assert tensorrt_rtx_.build(model, recipe(Precision.INT8), OPTIONS, tmp_path).size_bytes > 0


def test_every_tensor_kind_of_the_conformance_suite_builds(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["long", "long"], ["long2"]),
        helper.make_node("Mul", ["int", "int"], ["int2"]),
        helper.make_node("Not", ["flag"], ["flag2"]),
        helper.make_node("Cast", ["byte"], ["byte2"], to=FLOAT),
        helper.make_node("Mul", ["byte2", "scalar"], ["scaled"]),
        helper.make_node("ReduceSum", ["long"], ["total"], keepdims=0),
    ]
    kinds = [("long", INT64), ("int", TensorProto.INT32), ("flag", TensorProto.BOOL)]
    inputs: list[Value] = [
        *((name, dtype, ["n"]) for name, dtype in kinds),
        ("byte", UINT8, ["n"]),
        ("scalar", FLOAT, []),
    ]
    outputs: list[Value] = [
        *((f"{name}2", dtype, ["n"]) for name, dtype in kinds),
        ("scaled", FLOAT, ["n"]),
        ("total", INT64, []),
    ]
    model = save(tmp_path, nodes, inputs, outputs)
    assert refusals(model) == ()
    assert tensorrt_rtx_.build(model, recipe(), OPTIONS, tmp_path).notes == ()


def test_several_profiles_and_static_shapes_build(tmp_path: Path) -> None:
    exact = Profile(dims={"n": DimRange(min=16, opt=16, max=16)})
    dynamic = tensorrt_rtx_.build(
        linear(tmp_path), recipe(), BuildOptions(profiles=(PROFILE, exact)), tmp_path
    )
    assert dynamic.profiles == (PROFILE, exact)
    static = save(
        tmp_path,
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, [2, 3])],
    )
    assert tensorrt_rtx_.build(static, recipe(), BuildOptions(profiles=()), tmp_path).size_bytes > 0


def test_weights_in_a_file_beside_the_model_are_read(tmp_path: Path) -> None:
    weight = constant("w", np.ones((64, 64), np.float32))
    model = save(
        tmp_path,
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", FLOAT, ["n", 64])],
        [("y", FLOAT, ["n", 64])],
        [weight],
    )
    engine = tensorrt_rtx_.build(model, recipe(), OPTIONS, tmp_path)
    onnx.save(
        onnx.load(model.path),
        tmp_path / "split.onnx",
        save_as_external_data=True,
        location="split.data",
        size_threshold=0,
    )
    split = onnx_model(tmp_path, "split.onnx")
    assert refusals(split) == ()
    assert tensorrt_rtx_.build(split, recipe(), OPTIONS, tmp_path).digest == engine.digest


def test_float64_inside_the_model_is_noted(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Cast", ["wide"], ["y"], to=FLOAT),
    ]
    model = save(tmp_path, nodes, [("x", FLOAT, ["n"])], [("y", FLOAT, ["n"])])
    (note,) = tensorrt_rtx_.build(model, recipe(), OPTIONS, tmp_path).notes
    assert "float64" in note.text


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            recipe(compute_capability="9.0"),
            (
                r"'9.0'; sm_90 \(H100, H200\) is not an RTX GPU; expected one of 7.5, 8.0, 8.6,"
                r" 8.9, 12.0"
            ),
        ),
        (recipe(compute_capability="sm_89"), "'sm_89'; expected one of 7.5"),
        (recipe(compute_capability=None), "names none\n.*one of 7.5"),
        (recipe(Precision.TF32), "not in tf32"),
        (recipe(Precision.FP16), "the recipe says fp16, the graph is fp32"),
        (
            recipe(compute_capability="7.5"),
            (
                "for compute capability 7.5: Cannot compile operation 'matmul' for Turing .*FP32"
                " GEMM is not supported"
            ),
        ),
    ],
)
def test_an_impossible_recipe_is_refused_by_name(
    tmp_path: Path, recipe: Recipe, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        tensorrt_rtx_.build(linear(tmp_path), recipe, OPTIONS, tmp_path)
    assert not (tmp_path / tensorrt_rtx_.FILE).exists()


def test_what_the_library_warns_of_becomes_a_note(tmp_path: Path) -> None:
    model = save(
        tmp_path,
        [helper.make_node("Expand", ["x", "k"], ["y"])],
        [("x", FLOAT, [1, 3]), ("k", INT64, [2])],
        [("y", FLOAT, ["a", "b"])],
    )
    below_zero = BuildOptions(
        profiles=(Profile(values={"k": ValueRange(min=(-5, 3), opt=(4, 3), max=(8, 3))}),)
    )
    engine = tensorrt_rtx_.build(model, recipe(), below_zero, tmp_path)
    assert any("kMIN values are not self-consistent" in note.text for note in engine.notes), (
        engine.notes
    )


def test_a_symbol_without_a_profile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"input 'x' \['n', 3\] is dynamic, and a profile gives no sizes for n"
    ):
        tensorrt_rtx_.build(linear(tmp_path), recipe(), BuildOptions(profiles=()), tmp_path)


def test_a_node_that_does_not_parse_stops_the_build(tmp_path: Path) -> None:
    model = save(
        tmp_path,
        [helper.make_node("Det", ["x"], ["y"], name="det")],
        [("x", FLOAT, ["n", 3, 3])],
        [("y", FLOAT, ["n"])],
    )
    with pytest.raises(UnsupportedError, match="Det 'det': TensorRT has no importer"):
        tensorrt_rtx_.build(model, recipe(), OPTIONS, tmp_path)


def test_loading_says_what_the_engine_needs_and_what_is_here(tmp_path: Path) -> None:
    engine = tensorrt_rtx_.build(linear(tmp_path), recipe(), OPTIONS, tmp_path)
    with pytest.raises(
        BackendUnavailable,
        match=(
            r"needs an NVIDIA GPU of compute capability 8.9 with driver 580 or later, this host"
            r" has "
        ),
    ):
        tensorrt_rtx_.load(engine)


@pytest.mark.parametrize(
    ("gpus", "ending"),
    [
        (Gpus(reason="no NVIDIA driver"), "this host has none: no NVIDIA driver"),
        (Gpus(devices=(RTX_4090,)), "cannot run TensorRT-RTX engines yet"),
        (
            Gpus(devices=(RTX_4090.model_copy(update={"driver": "535.1"}),)),
            "has RTX 4090 (compute capability 8.9, driver 535.1)",
        ),
        (
            Gpus(devices=(RTX_4090.model_copy(update={"compute_capability": "9.0"}),)),
            "(compute capability 9.0, driver 580.65.06)",
        ),
    ],
)
def test_why_an_engine_does_not_run(gpus: Gpus, ending: str) -> None:
    assert tensorrt_rtx_.why_not_run("8.9", gpus).endswith(ending)
