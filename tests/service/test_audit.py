"""Who did what, over HTTP and gRPC, is in the audit; and what cannot be recorded is not done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from service.grpc import grpc_service_pb2 as pb
from service.grpc.descriptors import SERVICE
from service.grpc.server import rpc_server
from service.limits.failures import MAX_FAILURES
from service.storage.audit import Audit
from service.storage.audit_entry import Filter, StoredEntry
from service.storage.database import Database
from tests.service.builders.app import Desk, at_desk, parts
from tests.service.builders.jobs import WITHIN_S
from tests.service.http.test_routers_models import report
from tests.service.serving.engines import linear

ADDRESS = "127.0.0.1"  # of the client at a desk
STRANGER = {"Authorization": f"Bearer cru_0123456789_{'A' * 43}"}


async def new_key(desk: Desk, owner: str, *scopes: str) -> dict[str, str]:
    """A key's header. The key is made in another thread, as the loop's may not query."""

    def create() -> str:
        text = desk.service.keys.create("test", scopes, owner)[1]
        desk.service.database.close()
        return text

    return {"Authorization": f"Bearer {await asyncio.to_thread(create)}"}


def prefix(key: Mapping[str, str]) -> str:
    return key["Authorization"].split("_")[1]


def entries(home: Path, action: str = "") -> tuple[StoredEntry, ...]:
    """What a server that has stopped left."""
    return Audit(Database(home / "crucible.db")).entries(Filter(action=action), 1000)


def names(found: tuple[StoredEntry, ...]) -> list[tuple[str, str, str]]:
    return [(entry.action, entry.object, entry.owner) for entry in found]


def test_what_is_done_to_jobs_is_recorded_with_its_caller(tmp_path: Path) -> None:
    ids: list[str] = []

    async def story(desk: Desk) -> None:
        mine, admin = (
            await new_key(desk, "me", "compile"),
            await new_key(desk, "operator", "admin"),
        )
        for headers in (mine, mine):  # the second is an equal request, which does nothing
            answer = await desk.compile("hang", {**headers, "X-Request-Id": "r1"})
            assert answer.status_code == 202
        job = answer.json()["id"]
        await desk.client.delete(f"/jobs/{job}", headers=admin)
        desk.client.headers.update(mine)
        await desk.until(job, "cancelled")
        again = await desk.client.post(f"/jobs/{job}/retry")
        ids.extend((job, again.json()["id"], prefix(mine)))
        assert not desk.service.database.is_open_here  # the event loop's thread has queried nothing

    at_desk(tmp_path, story, keys_required=True)
    job, again, key = ids
    found = entries(tmp_path, "job")
    assert names(found) == [
        ("job.submitted", f"job/{job}", "me"),
        ("job.cancelled", f"job/{job}", "operator"),
        ("job.retried", f"job/{again}", "me"),
    ]
    assert (found[0].key, found[0].address, found[0].request) == (key, ADDRESS, "r1")
    assert (found[1].details, found[2].details) == (
        {"owner": "me"},
        {"retries": job, "owner": "me"},
    )


def test_what_is_done_to_models_is_recorded(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        first, second = await asyncio.to_thread(
            lambda: [report(desk, linear(tmp_path / "e", layers=layers)) for layers in (1, 2)]
        )
        for method, path, body in (
            ("POST", "promote", {"report": first}),
            ("PUT", "deployment", {}),
            ("POST", "promote", {"report": second}),
            ("POST", "rollback", None),
            ("DELETE", "deployment", None),
        ):
            answer = await desk.client.request(method, f"/models/m/{path}", json=body)
            assert answer.status_code < 300, answer.text
        await desk.client.post("/models/m/promote", json={"report": "none"})
        assert not desk.service.database.is_open_here

    at_desk(tmp_path, story)
    found = entries(tmp_path, "model")
    assert [(entry.action, entry.details["version"]) for entry in found[:-1]] == [
        ("model.promoted", 1),
        ("model.deployed", 1),
        ("model.promoted", 2),
        ("model.rolled_back", 1),
    ]
    assert found[-1].action == "model.unloaded"
    assert {(entry.object, entry.owner, entry.address) for entry in found} == {
        ("model/m", "local", ADDRESS)
    }


def test_what_is_refused_is_recorded_and_so_is_what_an_administrator_reads(
    tmp_path: Path,
) -> None:
    job = ""

    async def story(desk: Desk) -> None:
        nonlocal job
        mine, other, admin = [
            await new_key(desk, owner, scope)
            for owner, scope in (("me", "compile"), ("other", "infer"), ("operator", "admin"))
        ]
        desk.client.headers.update(mine)
        job = (await desk.end_of("succeed"))["id"]
        del desk.client.headers["Authorization"]
        for headers, method, path, status in (
            (other, "GET", f"/jobs/{job}", 404),
            (other, "GET", "/jobs/none", 404),  # there is no such job: no entry
            (other, "DELETE", f"/jobs/{job}", 403),
            (mine, "POST", "/compile", 422),
            (mine, "GET", f"/reports/{job}", 200),
            (admin, "GET", f"/reports/{job}", 200),
            (STRANGER, "GET", "/jobs", 401),
            ({}, "POST", "/compile", 401),
            ({**mine, "Origin": "http://evil.example"}, "POST", "/compile", 403),
        ):
            answer = await desk.client.request(method, path, headers=headers)
            assert (path, answer.status_code) == (path, status), answer.text
        assert not desk.service.database.is_open_here

    at_desk(tmp_path, story, keys_required=True)
    found = [entry for entry in entries(tmp_path) if entry.action not in ("key.created",)]
    others = sorted(found[1:], key=lambda entry: entry.action)
    assert names(tuple(others)) == [
        ("access.refused", f"GET /jobs/{job}", "other"),
        ("access.refused", f"DELETE /jobs/{job}", "other"),
        ("access.refused", "POST /compile", ""),
        ("authentication.refused", "key/0123456789", ""),
        ("authentication.refused", "", ""),
        ("report.read", f"job/{job}", "operator"),
        ("upload.refused", "POST /compile", "me"),
    ]
    assert others[1].details == {
        "status": 403,
        "reason": "this key has no scope 'compile', it has infer",
    }
    assert {entry.address for entry in found} == {ADDRESS}


def test_an_address_that_fails_too_often_waits_but_not_its_valid_keys(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        early, late = await new_key(desk, "me", "infer"), await new_key(desk, "me", "metrics")

        async def ask(headers: Mapping[str, str]) -> httpx.Response:
            return await desk.client.get("/jobs", headers=headers)

        assert (await ask(early)).status_code == 200
        statuses = [(await ask(STRANGER)).status_code for _ in range(MAX_FAILURES + 2)]
        assert statuses == [401] * MAX_FAILURES + [429] * 2
        refusal = await ask({})
        assert (refusal.status_code, int(refusal.headers["Retry-After"]) > 0) == (429, True)
        assert (await ask(early)).status_code == 200
        text = (await desk.client.get("/metrics", headers=late)).text  # not known until now
        assert f'crucible_failed_authentications_total{{status="401"}} {MAX_FAILURES}.0' in text
        assert 'crucible_failed_authentications_total{status="429"} 3.0' in text

    at_desk(tmp_path, story, keys_required=True)
    assert len(entries(tmp_path, "authentication")) == MAX_FAILURES + 3


def test_metrics_name_models_only_to_those_who_may_know_them(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        for scope, sees in (("infer", False), ("metrics", True), ("admin", True)):
            answer = await desk.client.get("/metrics", headers=await new_key(desk, "me", scope))
            assert ("crucible_model_state" in answer.text) is sees
            assert ("crucible_inference_queue" in answer.text) is sees
            assert "crucible_jobs" in answer.text

    at_desk(tmp_path, story, keys_required=True)


def test_no_request_lets_the_event_loop_query_the_database(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        desk.client.headers.update(await new_key(desk, "operator", "admin"))
        job = (await desk.end_of("succeed"))["id"]
        files = parts("succeed") | {"plan": ("plan.yaml", b"name: succeed\ntargets: [cpu]")}
        compiled = (await desk.client.post("/compile", files=files)).json()["id"]
        engine = await asyncio.to_thread(partial(report, desk, linear(tmp_path / "e"), "operator"))
        await desk.client.post("/models/m/promote", json={"report": engine})
        await desk.client.put("/models/m/deployment", json={})
        paths = {
            path.format(job_id=job, compile_id=compiled, name="m", model="m", version=1)
            for path, methods in desk.app.openapi()["paths"].items()
            if "get" in methods and "sharedmemory" not in path and path != "/v1/models/{model}"
        }
        answers = {path: (await desk.client.get(path)).status_code for path in sorted(paths)}
        assert len(answers) > 15
        assert [path for path, status in answers.items() if status != 200] == []
        await desk.client.post("/models/m/benchmark", json={})
        await desk.client.post("/models/m/recompile", json={"dry_run": True})
        assert not desk.service.database.is_open_here

    at_desk(tmp_path, story, keys_required=True)


@pytest.mark.parametrize("path", ["/compile", "/models/m/promote"])
def test_what_cannot_be_recorded_is_not_done(tmp_path: Path, path: str) -> None:
    async def story(desk: Desk) -> None:
        job = await asyncio.to_thread(partial(report, desk, linear(tmp_path / "e")))
        jobs = await desk.service.read(desk.service.jobs.ids)
        with desk.service.database.write() as rows:
            rows.exec_driver_sql("DROP TABLE audit")
        if path == "/compile":
            answer = await desk.compile("succeed")
        else:
            answer = await desk.client.post(path, json={"report": job})
        assert answer.status_code == 503
        assert await desk.service.read(desk.service.jobs.ids) == jobs
        assert await desk.service.read(desk.service.repository.list) == ()

    at_desk(tmp_path, story)


def test_calls_over_grpc_are_recorded_too(tmp_path: Path) -> None:
    async def call(channel: grpc.aio.Channel, key: Mapping[str, str]) -> grpc.StatusCode:
        method: Any = channel.unary_unary(f"/{SERVICE.full_name}/RepositoryModelUnload")
        metadata = [("x-request-id", "r2"), *((name.lower(), text) for name, text in key.items())]
        try:
            await method(
                pb.RepositoryModelUnloadRequest(model_name="m").SerializeToString(),
                metadata=metadata,
                timeout=WITHIN_S,
            )
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async def story(desk: Desk) -> None:
        admin, other = (
            await new_key(desk, "operator", "admin"),
            await new_key(desk, "other", "infer"),
        )
        job = await asyncio.to_thread(partial(report, desk, linear(tmp_path / "e"), "operator"))
        desk.client.headers.update(admin)
        await desk.client.post("/models/m/promote", json={"report": job})
        await desk.client.put("/models/m/deployment", json={})
        async with rpc_server(desk.service, None) as rpc:
            assert rpc is not None
            async with grpc.aio.insecure_channel(rpc.address) as channel:
                assert [await call(channel, key) for key in (STRANGER, other, admin)] == [
                    grpc.StatusCode.UNAUTHENTICATED,
                    grpc.StatusCode.PERMISSION_DENIED,
                    grpc.StatusCode.OK,
                ]
        assert not desk.service.database.is_open_here

    at_desk(tmp_path, story, port=0, keys_required=True)
    method = f"/{SERVICE.full_name}/RepositoryModelUnload"
    found = [entry for entry in entries(tmp_path) if entry.request == "r2"]
    assert sorted(names(tuple(found))) == [
        ("access.refused", method, "other"),
        ("authentication.refused", "key/0123456789", ""),
        ("model.unloaded", "model/m", "operator"),
    ]
    assert {entry.address for entry in found} == {ADDRESS}
