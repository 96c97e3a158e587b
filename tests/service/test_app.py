"""The application as a whole: what it loads, how it answers errors, who may see what, and when it
is ready.
"""

import asyncio
import html
import json
import re
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from structlog.testing import capture_logs

from pipeline.errors import StoreError
from service.app import create_app
from service.client.address import JOB_ID
from service.devices.leases import utc_now
from service.http.routers.docs import page
from service.http.schemas import EXAMPLE_ID
from service.jobs.state import new_id
from service.settings import Settings
from service.storage.database import Database
from service.storage.key import Key
from service.storage.keys import Keys
from service.storage.layout import HOME_MODE
from service.submission.plan import parse
from tests.service.builders.app import HOST, URL, Desk, at_desk, known_host, opened_desk
from tests.service.builders.jobs import WITHIN_S, WORKER

HEAVY = (
    "torch torchvision tensorrt tensorrt_rtx onnxruntime openvino nncf modelopt onnxsim polygraphy"
    " matplotlib onnx onnx_graphsurgeon onnx_ir onnxscript"
)


def test_importing_the_server_loads_no_backend() -> None:
    message = (
        f"import sys, service.server, service.app; print(*(set({HEAVY!r}.split()) &"
        " sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", message], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "service.not_found"),
        ("GET", "/jobs/", 404, "service.not_found"),
        ("PUT", "/jobs", 405, "service.method_not_allowed"),
        ("GET", "/jobs/17", 404, "service.not_found"),
        ("GET", "/jobs?limit=0", 422, "service.unprocessable"),
        ("GET", "/jobs?state=odd", 422, "service.unprocessable"),
        ("GET", "/jobs/17/events?after=-1", 422, "service.unprocessable"),
        ("GET", f"/jobs/17/events?after={2**63}", 422, "service.unprocessable"),
        ("DELETE", "/jobs/17", 404, "service.not_found"),
        ("POST", "/jobs/17/retry", 404, "service.not_found"),
        ("GET", "/reports/../../crucible.db", 404, "service.not_found"),
        ("GET", "/jobs/..%2F..%2Fcrucible.db/log", 404, "service.not_found"),
        ("POST", "/compile", 422, "service.unprocessable"),
    ],
)
def test_every_refusal_has_one_form(
    tmp_path: Path, method: str, path: str, status: int, code: str
) -> None:
    async def story(desk: Desk) -> None:
        answer = await desk.client.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
        assert answer.json()["error"]
        assert answer.headers["x-request-id"]
        assert (status == 405) == ("allow" in answer.headers)

    at_desk(tmp_path, story)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/jobs/17", "DELETE, GET"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("GET", "/compile", "POST"),
        ("PATCH", "/models/m/deployment", "DELETE, PUT"),
    ],
)
def test_a_method_that_a_path_does_not_take_is_told_all_that_it_does(
    tmp_path: Path, method: str, path: str, allowed: str
) -> None:
    async def story(desk: Desk) -> None:
        answer = await desk.client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.json()["error"] == f"this path takes {allowed}"

    at_desk(tmp_path, story)


def test_a_fault_of_ours_is_500_with_an_id_and_no_traceback(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        @desk.app.get("/fault")
        async def fault() -> None:
            raise ZeroDivisionError("of ours")

        answer = await desk.client.get("/fault", headers={"X-Request-Id": "r17"})
        assert answer.status_code == 500
        assert answer.json()["code"] == "internal"
        assert "r17" in answer.json()["error"]
        assert "ZeroDivisionError" not in answer.text
        assert (await desk.client.get("/healthz")).status_code == 200
        figures = (await desk.client.get("/metrics")).text
        assert (
            'crucible_http_requests_total{method="GET",route="/fault",status="500"} 1.0' in figures
        )

    at_desk(tmp_path, story)


def test_a_corrupt_row_is_told_and_the_others_are_served(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        good, bad = await desk.end_of("succeed"), await desk.end_of("fail")
        with desk.service.database.write() as rows:
            rows.exec_driver_sql("UPDATE jobs SET job = '{' WHERE id = ?", (bad["id"],))
        answer = await desk.client.get(f"/jobs/{bad['id']}")
        assert answer.status_code == 500
        assert "damaged" in answer.json()["error"]
        listed = (await desk.client.get("/jobs")).json()["jobs"]
        assert [job["id"] for job in listed] == [good["id"]]

    at_desk(tmp_path, story)


def test_other_owners_jobs_are_not_there_and_an_admin_sees_all(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        mine, other, admin, reader = (
            desk.key("compile"),
            desk.key("compile"),
            desk.key("admin"),
            desk.key("infer"),
        )
        desk.client.headers.update(mine)
        job = await desk.end_of("succeed")
        paths = [
            f"/{kind}"
            for kind in (
                f"jobs/{job['id']}",
                f"jobs/{job['id']}/log",
                f"jobs/{job['id']}/events",
                f"reports/{job['id']}",
            )
        ]
        paths += [
            f"/reports/{job['id']}/{part}"
            for part in ("latency", "accuracy", "samples", "engine.tar")
        ]
        for path in paths:
            got = [
                (await desk.client.get(path, headers=key)).status_code
                for key in (mine, other, admin)
            ]
            assert (path, got) == (path, [200, 404, 200])
        for method, path in (
            ("DELETE", f"/jobs/{job['id']}"),
            ("POST", f"/jobs/{job['id']}/retry"),
        ):
            got = [
                (await desk.client.request(method, path, headers=key)).status_code
                for key in (mine, other, admin, reader)
            ]
            assert (path, got) == (path, [409, 404, 409, 403])
        assert (await desk.client.get("/jobs", headers=other)).json()["jobs"] == []
        assert (await desk.client.get("/jobs", headers=reader)).status_code == 200
        assert (await desk.compile("succeed", reader)).status_code == 403
        again = await desk.compile(
            "succeed", other
        )  # an equal request of another owner is another job
        assert (again.status_code, again.json()["id"] == job["id"]) == (202, False)
        assert (await desk.client.get("/metrics")).status_code == 200
        del desk.client.headers["Authorization"]
        assert (await desk.client.get("/metrics")).status_code == 401
        for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
            assert (await desk.client.get(path)).status_code == 200

    at_desk(tmp_path, story, keys_required=True)


def test_it_is_ready_only_between_its_start_and_its_end(tmp_path: Path) -> None:
    async def run() -> None:
        known = asyncio.Event()

        async def later() -> Any:
            await known.wait()
            return HOST

        app = create_app(Settings(home=tmp_path), WORKER, later)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client,
        ):
            assert (await client.get("/healthz")).status_code == 200
            starting = await client.get("/readyz")
            assert (starting.status_code, starting.json()["error"]) == (
                503,
                "the server is starting: it probes the host's devices and tools",
            )
            assert int(starting.headers["Retry-After"]) > 0
            assert (await client.post("/compile")).status_code == 503
            assert (await client.get("/jobs")).status_code == 200
            known.set()
            await app.state.service.started
            for path in ("/readyz", "/readyz?for=jobs"):
                ready = {"status": "ready", "jobs": "ready"}
                assert (await client.get(path)).json() == ready
            await app.state.service.stop()
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.post("/compile")).json()["error"] == "the server is stopping"

    asyncio.run(run())


def test_a_second_server_on_one_home_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened_desk(tmp_path):
            second = create_app(Settings(home=tmp_path), WORKER, known_host)
            with pytest.raises(StoreError, match=f"another server uses '{tmp_path}'"):
                async with second.router.lifespan_context(second):
                    pass
        async with opened_desk(tmp_path):  # the first has let it go
            pass

    asyncio.run(run())


@pytest.mark.parametrize(("before", "events"), [(0o755, ["home.secured"]), (0o700, [])])
def test_the_home_is_closed_to_others_at_the_start(
    tmp_path: Path, before: int, events: list[str]
) -> None:
    async def story(desk: Desk) -> None:
        assert stat.S_IMODE(tmp_path.stat().st_mode) == HOME_MODE

    tmp_path.chmod(before)
    with capture_logs() as lines:
        at_desk(tmp_path, story)
    assert [line["event"] for line in lines if line["event"].startswith("home")] == events


def test_the_first_admin_key_comes_from_a_file(tmp_path: Path) -> None:
    text = f"cru_0123456789_{'A' * 43}"
    (tmp_path / "admin").write_text(f"{text}\n")

    async def story(desk: Desk) -> None:
        assert (
            await desk.client.get("/jobs", headers={"Authorization": f"Bearer {text}"})
        ).status_code == 200
        assert (
            await desk.client.get("/jobs", headers={"Authorization": f"Bearer {text[:-1]}B"})
        ).status_code == 401

    for _ in range(2):  # it is known the second time
        at_desk(tmp_path, story, keys_required=True, admin_key_file=tmp_path / "admin")


def test_what_an_upload_left_that_became_no_job_is_removed_at_the_next_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "uploads" / "half").mkdir(parents=True)

    async def story(desk: Desk) -> None:
        assert not (tmp_path / "uploads" / "half").exists()

    at_desk(tmp_path, story)


def test_the_docs_need_nothing_from_elsewhere_and_show_every_path(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        answer = await desk.client.get("/docs")
        document = (await desk.client.get("/openapi.json")).json()
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "http" not in answer.text.replace("application/", "")
        for path, methods in document["paths"].items():
            assert all(f"{method.upper()} {path}" in answer.text for method in methods)
        assert {
            "/compile",
            "/jobs",
            "/jobs/{job_id}/events",
            "/reports/{job_id}",
            "/readyz",
            "/metrics",
        } <= set(document["paths"])

    at_desk(tmp_path, story)


def test_every_body_has_an_example_that_is_taken_and_shown(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        # bodies are `defer_build=False`: FastAPI hides pydantic's warning of its alias only here
        warnings.simplefilter("error")
        document = create_app(Settings(home=tmp_path)).openapi()
    shown = html.unescape(page(document))
    examples = {}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for form, content in operation.get("requestBody", {}).get("content", {}).items():
                if content["schema"].get("format") == "binary":
                    continue
                schema = {**content["schema"], "components": document["components"]}
                example = (
                    content["example"]
                    if "example" in content
                    else example_of(content["schema"], document)
                )
                jsonschema.validate(example, schema)
                assert f"<pre>{json.dumps(example, indent=1)}</pre>" in shown, path
                examples[path, form] = example
    main = {
        "/compile",
        "/infer",
        "/models/{name}/infer",
        "/v2/models/{name}/infer",
        "/models/{name}/promote",
        "/models/{name}/deployment",
    }
    assert main <= {path for path, _ in examples}
    assert parse(examples["/compile", "multipart/form-data"]["plan"].encode()).name == "resnet50"


def example_of(schema: dict[str, Any], document: dict[str, Any]) -> Any:
    """The first one of a schema that is named, or may be left out."""
    name = schema.get("anyOf", [schema])[0]["$ref"].rpartition("/")[2]
    return document["components"]["schemas"][name]["examples"][0]


def test_every_id_that_the_docs_show_is_one(tmp_path: Path) -> None:
    shown = json.dumps(create_app(Settings(home=tmp_path)).openapi())
    ids = set(re.findall(r"\b[0-9a-f]{20,40}\b", shown))
    assert ids == {EXAMPLE_ID}
    assert JOB_ID.fullmatch(EXAMPLE_ID)
    assert len(new_id(utc_now())) == len(EXAMPLE_ID)


class Slow(Keys):
    """A database that somebody else holds until the event is set."""

    def __init__(self, database: Database, release: threading.Event) -> None:
        super().__init__(database)
        self._release, self.lookup = release, threading.Event()

    def verify(self, text: str) -> Key:
        self.lookup.set()
        assert self._release.wait(WITHIN_S)
        return super().verify(text)


def test_a_database_that_is_held_holds_up_nobody_who_needs_no_answer_of_it(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        release = threading.Event()
        known, unknown = desk.key("infer"), desk.key("infer")
        desk.service.keys = keys = Slow(desk.service.database, release)
        release.set()
        assert (await desk.client.get("/models", headers=known)).status_code == 200
        release.clear()
        keys.lookup.clear()
        waiting = asyncio.create_task(desk.client.get("/models", headers=unknown))
        assert await asyncio.to_thread(keys.lookup.wait, WITHIN_S)
        for path, headers in (("/healthz", {}), ("/models", known)):
            assert (await desk.client.get(path, headers=headers)).status_code == 200
        assert not waiting.done()
        release.set()
        assert (await waiting).status_code == 200

    at_desk(tmp_path, story, keys_required=True)
