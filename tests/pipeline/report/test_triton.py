"""An engine as a model of Triton's repository: its config is one that Triton's own proto reads."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelInstanceGroup

from pipeline.core.artifacts import Engine, Target
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, TensorSpec
from pipeline.errors import PlanError, UnsupportedError
from pipeline.report import triton
from pipeline.report.bundle import deliver_engine
from pipeline.serving_inputs import BatchSpec
from tests.builders.cli import crucible_here

TARGETS = {
    "tensorrt": Target(
        backend="tensorrt", version="10.6.0", device="NVIDIA H200", compute_capability="9.0"
    ),
    "onnxruntime": Target(backend="onnxruntime", version="1.23.0", device="some CPU"),
    "openvino": Target(backend="openvino", version="2026.4", device="some CPU"),
}


def engine_in(
    folder: Path,
    backend: str = "onnxruntime",
    inputs: tuple[TensorSpec, ...] = (
        TensorSpec(name="x", dtype="float32", shape=("batch", 3, "side")),
    ),
    outputs: tuple[TensorSpec, ...] = (TensorSpec(name="y", dtype="float16", shape=("batch", 4)),),
    batches: tuple[tuple[int, int, int], ...] = ((1, 8, 64),),
    precision: Precision = Precision.FP32,
    threads: int = 0,
) -> Engine:
    folder.mkdir(exist_ok=True)
    file = "engine.plan" if backend == "tensorrt" else "tiny.onnx"
    (folder / file).write_bytes(b"engine")
    (folder / "engine.json").write_text("{}")
    side = DimRange(min=8, opt=16, max=32)
    return Engine(
        root=folder,
        file=file,
        digest="0" * 64,
        target=TARGETS[backend],
        recipe=Recipe(backend=backend, precision=precision),
        inputs=inputs,
        outputs=outputs,
        profiles=tuple(
            Profile(dims={"batch": DimRange(min=low, opt=usual, max=high), "side": side})
            for low, usual, high in batches
        ),
        threads=threads,
        size_bytes=6,
    )


def proved(engine: Engine, **axes: int | None) -> BatchSpec:
    """Rows along axis 0 of everything but `axes`, up to what some profile holds."""
    along = dict.fromkeys((spec.name for spec in (*engine.inputs, *engine.outputs)), 0) | axes
    return BatchSpec(
        axes=along,
        maximum=max(profile.dims["batch"].max for profile in engine.profiles),
        proved=True,
        largest_error=0.0005,
    )


def refuted(engine: Engine) -> BatchSpec:
    return BatchSpec(
        axes={spec.name: 0 for spec in (*engine.inputs, *engine.outputs)},
        reason="rows influence each other",
    )


def parsed(engine: Engine, batch: BatchSpec | None = None) -> ModelConfig:
    return text_format.Parse(
        triton.config_text(engine, batch or proved(engine), 'na"me'), ModelConfig()
    )


def test_rows_are_batched_as_the_profile_says(tmp_path: Path) -> None:
    config = parsed(engine_in(tmp_path, threads=3))
    assert (config.name, config.backend, config.max_batch_size) == ('na"me', "onnxruntime", 64)
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in config.input] == [
        ("x", DataType.TYPE_FP32, [3, -1])
    ]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in config.output] == [
        ("y", DataType.TYPE_FP16, [4])
    ]
    assert config.HasField("dynamic_batching")
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert config.instance_group[0].kind == ModelInstanceGroup.KIND_CPU
    assert config.parameters["intra_op_thread_count"].string_value == "3"


def test_tensorrt_names_every_profile(tmp_path: Path) -> None:
    config = parsed(engine_in(tmp_path, "tensorrt", batches=((1, 1, 8), (8, 32, 64))))
    assert config.max_batch_size == 64
    assert list(config.dynamic_batching.preferred_batch_size) == [1, 32]
    (group,) = config.instance_group
    assert (group.kind, list(group.profile)) == (ModelInstanceGroup.KIND_GPU, ["0", "1"])


@pytest.mark.parametrize(
    ("batches", "maximum"),
    [(((1, 1, 8), (16, 32, 64)), 8), (((4, 4, 64),), 0), (((1, 1, 1),), 0)],
    ids=["no profile holds 9 to 15 rows", "one row alone does not fit", "one row only"],
)
def test_no_batch_is_formed_that_the_engine_refuses(
    tmp_path: Path, batches: tuple[tuple[int, int, int], ...], maximum: int
) -> None:
    config = parsed(engine_in(tmp_path, batches=batches))
    assert config.max_batch_size == maximum
    assert config.HasField("dynamic_batching") == (maximum > 0)
    assert list(config.input[0].dims) == ([3, -1] if maximum else [-1, 3, -1])


def test_where_nothing_is_proved_shapes_are_whole(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    for batch in (refuted(engine), proved(engine, y=1), proved(engine, y=None)):
        config = parsed(engine, batch)
        assert config.max_batch_size == 0
        assert not config.HasField("dynamic_batching")
        assert [list(each.dims) for each in (*config.input, *config.output)] == [
            [-1, 3, -1],
            [-1, 4],
        ]


def test_scalars_and_shape_tensors(tmp_path: Path) -> None:
    scalar = TensorSpec(name="k", dtype="int32", shape=(), location="host")
    engine = engine_in(
        tmp_path, inputs=(scalar,), outputs=(TensorSpec(name="y", dtype="bool", shape=("batch",)),)
    )
    config = parsed(engine, refuted(engine))
    k: ModelInput = config.input[0]
    assert (list(k.dims), k.HasField("reshape"), list(k.reshape.shape), k.is_shape_tensor) == (
        [1],
        True,
        [],
        True,
    )
    assert list(config.output[0].dims) == [-1]


def test_a_type_that_triton_lacks_is_named(tmp_path: Path) -> None:
    engine = engine_in(
        tmp_path, inputs=(TensorSpec(name="x", dtype="complex64", shape=("batch",)),)
    )
    with pytest.raises(UnsupportedError, match="no type for input 'x', which is complex64"):
        triton.config_text(engine, refuted(engine), "m")


def export(engine: Engine, name: str, folder: Path) -> Path:
    return triton.export_triton(engine, proved(engine), triton.parse_name(name), folder)


def test_versions_stand_side_by_side(tmp_path: Path) -> None:
    engine, models = engine_in(tmp_path / "engine", "tensorrt"), tmp_path / "models"
    export(engine, "net/1", models)
    assert export(engine, "net/2", models) == models / "net"
    files = sorted(str(path.relative_to(models)) for path in models.rglob("*") if path.is_file())
    assert files == ["net/1/model.plan", "net/2/model.plan", "net/config.pbtxt"]
    with pytest.raises(PlanError, match="exists already"):
        export(engine, "net/2", models)
    with pytest.raises(PlanError, match="holds version 1, 2, whose inputs"):
        export(engine_in(tmp_path / "other", "tensorrt", batches=((1, 2, 4),)), "net/3", models)
    assert sorted(path.name for path in (models / "net").iterdir()) == ["1", "2", "config.pbtxt"]


def test_a_config_is_compared_by_what_it_means(tmp_path: Path) -> None:
    engine, models = engine_in(tmp_path / "engine"), tmp_path / "models"
    export(engine, "net/1", models)
    config = models / "net" / "config.pbtxt"
    written = config.read_text()
    config.write_text("# by hand\n" + written.replace("\n", "  "))
    export(engine, "net/2", models)
    assert config.read_text() == written
    config.write_text("no config")
    with pytest.raises(PlanError, match="holds version 1, 2, whose inputs"):
        export(engine, "net/3", models)


def test_external_data_lies_beside_the_graph(tmp_path: Path) -> None:
    engine = engine_in(tmp_path / "engine")
    (engine.root / "data").mkdir()
    (engine.root / "data" / "weights.bin").write_bytes(b"weights")
    export(engine, "net/1", tmp_path / "models")
    place = tmp_path / "models" / "net" / "1" / "model.onnx"
    files = {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file()
    }
    assert files == {"model.onnx": b"engine", "data/weights.bin": b"weights"}


def test_what_triton_cannot_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="tensorrt or onnxruntime for Triton, got one of openvino"
    ):
        export(engine_in(tmp_path / "engine", "openvino"), "net/1", tmp_path / "models")
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize(
    "text", ["net", "net/0", "net/01", "../net/1", "net/1/2", "/1", "net/-1", "a b/1"]
)
def test_a_name_is_one_folder_and_a_number(text: str) -> None:
    with pytest.raises(PlanError, match="expected NAME/VERSION"):
        triton.parse_name(text)


def test_remarks_tell_what_triton_needs(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, "tensorrt")
    (engine.root / "plugins").mkdir()
    (engine.root / "plugins" / "mine.so").touch()
    text = " ".join(triton.remarks(engine, proved(engine)))
    assert "TensorRT 10.6.0, and a GPU of compute capability 9.0" in text
    assert "up to 64 rows run together: proved on this engine, within 0.0005 of" in text
    assert "LD_PRELOAD=" in text
    int8 = engine_in(tmp_path / "int8", precision=Precision.INT8)
    assert "optimisers" in " ".join(triton.remarks(int8, proved(int8)))
    assert "every request runs alone: rows influence each other" in triton.remarks(
        int8, refuted(int8)
    )
    assert any(
        "rows along axis 0 of all" in remark for remark in triton.remarks(int8, proved(int8, x=1))
    )


@pytest.mark.slow
def test_the_command_takes_what_compile_wrote(compiled: tuple[Path, Path], tmp_path: Path) -> None:
    result = crucible_here(
        "export", "--triton", "tiny/1", "models", "--from", str(compiled[0] / "out"), cwd=tmp_path
    )
    assert (result.code, result.out) == (0, "models/tiny\n"), result.err
    config = text_format.Parse(
        (tmp_path / "models" / "tiny" / "config.pbtxt").read_text(), ModelConfig()
    )
    assert (config.max_batch_size, [list(tensor.dims) for tensor in config.input]) == (16, [[16]])
    assert (tmp_path / "models" / "tiny" / "1" / "model.onnx").is_file()
    assert "measured with ONNX Runtime" in result.err
    assert "up to 16 rows run together: proved on" in result.err
    again = crucible_here(
        "export", "--triton", "tiny/1", "models", "--from", str(compiled[0] / "out"), cwd=tmp_path
    )
    assert (again.code, "exists already" in again.err) == (1, True)


def test_without_from_the_command_takes_what_was_promoted_in_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it exports it, too, is in the test of the how-to pages, beside a server."""
    monkeypatch.setenv("CRUCIBLE_HOME", str(tmp_path / "home"))
    none = crucible_here("export", "--triton", "net/3", "models", cwd=tmp_path)
    assert (
        none.code,
        "no version 3 of 'net'" in none.err,
        "it has no model 'net'" in none.err,
    ) == (1, True, True)
    engine = engine_in(tmp_path / "built", "openvino")
    deliver_engine(engine, tmp_path / "home" / "models" / "net" / "3" / "engine")
    result = crucible_here("export", "--triton", "net/3", "models", cwd=tmp_path)
    assert (result.code, "got one of openvino" in result.err) == (1, True)
    assert not (tmp_path / "models").exists()
