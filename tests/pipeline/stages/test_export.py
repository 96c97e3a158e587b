"""Export: what comes out computes what PyTorch computes, or is refused with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from pipeline.backends.pytorch.export import example_sizes, feeds_at
from pipeline.backends.pytorch.module import load_module, run_module
from pipeline.core.artifacts import ModelSource, OnnxModel
from pipeline.core.shapes import Profile, TensorSpec
from pipeline.errors import ModelError, PlanError
from pipeline.onnx_graph import compare
from pipeline.plan.schema import ExportConfig
from pipeline.stages.export import export

BUILDERS = Path(__file__).parents[2] / "builders"
AUTO, DYNAMO, TORCHSCRIPT = (
    ExportConfig(),
    ExportConfig(exporter="dynamo"),
    ExportConfig(exporter="torchscript"),
)


def spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(
        name=name,
        dtype=dtype,
        shape=shape,
        kind="dynamic" if any(isinstance(dim, str) for dim in shape) else "static",
    )


def profile(**dims: list[int]) -> Profile:
    return Profile.model_validate({"dims": dims})


IMAGE = spec("image", "float32", "batch", 1, 8, 8)
IDS, MASK = spec("ids", "int64", "batch", "sequence"), spec("mask", "int64", "batch", "sequence")
BATCH = profile(batch=[1, 4, 9])
TEXT = profile(batch=[1, 2, 6], sequence=[1, 8, 16])


def source_of(function: str, *inputs: TensorSpec, outputs: tuple[str, ...] = ()) -> ModelSource:
    return ModelSource(
        entrypoint=f"models:{function}", python_path=BUILDERS, inputs=inputs, outputs=outputs
    )


def agrees(model: OnnxModel, source: ModelSource, sizes: Mapping[str, int]) -> bool:
    feeds = feeds_at(source.inputs, (), sizes)
    return (
        compare.compare_outputs(
            run_module(load_module(source), source, feeds),
            compare.open_reference(model.path)(feeds),
            1e-4,
        )
        == ""
    )


def shapes(specs: tuple[TensorSpec, ...]) -> list[tuple[str, str, tuple[int | str, ...]]]:
    return [(item.name, item.dtype, item.shape) for item in specs]


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSource, OnnxModel]:
    source = source_of("residual_cnn", IMAGE, outputs=("classes",))
    sample = {"image": np.random.default_rng(0).standard_normal((1, 1, 8, 8)).astype(np.float32)}
    return source, export(source, (BATCH,), AUTO, (sample,), tmp_path_factory.mktemp("cnn"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSource, OnnxModel]:
    source = source_of("encoder", IDS, MASK)
    samples = tuple(
        {"ids": np.arange(n).reshape(1, n), "mask": np.ones((1, n), np.int64)} for n in (7, 12)
    )
    return source, export(
        source,
        (TEXT, profile(batch=[1, 1, 1], sequence=[8, 8, 8])),
        AUTO,
        samples,
        tmp_path_factory.mktemp("encoder"),
    )


# --- what comes out ---


def test_a_cnn_keeps_its_names_its_batch_and_its_values(cnn: tuple[ModelSource, OnnxModel]) -> None:
    source, model = cnn
    assert model.opset == 20
    assert model.notes == ()
    assert shapes(model.inputs) == [("image", "float32", ("batch", 1, 8, 8))]
    assert shapes(model.outputs) == [("classes", "float32", ("batch", 10))]
    assert all(agrees(model, source, {"batch": batch}) for batch in (1, 3, 16))


def test_the_graph_holds_no_paths_of_the_user(cnn: tuple[ModelSource, OnnxModel]) -> None:
    assert str(BUILDERS).encode() not in cnn[1].path.read_bytes()


def test_an_encoder_has_two_symbols_and_outputs_by_the_keys_of_its_dict(
    encoder: tuple[ModelSource, OnnxModel],
) -> None:
    source, model = encoder
    assert shapes(model.inputs) == [
        ("ids", "int64", ("batch", "sequence")),
        ("mask", "int64", ("batch", "sequence")),
    ]
    assert shapes(model.outputs) == [
        ("embedding", "float32", ("batch", 16)),
        ("tokens", "float32", ("batch", "sequence", 16)),
    ]
    assert agrees(model, source, {"batch": 1, "sequence": 1})
    assert agrees(model, source, {"batch": 7, "sequence": 33})


def test_scalars_integers_and_flags_in_and_out(tmp_path: Path) -> None:
    source = source_of(
        "several",
        spec("x", "float32", "batch", 3),
        spec("scale", "float32"),
        outputs=("scaled", "count", "positive"),
    )
    model = export(source, (BATCH,), DYNAMO, (), tmp_path)
    assert shapes(model.outputs) == [
        ("scaled", "float32", ("batch", 3)),
        ("count", "int64", ()),
        ("positive", "bool", ("batch", 3)),
    ]
    assert agrees(model, source, {"batch": 2})
    assert [note.text for note in model.notes] == [
        "no data: the export is checked on generated inputs only"
    ]


def test_an_output_may_be_as_long_as_its_data_says(tmp_path: Path) -> None:
    source = source_of("positions", spec("x", "float32", "n"))
    model = export(source, (profile(n=[1, 4, 9]),), DYNAMO, (), tmp_path)
    assert model.outputs[0].kind == "data-dependent"
    assert agrees(model, source, {"n": 20})


# --- what is refused ---


def test_a_batch_baked_in_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        export(
            source_of("baked_batch", spec("x", "float32", "batch", 6)), (BATCH,), AUTO, (), tmp_path
        )
    assert "the model's code fixes 'batch' at its example's 4" in error.value.message
    assert "the torchscript exporter: at batch=1" in error.value.message


@pytest.mark.parametrize("options", [AUTO, TORCHSCRIPT])
def test_a_branch_on_data_is_refused_with_its_line(tmp_path: Path, options: ExportConfig) -> None:
    with pytest.raises(ModelError) as error:
        export(
            source_of("frozen_branch", spec("x", "float32", "batch", 4)),
            (BATCH,),
            options,
            (),
            tmp_path,
        )
    assert "models.py:" in error.value.message
    assert "torch.cond" in str(error.value)
    assert ("if x.sum() < 0" in error.value.message) == (options is AUTO)


def test_an_operator_no_exporter_takes_is_named_with_both_attempts(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        export(
            source_of("no_exporter", spec("x", "float32", "batch", 4, 4)),
            (BATCH,),
            AUTO,
            (),
            tmp_path,
        )
    assert "the dynamo exporter: No ONNX function found" in error.value.message
    assert "aten.linalg_eig" in error.value.message
    assert (
        "the torchscript exporter: Exporting the operator 'aten::linalg_eigvals'"
        in error.value.message
    )


def test_inputs_that_the_model_does_not_take_are_refused_before_any_export(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the PyTorch model fails on image float32\[4, 3, 8, 8\]"):
        export(
            source_of("residual_cnn", spec("image", "float32", "batch", 3, 8, 8)),
            (BATCH,),
            AUTO,
            (),
            tmp_path,
        )
    assert not list(tmp_path.iterdir())


# --- the fallback ---


def test_the_torchscript_exporter_takes_over_and_says_so(tmp_path: Path) -> None:
    source = source_of(
        "only_traceable", spec("x", "float32", "batch", 3), outputs=("twice", "flat")
    )
    model = export(source, (BATCH,), AUTO, (), tmp_path)
    assert any(
        "fell back to the TorchScript exporter: the dynamo exporter: " in note.text
        for note in model.notes
    )
    assert any("traced, models.py:" in note.text for note in model.notes)
    assert shapes(model.inputs) == [("x", "float32", ("batch", 3))]
    assert shapes(model.outputs)[1] == ("flat", "float32", ("batch",))
    assert agrees(model, source, {"batch": 5})


# --- .pt2 ---


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = load_module(source_of("residual_cnn", IMAGE))
    shape = {0: torch.export.Dim.DYNAMIC}
    path = tmp_path_factory.mktemp("pt2") / "model.pt2"
    torch.export.save(
        torch.export.export(module, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=(shape,)), path
    )
    return path


def test_a_pt2_takes_the_plans_names(program: Path, tmp_path: Path) -> None:
    source = ModelSource(
        path=program, inputs=(spec("picture", "float32", "rows", 1, 8, 8),), outputs=("classes",)
    )
    model = export(source, (profile(rows=[2, 4, 9]),), AUTO, (), tmp_path)
    assert shapes(model.inputs) == [("picture", "float32", ("rows", 1, 8, 8))]
    assert shapes(model.outputs) == [("classes", "float32", ("rows", 10))]
    assert agrees(model, source, {"rows": 3})


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (
            (spec("image", "float32", "batch", "one", 8, 8),),
            r"'image' is float32\[batch, one, 8, 8\] in the plan",
        ),
        (
            (spec("image", "int64", "batch", 1, 8, 8),),
            r"'image' is int64\[batch, 1, 8, 8\] in the plan",
        ),
        ((IMAGE, MASK), "names 2 inputs, the exported program has 1"),
    ],
)
def test_a_pt2_whose_inputs_are_not_the_plans_is_refused(
    program: Path, tmp_path: Path, inputs: tuple[TensorSpec, ...], expected: str
) -> None:
    ranges = profile(**{symbol: [2, 4, 9] for item in inputs for symbol in item.symbols})
    with pytest.raises(ModelError, match=expected):
        export(ModelSource(path=program, inputs=inputs), (ranges,), AUTO, (), tmp_path)


def test_values_that_decide_a_shape_are_drawn_inside_their_range(tmp_path: Path) -> None:
    """The model refuses a width below 2, so nothing else may be drawn, nor be made zero."""
    width = TensorSpec(name="width", dtype="int64", shape=())
    source = source_of("widened", TensorSpec(name="x", dtype="float32", shape=("batch", 3)), width)
    profile = Profile.model_validate({"dims": {"batch": [2, 5, 9]}, "values": {"width": [2, 5, 9]}})
    model = export(source, (profile,), AUTO, (), tmp_path)
    assert [note.text for note in model.notes] == [
        "no data: the export is checked on generated inputs only"
    ]
    feeds = {"x": np.ones((3, 3), np.float32), "width": np.array(7)}
    assert compare.open_reference(model.path)(feeds)[model.outputs[0].name].shape == (3, 7, 3)
    assert model.outputs[0].shape[1] != "batch"  # though it was of the same size each time


# --- .onnx ---


def test_an_onnx_file_is_adopted_with_its_external_data_however_small(
    cnn: tuple[ModelSource, OnnxModel], tmp_path: Path
) -> None:
    user, out = tmp_path / "user", tmp_path / "out"
    (user / "data").mkdir(parents=True)
    out.mkdir()
    onnx.save(
        onnx.load(cnn[1].path),
        user / "net.onnx",
        save_as_external_data=True,
        location="data/weights.bin",
        size_threshold=0,
    )
    model = export(ModelSource(path=user / "net.onnx"), (BATCH,), AUTO, (), out)
    shutil.rmtree(user)
    assert [file.name for file in out.iterdir()] == ["model.onnx"]
    assert model.inputs == cnn[1].inputs
    assert agrees(model, cnn[0], {"batch": 3})


def test_an_onnx_file_needs_a_range_for_each_of_its_symbols(
    cnn: tuple[ModelSource, OnnxModel], tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match="'batch' of input 'image'"):
        export(ModelSource(path=cnn[1].path), (), AUTO, (), tmp_path)


def test_an_onnx_file_that_the_checker_refuses_is_refused(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Nonsense", ["x"], ["y"], "node")], "g", [value], [result]
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "bad.onnx")
    with pytest.raises(ModelError, match="Nonsense"):
        export(ModelSource(path=tmp_path / "bad.onnx"), (), AUTO, (), tmp_path)


# --- shapes and feeds ---


def test_example_sizes_are_distinct_above_two_and_the_profiles_own_where_possible() -> None:
    assert example_sizes((IDS,), (TEXT,)) == {"batch": 6, "sequence": 8}
    assert example_sizes((IMAGE,), (profile(batch=[1, 8, 64]),)) == {"batch": 64}
    assert example_sizes((spec("x", "float32", "batch", 3),), (profile(batch=[1, 2, 2]),)) == {
        "batch": 2
    }
    assert example_sizes((IDS,), (profile(batch=[1, 1, 1], sequence=[1, 1, 1]),)) == {
        "batch": 3,
        "sequence": 4,
    }


def test_samples_are_repeated_and_cut_to_a_shape() -> None:
    sample = {"ids": np.array([[5, 6, 7]]), "mask": np.array([[1, 1, 0]])}
    feeds = feeds_at((IDS, MASK), (sample,), {"batch": 2, "sequence": 5})
    assert feeds["ids"].tolist() == [[5, 6, 7, 5, 6]] * 2
    assert feeds_at((IDS, MASK), (sample,), {"batch": 1, "sequence": 2})["mask"].tolist() == [
        [1, 1]
    ]
