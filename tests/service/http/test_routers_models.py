"""Models over HTTP, on real engines in real processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from pipeline.core.artifacts import Engine
from pipeline.results.report import Verdict
from service.app import create_app
from service.auth import LOCAL
from service.errors import NotFound, Unavailable
from service.grpc.grpc_service_pb2 import ModelConfigRequest
from service.grpc.methods import Call, model_config
from service.inference import InferAnswer, InferRequest
from service.registry.models import RESERVED, DeploymentOptions, PromoteRequest
from service.settings import Settings
from tests.service.builders.app import URL, Desk, at_desk, known_host
from tests.service.builders.jobs import WORKER
from tests.service.serving.engines import direct, linear, marked
from tests.service.serving.models import ended_job


def report(
    desk: Desk, engine: Engine | None = None, owner: str = "local", verdict: Verdict = "accepted"
) -> str:
    return ended_job(desk.service.folders, desk.service.jobs, verdict, owner, engine=engine)


async def json_of(answer: httpx.Response, status: int = 200) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


async def ask(desk: Desk, number: float = 1.0) -> int:
    """The version that answers, whose answer is right."""
    answer = await desk.service.serving.infer(InferRequest(LOCAL, "m", {"x": marked(number)}))
    engine = desk.service.repository.engine(
        desk.service.repository.get("m").version(answer.version)
    )
    assert isinstance(engine, Engine)
    assert np.array_equal(answer.outputs["y"], direct(engine, {"x": marked(number)})["y"])
    return answer.version


def test_a_model_from_its_report_to_an_answer_and_back(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        web = desk.client
        assert await json_of(await web.get("/models")) == {"models": []}
        first, second = (
            report(desk, linear(tmp_path / "e")),
            report(desk, linear(tmp_path / "e", layers=2)),
        )
        view = await json_of(await web.post("/models/m/promote", json={"report": first}))
        assert (
            view["current"]["version"],
            view["current"]["job"],
            view["deployment"]["state"],
        ) == (1, first, "unloaded")
        batch = view["current"]["batch"]
        assert (batch["proved"], batch["maximum"], batch["axes"], batch["reason"]) == (
            True,
            16,
            {"x": 0, "y": 0},
            "",
        )
        assert [tensor["name"] for tensor in view["current"]["inputs"]] == ["x"]

        view = await json_of(
            await web.put(
                "/models/m/deployment", json={"device": ["cpu"], "instances": 2, "max_batch": 4}
            )
        )
        assert (
            view["deployment"]["state"],
            view["deployment"]["version"],
            view["deployment"]["device"],
        ) == ("ready", 1, "cpu")
        (of_device,) = view["deployment"]["devices"]
        assert (of_device["device"], of_device["state"], of_device["memory_bytes"]) == (
            "cpu",
            "ready",
            view["deployment"]["memory_bytes"],
        )
        assert (
            view["deployment"]["memory_bytes"] // 2 == view["current"]["memory_bytes"] > 2**24
        )  # an interpreter, at least
        told_by = [await json_of(await web.get("/v2/models/m/config"))]
        told_by.append(
            MessageToDict(
                await model_config(
                    Call(desk.service, LOCAL, None, "", ()), ModelConfigRequest(name="m")
                )
            )["config"]
        )
        assert [config.get("max_batch_size", config.get("maxBatchSize")) for config in told_by] == [
            4,
            4,
        ]  # not the 16 that were proved
        assert await ask(desk) == 1
        assert (await json_of(await web.post("/models/m/promote", json={"report": second})))[
            "deployment"
        ]["version"] == 2
        assert await ask(desk) == 2
        shapes = await json_of(await web.get("/models/m/shapes"))
        assert shapes["batches"] == [
            {"sizes": {"batch": 1}, "runs": 1, "requests": 1, "padding": 0.0}
        ]
        assert shapes["suggestion"]["profiles"] == [
            {"dims": {"batch": {"min": 1, "opt": 1, "max": 16}}, "values": {}}
        ]
        assert (await json_of(await web.post("/models/m/rollback")))["deployment"]["version"] == 1
        assert await ask(desk) == 1

        figures = (await web.get("/metrics")).text
        assert (
            'crucible_model_state{device="cpu",model="m",state="ready",version="1"} 1.0' in figures
        )
        assert 'crucible_model_instances{device="cpu",model="m",version="1"} 2.0' in figures
        assert (
            'crucible_inference_requests_total{model="m",state="executed",version="2"} 1.0'
            in figures
        )
        await json_of(await web.delete("/models/m/deployment"), 204)
        (listed,) = (await json_of(await web.get("/models")))["models"]
        assert listed == await json_of(await web.get("/models/m"))
        assert listed["deployment"]["state"] == "unloaded"
        assert "crucible_model_state{" not in (await web.get("/metrics")).text

    at_desk(tmp_path, story)


def hidden_by(paths: Mapping[str, Mapping[str, object]]) -> set[str]:
    """What a model cannot be called, because a path of the same method has this word where others
    have the name.
    """
    split = [(method, path.split("/")) for path, methods in paths.items() for method in methods]
    secrets = set()
    for method, path in split:
        for _, other in [
            part
            for part in split
            if "{name}" in path and part[0] == method and len(part[1]) == len(path)
        ]:
            differ = [(a, b) for a, b in zip(path, other, strict=True) if a != b]
            if len(differ) == 1 and differ[0][0] == "{name}":
                secrets.add(differ[0][1])
    return secrets


def test_a_name_that_a_path_would_hide_is_refused(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        assert hidden_by(desk.app.openapi()["paths"]) == RESERVED == {"stats"}
        answer = await json_of(
            await desk.client.post(
                "/models/stats/promote", json={"report": report(desk, linear(tmp_path / "e"))}
            ),
            422,
        )
        assert (
            answer["error"]
            == "the model name 'stats' is reserved: /v2/models/stats is another path"
        )
        assert await json_of(await desk.client.get("/models")) == {"models": []}

    at_desk(tmp_path, story)


def test_a_version_is_loaded_anew_beside_itself(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await json_of(
            await desk.client.post(
                "/models/m/promote", json={"report": report(desk, linear(tmp_path / "e"))}
            )
        )
        for instances in (1, 2, 1):
            await json_of(
                await desk.client.put("/models/m/deployment", json={"instances": instances})
            )
            assert await ask(desk) == 1
        await asyncio.sleep(1)
        (served,) = desk.service.serving.served(LOCAL)
        assert (served.state, served.instances) == ("ready", 1)
        assert (
            'crucible_inference_queue{model="m",version="1"} 0.0'
            in (await desk.client.get("/metrics")).text
        )

    at_desk(tmp_path, story)


@pytest.mark.slow
def test_ten_thousand_requests_over_every_change_and_none_is_lost(tmp_path: Path) -> None:
    """Each answer is right for the version that it names."""
    engines = {layers: linear(tmp_path / "e", layers=layers) for layers in (1, 2)}
    expected = {layers: direct(engine, {"x": marked(0)})["y"] for layers, engine in engines.items()}
    layers_of = {1: 1, 2: 2, 3: 2}  # of each version
    answered: Counter[int] = Counter()
    absent: Counter[str] = Counter()

    def check(answer: InferAnswer, number: int) -> None:
        right = expected[layers_of[answer.version]] * np.float32(number + 1)
        tolerance = 1e-4 * float(np.abs(right).max())
        assert answer.id == str(number)
        assert np.allclose(answer.outputs["y"], right, rtol=1e-3, atol=tolerance)
        answered[answer.version] += 1

    async def client(desk: Desk, first: int, done: asyncio.Event) -> None:
        for number in itertools.takewhile(lambda _: not done.is_set(), itertools.count(first, 16)):
            try:
                answer = await desk.service.serving.infer(
                    InferRequest(LOCAL, "m", {"x": marked(number)}, id=str(number))
                )
            except (NotFound, Unavailable) as error:
                absent[error.message] += 1
                await asyncio.sleep(0.001)
                continue
            check(answer, number)

    async def more(by: int) -> None:
        goal = answered.total() + by
        while answered.total() < goal:
            await asyncio.sleep(0.01)

    async def story(desk: Desk) -> None:
        models = desk.service.models
        jobs = {layers: report(desk, engine) for layers, engine in engines.items()}

        async def promote(layers: int) -> None:
            await models.promote(LOCAL, "m", PromoteRequest(report=jobs[layers]))

        await promote(1)
        await models.deploy(LOCAL, "m", DeploymentOptions())
        done = asyncio.Event()
        clients = [asyncio.create_task(client(desk, first, done)) for first in range(16)]
        try:
            for change in (
                lambda: promote(2),
                lambda: models.rollback(LOCAL, "m"),
                lambda: models.deploy(LOCAL, "m", DeploymentOptions(instances=2)),
                lambda: promote(2),
            ):
                await change()
                await more(2000)
            await models.unload(LOCAL, "m")
            await models.load(LOCAL, "m")
            await more(2000)
        finally:
            done.set()
            await asyncio.gather(*clients)  # raises what any client got besides its answer
        assert (set(answered), answered.total() >= 10_000) == ({1, 2, 3}, True)
        assert set(absent) <= {"no model 'm' is deployed", "model 'm' is loading"}

    at_desk(tmp_path, story)


def test_what_is_deployed_answers_again_after_a_restart(tmp_path: Path) -> None:
    async def before(desk: Desk) -> None:
        await json_of(
            await desk.client.post(
                "/models/m/promote", json={"report": report(desk, linear(tmp_path / "e"))}
            )
        )
        await json_of(await desk.client.put("/models/m/deployment", json={}))

    async def after() -> None:
        app, errors = create_app(Settings(home=tmp_path), WORKER, known_host), set()
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client,
        ):
            while (answer := await client.get("/readyz")).status_code == 503:
                errors.add(answer.json()["error"])
                await asyncio.sleep(0.01)
            assert (
                "the server is starting: it loads 1 of 1 deployed models, GET /models shows"
                " which" in errors
            )
            assert await ask(Desk(app, client)) == 1

    at_desk(tmp_path, before)
    asyncio.run(after())


def test_an_engine_that_does_not_run_is_no_version(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        answer = await json_of(
            await desk.client.post("/models/m/promote", json={"report": report(desk)}), 409
        )  # its engine is no model
        assert "the engine does not run here" in answer["error"]
        assert str(tmp_path) not in str(answer)
        assert await json_of(await desk.client.get("/models")) == {"models": []}

    at_desk(tmp_path, story)


REFUSED = [
    ("POST", "/models/m/promote", {"report": "nobody"}, 404, "no job 'nobody'"),
    ("POST", "/models/m/promote", {"report": "a", "more": 1}, 422, "more"),
    ("POST", "/models/m/promote", {}, 422, "report"),
    ("POST", "/models/..m/promote", {"report": "a"}, 422, "name"),
    ("POST", "/models/m/rollback", None, 404, "no model 'm'"),
    ("PUT", "/models/m/deployment", {}, 404, "no model 'm'"),
    ("PUT", "/models/m/deployment", {"instances": 0}, 422, "instances"),
    ("PUT", "/models/m/deployment", {"timeout_s": -1}, 422, "timeout_s"),
    ("PUT", "/models/m/deployment", {"device": []}, 422, "expected at least one device"),
    ("PUT", "/models/m/deployment", {"device": ["cpu", "cpu"]}, 422, "'cpu' is in the list twice"),
    ("DELETE", "/models/m/deployment", None, 404, "no model 'm' is deployed"),
    ("GET", "/models/m", None, 404, "no model 'm'"),
    ("GET", "/models/m/shapes", None, 404, "no model 'm' is deployed"),
    ("POST", "/models/m/recompile", {}, 404, "no model 'm'"),
    ("POST", "/models/m/recompile", {"dry": True}, 422, "dry"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), REFUSED)
def test_what_cannot_be_done(
    tmp_path: Path, method: str, path: str, body: dict[str, Any] | None, status: int, message: str
) -> None:
    async def story(desk: Desk) -> None:
        answer = await json_of(await desk.client.request(method, path, json=body), status)
        assert message in answer["error"]
        assert answer.keys() >= {"error", "code"}

    at_desk(tmp_path, story)


def test_only_admins_change_models_and_others_do_not_see_them(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        key = desk.key("infer", "compile")
        for method, path, body in (
            ("POST", "/models/m/promote", {"report": "a"}),
            ("POST", "/models/m/rollback", None),
            ("PUT", "/models/m/deployment", {}),
            ("DELETE", "/models/m/deployment", None),
        ):
            answer = await json_of(
                await desk.client.request(method, path, json=body, headers=key), 403
            )
            assert "no scope 'admin'" in answer["error"]
        admin = desk.key("admin")
        await json_of(
            await desk.client.post(
                "/models/m/promote",
                json={"report": report(desk, linear(tmp_path / "e"))},
                headers=admin,
            )
        )
        await json_of(await desk.client.get("/models/m", headers=admin))
        await json_of(await desk.client.get("/models/m", headers=key), 404)
        assert await json_of(await desk.client.get("/models", headers=key)) == {"models": []}

    at_desk(tmp_path, story, keys_required=True)


def test_a_worker_that_is_killed_comes_back(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        await json_of(
            await desk.client.post(
                "/models/m/promote", json={"report": report(desk, linear(tmp_path / "e"))}
            )
        )
        await json_of(await desk.client.put("/models/m/deployment", json={}))
        manager: Any = desk.service.serving  # its private entries
        (entry,) = manager._table.entries.values()
        assert entry.loaded is not None
        killed = entry.loaded.running.pids[0]
        os.kill(killed, signal.SIGKILL)
        while killed in entry.loaded.running.pids:
            await asyncio.sleep(0.02)
        while (await json_of(await desk.client.get("/models/m")))["deployment"]["state"] != "ready":
            await asyncio.sleep(0.05)
        assert await ask(desk) == 1

    at_desk(tmp_path, story)
