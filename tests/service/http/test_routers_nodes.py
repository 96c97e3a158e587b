"""Nodes and compiles for several targets over HTTP, with a second runner on the same database."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.http.routers.health import NODE_COMMANDS
from service.jobs.nodes import NO_NODE
from tests.service.builders.app import MODEL, Desk, at_desk
from tests.service.builders.jobs import WITHIN_S
from tests.service.jobs.test_nodes import L4, both_are_live, joined

PLAN = "name: {name}\ntargets: [cpu, gpu:l4, {{name: big, device: gpu, labels: [tensorrt>=11]}}]"


async def send(desk: Desk, plan: str, headers: dict[str, str] | None = None) -> httpx.Response:
    files = {"model": ("model.onnx", MODEL), "plan": ("plan.yaml", plan.encode())}
    return await desk.client.post("/compile", files=files, headers=headers)


async def until_ended(desk: Desk, link: str) -> dict[str, Any]:
    async with asyncio.timeout(WITHIN_S):
        while True:
            view: dict[str, Any] = (await desk.client.get(link)).json()
            if view["outcome"] is not None:
                return view
            await asyncio.sleep(0.1)


def test_each_target_is_compiled_where_its_device_is(tmp_path: Path, postgresql: str) -> None:
    async def story(desk: Desk) -> None:
        async with joined(tmp_path, postgresql, L4) as other:
            await both_are_live(other)
            answer = await send(desk, PLAN.format(name="succeed"))
            compiled = answer.json()
            assert (answer.status_code, answer.headers["Location"]) == (202, compiled["link"])
            ended = await until_ended(desk, compiled["link"])
            assert {target["name"]: target["outcome"] for target in ended["targets"]} == {
                "cpu": "accepted",
                "gpu-l4": "accepted",
                "big": "unavailable",
            }
            assert (ended["outcome"], ended["name"]) == ("unavailable", "succeed")
            devices = [target["job"]["device"] for target in ended["targets"]]
            assert devices[:2] == ["cpu", "gpu:0"]
            message = ended["targets"][2]["job"]["failure"]["message"]
            assert "the label 'tensorrt>=11'" in message
            assert "gpu:0 (NVIDIA L4, tensorrt 10.6.0)" in message

            again = await until_ended(
                desk, (await send(desk, PLAN.format(name="succeed"))).headers["Location"]
            )
            jobs = [[each["job"]["id"] for each in view["targets"]] for view in (ended, again)]
            assert jobs[0][:2] == jobs[1][:2], "an equal request gets the jobs that succeeded"
            assert jobs[0][2] != jobs[1][2]
            names = {path.name for path in (tmp_path / "uploads").iterdir()}
            assert names == {*jobs[0], *jobs[1]}, "the upload itself is removed"

    at_desk(tmp_path, story, database_url=postgresql)


def test_the_threads_of_a_target_are_those_of_its_plan(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        plan = "name: succeed\nbenchmark: {threads: 3}\ntargets: [cpu, {device: cpu, threads: 1}]"
        compiled = (await send(desk, plan)).json()
        plans = [desk.service.folders.load_plan(each["job"]["id"]) for each in compiled["targets"]]
        assert [(plan.benchmark.threads, plan.targets) for plan in plans] == [(3, ()), (1, ())]
        assert all(plan.model.path and plan.model.path.is_file() for plan in plans)
        assert [each["job"]["target"] for each in compiled["targets"]] == [
            "cpu",
            "cpu, threads>=1",
        ]

    at_desk(tmp_path, story)


def test_a_compile_belongs_to_its_owner(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        mine, other, admin = desk.key("compile"), desk.key("compile"), desk.key("admin")
        link = (await send(desk, "name: succeed\ntargets: [cpu]", mine)).json()["link"]
        seen = [(await desk.client.get(link, headers=key)).status_code for key in (mine, other)]
        assert seen == [200, 404]
        assert (await desk.client.get(link, headers=admin)).status_code == 200
        unknown = await desk.client.get("/compiles/1", headers=mine)
        assert (unknown.status_code, unknown.json()["error"]) == (404, "no compile '1'")

    at_desk(tmp_path, story, keys_required=True)


def test_a_target_of_another_form_is_refused(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        answer = await send(desk, "name: succeed\ntargets: [tpu]")
        assert answer.status_code == 422
        assert "expected cpu, gpu, gpu:0" in answer.json()["error"]
        assert not list((tmp_path / "uploads").glob("*"))

    at_desk(tmp_path, story)


def test_a_compile_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        refused = await send(desk, "name: succeed\ntargets: [cpu, gpu]")
        assert refused.status_code == 429, refused.text
        assert "1 of your jobs are waiting, expected at most 1" in refused.json()["error"]
        assert (await desk.client.get("/jobs")).json()["jobs"] == []
        assert list((tmp_path / "uploads").iterdir()) == []

        target = "{name: again, device: cpu}"
        answer = await send(desk, f"name: succeed\ntargets: [cpu, {target}]")
        assert answer.status_code == 202, answer.text
        first, second = (each["job"]["id"] for each in answer.json()["targets"])
        assert first == second, "equal targets share a job"
        assert [path.name for path in (tmp_path / "uploads").iterdir()] == [first]

    at_desk(tmp_path, story, max_queued=1)


@pytest.mark.parametrize("executor", ["agent", "ray"])
def test_a_server_whose_executor_is_nodes_runs_no_job(
    tmp_path: Path, postgresql: str, executor: str
) -> None:
    async def story(desk: Desk) -> None:
        lone = await desk.client.get("/readyz?for=jobs")
        assert lone.status_code == 503
        assert f"no node is live, and executor is '{executor}'" in lone.json()["error"]
        assert NODE_COMMANDS[executor] in lone.json()["next"]
        assert (await desk.client.get("/readyz")).status_code == 200, "it serves models"
        assert (await desk.end_of("succeed"))["failure"]["code"] == NO_NODE
        async with joined(tmp_path, postgresql, L4), asyncio.timeout(WITHIN_S):
            while (await desk.client.get("/readyz?for=jobs")).status_code == 503:
                await asyncio.sleep(0.1)
            ended = await desk.end_of("succeed")
            assert (ended["state"], ended["device"]) == ("succeeded", "gpu:0")

    at_desk(tmp_path, story, database_url=postgresql, executor=executor)


def test_administrators_see_the_nodes(tmp_path: Path, postgresql: str) -> None:
    async def story(desk: Desk) -> None:
        async with joined(tmp_path, postgresql, L4) as other:
            await both_are_live(other)
            headers = desk.key("admin")
            page = (await desk.client.get("/nodes", headers=headers)).json()
            kinds = {node["kind"]: (node["live"], node["labels"]) for node in page["nodes"]}
            assert kinds == {"server": (True, {"cpu": {}}), "node": (True, L4)}
        refused = await desk.client.get("/nodes", headers=desk.key("compile"))
        assert refused.status_code == 403

    at_desk(tmp_path, story, database_url=postgresql, keys_required=True)


def test_the_page_of_administrators_lists_the_nodes(tmp_path: Path, postgresql: str) -> None:
    async def story(desk: Desk) -> None:
        async with joined(tmp_path, postgresql, L4) as other:
            await both_are_live(other)
            text = (await desk.client.get("/ui/admin")).text
            assert "(node), gpu:0: NVIDIA L4, tensorrt 10.6.0" in text

    at_desk(tmp_path, story, database_url=postgresql)
