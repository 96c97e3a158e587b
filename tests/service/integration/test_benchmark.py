"""A model measured again over HTTP: the job with the double for its worker, and once with real
engines in the place of both.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.plan.schema import ModelConfig, Plan
from pipeline.report.bundle import load_engine
from pipeline.report.files import load_report
from service.jobs.queue import WORKER
from service.jobs.worker import CONTENDED
from tests.service.builders.app import MODEL, Desk, at_desk, opened_desk
from tests.service.http.test_routers_models import json_of
from tests.service.jobs.test_worker import tiny_model
from tests.service.serving.engines import linear
from tests.service.serving.models import ended_job

ENDED = ("succeeded", "failed", "cancelled")


async def model(
    desk: Desk, folder: Path, name: str = "succeed", owner: str = "local", layers: int = 1
) -> str:
    """The next version of `m`, whose benchmark does what `name` says to the double; the id of the
    job that made it.
    """
    folders = desk.service.folders
    job = ended_job(
        folders, desk.service.jobs, owner=owner, engine=linear(folder / "e", layers=layers)
    )
    (folders.uploads(job) / "model.onnx").write_bytes(b"onnx")
    folders.save_plan(
        job, Plan(name=name, model=ModelConfig(path=folders.uploads(job) / "model.onnx"))
    )
    await json_of(
        await desk.client.post("/models/m/promote", json={"report": job}, headers=admin(desk))
    )
    return job


def admin(desk: Desk) -> dict[str, str]:
    return desk.key("admin") if desk.service.settings.needs_keys else {}


async def measured(desk: Desk, **request: Any) -> dict[str, Any]:
    """The job that a request makes."""
    answer = await desk.client.post("/models/m/benchmark", **request)
    job: dict[str, Any] = await json_of(answer, 202)
    assert answer.headers["Location"] == f"/jobs/{job['id']}" == job["links"]["job"]
    return job


def test_a_benchmark_is_a_job_of_its_own_with_a_report_of_its_own(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        web, folders = desk.client, desk.service.folders
        first = await model(desk, tmp_path)
        second = await model(desk, tmp_path, layers=2)
        job = await measured(desk)
        assert (job["measures"], job["name"], job["owner"], job["device"]) == (
            {"model": "m", "version": 2},
            "succeed",
            "local",
            "cpu",
        )
        assert (await desk.until(job["id"], *ENDED))["state"] == "succeeded"
        await json_of(await web.get(f"/reports/{job['id']}/latency"))
        assert json.loads(gzip.decompress((await web.get(f"/reports/{job['id']}/samples")).content))
        events = (await web.get(f"/jobs/{job['id']}/events")).text
        assert [line for line in events.splitlines() if line.startswith("event: ")][
            -1
        ] == "event: succeeded"
        assert "I am succeed" in (await web.get(f"/jobs/{job['id']}/log")).text

        taken = folders.compiled(job["id"])
        assert (
            load_engine(taken).digest
            == load_engine(folders.version("m", 2)).digest
            == load_engine(folders.report(second)).digest
        )
        assert (taken / "report.json").read_bytes() == (
            folders.report(second) / "report.json"
        ).read_bytes()
        assert folders.load_plan(job["id"]).model.path == folders.uploads(job["id"]) / "model.onnx"

        old = await measured(desk, json={"version": 1})
        assert (old["measures"]["version"], old["id"] != job["id"]) == (1, True)
        assert (
            load_engine(folders.compiled(old["id"])).digest
            == load_engine(folders.report(first)).digest
        )
        assert (await desk.until(old["id"], *ENDED))["state"] == "succeeded"
        assert (await measured(desk))["id"] not in (
            job["id"],
            old["id"],
        )  # an equal request is another run

    at_desk(tmp_path, story)


def test_what_is_loaded_is_measured_and_goes_on_answering(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await model(desk, tmp_path, "measure")
        await json_of(await desk.client.put("/models/m/deployment", json={"version": 1}))
        await model(desk, tmp_path, "measure", layers=2)
        job = await measured(desk)
        assert job["measures"]["version"] == 1  # the second is current, and not loaded
        answer = await desk.client.post(
            "/models/m/infer", json={"inputs": {"x": [[1.0] * 8]}}
        )  # while the job waits for quiet, or measures
        assert (await json_of(answer))["version"] == 1
        ended = await desk.until(job["id"], *ENDED)
        assert ended["state"] == "succeeded", ended
        assert desk.service._leases.devices.held == ()  # the model rests

    at_desk(tmp_path, story)


def test_a_key_finds_its_benchmark_again_and_only_that(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await model(desk, tmp_path)
        once = {"Idempotency-Key": "a"}
        job = await measured(desk, headers=once)
        await desk.until(job["id"], *ENDED)
        answer = await desk.client.post("/models/m/benchmark", headers=once)
        assert (await json_of(answer))["id"] == job["id"]  # 200: it has ended
        await json_of(
            await desk.client.post("/models/m/benchmark", headers=once, json={"version": 1}), 409
        )
        await json_of(
            await desk.client.post("/compile", headers=once, files={"model": ("m.onnx", MODEL)}),
            409,
        )
        folders = desk.service.folders
        assert {
            path.name for path in folders.uploads("x").parent.iterdir()
        } == desk.service.jobs.ids()  # nothing else is left

    at_desk(tmp_path, story)


def test_a_benchmark_is_cancelled_and_tried_again(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        web = desk.client
        await model(desk, tmp_path, "hang")
        job = await measured(desk)
        await desk.until(job["id"], "running")
        await json_of(await web.delete(f"/jobs/{job['id']}"), 202)
        assert (await desk.until(job["id"], *ENDED))["state"] == "cancelled"
        again = await json_of(await web.post(f"/jobs/{job['id']}/retry"), 202)
        assert again["measures"] == job["measures"]
        assert (
            load_engine(desk.service.folders.compiled(again["id"])).digest
            == load_engine(desk.service.folders.compiled(job["id"])).digest
        )
        await json_of(await web.delete(f"/jobs/{again['id']}"), 202)
        assert (await desk.until(again["id"], *ENDED))["state"] == "cancelled"

    at_desk(tmp_path, story)


def test_a_benchmark_that_fails_says_why(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await model(desk, tmp_path, "fail")
        ended = await desk.until((await measured(desk))["id"], *ENDED)
        assert (ended["state"], ended["failure"]["code"]) == ("failed", "model.invalid")
        await json_of(await desk.client.get(f"/reports/{ended['id']}"), 404)

    at_desk(tmp_path, story)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"json": {"version": 7}}, 404, "model 'm' has no version 7"),
    ({"json": {"version": 0}}, 422, "version"),
    ({"json": {"version": "x"}}, 422, "version"),
    ({"json": {"sizes": [1]}}, 422, "sizes"),
    ({"json": [1]}, 422, "body"),
    ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 422, "JSON"),
    ({"content": b"\xff\xfe", "headers": {"Content-Type": "application/json"}}, 422, "body"),
    ({"content": b"rubbish"}, 422, "body"),
    ({"headers": {"Idempotency-Key": ""}}, 422, "Idempotency-Key"),
    ({"headers": {"Idempotency-Key": "k" * 256}}, 422, "Idempotency-Key"),
]


def test_what_is_asked_wrongly_makes_no_job(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await json_of(await desk.client.post("/models/m/benchmark"), 404)
        await json_of(await desk.client.post("/models/..m/benchmark"), 422)
        await json_of(await desk.client.get("/models/m/benchmark"), 405)
        known = {await model(desk, tmp_path)}
        for request, status, message in REFUSED:
            answer = await json_of(await desk.client.post("/models/m/benchmark", **request), status)
            assert message in answer["error"], request
        uploads = desk.service.folders.uploads("x").parent
        assert desk.service.jobs.ids() == {path.name for path in uploads.iterdir()} == known

    at_desk(tmp_path, story)


def change_engine(desk: Desk, job: str) -> Path:
    return desk.service.folders.version("m", 1) / "engine" / "model.onnx"


def change_report(desk: Desk, job: str) -> Path:
    return desk.service.folders.report(job) / "report.json"


def change_plan(desk: Desk, job: str) -> Path:
    return desk.service.folders.uploads(job) / "plan.json"


@contextmanager
def damaged(file: Path, how: Callable[[Path], object]) -> Iterator[None]:
    content = file.read_bytes()
    how(file)
    try:
        yield
    finally:
        file.write_bytes(content)


def test_what_is_damaged_is_refused_without_naming_places(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await model(desk, tmp_path)
        for place in (change_engine, change_report, change_plan):
            with damaged(place(desk, job), Path.unlink):
                answer = await json_of(await desk.client.post("/models/m/benchmark"), 500)
            assert (
                "version 1 of 'm' is damaged" in answer["error"],
                str(tmp_path) in str(answer),
            ) == (True, False), answer
        with damaged(change_engine(desk, job), lambda file: file.write_bytes(b"other")):
            answer = await json_of(await desk.client.post("/models/m/benchmark"), 500)
            assert (answer["code"], "another digest" in answer["error"]) == ("host.damaged", True)
            command = f"`crucible promote m {job}`"
            assert answer["next"] == f"{command} takes the engine from its job again"
        with damaged(change_plan(desk, job), lambda file: file.write_bytes(b"{")):
            await json_of(await desk.client.post("/models/m/benchmark"), 503)
        assert {path.name for path in desk.service.folders.uploads("x").parent.iterdir()} == {job}
        assert (await desk.until((await measured(desk))["id"], *ENDED))["state"] == "succeeded"

    at_desk(tmp_path, story)


def test_a_benchmark_takes_the_scope_compile_and_a_model_of_ones_own(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        _, mine = desk.service.keys.create("mine", ("compile",), "me")
        _, other = desk.service.keys.create("other", ("compile",), "you")
        await model(desk, tmp_path, owner="me")
        for key, status in ((desk.key("infer"), 403), (bearer(other), 404), ({}, 401)):
            await json_of(await desk.client.post("/models/m/benchmark", headers=key), status)
        job = await measured(desk, headers=bearer(mine))
        assert job["owner"] == "me"
        await json_of(await desk.client.get(f"/jobs/{job['id']}", headers=bearer(other)), 404)
        theirs = await measured(desk, headers=admin(desk))
        assert theirs["owner"] != "me"  # the key's

    at_desk(tmp_path, story, keys_required=True)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_benchmarks_report_may_be_promoted_and_measured_too(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await model(desk, tmp_path)
        job = await measured(desk)
        await desk.until(job["id"], *ENDED)
        place = desk.service.folders.report(job["id"])
        for file in desk.service.folders.compiled(job["id"]).rglob("*"):  # what a real child leaves
            if file.is_file():
                (place / file.relative_to(desk.service.folders.compiled(job["id"]))).write_bytes(
                    file.read_bytes()
                )
        (place / "sha256.json").unlink()
        view = await json_of(
            await desk.client.post("/models/m/promote", json={"report": job["id"]})
        )
        assert (view["current"]["version"], view["current"]["job"]) == (2, job["id"])
        again = await measured(desk)
        assert (again["measures"]["version"], (await desk.until(again["id"], *ENDED))["state"]) == (
            2,
            "succeeded",
        )

    at_desk(tmp_path, story)


@pytest.mark.slow
def test_a_real_model_is_compiled_loaded_and_measured_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with opened_desk(tmp_path / "home", worker=WORKER) as desk:
            web = desk.client
            tiny_model(tmp_path / "tiny.onnx")
            quick = b"benchmark: {duration_s: 0.2, budget_s: 0.01}\n"
            plan = (
                quick
                + b"name: tiny\ncandidates: [{backend: onnxruntime, precision: fp32}]\nsimplify:"
                b" {enabled: false}"
            )
            files = {
                "model": ("tiny.onnx", (tmp_path / "tiny.onnx").read_bytes()),
                "plan": ("plan.yaml", plan),
            }
            compiled = await ended(desk, await web.post("/compile", files=files))
            await json_of(
                await web.post(
                    "/models/m/promote", json={"report": compiled["id"], "override": True}
                )
            )
            await json_of(await web.put("/models/m/deployment", json={}))

            job = await ended(desk, await web.post("/models/m/benchmark"))
            assert (job["verdict"], job["winner"], job["measures"]) == (
                "unproven",
                "onnxruntime fp32",
                {"model": "m", "version": 1},
            )
            before, after = (
                load_report(desk.service.folders.report(each["id"])) for each in (compiled, job)
            )
            assert (
                after.command
                == "a request to the service, version 1 of model 'm' measured again, job"
                f" {job['id']} ('tiny')"
            )
            assert after.baseline is not None
            assert before.baseline is not None
            assert (
                after.baseline.rows[0].end_to_end.values_s
                != before.baseline.rows[0].end_to_end.values_s
            )
            assert after.benchmarked >= before.benchmarked
            assert after.reasons[0].startswith("not measurable: ")
            assert after.reasons[1] == before.reasons[1] == "no data: accuracy not proven"
            latency = await json_of(await web.get(f"/reports/{job['id']}/latency"))
            assert [each["label"] for each in latency["candidates"]] == ["onnxruntime fp32"]
            stages = [
                (event.data["stage"], event.data["state"])
                for event in desk.service.jobs.events(job["id"])
                if event.kind == "stage"
            ]
            assert ("benchmark", "started") in stages
            assert stages[-1] == ("benchmark", "finished")
            assert not any(
                str(tmp_path).encode() in file.read_bytes()
                for file in desk.service.folders.report(job["id"]).rglob("*")
                if file.is_file()
            )

            async def ask() -> None:
                """The model answers while it is measured, and the report tells of that."""
                if any(lease.use == "measure" for lease in desk.service._leases.devices.held):
                    await json_of(
                        await web.post("/models/m/infer", json={"inputs": {"x": [[1.0] * 16]}})
                    )

            assert CONTENDED.text not in after.reasons
            busy = await ended(desk, await web.post("/models/m/benchmark"), ask)
            assert (
                load_report(desk.service.folders.report(busy["id"])).reasons[-1] == CONTENDED.text
            )

    asyncio.run(story())


async def nothing() -> None:
    pass


async def ended(
    desk: Desk, answer: httpx.Response, meanwhile: Callable[[], Awaitable[None]] = nothing
) -> dict[str, Any]:
    """As `Desk.until`, for what takes longer on a busy machine."""
    job: dict[str, Any] = await json_of(answer, 202)
    while job["state"] not in ENDED:
        await asyncio.sleep(0.1)
        await meanwhile()
        job = await json_of(await desk.client.get(f"/jobs/{job['id']}"))
    assert job["state"] == "succeeded", (job, desk.service.folders.work(job["id"]).log.read_text())
    return job
