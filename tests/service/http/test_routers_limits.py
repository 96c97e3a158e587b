"""The limits of a caller: shown, and enforced over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

from service.http.routers.health import DISK_SHORT
from service.limits.key_limits import KeyLimits
from tests.service.builders.app import Desk, at_desk, model_bytes

LARGE = model_bytes("g" * 100_000)


async def limits_of(desk: Desk, headers: dict[str, str] | None = None) -> dict[str, Any]:
    view = (await desk.client.get("/limits", headers=headers)).json()
    return {row["setting"]: (row["used"], row["limit"]) for row in view["limits"]}


def test_a_caller_sees_each_limit_and_what_is_used_of_it(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        mine, other = desk.key("compile"), desk.key("compile")
        running = (await desk.compile("hang", mine)).json()["id"]
        assert (await desk.compile("succeed", mine)).status_code == 202
        desk.client.headers.update(mine)
        await desk.until(running, "running")
        shown = await limits_of(desk)
        assert shown["max_queued"] == (1, 7)
        assert shown["max_running"] == (1, None)
        assert shown["max_streams"] == (0, 100)
        assert shown["max_requests_per_s"][1] == 1000
        for setting in ("max_stored_bytes", "max_upload_bytes_per_hour"):
            assert shown[setting][0] > 0
        assert (await limits_of(desk, other))["max_stored_bytes"][0] == 0
        view = (await desk.client.get("/limits")).json()
        assert view["owner"] == f"key:{view['key']}"

    at_desk(tmp_path, story, keys_required=True, max_queued=7, max_requests_per_s=1000)


def test_without_keys_the_rate_does_not_apply(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        answers = [await desk.client.get("/jobs") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert (await limits_of(desk))["max_requests_per_s"] == (0, None)

    at_desk(tmp_path, story, max_requests_per_s=1)


def test_a_key_over_its_rate_is_refused_and_others_are_not(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        limits = desk.service.limits
        assert isinstance(limits, KeyLimits)
        limits._clock_ns = lambda: 0
        one, other = desk.key("infer"), desk.key("infer")
        statuses = [(await desk.client.get("/jobs", headers=one)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        refusal = await desk.client.post("/infer", headers=one)
        assert (refusal.status_code, refusal.headers["Retry-After"]) == (429, "1")
        assert "`max_requests_per_s`" in refusal.json()["next"]
        assert (await desk.client.get("/jobs", headers=other)).status_code == 200

    at_desk(tmp_path, story, keys_required=True, max_requests_per_s=2)


def test_an_upload_beyond_the_hour_is_refused_whether_its_length_is_announced_or_not(
    tmp_path: Path,
) -> None:
    async def story(desk: Desk) -> None:
        announced = await desk.compile("succeed", model=LARGE)
        assert announced.status_code == 202
        request = desk.client.build_request(
            "POST", "/compile", files={"model": ("m.onnx", model_bytes("h" * 100_000))}
        )
        for length in (request.headers["Content-Length"], None):
            if length is None:
                del request.headers["Content-Length"]
                request.headers["Transfer-Encoding"] = "chunked"
            refusal = await desk.client.send(request)
            assert (refusal.status_code, refusal.json()["code"]) == (429, "service.too_many")
            assert "`max_upload_bytes_per_hour`" in refusal.json()["error"]
            assert int(refusal.headers["Retry-After"]) > 3500
        assert len(list((tmp_path / "uploads").iterdir())) == 1

    at_desk(tmp_path, story, max_upload_bytes=150_000, max_upload_bytes_per_hour=150_000)


def test_the_bytes_of_failed_jobs_are_freed_before_an_upload_is_refused(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        failed = [(await desk.end_of(name))["id"] for name in ("fail", "die")]
        cancelled = (await desk.compile("hang", model=LARGE)).json()["id"]
        await desk.client.delete(f"/jobs/{cancelled}")
        await desk.until(cancelled, "cancelled")
        for job in failed:
            (tmp_path / "uploads" / job / "more").write_bytes(LARGE)
        freed_first = [*failed, cancelled]
        for number in (1, 2, 3):  # three jobs of 100 KB fit
            assert (await desk.compile(f"hang-{number}", model=LARGE)).status_code == 202
            present = [(tmp_path / "uploads" / job).exists() for job in freed_first]
            assert present == [False] * number + [True] * (3 - number)
        refusal = await desk.compile("hang-4", model=LARGE)
        assert (refusal.status_code, "Retry-After" in refusal.headers) == (429, False)
        assert "expected at most 380000 (`max_stored_bytes`)" in refusal.json()["error"]
        for job in failed:  # the reason stays
            assert (await desk.client.get(f"/jobs/{job}")).json()["state"] == "failed"
            assert "I am" in (await desk.client.get(f"/jobs/{job}/log")).text
        retried = (await desk.client.post(f"/jobs/{failed[0]}/retry")).json()
        ended = await desk.until(retried["id"], "failed")
        assert ended["failure"]["next_step"] == "send the model again"

    at_desk(tmp_path, story, max_upload_bytes=150_000, max_stored_bytes=380_000)


def test_one_key_cannot_open_all_streams(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        job = (await desk.compile("hang")).json()
        following = asyncio.create_task(desk.client.get(f"/jobs/{job['id']}/events"))
        while (await limits_of(desk))["max_streams"] != (1, 1):
            await asyncio.sleep(0.01)
        refusal = await desk.client.get(f"/jobs/{job['id']}/events")
        assert refusal.status_code == 429
        assert "`max_streams`" in refusal.json()["error"]
        await desk.client.delete(f"/jobs/{job['id']}")
        assert "event: cancelled" in (await following).text
        assert "event: cancelled" in (await desk.client.get(f"/jobs/{job['id']}/events")).text
        assert (await limits_of(desk))["max_streams"] == (0, 1)

    at_desk(tmp_path, story, max_streams=1)


def test_below_the_disk_reserve_no_job_is_accepted_and_the_rest_goes_on(tmp_path: Path) -> None:
    async def story(desk: Desk) -> None:
        refusal = await desk.compile("succeed")
        assert (refusal.status_code, refusal.json()["code"]) == (507, "service.storage_full")
        assert "`disk_reserve_bytes`" in refusal.json()["error"]
        assert not list((tmp_path / "uploads").glob("*"))
        for path in ("/jobs/x/retry", "/models/x/benchmark", "/models/x/recompile"):
            assert (await desk.client.post(path, json={})).status_code == 507
        ready = await desk.client.get("/readyz")
        assert (ready.status_code, ready.json()) == (
            200,
            {"status": "ready", "jobs": f"not ready: {DISK_SHORT}"},
        )
        for_jobs = await desk.client.get("/readyz?for=jobs")
        assert (for_jobs.status_code, for_jobs.json()["error"]) == (503, DISK_SHORT)
        assert (await desk.client.get("/v2/health/ready")).status_code == 200
        assert (await desk.client.get("/jobs")).status_code == 200

    at_desk(tmp_path, story, disk_reserve_bytes=2**62)
