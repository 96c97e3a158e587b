"""From an upload to a job, over the web pages: drafts, their form, and every refusal."""

import datetime as dt
import html
import io
import re
import shlex
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import onnx
from onnx import TensorProto, helper

from service.storage.drafts import DRAFT_S, Drafts
from tests.service.builders.app import MODEL, Desk, at_desk, model_bytes
from tests.service.pages.test_pages import HOSTILE, Scripts, csrf_of, signed_in

OK = {
    "name": "succeed",
    "metric": "auto",
    "max_drop": "0.02",
    "objective": "latency",
    "min_0": "1",
    "opt_0": "8",
    "max_0": "16",
    "min_1": "1",
    "opt_1": "4",
    "max_1": "9",
}


def dynamic_model() -> bytes:
    """A model whose input has the dimensions `batch` and `<script>`, and a weight among inputs."""
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT16, ["batch", 3, HOSTILE])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    weight_input = helper.make_tensor_value_info("w", TensorProto.FLOAT, [1])
    output = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch"])
    graph = helper.make_graph([], "g", [image, weight_input], [output], [weight])
    content: bytes = helper.make_model(graph).SerializeToString()
    return content


async def upload(
    desk: Desk,
    model: bytes,
    filename: str = "model.onnx",
    csrf: str = "",
    **options: Any,
) -> httpx.Response:
    """Send the upload form as a browser does: the token first, and a role without a file."""
    boundary = "b0undary"
    disposition = "\r\nContent-Disposition: form-data; name="
    unchosen = 'filename=""\r\nContent-Type: application/octet-stream'
    body = (
        f'--{boundary}{disposition}"csrf"\r\n\r\n{csrf}\r\n--{boundary}{disposition}"selection"; '
        f'{unchosen}\r\n\r\n\r\n--{boundary}{disposition}"model"; filename="{filename}"\r\n\r\n'
    ).encode() + model
    end = f"\r\n--{boundary}--\r\n".encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    headers |= options.pop("headers", {})
    return await desk.client.post("/ui/drafts", content=body + end, headers=headers, **options)


def uploads(home: Path) -> list[str]:
    return [folder.name for folder in (home / "uploads").glob("*")]


def refusal(page: httpx.Response) -> str:
    found = re.search(r'<div class="notice bad" role="alert">(.*?)</div>', page.text, re.DOTALL)
    assert found, page.text
    return html.unescape(re.sub(r"<[^>]+>", "", found[1]))


def test_an_upload_becomes_a_job(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        assert 'href="/ui/new"' in (await desk.client.get("/")).text
        answer = await upload(desk, dynamic_model(), f"{HOSTILE}.onnx")
        assert answer.status_code == 303, answer.text
        page = await desk.client.get(answer.headers["Location"])
        assert Scripts(page.text).found == []
        assert page.text.count("&lt;script&gt;") > 2
        for text in ("<td>float16</td>", "batch \N{MULTIPLICATION SIGN} 3", "no GPU is here"):
            assert text in page.text
        assert [f'name="{name}"' in page.text for name in ("opt_0", "opt_1", "opt_2")] == [
            True,
            True,
            False,
        ], "two symbols"
        assert 'value="onnxruntime fp32"' in page.text
        assert 'value="tensorrt fp16"' not in page.text
        (draft,) = uploads(tmp_path)
        form = {**OK, "candidate": "onnxruntime fp32", "more": "benchmark: {sizes: []}"}
        accepted = await desk.client.post(f"/ui/drafts/{draft}", data=form)
        assert accepted.status_code == 303, accepted.text
        job = accepted.headers["Location"].removeprefix("/ui/jobs/")
        assert uploads(tmp_path) == [job]
        plan = desk.service.folders.load_plan(job)
        assert (plan.name, plan.accuracy.max_drop) == ("succeed", 0.02)
        assert plan.profiles[0].sizes("opt") == {"batch": 8, HOSTILE: 4}
        assert [each.backend for each in plan.candidates] == ["onnxruntime"]
        assert plan.model.path is not None
        assert plan.model.path.read_bytes() == dynamic_model()
        await desk.until(job, "succeeded")
        assert (await desk.client.get(f"/ui/drafts/{draft}")).status_code == 404
        again = await desk.client.post(f"/ui/drafts/{draft}", data=form)
        assert again.status_code == 404

    at_desk(tmp_path, story)


def test_the_texts_send_an_equal_request(tmp_path: Path) -> None:
    name = "-a b'$(x);,.onnx"

    async def story(desk: Desk) -> None:
        draft = (await upload(desk, dynamic_model(), name)).headers["Location"]
        for headers in ({}, {"HX-Request": "true"}):
            page = (await desk.client.post(f"{draft}/commands", data=OK, headers=headers)).text
            found = re.findall(r"<pre[^>]*><code>(.*?)</code></pre>", page, re.DOTALL)
            plan, cli, curl, python = map(html.unescape, found)
            assert ("<title>" in page) == (not headers)
        assert shlex.split(cli)[:5] == ["crucible", "submit", f"./{name}", "--plan", "plan.yaml"]
        assert f'model=@"{name}"' in shlex.split(curl)
        assert repr(name) in python
        compile(python, "<copied>", "exec")
        job = (await desk.client.post(draft, data=OK)).headers["Location"]
        files = {"model": (name, dynamic_model()), "plan": ("plan.yaml", plan.encode())}
        equal = await desk.client.post("/compile", files=files)
        assert job == f"/ui/jobs/{equal.json()['id']}"

    at_desk(tmp_path, story)


REFUSED_PLANS: tuple[tuple[dict[str, str], str], ...] = (
    ({"opt_0": "17"}, "profiles.0.batch: expected min <= opt <= max"),
    ({"opt_0": ""}, "the dimension 'batch' has no range"),
    ({"opt_0": "9" * 5000}, "profiles.0"),
    ({"name": "a/b"}, "name: "),
    ({"max_drop": "much"}, "accuracy.max_drop"),
    ({"max_drop": "nan"}, "accuracy.max_drop"),
    ({"metric": "module:function"}, "accuracy.metric is 'module:function', and this service"),
    ({"objective": "max_latency_ms"}, "objective"),
    ({"candidate": "onnxruntime"}, "candidates.0.precision"),
    ({"more": "accuracy: {max_drop: 1}"}, "`accuracy.max_drop` is under further keys"),
    ({"more": "a: &a [1]\nb: *a"}, "anchors and aliases"),
    ({"more": "- 1"}, "expected a plan"),
    ({"more": "data: {calibration: /etc/passwd}"}, "no path of the server"),
    ({"more": "serving: [" + "1, " * 60_000 + "]"}, "items"),
)


def test_a_refused_plan_is_shown_at_its_form(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        draft = (await upload(desk, dynamic_model())).headers["Location"]
        for change, sentence in REFUSED_PLANS:
            form = {**OK, "name": "kept", **change}
            page = await desk.client.post(draft, data=form)
            assert page.status_code == 422
            assert sentence in refusal(page)
            assert f'value="{form["name"]}"' in page.text
            assert f'value="{form["max_drop"]}"' in page.text
            assert sentence in refusal(await desk.client.post(f"{draft}/commands", data=form))
        assert draft == f"/ui/drafts/{uploads(tmp_path)[0]}"

    at_desk(tmp_path, story)


def test_a_refused_upload_leaves_nothing(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="model"; filename="m.onnx"\r\n\r\n123'

    async def story(desk: Desk) -> None:
        for name, content, sentence in (
            ("m.pt2", b"PK", "is a pickle"),
            ("m.pth", MODEL, "is a pickle"),
            ("m.onnx", b"hello", "no ONNX model"),
            ("m.onnx", b"", "empty file"),
        ):
            page = await upload(desk, content, name)
            assert page.status_code == 422
            assert sentence in refusal(page)
            assert "torch.onnx.export(" in page.text
            part = await upload(desk, content, name, headers={"HX-Request": "true"})
            assert (part.status_code, "<title>" in part.text) == (422, False)
            assert sentence in refusal(part)
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        cut = await desk.client.post("/ui/drafts", content=broken(), headers=headers)
        assert "ended before its last boundary" in refusal(cut)
        files = {"model": ("m.onnx", MODEL), "plan": ("plan.yaml", b"name: x")}
        assert "a draft with a part `plan`" in refusal(
            await desk.client.post("/ui/drafts", files=files)
        )
        assert uploads(tmp_path) == []

    at_desk(tmp_path, story)


def test_a_program_is_refused_where_the_sandbox_does_not_hold(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")

    async def story(desk: Desk) -> None:
        assert ".pt2" in (await desk.client.get("/ui/new")).text
        page = await upload(desk, packed.getvalue(), "m.pt2")
        assert page.status_code == 422
        assert "sandbox does not hold" in refusal(page)
        assert uploads(tmp_path) == []

    at_desk(tmp_path, story, allow_code=True)


def test_nobody_sees_a_draft_of_another_owner(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await signed_in(desk, "compile")
        csrf = csrf_of((await desk.client.get("/ui/new")).text)
        draft = (await upload(desk, dynamic_model(), csrf=csrf)).headers["Location"]
        assert (await desk.client.get(draft)).status_code == 200
        desk.client.cookies.clear()
        await signed_in(desk, "admin")
        data = {**OK, "csrf": csrf_of((await desk.client.get("/ui/new")).text)}
        assert (await desk.client.get(draft)).status_code == 404
        for path in (draft, f"{draft}/commands", f"{draft}/delete"):
            assert (await desk.client.post(path, data=data)).status_code == 404
        assert (await desk.client.get("/ui/drafts/%2e%2e")).status_code == 404
        assert len(uploads(tmp_path)) == 1
        desk.client.cookies.clear()
        await signed_in(desk, "infer")
        assert (await desk.client.get("/ui/new")).status_code == 403
        assert 'href="/ui/new"' not in (await desk.client.get("/")).text

    at_desk(tmp_path, story, keys_required=True)


def test_without_the_token_nothing_is_stored(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        assert (await upload(desk, MODEL)).headers["Location"].startswith("/ui/sign-in")
        await signed_in(desk, "compile")
        for csrf in ("", "0" * 64, "é"):
            refused = await upload(desk, MODEL, csrf=csrf)
            assert (refused.status_code, uploads(tmp_path)) == (403, [])
        csrf = csrf_of((await desk.client.get("/ui/new")).text)
        late = {"model": ("m.onnx", MODEL), "csrf": (None, csrf.encode())}
        assert (await desk.client.post("/ui/drafts", files=late)).status_code == 403
        headers = {"X-CSRF-Token": csrf, "HX-Request": "true"}
        sent = await upload(desk, MODEL, headers=headers)
        draft = sent.headers["HX-Redirect"]
        assert (await desk.client.post(draft, data=OK)).status_code == 403
        assert (await desk.client.post(f"{draft}/delete")).status_code == 403
        data = {"csrf": csrf}
        assert (await desk.client.post(f"{draft}/delete", data=data)).status_code == 303
        assert uploads(tmp_path) == []

    at_desk(tmp_path, story, keys_required=True)


def test_drafts_count_against_the_quota_once(tmp_path: Path) -> None:
    """The job of a draft shares its files, so it fits where two such uploads do not."""

    async def story(desk: Desk) -> None:
        draft = (await upload(desk, model_bytes("g" * 20_000))).headers["Location"]
        full = await upload(desk, model_bytes("h" * 20_000))
        assert (full.status_code, len(uploads(tmp_path))) == (429, 1)
        assert "max_stored_bytes" in refusal(full)
        accepted = await desk.client.post(draft, data=OK)
        assert accepted.status_code == 303

    at_desk(tmp_path, story, max_stored_bytes=40_000, max_upload_bytes=30_000)


def test_each_limit_of_an_upload_has_its_page(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        assert (await upload(desk, MODEL)).status_code == 303
        hourly = await upload(desk, model_bytes("g" * 20_000))
        assert hourly.status_code == 429
        assert "Retry-After" in hourly.headers
        assert "max_upload_bytes_per_hour" in refusal(hourly)
        assert (await upload(desk, model_bytes("g" * 30_000))).status_code == 413

    async def full(desk: Desk) -> None:
        page = await desk.client.get("/ui/new")
        assert "nearly full" in refusal(page)
        assert "data-upload" not in page.text
        assert (await upload(desk, MODEL)).status_code == 507

    at_desk(tmp_path, story, max_upload_bytes=20_500, max_upload_bytes_per_hour=20_500)
    at_desk(tmp_path, full, disk_reserve_bytes=2**60)


def test_a_draft_ends_after_an_hour_and_not_with_the_server(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        assert (await upload(desk, MODEL)).status_code == 303

    async def after_restart(desk: Desk) -> None:
        draft = f"/ui/drafts/{uploads(tmp_path)[0]}"
        assert desk.service.drafts.remove_ended() == 0
        assert (await desk.client.get(draft)).status_code == 200
        later = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=DRAFT_S)
        desk.service.drafts = Drafts(desk.service.folders, desk.service.files, lambda: later)
        for answer in (await desk.client.get(draft), await desk.client.post(draft, data=OK)):
            assert answer.status_code == 404
            assert "expired" in refusal(answer)
        assert (desk.service.drafts.remove_ended(), uploads(tmp_path)) == (1, [])

    at_desk(tmp_path, story)
    at_desk(tmp_path, after_restart)


def test_archives_and_weights_have_their_forms(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("folder/m.onnx", dynamic_model())

    async def story(desk: Desk) -> None:
        draft = (await upload(desk, packed.getvalue(), "m.zip")).headers["Location"]
        assert "<td>float16</td>" in (await desk.client.get(draft)).text
        job = (await desk.client.post(draft, data=OK)).headers["Location"]
        path = desk.service.folders.load_plan(job.removeprefix("/ui/jobs/")).model.path
        assert path is not None
        assert onnx.load(path).graph.input[0].name == "image"
        weights = (2).to_bytes(8, "little") + b"{}"
        draft = (await upload(desk, weights, "m.safetensors")).headers["Location"]
        page = (await desk.client.get(draft)).text
        assert "<option selected>resnet18" in page
        more = re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL)
        assert more
        form = {**OK, "architecture": "resnet18", "classes": "10", "more": html.unescape(more[1])}
        job = (await desk.client.post(draft, data=form)).headers["Location"]
        model = desk.service.folders.load_plan(job.removeprefix("/ui/jobs/")).model
        assert model.entrypoint == "service.architectures:resnet18_of_10"
        assert model.inputs[0].shape == ("batch", 3, 224, 224)

    at_desk(tmp_path, story)
