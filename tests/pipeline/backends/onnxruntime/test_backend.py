import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from pipeline import backends
from pipeline.backends.base import Loaded
from pipeline.backends.onnxruntime import backend as onnxruntime_
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import Profile, Tensors
from pipeline.errors import DataError, UnsupportedError
from pipeline.onnx_graph.files import onnx_model
from pipeline.plan.baselines import AS_WRITTEN
from tests.builders.qat import CONSTANTS, PLAIN, quantised
from tests.pipeline.conformance.models import Case, convolution, model, ramp, several

FP32 = Recipe(backend="onnxruntime", precision=Precision.FP32)


def save(root: Path, proto: onnx.ModelProto, precision: Precision = Precision.FP32) -> OnnxModel:
    root.mkdir(exist_ok=True)
    (root / "model.onnx").write_bytes(proto.SerializeToString())
    return onnx_model(root, "model.onnx", precision)


def unsupported_model() -> onnx.ModelProto:
    """Four bad nodes between good ones: of an unknown domain, twice; without a kernel for its
    dtype; unknown inside a branch.
    """
    value = helper.make_tensor_value_info
    body = [
        helper.make_graph(
            [helper.make_node(op, ["x"], [f"o{op}"], name=f"inner_{op}", domain=domain)],
            op,
            [],
            [value(f"o{op}", 1, ["n", 3])],
        )
        for op, domain in (("Relu", ""), ("Missing", "acme"))
    ]
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="first"),
        helper.make_node("Fancy", ["a"], ["b"], name="fancy", domain="acme"),
        helper.make_node("Add", ["b", "b"], ["c"], name="after_unknown"),
        helper.make_node("BitShift", ["i", "i"], ["d"], name="no_kernel", direction="LEFT"),
        helper.make_node(
            "If", ["flag"], ["e"], name="branch", then_branch=body[0], else_branch=body[1]
        ),
        helper.make_node("Celu", ["h"], ["g"], name="last"),
        helper.make_node("Fancy", ["c"], ["f"], name="fancy_again", domain="acme"),
    ]
    inputs = [
        value("x", 1, ["n", 3]),
        value("i", onnx.TensorProto.UINT16, [4]),
        value("flag", 9, []),
        value("h", 1, [2]),
    ]
    outputs = [
        value("f", 1, ["n", 3]),
        value("d", onnx.TensorProto.UINT16, [4]),
        value("e", 1, ["n", 3]),
        value("g", 1, [2]),
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("acme", 3)]
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=opsets, ir_version=10
    )


def test_names_every_unsupported_node(tmp_path: Path) -> None:
    refusals = onnxruntime_.unsupported(save(tmp_path, unsupported_model()), onnxruntime_.probe())
    assert {(r.node, r.operator, r.opset) for r in refusals} == {
        ("fancy", "acme::Fancy", 3),
        ("no_kernel", "BitShift", 20),
        ("inner_Missing", "acme::Missing", 3),
        ("fancy_again", "acme::Fancy", 3),
    }
    assert all(r.reason and r.remedy for r in refusals)
    assert "not a registered" in refusals[0].reason


def test_names_a_node_inside_a_local_function(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["p"], ["q"]),
        helper.make_node("Fancy", ["q"], ["r"], name="deep", domain="acme"),
    ]
    opsets = [
        helper.make_opsetid("", 20),
        helper.make_opsetid("acme", 1),
        helper.make_opsetid("own", 1),
    ]
    function = helper.make_function("own", "Block", ["p"], ["r"], nodes, opsets)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Block", ["x"], ["y"], domain="own")],
        "g",
        [value("x", 1, [2])],
        [value("y", 1, [2])],
    )
    proto = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)
    (refusal,) = onnxruntime_.unsupported(save(tmp_path, proto), onnxruntime_.probe())
    assert refusal.operator == "acme::Fancy"


@pytest.mark.parametrize("case", [several(), convolution()], ids=lambda case: case.name)
def test_refuses_nothing_of_a_good_model(tmp_path: Path, case: Case) -> None:
    assert onnxruntime_.unsupported(case.write(tmp_path), onnxruntime_.probe()) == ()


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16, Precision.TF32])
def test_refuses_by_name_a_precision_that_would_be_pretended(
    tmp_path: Path, precision: Precision
) -> None:
    recipe = Recipe(backend="onnxruntime", precision=precision)
    with pytest.raises(UnsupportedError, match=f"only pretend to run {precision}"):
        onnxruntime_.build(
            several().write(tmp_path / "in"), recipe, BuildOptions(profiles=()), tmp_path
        )
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


def test_the_registry_has_no_16_bit_kernels_of_heavy_operators() -> None:
    """The evidence for the refusal; when it fails, a new ONNX Runtime can do more."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    heavy = [
        kernel
        for kernel in get_all_opkernel_def()
        if kernel.op_name in ("Conv", "MatMul", "Gemm") and kernel.domain == ""
    ]
    types = {kind for kernel in heavy for kind in kernel.type_constraints["T"]}
    assert "tensor(float)" in types
    assert not types & {"tensor(float16)", "tensor(bfloat16)"}


def test_refuses_a_graph_in_another_precision_than_the_recipe(tmp_path: Path) -> None:
    recipe = Recipe(backend="onnxruntime", precision=Precision.INT8)
    with pytest.raises(UnsupportedError, match="recipe says int8, the graph is fp32"):
        onnxruntime_.build(several().write(tmp_path), recipe, BuildOptions(profiles=()), tmp_path)


def test_refuses_bfloat16_inputs_by_name(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("Cast", ["x"], ["y"], to=1)],
        [("x", "bfloat16", (2,))],
        [("y", "float32", (2,))],
    )
    with pytest.raises(UnsupportedError, match="'x' is bfloat16"):
        onnxruntime_.build(save(tmp_path / "in", proto), FP32, BuildOptions(profiles=()), tmp_path)


def test_takes_external_data_along(tmp_path: Path) -> None:
    weights = ramp(64, 512)
    proto = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", "float32", ("n", 64))],
        [("y", "float32", ("n", 512))],
        {"w": weights},
    )
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    onnx.save_model(
        proto,
        str(source / "m.onnx"),
        save_as_external_data=True,
        location="m.onnx.data",
        size_threshold=0,
    )
    engine = onnxruntime_.build(
        onnx_model(source, "m.onnx"),
        FP32,
        BuildOptions(profiles=(Profile(dims={"n": [1, 1, 4]}),)),
        out,
    )
    (source / "m.onnx.data").unlink()
    assert sorted(file.name for file in out.iterdir()) == ["m.onnx", "m.onnx.data"]
    assert engine.size_bytes > weights.nbytes
    with closing(onnxruntime_.load(engine)) as loaded, closing(loaded.session()) as session:
        session.bind({"x": np.eye(2, 64, dtype=np.float32)})
        session.execute()
        np.testing.assert_array_equal(session.fetch()["y"], weights[:2])


def test_runs_an_int8_graph(tmp_path: Path) -> None:
    constants: Tensors = {"s": np.array(0.5, np.float32), "z": np.array(3, np.uint8)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    proto = model(nodes, [("x", "float32", (3,))], [("y", "float32", (3,))], constants)
    recipe = Recipe(backend="onnxruntime", precision=Precision.INT8)
    source = save(tmp_path / "in", proto, Precision.INT8)
    engine = onnxruntime_.build(source, recipe, BuildOptions(profiles=()), tmp_path)
    with closing(onnxruntime_.load(engine)) as loaded, closing(loaded.session()) as session:
        session.bind({"x": np.array([0.2, 0.3, -9], np.float32)})
        session.execute()
        np.testing.assert_array_equal(session.fetch()["y"], np.array([0, 0.5, -1.5], np.float32))


def test_values_that_the_graph_cannot_take_are_a_data_error(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("Gather", ["table", "ids"], ["y"])],
        [("ids", "int64", (2,))],
        [("y", "float32", (2, 3))],
        {"table": ramp(4, 3)},
    )
    engine = onnxruntime_.build(
        save(tmp_path / "in", proto), FP32, BuildOptions(profiles=()), tmp_path
    )
    with closing(onnxruntime_.load(engine)) as loaded, closing(loaded.session()) as session:
        session.bind({"ids": np.array([0, 9])})
        with pytest.raises(
            DataError, match=r"cannot run on these inputs: .*out of data bounds"
        ) as error:
            session.execute()
        assert "onnxruntime_src" not in error.value.message
        session.bind({"ids": np.array([0, 3])})
        session.execute()
        np.testing.assert_array_equal(session.fetch()["y"], ramp(4, 3)[[0, 3]])


def test_knows_the_host_without_importing_the_library() -> None:
    code = (
        "import sys; from pipeline import backends; t = backends.backend('onnxruntime').probe();"
        " print(t.version, 'onnxruntime' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    version, imported = result.stdout.split()
    assert version[0].isdigit()
    assert imported == "False"


def test_q_dq_are_computed_as_written_where_the_recipe_says_so(tmp_path: Path) -> None:
    """The reference of a quantised model. As int8, ONNX Runtime rounds this bias to integers of
    0.0002 or 0.0004, and it is gone.
    """
    conv = PLAIN.replace("(xd, wd)", "(xd, wd, b)").replace("y = Relu(c)", "r = Relu(c)")
    body = f"{conv} rq = QuantizeLinear(r, t, u0) y = DequantizeLinear(rq, t, u0)"
    constants = CONSTANTS.replace(
        "float[4] b,", "float[4] b = {0.00008, 0.00008, 0.00008, 0.00008},"
    ).replace("t = {0.03}", "t = {0.00003}")
    source = save(tmp_path / "in", quantised(body, constants=constants))
    recipe = FP32.model_copy(update={"variant": AS_WRITTEN})
    (tmp_path / "out").mkdir()
    engine = onnxruntime_.build(
        source, recipe, BuildOptions(profiles=(), threads=1), tmp_path / "out"
    )
    with closing(onnxruntime_.load(engine)) as loaded, closing(loaded.session()) as session:
        session.bind({"x": np.zeros((2, 4, 8, 8), np.float32)})
        session.execute()
        answers = session.fetch()
    assert np.allclose(answers["y"], 3 * 0.00003)


@pytest.mark.parametrize(
    ("load", "stops"), [(backends.load, False), (backends.load_to_serve, True)]
)
def test_threads_of_engines_that_serve_soon_sleep(
    tmp_path: Path, load: Callable[[Engine], Loaded], stops: bool
) -> None:
    engine = onnxruntime_.build(
        save(tmp_path / "in", convolution().proto), FP32, BuildOptions(profiles=()), tmp_path
    )
    with closing(load(engine)) as loaded:
        assert isinstance(loaded, onnxruntime_.OrtLoaded)
        assert loaded._session is not None
        options = loaded._session.get_session_options()
        spin_us = onnxruntime_.SERVING_SPIN_US if stops else onnxruntime_.SPIN_US
        spins = options.get_session_config_entry("session.intra_op.spin_duration_us")
        assert spins == str(spin_us)
        if not stops:
            with pytest.raises(RuntimeError):  # never set
                options.get_session_config_entry("session.force_spinning_stop")
            return
        assert options.get_session_config_entry("session.force_spinning_stop") == "1"
