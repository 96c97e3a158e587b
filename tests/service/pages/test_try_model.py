"""Trying a model: real engines behind the form, and hostile names and inputs."""

import html
import io
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper
from PIL import Image

from pipeline.core.artifacts import Engine
from pipeline.serving_inputs import InputRecipe, ServingConfig
from service.auth import LOCAL
from service.pages.try_model import output_view
from service.registry.models import DeploymentOptions, PromoteRequest
from tests.service.builders.app import Desk, at_desk
from tests.service.pages.test_pages import HOSTILE, Scripts
from tests.service.serving.engines import engine_of
from tests.service.serving.models import ended_job

Files = dict[str, tuple[str, bytes] | tuple[str, bytes, str]]
QUOTES = "b'\"; $(x)"
IMAGE = InputRecipe(input="image", size=(2, 2))


async def loaded(desk: Desk, name: str, engine: Engine, serving: ServingConfig | None) -> None:
    job = ended_job(desk.service.folders, desk.service.jobs, engine=engine, serving=serving)
    await desk.service.models.promote(LOCAL, name, PromoteRequest(report=job))
    await desk.service.models.deploy(LOCAL, name, DeploymentOptions())


def file_of(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> tuple[str, bytes]:
    stream = io.BytesIO()
    np.save(stream, array)
    return "x.npy", stream.getvalue()


def test_a_request_of_two_inputs_with_hostile_names(tmp_path: Path) -> None:
    shape = (TensorProto.FLOAT, ["batch", 2])
    add = helper.make_node("Add", [HOSTILE, QUOTES], ["y"])
    engine = engine_of(tmp_path / "e", [add], {HOSTILE: shape, QUOTES: shape}, {"y": shape})

    async def story(desk: Desk) -> None:
        await loaded(desk, "m", engine, None)
        web, path = desk.client, "/ui/models/m/try"
        form = (await web.get(path)).text
        assert form.count("[[0,0]]</textarea>") == 2, "zeros of the smallest shape"
        assert Scripts(form).found == []

        async def send(data: dict[str, str], files: Files | None = None, status: int = 200) -> str:
            answer = await web.post(path, data=data, files=files)
            assert answer.status_code == status, answer.text
            assert Scripts(answer.text).found == []
            return html.unescape(answer.text)

        spaces = " " * (2 << 20)  # more than a form's field has by default
        assert "11, 22.5" in await send({"text-0": f"[[1, 2.5]]{spaces}", "text-1": "[[10, 20]]"})
        text = await send({"text-0": "[[1, 2.5]]", "text-1": "[[10, 20]]"})
        assert "11, 22.5" in text
        assert "With 1 row in the batch" in text
        assert "curl http://localhost:8000/models/m/infer" in text
        file: Files = {"file-1": file_of(np.array([[10, 20]], np.float32))}
        text = await send({"text-0": "[[3, 2.5]]"}, file)
        assert "13, 22.5" in text
        assert "numpy.load('x.npy')" in text
        zeros = await send({"text-0": "[[1, 2]]", "text-1": " "})
        assert "numpy.zeros([1, 2], 'float32')" in zeros

        for wrong, message in (
            ("[[1, ", "this is not JSON"),
            ("[[1, 2], [3]]", "lists of equal lengths"),
            ('["a"]', "expected numbers"),
            ("NaN", "this is not JSON"),
            ('0}, "outputs": {', "this is not JSON"),
            (HOSTILE, "this is not JSON"),
        ):
            text = await send({"text-0": wrong, "text-1": "[[7, 7]]"}, status=422)
            assert message in text
            assert text.count("aria-invalid") == 1
            assert "[[7, 7]]" in text, "the other value is kept"
            assert wrong in text
        text = await send({"text-0": "[[1, 2, 3]]", "text-1": "[[1, 2]]"}, status=422)
        assert "The model did not take this request" in text
        text = await send({}, {"file-0": ("x.png", b"no array", "image/png")}, status=422)
        assert "expected a .npy file" in text
        text = await send({}, {"file-0": file_of(np.zeros((1, 2)))}, status=422)
        assert "float64" in text
        large: Files = {"file-0": file_of(np.zeros((200_000, 2), np.float32))}
        text = await send({"text-1": "[[1, 2]]"}, large, status=422)
        assert "The model did not take this request" in text, "more than other forms may have"

    at_desk(tmp_path, story)


def test_an_image_goes_where_the_plan_says_how(tmp_path: Path) -> None:
    mean = helper.make_node("ReduceMean", ["image", "axes"], ["scores"], keepdims=0)
    engine = engine_of(
        tmp_path / "e",
        [mean],
        {"image": (TensorProto.FLOAT, ["batch", 3, 2, 2])},
        {"scores": (TensorProto.FLOAT, ["batch", 3])},
        {"axes": np.array([2, 3])},
    )
    labels: dict[str, tuple[str, ...]] = {"scores": (HOSTILE, "green", "blue")}
    picture = io.BytesIO()
    Image.new("RGB", (5, 5), (255, 51, 0)).save(picture, "PNG")
    files = {"file-0": ("a picture.png", picture.getvalue(), "image/png")}

    async def story(desk: Desk) -> None:
        await loaded(desk, "photos", engine, ServingConfig(image=IMAGE, labels=labels))
        await loaded(desk, "tensors", engine, None)
        assert "image/png" in (await desk.client.get("/ui/models/photos/try")).text
        answer = await desk.client.post("/ui/models/photos/try", files=files)
        assert answer.status_code == 200, answer.text
        assert Scripts(answer.text).found == []
        text = html.unescape(answer.text)
        first = text.index(f"<td>{HOSTILE}</td>")
        assert first < text.index("<td>green</td>") < text.index("<td>blue</td>")
        assert ">0.2<" in text
        assert "--data-binary '@a picture.png'" in text
        assert "takes tensors only" in text
        assert "serving.image" in (await desk.client.get("/ui/models/tensors/try")).text
        refused = await desk.client.post("/ui/models/tensors/try", files=files)
        assert refused.status_code == 422
        shape = await desk.client.post("/ui/models/tensors/try", data={"text-0": "[[1]]"})
        assert 'aria-invalid="true"' in shape.text, "of the only input"

    at_desk(tmp_path, story)


def test_outputs_are_ranked_only_if_they_look_like_scores() -> None:
    scores = np.array([[0.5, np.nan, -1, 3, 2, 1]], np.float32)
    ranked = output_view("y", scores, ()).ranked
    assert [label for label, _ in ranked] == ["class 3", "class 4", "class 5", "class 0", "class 2"]
    assert output_view("y", scores, ("a",)).ranked[3] == ("a", "0.5")
    for other in (np.zeros((2, 3, 4)), np.zeros((1, 9), np.int64), np.zeros((0, 9)), np.zeros(())):
        view = output_view("y", other, ())
        assert view.ranked == ()
        assert len(view.first) + view.more == other.size
