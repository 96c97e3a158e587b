"""Jobs over HTTP: sent, found again, listed, followed, cancelled and tried again."""

import asyncio
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import DiskFull
from pipeline.plan.schema import ModelConfig, Plan
from service.http.sse import HEARTBEAT, RESTARTING, stream
from service.submission.submit import device_for
from tests.service.builders.app import MODEL, Desk, at_desk, model_bytes
from tests.service.builders.jobs import new_job


def events_of(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    """The events of a stream: number, kind, data."""
    parsed = []
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if not line.startswith(":")
        )
        if "id" in fields:
            parsed.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return parsed


def tar_of(name: str, content: bytes) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return data.getvalue()


def uploads(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "uploads").glob("*"))


def test_a_model_is_compiled_and_its_job_tells_how(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        answer = await desk.compile("succeed")
        job = answer.json()
        assert (answer.status_code, answer.headers["Location"]) == (202, f"/jobs/{job['id']}")
        assert job["links"] == {
            "job": f"/jobs/{job['id']}",
            "events": f"/jobs/{job['id']}/events",
            "log": f"/jobs/{job['id']}/log",
            "report": None,
        }
        ended = await desk.until(job["id"], "succeeded")
        assert (ended["name"], ended["device"], ended["attempt"], ended["verdict"]) == (
            "succeed",
            "cpu",
            1,
            "accepted",
        )
        assert ended["progress"]["stage"] == "build"
        assert ended["elapsed_s"] >= 0
        assert ended["links"]["report"] == f"/reports/{job['id']}"
        assert not {"pid", "pid_started", "identity"} & ended.keys()
        log = await desk.client.get(f"/jobs/{job['id']}/log")
        assert log.headers["content-type"] == "text/plain; charset=utf-8"
        assert "I am succeed" in log.text
        assert (await desk.client.get(f"/jobs/{job['id']}/log?bytes=3")).text == log.text[-3:]

    at_desk(tmp_path, story)


def test_an_equal_request_gets_the_same_job_unless_that_failed(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        answers = await asyncio.gather(*(desk.compile("succeed-0.5") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {202}
        (job_id,) = {answer.json()["id"] for answer in answers}
        assert uploads(tmp_path) == [job_id]
        await desk.until(job_id, "succeeded")
        again = await desk.compile("succeed-0.5")
        assert (again.status_code, again.json()["id"], again.json()["state"]) == (
            200,
            job_id,
            "succeeded",
        )
        assert (await desk.compile("succeed-0.5", model=model_bytes("other"))).json()[
            "id"
        ] != job_id
        failed = await desk.end_of("fail")
        anew = await desk.compile("fail")
        assert (anew.status_code, anew.json()["id"] == failed["id"]) == (202, False)

    at_desk(tmp_path, story)


def test_an_idempotency_key_finds_its_job_whatever_became_of_it(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        once = {"Idempotency-Key": "17"}
        first = (await desk.compile("fail", once)).json()
        await desk.until(first["id"], "failed")
        again = await desk.compile("fail", once)
        assert (again.status_code, again.json()["id"], again.json()["state"]) == (
            200,
            first["id"],
            "failed",
        )
        other = await desk.compile("leave", once)
        assert (other.status_code, other.json()["code"]) == (409, "service.conflict")
        assert (await desk.compile("fail", {"Idempotency-Key": "x" * 256})).status_code == 422
        assert uploads(tmp_path) == [first["id"]]

    at_desk(tmp_path, story)


def test_too_many_waiting_jobs_are_refused_with_a_time(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        running = (await desk.compile("hang")).json()
        await desk.until(running["id"], "running")
        assert (await desk.compile("succeed")).status_code == 202
        refused = await desk.compile("fail")
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "60")
        assert len(uploads(tmp_path)) == 2

    at_desk(tmp_path, story, max_queued=1)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (
            b"--b\r\nContent-Disposition: form-data; name=model\r\n\r\nhalf",
            "multipart/form-data; boundary=b",
            422,
        ),
        (b"x", "multipart/form-data", 422),
        (b"x", f"multipart/form-data; boundary={'b' * 500}", 422),
        (b"x", "text/plain", 422),
        (b"{", "application/json", 422),
        (b'{"config": "../secret"}', "application/json", 422),
        (b'{"config": "odd", "more": 1}', "application/json", 422),
        (b'{"config": "odd"}', "application/json; charset=utf-8", 404),
        (b" " * 300_000, "application/json", 413),
    ],
)
def test_what_is_no_request_to_compile_leaves_nothing(
    tmp_path: Path, body: bytes, kind: str, status: int
) -> None:
    async def story(desk: Desk) -> None:
        answer = await desk.client.post("/compile", content=body, headers={"Content-Type": kind})
        assert (answer.status_code, uploads(tmp_path)) == (status, [])
        assert answer.json()["next"]

    at_desk(tmp_path, story)


@pytest.mark.parametrize(
    "plan",
    [
        "model: {path: /etc/passwd}",
        "data: {calibration: ../../secret.npz}",
        "data: {selection: file:///etc/passwd}",
        "accuracy: {metric: 'os:system'}",
        "architecture: os:system",
        "x: &x [a]\ny: *x",
        "name: " + "a" * 10_000_000,
    ],
    ids=lambda plan: str(plan)[:30],
)
def test_a_plan_that_reaches_beyond_its_upload_is_422(tmp_path: Path, plan: str) -> None:
    async def story(desk: Desk) -> None:
        answer = await desk.client.post(
            "/compile", files={"model": ("m.onnx", MODEL), "plan": ("p", plan.encode())}
        )
        assert (answer.status_code, answer.json()["code"]) == (422, "service.unprocessable")
        assert "root:" not in answer.text
        assert uploads(tmp_path) == []

    at_desk(tmp_path, story)


@pytest.mark.parametrize(
    ("filename", "content", "message"),
    [
        ("README.md", b"# Crucible", "begins with '# Crucible' and is no ONNX model"),
        ("m.onnx", MODEL[:-1], "the model is cut off"),
        ("m.tar", tar_of("m.onnx", b"# Crucible"), "begins with '# Crucible'"),
        ("m.pt2", MODEL, "is no .pt2 file"),
        ("m.onnx", bytes(10_000_000), "is no ONNX model"),
        ("m.onnx", b"", "an empty file"),
    ],
    ids=["text", "cut", "in-archive", "pt2", "zeros", "empty"],
)
def test_what_is_no_model_is_422_and_makes_no_job(
    tmp_path: Path, filename: str, content: bytes, message: str
) -> None:
    async def story(desk: Desk) -> None:
        plan = b"inputs: [{name: x, dtype: float32, shape: [1]}]"  # .pt2 needs it
        files = {"model": (filename, content), "plan": ("p", plan)}
        answer = await desk.client.post("/compile", files=files)
        assert (answer.status_code, uploads(tmp_path)) == (422, []), answer.text
        assert message in answer.json()["error"]
        assert (await desk.client.get("/jobs")).json()["jobs"] == []
        assert str(tmp_path) not in answer.text

    at_desk(tmp_path, story, allow_code=True)


def test_the_log_of_a_job_begins_with_the_warnings_about_its_plan(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        plan = b"name: succeed\nrescue: false"
        files = {"model": ("m.onnx", MODEL), "plan": ("p", plan)}
        job = (await desk.client.post("/compile", files=files)).json()
        await desk.until(job["id"], "succeeded")
        log = (await desk.client.get(f"/jobs/{job['id']}/log")).text
        first, second = log.splitlines()[:2]
        assert first == "`rescue` is now called `fallback`; the old name still works"
        assert second.endswith("I am succeed")
        again = await desk.client.post("/compile", files=files)
        assert again.json()["id"] == job["id"]
        assert [path.name for path in (tmp_path / "jobs").iterdir()] == [job["id"]]

    at_desk(tmp_path, story)


def test_a_plan_of_the_servers_own_is_compiled_by_its_name(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    configs.mkdir()
    np.savez(configs / "data.npz", x=np.zeros(3))
    (tmp_path / "secret.yaml").write_text("model: {path: /etc/passwd.onnx}")
    (configs / "succeed.yaml").write_text(
        "model: {entrypoint: code:build, python_path: ., weights_from: nowhere, inputs: [{name: x,"
        " dtype: float32, shape: [1]}]}\ndata: {validation: data.npz}\n"
    )
    (configs / "code.py").write_text("build = None\n")

    async def story(desk: Desk) -> None:
        async def send(name: str = "succeed") -> Any:
            return await desk.client.post("/compile", json={"config": name})

        first = await send()
        assert first.status_code == 202, first.text
        await desk.until(first.json()["id"], "succeeded")
        again = await send()
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        (configs / "code.py").write_text("build = 17\n")  # another model now
        changed = await send()
        assert (changed.status_code, changed.json()["id"] == first.json()["id"]) == (202, False)
        unknown = await send("secret")
        assert (unknown.status_code, "known: succeed" in unknown.json()["next"]) == (404, True)
        (configs / "data.npz").unlink()
        broken = await send()
        assert (broken.status_code, "data.npz" in broken.json()["error"]) == (422, True)

    at_desk(tmp_path, story, configs=configs)


def test_jobs_are_listed_by_pages_and_by_state(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        ids = [(await desk.end_of(name))["id"] for name in ("succeed", "fail", "leave")]
        first = (await desk.client.get("/jobs?limit=2")).json()
        assert [job["id"] for job in first["jobs"]] == [ids[2], ids[1]]
        second = (await desk.client.get(f"/jobs?limit=2&after={first['next']}")).json()
        assert ([job["id"] for job in second["jobs"]], second["next"]) == ([ids[0]], None)
        failed = (await desk.client.get("/jobs?state=failed")).json()["jobs"]
        assert [job["id"] for job in failed] == [ids[2], ids[1]]

    at_desk(tmp_path, story)


def test_events_come_in_order_from_any_number_on(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await desk.end_of("succeed")
        path = f"/jobs/{job['id']}/events"
        answer = await desk.client.get(path)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.text)
        assert [kind for _, kind, _ in events] == [
            "queued",
            "running",
            "stage",
            "stage",
            "succeeded",
        ]
        assert events[-1][2] == {
            "at": job["finished"],
            "verdict": "accepted",
            "winner": job["winner"],
        }
        for number, _, _ in events:
            rest = [event for event in events if event[0] > number]
            assert (
                events_of(
                    (await desk.client.get(path, headers={"Last-Event-ID": str(number)})).text
                )
                == rest
            )
            assert events_of((await desk.client.get(f"{path}?after={number}")).text) == rest
        assert (await desk.client.get(path, headers={"Last-Event-ID": "x"})).status_code == 422

    at_desk(tmp_path, story)


def test_a_follower_misses_nothing_is_kept_awake_and_is_told_of_a_restart(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        service = desk.service
        job, _ = await service.runner.submit(new_job(service.folders, "hang"))
        got: list[bytes] = []

        async def follow() -> None:
            async for text in stream(service, job.id, 0, heartbeat_s=0.05):
                got.append(text)

        following = asyncio.create_task(follow())
        await desk.until(job.id, "running")
        while HEARTBEAT not in got:
            await asyncio.sleep(0.01)
        assert "crucible_event_streams 1.0" in service.metrics.text().decode()
        await service.stop()
        await following
        assert got[-1] == RESTARTING
        followed = [number for number, _, _ in events_of(b"".join(got).decode())]
        stored = [event.seq for event in service.jobs.events(job.id)]
        assert (
            stored[: len(followed)] == followed
        )  # that it was queued again may come with the next connection
        assert "crucible_event_streams 0.0" in service.metrics.text().decode()
        assert service.jobs.get(job.id).state == "queued"

    at_desk(tmp_path, story)


def test_a_job_is_cancelled_and_tried_again(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = (await desk.compile("hang")).json()
        await desk.until(job["id"], "running")
        assert (await desk.client.post(f"/jobs/{job['id']}/retry")).status_code == 409
        assert (await desk.client.delete(f"/jobs/{job['id']}")).status_code == 202
        await desk.until(job["id"], "cancelled")
        assert (await desk.client.delete(f"/jobs/{job['id']}")).status_code == 409
        again = await desk.client.post(f"/jobs/{job['id']}/retry")
        assert (again.status_code, again.headers["Location"]) == (
            202,
            f"/jobs/{again.json()['id']}",
        )
        assert again.json()["id"] != job["id"]
        await desk.until(again.json()["id"], "running")

    at_desk(tmp_path, story)


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        @desk.app.get("/full")
        async def full() -> None:
            raise OSError(28, "No space left on device", "x")

        @desk.app.get("/database")
        async def database() -> None:
            raise DiskFull("the disk is full")

        for path in ("/full", "/database"):
            answer = await desk.client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (507, "host.disk_full")

    at_desk(tmp_path, story)


@pytest.mark.parametrize(
    ("devices", "backends", "load", "chosen"),
    [
        (("cpu",), (), {}, "cpu"),
        (("cpu", "gpu:0", "gpu:1"), (), {}, "gpu:0"),
        (("cpu", "gpu:0", "gpu:1"), (), {"gpu:0": 2, "gpu:1": 1}, "gpu:1"),
        (("cpu", "gpu:0"), ("onnxruntime", "openvino"), {}, "cpu"),
        (("cpu", "gpu:0"), ("onnxruntime", "tensorrt"), {}, "gpu:0"),
        (("cpu",), ("tensorrt",), {}, "cpu"),
    ],
)
def test_which_queue_a_plan_goes_to(
    devices: tuple[str, ...], backends: tuple[str, ...], load: dict[str, int], chosen: str
) -> None:
    candidates: Any = [{"backend": backend, "precision": "fp32"} for backend in backends]
    plan = Plan(model=ModelConfig(path=Path("m.onnx")), candidates=candidates)
    assert device_for(plan, devices, load) == chosen


def test_a_job_tells_how_long_its_plan_takes_here_and_no_path_of_the_host(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        assert (await desk.compile("succeed-0.2")).json()["estimate_s"] is None
        first = await desk.end_of("succeed-0.3")
        again = (await desk.compile("succeed-0.3", model=model_bytes("other"))).json()
        assert again["estimate_s"] == first["elapsed_s"] > 0
        left = await desk.end_of("leave")
        desk.service.folders.work(left["id"]).log.write_text(
            f"cannot read {tmp_path}/uploads/{left['id']}/model.onnx"
        )
        assert (await desk.client.get(f"/jobs/{left['id']}/log")).text == "cannot read model.onnx"

    at_desk(tmp_path, story)
