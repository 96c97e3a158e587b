"""Fewer nodes and the same values, or the input model back with a reason."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.compiler.graph import SIMPLIFY
from pipeline.core.artifacts import OnnxModel
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import DimRange, Profile, Tensors, ValueRange
from pipeline.execution.stage_runner import Runner, StageCall
from pipeline.execution.store import Store
from pipeline.onnx_graph.compare import open_reference
from pipeline.onnx_graph.files import (
    external_files,
    onnx_model,
    operator_histogram,
    read_proto,
    write_proto,
)
from pipeline.plan.schema import SimplifyConfig
from pipeline.stages.simplify import simplify
from pipeline.stages.simplify.simplifier import Simplifier

PROFILES = (Profile(dims={"N": DimRange(min=1, opt=4, max=8)}),)

SHAPE_ARITHMETIC = """g (float[N, 4, 6] x) => (float[N, 24] y, float[?, ?] z)
    <int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64[1] axis = {0}, float k = {2}>
{
    s = Shape(x)
    n = Gather(s, zero)
    n1 = Unsqueeze(n, axis)
    h = Gather(s, one)
    w = Gather(s, two)
    hw = Mul(h, w)
    hw1 = Unsqueeze(hw, axis)
    shape = Concat<axis = 0>(n1, hw1)
    flat = Reshape(x, shape)
    two_f = Constant<value_float = 2.0>()
    k2 = Mul(k, two_f)
    root = Sqrt(k2)
    same = Identity(flat)
    y = Mul(same, root)
    minus = Constant<value_ints = [-1]>()
    shape2 = Concat<axis = 0>(n1, minus)
    z = Reshape(y, shape2)
}"""

QUANTIZED = """g (float[N, 4] x) => (float[N, 3] y)
    <int8[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, int8 zero = {0},
      float w_scale = {0.1}, float x_scale = {0.02}, float x_scale_2 = {0.02}>
{
    q = QuantizeLinear(x, x_scale, zero)
    d = DequantizeLinear(q, x_scale, zero)
    wd = DequantizeLinear(w, w_scale, zero)
    a = MatMul(d, wd)
    q1 = QuantizeLinear(x, x_scale_2, zero)
    d1 = DequantizeLinear(q1, x_scale_2, zero)
    wd1 = DequantizeLinear(w, w_scale, zero)
    b = MatMul(d1, wd1)
    y = Add(a, b)
}"""

TWO_NODES = "g (float[N, 4] x) => (float[N, 4] y) { h = Relu(x)  y = Add(h, h) }"


def model_from(folder: Path, graph: str) -> OnnxModel:
    folder.mkdir(parents=True, exist_ok=True)
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17, "com.example" : 1]>\n{graph}'
    )
    (folder / "source.onnx").write_bytes(proto.SerializeToString())
    return onnx_model(folder, "source.onnx")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture
def two_nodes(tmp_path: Path) -> OnnxModel:
    return model_from(tmp_path / "in", TWO_NODES)


def nodes(model: OnnxModel) -> int:
    return sum(operator_histogram(model.path).values())


def assert_rolled_back(result: OnnxModel, source: OnnxModel, reason: str) -> None:
    (note,) = result.notes
    assert note.level == "warning"
    assert "simplification was discarded" in note.text
    assert reason in note.text
    assert result.path.read_bytes() == source.path.read_bytes()
    assert (result.inputs, result.outputs, result.digest) == (
        source.inputs,
        source.outputs,
        source.digest,
    )
    assert sorted(file.name for file in result.root.iterdir()) == ["model.onnx"]


# --- simplifiers that go wrong: real functions, run in the child in onnxsim's place ---


def keep(source: Path, target: Path, progress: Progress) -> None:
    target.write_bytes(source.read_bytes())


def bake_batch(source: Path, target: Path, progress: Progress) -> None:
    """What overwriting the input shape does: every N becomes 1."""
    proto = read_proto(source)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    write_proto(proto, target)


def bake_batch_inside(source: Path, target: Path, progress: Progress) -> None:
    """The interface stays dynamic, but a reshape holds the batch of its example."""
    proto = read_proto(source)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, -1]), "baked"))
    proto.graph.node.insert(0, onnx.helper.make_node("Reshape", ["x", "baked"], ["xx"]))
    proto.graph.node[1].input[0] = "xx"
    write_proto(proto, target)


def change_value(source: Path, target: Path, progress: Progress) -> None:
    proto = read_proto(source)
    proto.graph.node[0].op_type = "LeakyRelu"
    write_proto(proto, target)


def rename_output(source: Path, target: Path, progress: Progress) -> None:
    proto = read_proto(source)
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "renamed"
    write_proto(proto, target)


def grow(source: Path, target: Path, progress: Progress) -> None:
    proto = read_proto(source)
    proto.graph.initializer.append(
        onnx.numpy_helper.from_array(np.zeros((1_000_000, 4), np.float32), "bloat")
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "first"))
    proto.graph.node.append(onnx.helper.make_node("Gather", ["bloat", "index"], ["row"]))
    proto.graph.node.append(
        onnx.helper.make_node("Add", ["row", "before"], [proto.graph.output[0].name])
    )
    proto.graph.node[-3].output[0] = "before"
    proto.graph.node.insert(
        0, onnx.helper.make_node("ArgMax", ["x"], ["argmax"], axis=1, keepdims=0)
    )
    proto.graph.node.insert(1, onnx.helper.make_node("Mul", ["argmax", "first"], ["index"]))
    write_proto(proto, target)


def put_in_foreign_operator(source: Path, target: Path, progress: Progress) -> None:
    proto = read_proto(source)
    proto.graph.node[0].domain = "com.example"
    write_proto(proto, target)


def drop_quantizers(source: Path, target: Path, progress: Progress) -> None:
    proto = read_proto(source)
    for node in proto.graph.node:
        node.input[:] = ["x" if name in ("d", "d1") else name for name in node.input]
    write_proto(proto, target)


def write_rubbish(source: Path, target: Path, progress: Progress) -> None:
    target.write_bytes(b"rubbish")


def write_nothing(source: Path, target: Path, progress: Progress) -> None:
    pass


def raise_error(source: Path, target: Path, progress: Progress) -> None:
    raise RuntimeError("the optimizer met a bug")


def segfault(source: Path, target: Path, progress: Progress) -> None:
    target.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGSEGV)


def run_out_of_memory(source: Path, target: Path, progress: Progress) -> None:
    raise MemoryError


def be_killed(source: Path, target: Path, progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(source: Path, target: Path, progress: Progress) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("simplifier", "reason"),
    [
        (bake_batch, "inputs were x float32[N, 4] and became x float32[1, 4]"),
        (bake_batch_inside, "on inputs x [4, 4]"),
        (change_value, "output 'y' differs by"),
        (rename_output, "outputs were y float32[N, 4] and became renamed"),
        (grow, "the file grew from"),
        (put_in_foreign_operator, "com.example::Relu"),
        (write_rubbish, "not a complete ONNX file"),
        (write_nothing, "no model at"),
        (raise_error, "RuntimeError: the optimizer met a bug"),
        (segfault, "SIGSEGV"),
    ],
)
def test_what_goes_wrong_is_rolled_back_with_its_reason(
    two_nodes: OnnxModel, out: Path, simplifier: object, reason: str
) -> None:
    assert callable(simplifier)
    result = simplify(two_nodes, PROFILES, SimplifyConfig(), (), out, silent, simplifier)
    assert_rolled_back(result, two_nodes, reason)
    assert not result.provisional, "it would go wrong again"


@pytest.mark.parametrize(
    ("simplifier", "reason"), [(run_out_of_memory, "out of memory"), (be_killed, "SIGKILL")]
)
def test_what_more_memory_may_mend_is_tried_again_by_the_next_compile(
    two_nodes: OnnxModel, tmp_path: Path, simplifier: Simplifier, reason: str
) -> None:
    def stage(model: OnnxModel, out: Path, progress: Progress = silent) -> OnnxModel:
        return simplify(model, PROFILES, SimplifyConfig(), (), out, progress, *simplifiers)

    def run(store: Store) -> OnnxModel:
        runner = Runner(store, run=lambda function, *arguments, **rest: function(*arguments))
        return runner.stage(StageCall(SIMPLIFY, OnnxModel, partial(stage, two_nodes)))

    simplifiers = [simplifier]
    store = Store(tmp_path)
    failed = run(store)
    assert (
        "simplification was discarded and the original graph is used, and the next compile tries"
        " again: " in failed.notes[0].text
    )
    assert reason in failed.notes[0].text
    simplifiers.clear()
    assert run(store) == failed, "this one goes on with what it has"
    assert run(Store(tmp_path)).notes[0].level == "info"


def test_a_simplifier_that_hangs_is_stopped_and_rolled_back(
    two_nodes: OnnxModel, out: Path
) -> None:
    result = simplify(two_nodes, PROFILES, SimplifyConfig(timeout_s=3), (), out, silent, hang)
    assert_rolled_back(result, two_nodes, "longer than its limit of 3 s")


def test_lost_quantizers_are_rolled_back(tmp_path: Path, out: Path) -> None:
    source = model_from(tmp_path / "in", QUANTIZED)
    assert_rolled_back(
        simplify(source, PROFILES, SimplifyConfig(), (), out, silent, drop_quantizers),
        source,
        "QuantizeLinear",
    )


# --- the real simplifier ---


def test_shape_arithmetic_loses_at_least_half_of_its_nodes(tmp_path: Path, out: Path) -> None:
    source = model_from(tmp_path / "in", SHAPE_ARITHMETIC)
    messages: list[str] = []
    result = simplify(
        source,
        PROFILES,
        SimplifyConfig(),
        (),
        out,
        lambda fraction, text, figures=None: messages.append(text),
    )
    assert nodes(source) == 17
    assert nodes(result) <= nodes(source) // 2
    assert (result.inputs, result.outputs, result.opset) == (
        source.inputs,
        source.outputs,
        source.opset,
    )
    assert [note.level for note in result.notes] == ["info"]
    assert "17 nodes became" in result.notes[0].text
    assert [file.name for file in out.iterdir()] == ["model.onnx"]
    assert "folding constants" in messages
    feeds: Tensors = {"x": np.random.default_rng(0).standard_normal((5, 4, 6)).astype(np.float32)}
    before, after = open_reference(source.path)(feeds), open_reference(result.path)(feeds)
    assert all(np.allclose(before[name], after[name], rtol=1e-6) for name in before)


def test_quantizers_and_their_scales_stay(tmp_path: Path, out: Path) -> None:
    source = model_from(tmp_path / "in", QUANTIZED)
    result = simplify(source, PROFILES, SimplifyConfig(), (), out, silent)
    assert [note.level for note in result.notes] == ["info"]  # kept, not rolled back
    before, after = operator_histogram(source.path), operator_histogram(result.path)
    assert (
        (after["QuantizeLinear"], after["DequantizeLinear"])
        == (before["QuantizeLinear"], before["DequantizeLinear"])
        == (2, 4)
    )
    graph = read_proto(result.path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    scales = sorted(
        float(constants[node.input[1]]) for node in graph.node if node.op_type == "DequantizeLinear"
    )
    assert scales == pytest.approx([0.02, 0.02, 0.1, 0.1])
    assert {array.dtype.name for array in constants.values() if array.size == 12} == {"int8"}


def test_constant_and_passed_through_outputs_and_unused_inputs_stay(
    tmp_path: Path, out: Path
) -> None:
    graph = """g (float[N, 4] x, float[N] unused) => (float[2] c, float[N, 4] y, float[N, 4] same)
      <float[2] k = {1, 2}>
    { c = Mul(k, k)  y = Relu(x)  same = Identity(x) }"""
    source = model_from(tmp_path / "in", graph)
    result = simplify(source, PROFILES, SimplifyConfig(), (), out, silent)
    assert [note.level for note in result.notes] == ["info"]
    assert (result.inputs, result.outputs) == (source.inputs, source.outputs)


def test_large_expansions_and_random_nodes_are_not_folded(tmp_path: Path, out: Path) -> None:
    graph = """g (float[N, 4] x) => (float[N, 4] y, float[N, 4] r)
      <int64[2] size = {1000000, 4}, float[1, 1] one = {1}, int64 i = {3}>
    { big = Expand(one, size)  row = Gather(big, i)  y = Add(x, row)
      noise = RandomNormal<shape = [4], seed = 1.0>()  r = Add(x, noise) }"""
    source = model_from(tmp_path / "in", graph)
    result = simplify(source, PROFILES, SimplifyConfig(), (), out, silent)
    assert result.path.stat().st_size < 100_000
    assert operator_histogram(result.path)["RandomNormal"] == 1


def external_model(folder: Path) -> OnnxModel:
    """Its weights lie in source.onnx.data, and are listed among the inputs, as old files do."""
    folder.mkdir()
    graph = "g (float[N, 200] x, float[200, 200] w) => (float[N, 200] y) { y = MatMul(x, w) }"
    proto = onnx.parser.parse_model(f'<ir_version: 3, opset_import: ["" : 17]>\n{graph}')
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(200, dtype=np.float32), "w"))
    write_proto(proto, folder / "source.onnx", external_above_bytes=1000)
    return onnx_model(folder, "source.onnx")


def test_external_data_and_initializers_among_the_inputs(tmp_path: Path, out: Path) -> None:
    source = external_model(tmp_path / "in")
    result = simplify(source, PROFILES, SimplifyConfig(), (), out, silent)
    assert [note.level for note in result.notes] == ["info"]
    assert [spec.name for spec in result.inputs] == ["x"]


def test_a_roll_back_takes_the_external_data_along(tmp_path: Path, out: Path) -> None:
    source = external_model(tmp_path / "in")
    result = simplify(source, PROFILES, SimplifyConfig(), (), out, silent, raise_error)
    assert result.notes[0].level == "warning"
    assert result.digest == source.digest
    assert external_files(result.path) == ((out / "source.onnx.data").resolve(),)


def test_a_linear_layer_on_three_dims_is_not_wrapped_in_reshapes(tmp_path: Path, out: Path) -> None:
    graph = """g (float[N, M, 3] x) => (float[N, M, 2] y)
      <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}>
    { h = MatMul(x, w)  y = Add(h, b) }"""
    profiles = (
        Profile(dims={"N": DimRange(min=1, opt=2, max=4), "M": DimRange(min=1, opt=3, max=5)}),
    )
    result = simplify(
        model_from(tmp_path / "in", graph), profiles, SimplifyConfig(), (), out, silent
    )
    assert operator_histogram(result.path) == {"Add": 1, "MatMul": 1}


def test_subgraphs_that_use_the_graph_around_them_survive(tmp_path: Path, out: Path) -> None:
    graph = """g (float[N, 4] x, bool c) => (float[N, 4] y) <float k = {2}>
    {
        h = Mul(x, k)
        y = If (c) <then_branch = t () => (float[N, 4] a) { two = Constant<value_float = 2.0>()
          kk = Mul(k, two)  a = Mul(h, kk) },
                    else_branch = e () => (float[N, 4] b) { b = Neg(h) }>
    }"""
    source = model_from(tmp_path / "in", graph)
    result = simplify(source, PROFILES, SimplifyConfig(), (), out, silent)
    assert [note.level for note in result.notes] == ["info"]


def test_local_functions_become_plain_operators(tmp_path: Path, out: Path) -> None:
    graph = """g (float[N, 4] x) => (float[N, 4] y) { y = com.example.double(x) }
    <domain: "com.example", opset_import: ["" : 17]> double (x) => (y)
      { k = Constant<value_float = 2.0>()  y = Mul(x, k) }"""
    result = simplify(
        model_from(tmp_path / "in", graph), PROFILES, SimplifyConfig(), (), out, silent
    )
    assert operator_histogram(result.path) == {"Mul": 1}


# --- what it is compared on ---


def test_real_samples_are_compared_too(tmp_path: Path, out: Path) -> None:
    """Only NaN, which is never generated, tells the two graphs apart."""
    graph = "g (float[N, 4] x) => (float[N, 4] y) { p = Abs(x)  h = Relu(p)  y = Sub(h, x) }"
    source = model_from(tmp_path / "in", graph)
    sample: Tensors = {"x": np.full((2, 4), np.nan, np.float32)}
    result = simplify(source, PROFILES, SimplifyConfig(), (sample,), out, silent, drop_nan)
    assert_rolled_back(result, source, "on inputs x [2, 4]")


def drop_nan(source: Path, target: Path, progress: Progress) -> None:
    """relu(|x|) - x by comparisons: equal on every number."""
    proto = read_proto(source)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0, np.float32), "zero"))
    proto.graph.node[1].CopyFrom(onnx.helper.make_node("Greater", ["p", "zero"], ["positive"]))
    proto.graph.node.insert(2, onnx.helper.make_node("Where", ["positive", "p", "zero"], ["h"]))
    proto.graph.node[3].input[1] = "clean"
    proto.graph.node.insert(3, onnx.helper.make_node("IsNaN", ["x"], ["lost"]))
    proto.graph.node.insert(4, onnx.helper.make_node("Where", ["lost", "zero", "x"], ["clean"]))
    write_proto(proto, target)


def test_values_that_decide_a_shape_are_drawn_inside_their_range(tmp_path: Path, out: Path) -> None:
    """Not 0 or 1, as other integers are: k = 1, baked in, must be found out."""
    source = model_from(
        tmp_path / "in",
        "g (float[N, 12] x, int64[1] k) => (float[N, M] y, int64[N, M] i) { y, i = TopK(x, k) }",
    )
    valued = (
        PROFILES[0].model_copy(update={"values": {"k": ValueRange(min=(1,), opt=(1,), max=(8,))}}),
    )
    result = simplify(source, valued, SimplifyConfig(), (), out, silent, bake_k)
    assert_rolled_back(result, source, "output 'y': expected float32[8, 8], got float32[8, 1]")


def bake_k(source: Path, target: Path, progress: Progress) -> None:
    proto = read_proto(source)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    proto.graph.node[0].input[1] = "one"
    write_proto(proto, target)


def test_sizes_that_the_model_itself_refuses_prove_nothing(tmp_path: Path, out: Path) -> None:
    """Only even N can be reshaped: the odd size of the profile is passed over."""
    graph = (
        "g (float[N] x) => (float[M, 2] y) <int64[2] pairs = {-1, 2}> { h = Relu(x)  y = Reshape(h,"
        " pairs) }"
    )
    source = model_from(tmp_path / "in", graph)
    profiles = (Profile(dims={"N": DimRange(min=2, opt=4, max=8)}),)
    result = simplify(source, profiles, SimplifyConfig(), (), out, silent, keep)
    assert [note.level for note in result.notes] == ["info"]


def test_a_model_that_runs_on_no_input_is_rolled_back(tmp_path: Path, out: Path) -> None:
    source = model_from(
        tmp_path / "in", "g (float[N, 4] x) => (float[N, 4] y) { y = com.example.Twist(x) }"
    )
    assert_rolled_back(
        simplify(source, PROFILES, SimplifyConfig(), (), out, silent, keep), source, "Twist"
    )
