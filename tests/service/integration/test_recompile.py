"""A model compiled again for its traffic, over HTTP: the job with the double for its worker, and
once with a real compile.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from pipeline.plan.schema import DataConfig
from pipeline.report.files import load_report
from service.jobs.queue import WORKER
from service.submission.recompile import MIN_REQUESTS
from tests.service.builders.app import Desk, at_desk, opened_desk
from tests.service.http.test_routers_models import json_of, report
from tests.service.integration.test_benchmark import ENDED, admin, ended, model
from tests.service.serving.engines import engine_of, linear

WEB = "/models/m/recompile"


async def send(desk: Desk, rows: int, requests: int, width: int = 8) -> None:
    """Send requests one after the other, so that each runs alone."""
    for _ in range(requests):
        body = {"inputs": {"x": np.ones((rows, width)).tolist()}}
        await json_of(await desk.client.post("/models/m/infer", json=body, headers=admin(desk)))


async def served(desk: Desk, folder: Path, name: str = "succeed", owner: str = "local") -> str:
    """The job of a version that is loaded and has had traffic in two groups."""
    job = await model(desk, folder, name, owner)
    await json_of(await desk.client.put("/models/m/deployment", json={}, headers=admin(desk)))
    await send(desk, 1, MIN_REQUESTS // 2)
    await send(desk, 16, MIN_REQUESTS // 2)
    return job


async def refusal(desk: Desk, status: int = 409, **request: Any) -> dict[str, str]:
    answer: dict[str, str] = await json_of(await desk.client.post(WEB, **request), status)
    return answer


def test_the_plan_of_the_job_gets_the_profiles_of_the_traffic(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        built_by = await served(desk, tmp_path)
        folders = desk.service.folders
        shown = await json_of(await desk.client.get("/models/m/shapes"))
        assert [seen["runs"] for seen in shown["batches"]] == [MIN_REQUESTS // 2] * 2
        dry = await json_of(await desk.client.post(WEB, json={"dry_run": True}))
        assert (dry["version"], dry["built_by"], dry["job"]) == (1, built_by, None)
        assert dry["suggestion"] == shown["suggestion"]
        assert len((await json_of(await desk.client.get("/jobs")))["jobs"]) == 1

        answer = await desk.client.post(WEB, headers={"Idempotency-Key": "a"})
        job = (await json_of(answer, 202))["job"]
        assert answer.headers["Location"] == f"/jobs/{job['id']}"
        assert job["recompiles"] == {"model": "m", "version": 1}
        plan, old = folders.load_plan(job["id"]), folders.load_plan(built_by)
        assert [str(profile.dims["batch"]) for profile in plan.profiles] == [
            "min=1 opt=1 max=1",
            "min=1 opt=16 max=16",
        ]
        assert plan.benchmark.sizes == ({"batch": 1}, {"batch": 16})
        path = folders.uploads(job["id"]) / "model.onnx"
        assert (plan.model.path, path.read_bytes()) == (path, b"onnx")
        changed = {"profiles", "benchmark", "model"}
        assert plan.model_dump(exclude=changed) == old.model_dump(exclude=changed)
        again = await desk.client.post(WEB, headers={"Idempotency-Key": "a"})
        assert again.json()["job"]["id"] == job["id"]

        assert (await desk.until(job["id"], *ENDED))["state"] == "succeeded"
        view = await json_of(await desk.client.get("/models/m"))
        assert view["current"]["version"] == 1  # nothing is promoted by itself

    at_desk(tmp_path, story)


def test_the_same_plan_can_be_compiled_again_without_traffic(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        built_by = await model(desk, tmp_path)  # never loaded
        folders = desk.service.folders
        same = {"profiles": "same"}
        dry = await json_of(await desk.client.post(WEB, json={**same, "dry_run": True}))
        assert (dry["version"], dry["suggestion"], dry["job"]) == (1, None, None)
        job = (await json_of(await desk.client.post(WEB, json=same), 202))["job"]
        assert job["recompiles"] == {"model": "m", "version": 1}
        plan, old = folders.load_plan(job["id"]), folders.load_plan(built_by)
        assert plan.model_dump(exclude={"model"}) == old.model_dump(exclude={"model"})
        assert plan.model.path == folders.uploads(job["id"]) / "model.onnx"
        assert (await desk.until(job["id"], *ENDED))["state"] == "succeeded"
        (folders.uploads(built_by) / "model.onnx").unlink()
        assert "can not be repeated" in (await refusal(desk, json=same))["error"]
        assert (await refusal(desk, 422, json={"profiles": "other"}))["code"]

    at_desk(tmp_path, story)


def test_a_retry_still_names_the_model(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await served(desk, tmp_path, "fail")
        job = (await json_of(await desk.client.post(WEB), 202))["job"]
        assert (await desk.until(job["id"], *ENDED))["state"] == "failed"
        retried = await json_of(await desk.client.post(f"/jobs/{job['id']}/retry"), 202)
        assert retried["recompiles"] == job["recompiles"] == {"model": "m", "version": 1}

    at_desk(tmp_path, story)


def test_what_cannot_be_compiled_again_is_refused(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = await model(desk, tmp_path)
        assert "'m' is unloaded, so no traffic is counted" in (await refusal(desk))["error"]
        await json_of(await desk.client.put("/models/m/deployment", json={}))
        assert "has answered 0 requests since" in (await refusal(desk))["error"]
        await send(desk, 4, MIN_REQUESTS - 1)
        few = await refusal(desk, json={"dry_run": True})
        assert f"answered {MIN_REQUESTS - 1} requests" in few["error"]
        assert f"expected at least {MIN_REQUESTS}" in few["error"]
        await send(desk, 4, 1)
        assert "suggests the profiles that version 1 of 'm' has" in (await refusal(desk))["error"]
        await send(desk, 16, 2 * MIN_REQUESTS)

        folders = desk.service.folders
        selection = folders.uploads(job) / "selection.npz"
        plan = folders.load_plan(job)
        changes = {"data": DataConfig(selection=(selection,))}
        folders.save_plan(job, plan.model_copy(update=changes))
        gone = await refusal(desk, json={"dry_run": True})
        assert f"job {job}, which built version 1 of 'm', can not be repeated" in gone["error"]
        assert "no file at 'selection.npz'" in gone["error"]
        assert "profiles: [{batch: [4, 4, 4]}, {batch: [1, 16, 16]}]" in gone["next"]
        (folders.uploads(job) / "plan.json").unlink()
        assert f"the upload of job {job} cannot be read" in (await refusal(desk))["error"]

    at_desk(tmp_path, story)


def test_a_model_of_fixed_shapes_has_nothing_to_change(tmp_path: Path) -> None:
    shapes = dict.fromkeys("xy", (TensorProto.FLOAT, (2, 8)))
    fixed = engine_of(
        tmp_path,
        [helper.make_node("Identity", ["x"], ["y"])],
        {"x": shapes["x"]},
        {"y": shapes["y"]},
        profiles=(),
    )

    async def story(desk: Desk) -> None:
        body = {"report": report(desk, fixed)}
        await json_of(await desk.client.post("/models/m/promote", json=body))
        await json_of(await desk.client.put("/models/m/deployment", json={}))
        await send(desk, 2, 1)
        assert (await json_of(await desk.client.get("/models/m/shapes")))["suggestion"] is None
        assert "every input of version 1 of 'm' has a fixed shape" in (await refusal(desk))["error"]

    at_desk(tmp_path, story)


def test_only_the_owner_and_admins_may_and_the_job_is_the_owners(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        _, text = desk.service.keys.create("mine", ["compile"], "me")
        mine = {"Authorization": f"Bearer {text}"}
        await served(desk, tmp_path, owner="me")
        await refusal(desk, 401)
        await refusal(desk, 403, headers=desk.key("infer"))
        await refusal(desk, 404, headers=desk.key("compile"))
        for headers in (mine, admin(desk)):
            answer = await desk.client.post(WEB, headers=headers)
            assert (await json_of(answer, 202))["job"]["owner"] == "me"

    at_desk(tmp_path, story, keys_required=True)


@pytest.mark.slow
def test_a_real_model_gets_its_next_version_from_its_traffic(tmp_path: Path) -> None:
    model_file = (linear(tmp_path / "e").root.parent / "model.onnx").read_bytes()
    plan = b"""{name: m, profiles: [{batch: [1, 4, 16]}], simplify: {enabled: false},
        benchmark: {duration_s: 0.2, budget_s: 0.01},
        candidates: [{backend: onnxruntime, precision: fp32}]}"""

    async def story() -> None:
        async with opened_desk(tmp_path / "home", worker=WORKER) as desk:
            web = desk.client
            files = {"model": ("m.onnx", model_file), "plan": ("plan.yaml", plan)}
            first = await ended(desk, await web.post("/compile", files=files))
            await json_of(await web.post("/models/m/promote", json=override(first["id"])))
            await json_of(await web.put("/models/m/deployment", json={}))
            await send(desk, 1, MIN_REQUESTS // 2)
            await send(desk, 16, MIN_REQUESTS // 2)
            second = (await json_of(await web.post(WEB), 202))["job"]
            second = await desk.until(second["id"], *ENDED)
            loaded = load_report(desk.service.folders.report(second["id"]))
            assert "version 1 of model 'm' compiled again" in loaded.command
            (measured,) = [c.benchmark for c in loaded.candidates if c.benchmark is not None]
            assert [row.sizes for row in measured.rows] == [{"batch": 1}, {"batch": 16}]
            view = await json_of(await web.post("/models/m/promote", json=override(second["id"])))
            assert [profile["dims"]["batch"] for profile in view["current"]["profiles"]] == [
                {"min": 1, "opt": 1, "max": 1},
                {"min": 1, "opt": 16, "max": 16},
            ]
            assert (view["current"]["batch"]["maximum"], view["deployment"]["version"]) == (16, 2)
            await send(desk, 5, 1)

    asyncio.run(story())


def override(job: str) -> dict[str, Any]:
    return {"report": job, "override": True}
