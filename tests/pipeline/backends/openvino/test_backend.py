import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.backends.openvino import backend as openvino_
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Target
from pipeline.core.recipe import Placement, Precision, Recipe
from pipeline.core.shapes import Profile, Tensors
from pipeline.data.samples import CalibrationSet, open_set
from pipeline.errors import PlanError, UnsupportedError
from pipeline.execution.child_process import call_in_child
from pipeline.host.amx import tiles_described
from pipeline.host.environment import cpu_flags
from pipeline.onnx_graph.files import onnx_model, read_proto, write_proto
from pipeline.plan.schema import CalibrationConfig
from pipeline.stages.convert import convert
from tests.builders.convert import RESIDUAL, model_from_text, table_of
from tests.integration.robust import needs_root, small_disk
from tests.pipeline.backends.onnxruntime.test_backend import save, unsupported_model
from tests.pipeline.conformance.models import Case, convolution, dtypes, model, ramp, several

openvino = pytest.importorskip("openvino")

OLD_CPU = Target(backend="openvino", version="1", device="An old CPU", cpu_flags=("avx2",))
BATCH = BuildOptions(profiles=(Profile(dims={"batch": [1, 4, 8]}),), threads=1)


def built(source: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path) -> Engine:
    out.mkdir()
    return openvino_.build(source, recipe, options, out)


def answers(engine: Engine, feeds: Tensors) -> Tensors:
    with closing(openvino_.load(engine)) as loaded, closing(loaded.session()) as session:
        session.bind(feeds)
        session.upload()
        session.execute()
        session.download()
        return session.fetch()


def recipe_of(precision: Precision) -> Recipe:
    return Recipe(
        backend="openvino",
        precision=precision,
        realised_in="runtime" if precision in openvino_.NEEDED_FLAGS else "graph",
    )


def test_names_every_unsupported_node(tmp_path: Path) -> None:
    refusals = openvino_.unsupported(save(tmp_path, unsupported_model()), openvino_.probe())
    assert {(r.node, r.operator, r.opset) for r in refusals} >= {
        ("fancy", "acme::Fancy", 3),
        ("inner_Missing", "acme::Missing", 3),
        ("fancy_again", "acme::Fancy", 3),
    }
    assert not {"first", "after_unknown", "branch", "inner_Relu"} & {r.node for r in refusals}
    assert all(r.reason and r.remedy for r in refusals)


def test_names_a_node_with_a_refused_attribute(tmp_path: Path) -> None:
    resize = helper.make_node(
        "Resize",
        ["x", "roi", "scales"],
        ["y"],
        name="crop",
        coordinate_transformation_mode="tf_crop_and_resize",
    )
    constants = {"roi": np.array([0, 0, 1, 1], np.float32), "scales": np.array([2, 2], np.float32)}
    proto = model([resize], [("x", "float32", (4, 4))], [("y", "float32", (8, 8))], constants)
    (refusal,) = openvino_.unsupported(save(tmp_path, proto), openvino_.probe())
    assert (refusal.node, refusal.operator) == ("crop", "Resize")
    assert "tf_crop_and_resize" in refusal.reason
    assert ".cpp" not in refusal.reason


@pytest.mark.parametrize("case", [several(), dtypes(), convolution()], ids=lambda case: case.name)
def test_refuses_nothing_of_a_good_model(tmp_path: Path, case: Case) -> None:
    assert openvino_.unsupported(case.write(tmp_path), openvino_.probe()) == ()


def test_fp32_is_not_bf16(tmp_path: Path) -> None:
    """A CPU with bf16 would run it in bf16 unless told otherwise: 3e-3 off."""
    case = convolution()
    got = answers(
        built(case.write(tmp_path / "in"), recipe_of(Precision.FP32), BATCH, tmp_path / "out"),
        case.feeds[1],
    )
    np.testing.assert_allclose(
        got["logits"], case.expected(case.feeds[1])["logits"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_16_bit_precision_runs_as_such_or_is_refused_by_name(
    tmp_path: Path, precision: Precision
) -> None:
    case, recipe = convolution(), recipe_of(precision)
    source = case.write(tmp_path / "in")
    if openvino_.NEEDED_FLAGS[precision] & set(openvino_.probe().cpu_flags):
        got, exact = (
            answers(built(source, recipe, BATCH, tmp_path / "out"), case.feeds[1])["logits"],
            case.expected(case.feeds[1])["logits"],
        )
        error = np.abs(got - exact).max() / np.abs(exact).max()
        assert 1e-6 < error < 2e-2
    else:
        with pytest.raises(UnsupportedError, match=f"only pretend to run {precision}"):
            built(source, recipe, BATCH, tmp_path / "out")


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
def test_an_old_cpu_only_pretends(precision: Precision) -> None:
    with pytest.raises(
        UnsupportedError,
        match=rf"{precision} on this CPU \(An old CPU\): it needs .*{precision}.*, and has avx2",
    ):
        openvino_.check_recipe(recipe_of(precision), OLD_CPU)


@needs_root
def test_a_full_disk_is_not_taken_for_a_model_that_cannot_be_built(tmp_path: Path) -> None:
    weight = helper.make_tensor(
        "w", TensorProto.FLOAT, [256, 256], np.ones((256, 256), np.float32).tobytes(), raw=True
    )
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 256])
        for name in ("x", "y")
    ]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight]
    )
    write_proto(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10),
        tmp_path / "model.onnx",
    )
    with (
        small_disk(tmp_path / "out", "size=64k"),
        pytest.raises(OSError, match="No space left on device"),
    ):
        openvino_.build(
            onnx_model(tmp_path, "model.onnx"), recipe_of(Precision.FP32), BATCH, tmp_path / "out"
        )


def test_refuses_what_it_cannot_do_in_words(tmp_path: Path) -> None:
    all_flags = OLD_CPU.model_copy(update={"cpu_flags": ("avx512_bf16", "avx512_fp16")})
    with pytest.raises(UnsupportedError, match="no tf32"):
        openvino_.check_recipe(recipe_of(Precision.TF32), all_flags)
    with pytest.raises(UnsupportedError, match="cannot keep nodes head in fp32"):
        openvino_.check_recipe(
            recipe_of(Precision.BF16).model_copy(update={"keep_fp32": ("head",)}), all_flags
        )
    with pytest.raises(UnsupportedError, match="needs a graph in int8"):
        built(several().write(tmp_path), recipe_of(Precision.INT8), BATCH, tmp_path / "out")


def test_an_int8_graph_that_runs_in_fp32_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "in", convolution().proto, Precision.INT8)  # says int8, holds no Q/DQ
    with pytest.raises(
        UnsupportedError, match="only pretend to run int8: its 2 heavy layers run in f32"
    ):
        built(source, recipe_of(Precision.INT8), BATCH, tmp_path / "out")


def test_the_precision_that_was_set_is_read_back(tmp_path: Path) -> None:
    engine = built(
        convolution().write(tmp_path / "in"), recipe_of(Precision.FP32), BATCH, tmp_path / "out"
    )
    core = openvino.Core()
    compiled = core.compile_model(str(engine.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    openvino_.check_runs_as(compiled, recipe_of(Precision.FP32))
    with pytest.raises(
        UnsupportedError, match="inference_precision was set to bf16 and reads back as f32"
    ):
        openvino_.check_runs_as(compiled, recipe_of(Precision.BF16))


def test_a_quantised_graph_is_not_called_fp32(tmp_path: Path) -> None:
    recipe = Recipe(
        backend="openvino",
        precision=Precision.INT8,
        activation="uint8",
        placement=Placement(last_layer=True),
    )
    ranges = dict.fromkeys(("x", "c1", "r1", "c2", "s", "r2", "c3", "p", "f", "y"), (-4.0, 4.0))
    quantised = convert(model_from_text(tmp_path, RESIDUAL), recipe, table_of(ranges), (), tmp_path)
    options = BuildOptions(profiles=(Profile(dims={"N": [1, 4, 8]}),))
    assert built(quantised, recipe, options, tmp_path / "int8").recipe.precision is Precision.INT8
    with pytest.raises(UnsupportedError, match="only pretend to run fp32"):
        built(
            quantised.model_copy(update={"precision": Precision.FP32}),
            recipe_of(Precision.FP32),
            options,
            tmp_path / "fp32",
        )


def test_warns_of_narrowed_integers(tmp_path: Path) -> None:
    case = dtypes()
    engine = built(
        case.write(tmp_path / "in"),
        recipe_of(Precision.FP32),
        BuildOptions(profiles=case.profiles),
        tmp_path / "out",
    )
    assert any(
        "computes int64 in int32" in note.text and "'i64'" in note.text for note in engine.notes
    )


def test_takes_and_gives_bfloat16(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=1),
        helper.make_node("Cast", ["wide"], ["y"], to=16),
    ]
    proto = model(
        nodes,
        [("x", "bfloat16", ("batch", 2))],
        [("wide", "float32", ("batch", 2)), ("y", "bfloat16", ("batch", 2))],
    )
    engine = built(save(tmp_path / "in", proto), recipe_of(Precision.FP32), BATCH, tmp_path / "out")
    x = ramp(3, 2).astype(ml_dtypes.bfloat16)
    got = answers(engine, {"x": x})
    assert got["y"].dtype == x.dtype
    np.testing.assert_array_equal(got["y"], x)
    np.testing.assert_array_equal(got["wide"], ramp(3, 2))


def test_knows_the_host_without_importing_the_library() -> None:
    code = (
        "import sys; from pipeline import backends; t = backends.backend('openvino').probe();"
        " print(t.version, 'openvino' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split()[1] == "False"


def test_amx_is_used_only_where_its_tiles_are_described(tmp_path: Path) -> None:
    usable = "amx_tile" in cpu_flags() and tiles_described()
    (tmp_path / "out").mkdir()
    openvino_.build(
        several().write(tmp_path / "in"), recipe_of(Precision.FP32), BATCH, tmp_path / "out"
    )
    assert ("amx_tile" in openvino_.probe().cpu_flags) == usable
    assert usable or "amx_tile" not in cpu_flags() or "ONEDNN_MAX_CPU_ISA" in os.environ


# --- NNCF ---


def calibration(folder: Path) -> CalibrationSet:
    images = np.random.default_rng(0).standard_normal((40, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "set.npz", image=images)
    inputs = convolution().write(folder / "specs").inputs
    return open_set(CalibrationSet, (folder / "set.npz",), inputs, BATCH.profiles)


def test_nncf_gives_an_int8_graph_that_builds_like_any_other(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    case, out = convolution(), tmp_path / "nncf"
    for node, name in zip(
        case.proto.graph.node, ("stem", "relu", "pool", "flat", "head"), strict=True
    ):
        node.name = name
    source, samples = case.write(tmp_path / "in"), calibration(tmp_path)
    out.mkdir()
    recipe = Recipe(
        backend="openvino",
        precision=Precision.INT8,
        quantizer="nncf",
        weight_bits=7,
        keep_fp32=("hea*",),
    )
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

    assert (quantized.inputs, quantized.outputs, quantized.precision) == (
        source.inputs,
        source.outputs,
        Precision.INT8,
    )
    assert any("30 of 40" in note.text for note in quantized.notes)
    inputs_of = {node.name: list(node.input) for node in read_proto(quantized.path).graph.node}
    assert inputs_of["head"] == ["f", "fc"]
    assert "w" not in inputs_of["stem"]
    assert "image" not in inputs_of["stem"]

    feeds = {"image": np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32)}
    exact = case.expected(feeds)["logits"].ravel()
    got = answers(built(quantized, recipe, BATCH, tmp_path / "engine"), feeds)["logits"].ravel()
    assert 0.98 < exact @ got / np.linalg.norm(exact) / np.linalg.norm(got) < 1 - 1e-9
    assert onnxruntime_.unsupported(quantized, onnxruntime_.probe()) == ()


def test_a_pattern_that_names_no_node_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    recipe = Recipe(
        backend="openvino", precision=Precision.INT8, quantizer="nncf", keep_fp32=("hed",)
    )
    with pytest.raises(PlanError, match="no node matches 'hed'"):
        openvino_.quantize_with_nncf(
            several().write(tmp_path),
            calibration(tmp_path),
            recipe,
            CalibrationConfig(),
            BuildOptions(profiles=()),
            tmp_path,
        )
