"""The original model beside its engine: what runs, what is refused, and how they differ."""

import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from pipeline.core.artifacts import Engine
from pipeline.core.processing import Postprocess, Preprocess
from pipeline.plan.schema import ModelConfig, Plan
from pipeline.serving_inputs import Packing, ServingConfig
from service.auth import LOCAL
from service.pages import original as module
from service.pages.original import NoOriginal, difference_text, original_of
from service.registry.models import DeploymentOptions, PromoteRequest, Version
from service.storage.layout import Folders
from tests.service.builders.app import Desk, at_desk
from tests.service.serving.engines import Array, Shape, engine_of
from tests.service.serving.models import ended_job

Values = Mapping[str, tuple[int, Shape]]
X: Values = {"x": (TensorProto.FLOAT, ["batch", 2])}
Y: Values = {"y": (TensorProto.FLOAT, ["batch", 2])}
PATH = "/ui/models/m/try"
INPUTS = [{"name": "x", "dtype": "float32", "shape": [1]}]
ROW = "[[1, 2]]"
BOX = "Compare with the original model"


def times(factor: float, name: str = "factor") -> tuple[list[onnx.NodeProto], dict[str, Array]]:
    """y = x * factor."""
    return [helper.make_node("Mul", ["x", name], ["y"])], {name: np.array(factor, np.float32)}


def write_original(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Values,
    outputs: Values,
    constants: Mapping[str, Array],
) -> None:
    """The ONNX file that a client would have sent."""
    ends = [
        [helper.make_tensor_value_info(name, *shape) for name, shape in each.items()]
        for each in (inputs, outputs)
    ]
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", *ends, tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)


async def promoted(desk: Desk, engine: Engine, **plan: object) -> Path:
    """Load an engine as the model `m`. Returns the folder of its job's upload, without a model."""
    folders = desk.service.folders
    job = ended_job(folders, desk.service.jobs, engine=engine)
    held = folders.load_plan(job).model_copy(update=plan)
    folders.save_plan(job, held)
    await desk.service.models.promote(LOCAL, "m", PromoteRequest(report=job))
    await desk.service.models.deploy(LOCAL, "m", DeploymentOptions())
    return folders.uploads(job)


async def send(desk: Desk, values: str, compare: bool = True, status: int = 200) -> str:
    """Send the form with the values of its only input. Returns the page."""
    data = {"text-0": values} | ({"compare": "on"} if compare else {})
    answer = await desk.client.post(PATH, data=data)
    assert answer.status_code == status, answer.text
    return html.unescape(answer.text)


async def form(desk: Desk) -> str:
    return html.unescape((await desk.client.get(PATH)).text)


def test_the_answer_of_the_original_stands_beside_that_of_the_engine(tmp_path: Path) -> None:
    nodes, constants = times(2.0)
    engine = engine_of(tmp_path / "e", nodes, X, Y, constants)

    async def story(desk: Desk) -> None:
        uploads = await promoted(desk, engine)
        nodes, constants = times(2.5)
        write_original(uploads / "model.onnx", nodes, X, Y, constants)
        assert BOX in await form(desk)
        text = await send(desk, ROW)
        assert "2, 4</pre>" in text
        assert "The original model:" in text
        assert "2.5, 5</pre>" in text
        assert "Largest absolute difference 1; cosine 1.000000." in text
        plain = await send(desk, ROW, compare=False)
        assert "The original model:" not in plain
        assert "checked" not in plain, "the choice is kept"
        refused = await send(desk, "[[1, ", status=422)
        assert "checked" in refused
        left = list((desk.service.folders.serving).glob("original-*"))
        assert left == [], "nothing of the worker stays"
        assert (uploads / "model.onnx").stat().st_nlink == 1
        held = [lease for lease in desk.service.devices.held if "original" in lease.holder]
        assert held == []

    at_desk(tmp_path / "home", story)


def test_classes_have_the_scores_of_both(tmp_path: Path) -> None:
    scores: Values = {"y": (TensorProto.FLOAT, ["batch", 5])}
    inputs: Values = {"x": scores["y"]}
    nodes, constants = times(1.0)
    engine = engine_of(tmp_path / "e", nodes, inputs, scores, constants)

    async def story(desk: Desk) -> None:
        uploads = await promoted(desk, engine)
        nodes, _ = times(1.0)
        factors = {"factor": np.array([[1, 1, 9, 1, 1]], np.float32)}
        write_original(uploads / "model.onnx", nodes, inputs, scores, factors)
        text = await send(desk, "[[1, 2, 3, 4, 5], [0, 0, 1, 0, 0]]")
        rows = re.findall(r"<tr><td>(class \d)</td>" + 2 * r'<td class="number">([^<]+)</td>', text)
        assert rows[0] == ("class 4", "5", "5")
        assert rows[2] == ("class 2", "3", "27"), "in the order of the engine's scores"
        assert "Original model</th>" in text
        assert "difference 24; the highest class is the same in 1 of 2 rows." in text

    at_desk(tmp_path / "home", story)


def test_external_data_comes_along(tmp_path: Path) -> None:
    nodes, constants = times(2.0)
    engine = engine_of(tmp_path / "e", nodes, X, Y, constants)

    async def story(desk: Desk) -> None:
        uploads = await promoted(desk, engine)
        file = uploads / "unpacked" / "net" / "model.onnx"
        plan = desk.service.folders.load_plan(uploads.name)
        changed = plan.model_copy(update={"model": ModelConfig(path=file)})
        desk.service.folders.save_plan(uploads.name, changed)
        nodes, _ = times(4.0)
        wide = {"factor": np.full((1, 2), 4, np.float32)}
        write_original(file, nodes, X, Y, wide)
        onnx.save(
            onnx.load(file), file, save_as_external_data=True, location="w.bin", size_threshold=0
        )
        assert (file.parent / "w.bin").is_file()
        text = await send(desk, ROW)
        assert "4, 8</pre>" in text

    at_desk(tmp_path / "home", story)


def test_preprocessing_and_postprocessing_of_the_plan_stand_around_the_original(
    tmp_path: Path,
) -> None:
    """The engine takes uint8 [N, H, W, C] and gives indices; the original knows nothing of both."""
    engine = engine_of(
        tmp_path / "e",
        [
            helper.make_node("Cast", ["image"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["f", "axes"], ["m"], keepdims=0),
            helper.make_node("Div", ["m", "white"], ["s"]),
            helper.make_node("TopK", ["s", "k"], ["scores_values", "scores_indices"]),
        ],
        {"image": (TensorProto.UINT8, ["batch", 2, 2, 3])},
        {
            "scores_indices": (TensorProto.INT64, ["batch", 2]),
            "scores_values": (TensorProto.FLOAT, ["batch", 2]),
        },
        {
            "axes": np.array([1, 2]),
            "white": np.array(255, np.float32),
            "k": np.array([2]),
        },
    )
    steps = {
        "preprocess": {"image": Preprocess()},
        "postprocess": {"scores": Postprocess(top_k=2)},
    }

    async def story(desk: Desk) -> None:
        uploads = await promoted(desk, engine, **steps)
        write_original(
            uploads / "model.onnx",
            [helper.make_node("ReduceMean", ["image", "axes"], ["scores"], keepdims=0)],
            {"image": (TensorProto.FLOAT, ["batch", 3, 2, 2])},
            {"scores": (TensorProto.FLOAT, ["batch", 3])},
            {"axes": np.array([2, 3])},
        )
        pixel = "[51, 255, 102]"
        row = f"[{pixel}, {pixel}]"
        text = await send(desk, f"[[{row}, {row}]]")
        assert "2 of 2 values are equal." in text
        assert text.count("1, 2</pre>") == 2
        assert text.count("1, 0.4</pre>") == 2
        assert "Largest absolute difference" in text

    at_desk(tmp_path / "home", story)


def test_it_is_told_why_the_original_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, constants = times(2.0)
    engine = engine_of(tmp_path / "e", nodes, X, Y, constants)

    async def story(desk: Desk) -> None:
        uploads = await promoted(desk, engine)
        for text in (await form(desk), await send(desk, ROW)):
            assert "its job no longer holds the model that it was sent" in text
        assert "2, 4</pre>" in await send(desk, ROW), "the engine answers all the same"
        (uploads / "model.onnx").write_bytes(b"no model")
        assert BOX in await form(desk)
        broken = await send(desk, ROW)
        assert "gave no answer: it could not be loaded or run; the server's log says why." in broken
        assert str(tmp_path) not in broken
        assert "2, 4</pre>" in broken
        nodes, constants = times(1.0, "other")
        write_original(uploads / "model.onnx", nodes, X, {"z": Y["y"]}, constants)
        assert "could not be loaded or run" in await send(desk, ROW), "it has no such output"
        table = {"table": np.zeros(1, np.float32)}
        nodes = [
            helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64),
            helper.make_node("Gather", ["table", "i"], ["y"]),
        ]
        write_original(uploads / "model.onnx", nodes, X, Y, table)
        assert "it did not take this request: ONNX Runtime cannot run on these inputs" in (
            await send(desk, ROW)
        )
        async with desk.service.comparing:
            assert "another one is running" in await send(desk, ROW)
        with monkeypatch.context() as full:
            full.setattr(desk.service, "has_disk_reserve", lambda: False)
            assert "the disk of the service is nearly full" in await send(desk, ROW)
        monkeypatch.setattr(module, "MAX_BYTES", 10)
        assert "this page runs 0 MiB" in await form(desk)

    at_desk(tmp_path / "home", story)


def held_plan(folder: Path, plan: Plan) -> tuple[Version, Folders]:
    folders = Folders(folder)
    folders.save_plan("job", plan)
    (folders.uploads("job") / "model.onnx").write_bytes(b"a model")
    version = Version.model_construct(job="job", model="m", inputs=(), outputs=())
    return version, folders


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"path": "model.pt2", "inputs": INPUTS}, "it is a PyTorch program"),
        ({"path": "/elsewhere/model.onnx"}, "a file of its configuration"),
        ({"path": "gone/model.onnx"}, "no longer holds the model"),
        (
            {"entrypoint": "nets:build", "weights": "w.safetensors", "inputs": INPUTS},
            "it is a PyTorch program",
        ),
    ],
)
def test_only_an_onnx_file_of_the_upload_is_run(
    tmp_path: Path, model: dict[str, object], reason: str
) -> None:
    uploads = Folders(tmp_path).uploads("job")
    model = dict(model)
    if "path" in model:
        model["path"] = str(uploads / str(model["path"]))
    version, folders = held_plan(tmp_path, Plan(model=ModelConfig.model_validate(model)))
    with pytest.raises(NoOriginal, match=reason):
        original_of(version, folders)


def test_a_link_is_no_upload(tmp_path: Path) -> None:
    uploads = Folders(tmp_path).uploads("job")
    plan = Plan(model=ModelConfig(path=uploads / "model.onnx"))
    version, folders = held_plan(tmp_path, plan)
    assert original_of(version, folders).files == (uploads / "model.onnx",)
    (tmp_path / "secret").write_bytes(b"of the server")
    (uploads / "model.onnx").unlink()
    (uploads / "model.onnx").symlink_to(tmp_path / "secret")
    with pytest.raises(NoOriginal, match="no longer holds"):
        original_of(version, folders)


def test_it_needs_memory_and_a_plain_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = Folders(tmp_path).uploads("job")
    packing = Packing(axis="tokens", mask="mask", positions="positions")
    plan = Plan(model=ModelConfig(path=uploads / "model.onnx"))
    version, folders = held_plan(tmp_path, plan)
    monkeypatch.setattr(module, "free_bytes", lambda device: 20)
    with pytest.raises(NoOriginal, match="of memory, and 0 MiB are free"):
        original_of(version, folders)
    monkeypatch.setattr(module, "free_bytes", lambda device: None)
    assert original_of(version, folders).size_bytes == 7
    packed = plan.model_copy(update={"serving": ServingConfig.model_construct(packing=packing)})
    monkeypatch.setattr(type(folders), "load_plan", lambda self, job: packed)
    with pytest.raises(NoOriginal, match="several sequences in one row"):
        original_of(version, folders)


NAN = float("nan")


@pytest.mark.parametrize(
    ("mine", "theirs", "metric", "scores", "text"),
    [
        ([[1, 2, 3]], [[1, 2, 3.5]], "auto", True, "highest class is the same in 1 of 1 rows"),
        ([[1, 2], [2, 1]], [[1, 2], [1, 2]], "top1", True, "the same in 1 of 2 rows"),
        (
            [[5, 4, 3, 2, 1, 0]],
            [[4, 5, 3, 2, 1, 0]],
            "top5",
            True,
            "5 highest classes are the same",
        ),
        ([[1, 2]], [[1, 2]], "top5", True, "2 highest classes are the same in 1 of 1 rows"),
        ([[1, 2]], [[1, 2]], "cosine", True, "difference 0; cosine 1.000000."),
        ([[1, 2]], [[1, 2]], "net:metric", True, "cosine 1.000000."),
        ([[1, 0], [0, 1]], [[1, 0], [1, 0]], "auto", False, "cosine 0.000000, the smallest of 2"),
        (
            [[1, NAN]],
            [[1, 2]],
            "auto",
            False,
            "difference 0, and 1 NaN on one side only; cosine nan",
        ),
        ([1.5, 2.5], [1.0, 2.5], "auto", False, "Largest absolute difference 0.5; cosine 0.98"),
        ([[1, 2]], [[1, 2, 3]], "auto", False, "The original's shape is [1, 3]."),
        ([], [], "auto", False, "Both are empty."),
    ],
)
def test_differences_are_those_of_the_task(
    mine: object, theirs: object, metric: str, scores: bool, text: str
) -> None:
    array, expected = (np.array(each, np.float32) for each in (mine, theirs))
    assert text in difference_text(array, expected, metric, scores)


def test_indices_are_equal_or_not() -> None:
    text = difference_text(np.array([1, 2, 3]), np.array([1, 2, 4]), "auto", False)
    assert text == "2 of 3 values are equal."
