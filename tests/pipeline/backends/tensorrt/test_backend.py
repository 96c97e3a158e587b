"""The backend tensorrt: what it says on a host without a GPU, and what it builds on one with a GPU
(marked gpu; tiny models, 2 s each).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from pipeline.backends import cuda, timing_cache
from pipeline.backends.base import run_session
from pipeline.backends.cuda import OutOfDeviceMemory
from pipeline.backends.tensorrt import backend as tensorrt_
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt import parser as trt_parser
from pipeline.core.artifacts import BuildOptions, Engine, OnnxModel, Target, TensorRTOptions
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, Tensors, ValueRange
from pipeline.errors import BackendUnavailable, ModelError, PlanError, UnsupportedError
from pipeline.execution.child_process import call_in_child
from pipeline.host.gpu import find_gpus
from tests.pipeline.backends.tensorrt.builders import Value, save, save_product

FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
TYPES = {
    Precision.FP32: FLOAT,
    Precision.TF32: FLOAT,
    Precision.FP16: TensorProto.FLOAT16,
    Precision.BF16: TensorProto.BFLOAT16,
}
PROFILE = Profile(dims={"n": DimRange(min=1, opt=4, max=8)})
OPTIONS = BuildOptions(profiles=(PROFILE,), tensorrt=TensorRTOptions(optimization_level=1))
HOST = Target(
    backend="tensorrt",
    version="10.6.0",
    device="NVIDIA H200",
    compute_capability="9.0",
    driver="580.95.05",
)
WEIGHT = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32)


def linear(
    folder: Path, precision: Precision = Precision.FP32, label: Precision | None = None
) -> OnnxModel:
    """x float32 [n, 64] -> y float32 [n, 32], multiplied in `precision`."""
    return save_product(folder, WEIGHT, TYPES[precision], label or precision)


def feeds(rows: int) -> dict[str, NDArray[np.float32]]:
    return {"x": np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)}


def recipe(precision: Precision = Precision.FP32, **more: object) -> Recipe:
    runtime = {"realised_in": "runtime"} if precision is Precision.TF32 else {}
    return Recipe.model_validate({"backend": "tensorrt", "precision": precision, **runtime, **more})


def build(
    model: OnnxModel,
    recipe: Recipe,
    out: Path,
    options: BuildOptions = OPTIONS,
    progress: Progress = silent,
) -> Engine:
    out.mkdir(exist_ok=True)
    return tensorrt_.build(model, recipe, options, out, progress)


def run(engine: Engine, inputs: Tensors) -> Mapping[str, NDArray[Any]]:
    with closing(tensorrt_.load(engine)) as loaded, closing(loaded.session()) as session:
        return dict(run_session(session, inputs))


# -- without a GPU -----------------------------------------------------------


def test_probing_a_host_without_a_gpu_says_what_is_missing() -> None:
    if find_gpus().devices:
        pytest.skip("this host has a GPU")
    for call in (tensorrt_.probe, trt_library.library):
        with pytest.raises(
            BackendUnavailable, match="TensorRT cannot be used on this host: "
        ) as error:
            call()
        assert "on a host with an NVIDIA GPU" in error.value.next_step


def test_a_recipe_is_checked_without_the_library() -> None:
    tensorrt_.check_recipe(recipe(Precision.BF16), HOST)
    with pytest.raises(
        UnsupportedError,
        match=r"bf16 needs a GPU of compute capability 8.0 or later, this one has 7.5",
    ):
        tensorrt_.check_recipe(
            recipe(Precision.BF16), HOST.model_copy(update={"compute_capability": "7.5"})
        )
    with pytest.raises(UnsupportedError, match="ended with TensorRT 11"):
        tensorrt_.check_recipe(
            recipe(Precision.FP16, realised_in="flags"),
            HOST.model_copy(update={"version": "11.2.1.2"}),
        )


@pytest.mark.parametrize(
    ("more", "accepted", "refused"),
    [
        ({}, {}, {"compute_capability": "8.9"}),
        ({}, {"driver": "590"}, {"version": "10.7.0"}),
        (
            {"hardware_compatible": True},
            {"compute_capability": "12.0"},
            {"compute_capability": "7.5"},
        ),
        ({"version_compatible": True}, {"version": "10.13.3.9"}, {"version": "10.5.0"}),
    ],
)
def test_an_engine_is_for_the_hosts_that_its_recipe_asks_for(
    more: dict[str, Any], accepted: dict[str, str], refused: dict[str, str]
) -> None:
    target = tensorrt_.engine_target(HOST, recipe(Precision.FP16, **more))
    assert target.accepts(HOST) == ()
    assert target.accepts(HOST.model_copy(update=accepted)) == ()
    assert len(target.accepts(HOST.model_copy(update=refused))) == 1


@pytest.mark.parametrize(
    ("recipe", "graph"),
    [
        (recipe(Precision.FP16), Precision.FP16),
        (recipe(Precision.TF32), Precision.FP32),
        (recipe(Precision.TF32, realised_in="graph"), Precision.FP32),
        (recipe(Precision.BF16, realised_in="flags"), Precision.FP32),
        (recipe(Precision.INT8, realised_in="flags"), Precision.INT8),
        (recipe(Precision.FP8, quantizer="modelopt"), Precision.FP8),
    ],
)
def test_a_recipe_takes_one_kind_of_graph(tmp_path: Path, recipe: Recipe, graph: Precision) -> None:
    for precision in Precision:
        model = linear(tmp_path, label=precision)
        if precision is graph:
            tensorrt_._check_graph(model, recipe)
        else:
            with pytest.raises(
                UnsupportedError, match=f"takes a graph in {graph}, this one is {precision}"
            ):
                tensorrt_._check_graph(model, recipe)


def test_plugin_libraries_go_with_the_engine_in_order(tmp_path: Path) -> None:
    libraries = [tmp_path / name for name in ("libz.so.1", "liba.so", "libnvinfer_plugin.so.10")]
    for number, library in enumerate(libraries):
        library.write_text(str(number))
    tensorrt_._copy_plugins(tuple(libraries), tmp_path / "plugins")
    assert [
        (file.name, file.read_text()) for file in sorted((tmp_path / "plugins").glob("*.so"))
    ] == [("00-libz.so", "0"), ("01-liba.so", "1")]


# -- on a GPU ----------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TYPES)
def test_builds_and_runs_what_the_graph_says(tmp_path: Path, precision: Precision) -> None:
    tensorrt_.check_recipe(recipe(precision), tensorrt_.probe())
    model = linear(
        tmp_path / "model", precision, Precision.FP32 if precision is Precision.TF32 else None
    )
    events: list[tuple[float | None, str]] = []
    engine = build(
        model,
        recipe(precision),
        tmp_path / "out",
        progress=lambda fraction, text, figures=None: events.append((fraction, text)),
    )
    assert engine.target == tensorrt_.probe()
    assert engine.digest == hashlib.sha256(engine.path.read_bytes()).hexdigest()
    assert engine.size_bytes == engine.path.stat().st_size
    assert (engine.inputs, engine.outputs, engine.profiles) == (
        model.inputs,
        model.outputs,
        (PROFILE,),
    )
    assert (None, "timing kernels") in events
    feed = feeds(5)
    dtype = {Precision.FP16: np.float16, Precision.BF16: ml_dtypes.bfloat16}.get(
        precision, np.float32
    )
    expected = feed["x"].astype(dtype).astype(np.float64) @ WEIGHT.astype(dtype).astype(np.float64)
    coarseness = {Precision.FP32: 1e-5, Precision.BF16: 2e-2}.get(
        precision, 3e-3
    )  # of the result's own scale
    assert np.abs(run(engine, feed)["y"] - expected).max() < coarseness * np.abs(expected).max()


@pytest.mark.gpu
def test_int8_by_q_dq_builds_and_runs(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["x_q"]),
        helper.make_node("DequantizeLinear", ["x_q", "scale", "zero"], ["x_d"]),
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["w_d"]),
        helper.make_node("MatMul", ["x_d", "w_d"], ["y"]),
    ]
    quantized = np.round(WEIGHT * 100).astype(np.int8)
    weights = [
        numpy_helper.from_array(np.asarray(array), name)
        for name, array in (("scale", np.float32(0.01)), ("zero", np.int8(0)), ("w", quantized))
    ]
    model = save(
        tmp_path / "model",
        nodes,
        [("x", FLOAT, ["n", 64])],
        [("y", FLOAT, ["n", 32])],
        weights,
        Precision.INT8,
    )
    engine = build(model, recipe(Precision.INT8), tmp_path / "out")
    feed = {"x": np.full((4, 64), 0.25, np.float32)}
    np.testing.assert_allclose(
        run(engine, feed)["y"], feed["x"] @ (quantized * np.float32(0.01)), rtol=1e-2, atol=1e-2
    )


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
def test_builder_flags_leave_the_choice_to_tensorrt(tmp_path: Path, precision: Precision) -> None:
    request = recipe(precision, realised_in="flags")
    if trt_library.numbers(tensorrt_.probe().version) >= (11,):
        with pytest.raises(UnsupportedError, match="ended with TensorRT 11"):
            build(linear(tmp_path / "model"), request, tmp_path / "out")
        return
    engine = build(linear(tmp_path / "model"), request, tmp_path / "out")
    feed = feeds(3)
    np.testing.assert_allclose(run(engine, feed)["y"], feed["x"] @ WEIGHT, rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
def test_implicit_int8_without_its_calibration_cache_is_refused(tmp_path: Path) -> None:
    if trt_library.numbers(tensorrt_.probe().version) >= (11,):
        pytest.skip("TensorRT 11 has no implicit int8")
    with pytest.raises(
        ModelError, match=r"needs the calibration cache 'calibration.cache' beside the model"
    ):
        build(
            linear(tmp_path / "model", label=Precision.INT8),
            recipe(Precision.INT8, realised_in="flags"),
            tmp_path / "out",
        )


@pytest.mark.gpu
def test_two_profiles_each_run_their_shapes(tmp_path: Path) -> None:
    options = BuildOptions(
        profiles=(PROFILE, Profile(dims={"n": DimRange(min=100, opt=128, max=128)}))
    )
    engine = build(linear(tmp_path / "model"), recipe(), tmp_path / "out", options)
    with closing(tensorrt_.load(engine)) as loaded, closing(loaded.session()) as session:
        for rows in (1, 128, 8, 100):
            feed = feeds(rows)
            np.testing.assert_allclose(
                run_session(session, feed)["y"], feed["x"] @ WEIGHT, rtol=1e-4, atol=1e-4
            )


@pytest.mark.gpu
def test_values_that_decide_a_shape_are_read_on_the_host(tmp_path: Path) -> None:
    inputs: list[Value] = [("x", FLOAT, [1, 3]), ("k", INT64, [2])]
    model = save(
        tmp_path / "model",
        [helper.make_node("Expand", ["x", "k"], ["y"])],
        inputs,
        [("y", FLOAT, ["a", "b"])],
    )
    with pytest.raises(PlanError, match="input 'k' decides a shape by its values"):
        build(model, recipe(), tmp_path / "out", BuildOptions(profiles=(Profile(),)))
    profile = Profile(values={"k": ValueRange(min=(1, 3), opt=(4, 3), max=(8, 3))})
    engine = build(model, recipe(), tmp_path / "out", BuildOptions(profiles=(profile,)))
    assert [spec.location for spec in engine.inputs] == ["device", "host"]
    answer = run(engine, {"x": np.array([[1, 2, 3]], np.float32), "k": np.array([5, 3])})["y"]
    np.testing.assert_array_equal(answer, np.broadcast_to(np.array([1, 2, 3], np.float32), (5, 3)))


def timed_here() -> timing_cache.CacheScope:
    return timing_cache.CacheScope(tensorrt_.probe(), OPTIONS.tensorrt.timing_iterations)


@pytest.fixture
def idle_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else this host computes keeps no times out of the cache."""
    monkeypatch.setattr(timing_cache, "cpu_time", timing_cache.CpuTime)


@pytest.mark.gpu
@pytest.mark.usefixtures("idle_cpus")
def test_the_second_build_reads_the_timing_cache(tmp_path: Path) -> None:
    model, timed = linear(tmp_path / "model", Precision.FP16), timed_here()
    first = build(model, recipe(Precision.FP16), tmp_path / "first")
    cache = timing_cache.folder(timed) / timing_cache.FILE
    assert first.notes == ()
    size = cache.stat().st_size
    second = build(model, recipe(Precision.FP16), tmp_path / "second")
    assert cache.stat().st_size == size > 0  # nothing new was timed
    assert timing_cache.read(timed)
    assert second.notes == ()


@pytest.mark.gpu
@pytest.mark.usefixtures("idle_cpus")
def test_a_damaged_timing_cache_is_made_anew(tmp_path: Path) -> None:
    timed, junk = timed_here(), b"no timing cache" * 100
    timing_cache.write(timed, junk)
    (timing_cache.folder(timed) / timing_cache.ABOUT).unlink()
    engine = build(linear(tmp_path / "model"), recipe(), tmp_path / "out")
    assert any("was damaged and was created again" in note.text for note in engine.notes)
    assert timing_cache.read(timed) not in (b"", junk)


@pytest.mark.gpu
@pytest.mark.usefixtures("idle_cpus")
def test_a_timing_cache_that_was_written_as_rubbish_is_made_anew(tmp_path: Path) -> None:
    """Its digest is right, so only TensorRT could find out; 10.6 takes it for an empty one without
    a word.
    """
    timed, junk = timed_here(), b"no timing cache" * 100
    timing_cache.write(timed, junk)
    build(linear(tmp_path / "model"), recipe(), tmp_path / "out")
    assert timing_cache.read(timed) not in (b"", junk)


@pytest.mark.gpu
def test_a_hardware_compatible_engine_says_so_and_runs(tmp_path: Path) -> None:
    engine = build(
        linear(tmp_path / "model", Precision.FP16),
        recipe(Precision.FP16, hardware_compatible=True),
        tmp_path / "out",
    )
    assert engine.target.compute_capability == "8.0+"
    assert (
        engine.target.accepts(tensorrt_.probe().model_copy(update={"compute_capability": "8.6"}))
        == ()
    )
    feed = feeds(2)
    np.testing.assert_allclose(run(engine, feed)["y"], feed["x"] @ WEIGHT, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_a_version_compatible_engine_needs_the_lean_runtime(tmp_path: Path) -> None:
    major = trt_library.numbers(tensorrt_.probe().version)[0]
    model, request = linear(tmp_path / "model"), recipe(version_compatible=True)
    if not trt_library.missing_lean(major):
        assert build(model, request, tmp_path / "out").target.version.endswith("+")
        return
    with pytest.raises(
        UnsupportedError,
        match=rf"version compatibility needs the lean runtime libnvinfer_lean\.so\.{major}",
    ):
        build(model, request, tmp_path / "out")


@pytest.mark.gpu
def test_unsupported_nodes_are_all_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["d"], name="determinant"),
        helper.make_node("Fancy", ["d"], ["f"], name="fancy", domain="com.acme"),
        helper.make_node("MatMul", ["x", "w"], ["y"], name="misfit"),
    ]
    weight = numpy_helper.from_array(np.ones((4, 5), np.float32), "w")
    model = save(
        tmp_path,
        nodes,
        [("x", FLOAT, ["n", 3, 3])],
        [("f", FLOAT, ["n"]), ("y", FLOAT, ["n", 3, 5])],
        [weight],
    )
    refusals = tensorrt_.unsupported(model, tensorrt_.probe())
    assert [(refusal.node, refusal.operator) for refusal in refusals] == [
        ("determinant", "Det"),
        ("fancy", "com.acme::Fancy"),
        ("misfit", "MatMul"),
    ]
    assert "tensorrt.plugins" in refusals[1].remedy


@pytest.mark.gpu
@pytest.mark.parametrize("named", [False, True])
def test_nvidias_own_plugins_are_there_named_or_not(tmp_path: Path, named: bool) -> None:
    settings = {
        "plugin_version": "1",
        "score_threshold": 0.25,
        "iou_threshold": 0.5,
        "max_output_boxes": 3,
        "background_class": -1,
    }
    names = ["count", "boxes", "scores", "classes"]
    node = helper.make_node(
        "EfficientNMS_TRT", ["b", "s"], names, score_activation=0, box_coding=0, **settings
    )
    outputs: list[Value] = [
        ("count", INT32, [1, 1]),
        ("boxes", FLOAT, [1, 3, 4]),
        ("scores", FLOAT, [1, 3]),
        ("classes", INT32, [1, 3]),
    ]
    model = save(
        tmp_path / "model", [node], [("b", FLOAT, [1, 4, 4]), ("s", FLOAT, [1, 4, 2])], outputs
    )
    plugins = (own_plugin_library(),) if named else ()
    assert tensorrt_.unsupported(model, tensorrt_.probe(), plugins) == ()
    engine = build(
        model,
        recipe(),
        tmp_path / "out",
        BuildOptions(profiles=(), tensorrt=TensorRTOptions(plugins=plugins)),
    )
    assert not (tmp_path / "out" / tensorrt_.PLUGINS).exists()
    boxes = np.array([[[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3], [5, 5, 6, 6]]], np.float32)
    scores = np.array([[[0.9, 0], [0.8, 0], [0, 0.7], [0.1, 0.1]]], np.float32)
    answer = run(engine, {"b": boxes, "s": scores})
    assert answer["count"].item() == 2
    np.testing.assert_allclose(answer["scores"][0, :2], [0.9, 0.7])


def own_plugin_library() -> Path:
    """Where the plugin library that this process has loaded lies."""
    trt_library.library()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in lines if trt_parser.OWN_PLUGINS in line)


@pytest.mark.gpu
def test_a_build_without_memory_says_so_and_the_next_one_works(tmp_path: Path) -> None:
    """In a child, as every build: what a failure leaves in the library stays there."""
    model = convolution(tmp_path / "model")
    options = BuildOptions(profiles=(Profile(dims={"n": DimRange(min=64, opt=256, max=512)}),))
    with pytest.raises(OutOfDeviceMemory, match="the GPU's memory") as error:
        call_in_child(
            build_in_a_full_gpu,
            model,
            recipe(),
            options,
            tmp_path / "out",
            name="full",
            log=tmp_path / "log",
        )
    assert "tensorrt.workspace_mib" in error.value.next_step
    small = BuildOptions(profiles=(PROFILE,))
    assert (
        call_in_child(
            build_and_go,
            model,
            recipe(),
            small,
            tmp_path / "out",
            name="next",
            log=tmp_path / "log",
        ).size_bytes
        > 0
    )


def convolution(folder: Path) -> OnnxModel:
    """x [n, 16, 224, 224] -> y [n, 16, 224, 224]: 1.6 GB for 512 of each."""
    weight = numpy_helper.from_array(np.ones((16, 16, 3, 3), np.float32), "w")
    shape = ("n", 16, 224, 224)
    return save(
        folder,
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])],
        [("x", FLOAT, shape)],
        [("y", FLOAT, shape)],
        [weight],
    )


def build_and_go(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    return build(model, recipe, out, options, progress)


def build_in_a_full_gpu(
    model: OnnxModel, recipe: Recipe, options: BuildOptions, out: Path, progress: Progress = silent
) -> Engine:
    """Take all of the GPU's memory but 400 MB, then build."""
    rt = cuda.runtime()
    cuda.check(rt, rt.cudaFree(0))  # makes the context
    free, _ = cuda.check(rt, rt.cudaMemGetInfo())
    cuda.check(rt, rt.cudaMalloc(free - 400 * 2**20))
    return build(model, recipe, out, options, progress)


@pytest.mark.gpu
def test_an_engine_of_another_version_is_refused(tmp_path: Path) -> None:
    engine = build(linear(tmp_path / "model"), recipe(), tmp_path / "out")
    foreign = engine.model_copy(
        update={"target": engine.target.model_copy(update={"version": "10.0.0"})}
    )
    with pytest.raises(BackendUnavailable, match=r"engine needs version 10.0.0, this host has"):
        tensorrt_.load(foreign)


@pytest.mark.gpu
def test_the_layers_of_an_engine_are_told_with_times(tmp_path: Path) -> None:
    engine = build(
        linear(tmp_path / "model", Precision.FP16), recipe(Precision.FP16), tmp_path / "out"
    )
    table = tensorrt_.layers(engine, feeds(4))
    assert table is not None
    assert table.sizes == {"n": 4}
    assert any(layer.seconds for layer in table.layers)
    assert any(layer.nodes for layer in table.layers)
