"""Two servers on one PostgreSQL and one home, over HTTP: a client need not know which it asks."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline.errors import StoreError
from service.limits.failures import MAX_FAILURES
from service.storage.audit_entry import SERVICE
from service.storage.keys import KNOWN_FOR_S
from service.storage.layout import Folders
from service.storage.tables import database_clock_s, key_counts
from tests.service.builders.app import Desk, model_bytes, opened_desk
from tests.service.builders.postgresql import refusing_connections

Story = Callable[[Desk, Desk], Awaitable[None]]


def at_two_desks(home: Path, url: str, story: Story, **settings: Any) -> None:
    async def run() -> None:
        async with (
            opened_desk(home, database_url=url, **settings) as one,
            opened_desk(home, database_url=url, **settings) as two,
        ):
            await story(one, two)

    asyncio.run(run())


def test_a_job_of_one_server_is_seen_whole_at_the_other(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Desk, two: Desk) -> None:
        job = await one.end_of("succeed")
        assert job["state"] == "succeeded"
        for path in ("", "/log", "/events"):
            answers = [await desk.client.get(f"/jobs/{job['id']}{path}") for desk in (one, two)]
            assert [answer.status_code for answer in answers] == [200, 200], path
            assert answers[0].text == answers[1].text
        report = await two.client.get(f"/reports/{job['id']}")
        assert report.status_code == 200, report.text
        again = await two.compile("succeed")
        assert again.json()["id"] == job["id"], "an equal request gets the same job"

    at_two_desks(tmp_path, postgresql, story)


def test_the_events_of_a_running_job_stream_from_the_other_server(
    tmp_path: Path, postgresql: str
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        job_id = (await one.compile("hang")).json()["id"]
        await one.until(job_id, "running")

        async def follow(desk: Desk) -> list[str]:
            text = (await desk.client.get(f"/jobs/{job_id}/events")).text
            return [line for line in text.splitlines() if line.startswith(("id:", "event:"))]

        following = [asyncio.create_task(follow(desk)) for desk in (one, two)]
        await asyncio.sleep(0.1)
        assert (await two.client.delete(f"/jobs/{job_id}")).is_success
        streams = await asyncio.gather(*following)
        assert streams[0] == streams[1]
        assert "event: cancelled" in streams[0][-2:]

    at_two_desks(tmp_path, postgresql, story)


def test_a_key_revoked_at_one_server_is_refused_at_both(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Desk, two: Desk) -> None:
        header = one.key("compile")
        text = header["Authorization"].removeprefix("Bearer ")
        for desk in (one, two):  # a new key works everywhere at once
            assert (await desk.client.get("/jobs", headers=header)).status_code == 200
        key = await asyncio.to_thread(one.service.keys.verify, text)
        session = await asyncio.to_thread(one.service.sessions.begin, key, SERVICE)
        for desk in (one, two):
            assert await desk.service.has_session(session)
        job_id = (await one.compile("hang", header)).json()["id"]
        events = f"/jobs/{job_id}/events"
        following = asyncio.create_task(two.client.get(events, headers=header))
        while (await used(two, header))["max_streams"] != 1:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(one.service.keys.revoke, key.prefix)
        assert (await one.client.get("/jobs", headers=header)).status_code == 401
        for desk in (one, two):
            assert not await desk.service.has_session(session)
        await one.service.runner.cancel(job_id)
        assert "event: cancelled" not in (await following).text, "the key of the stream is revoked"
        await asyncio.sleep(KNOWN_FOR_S)
        assert (await two.client.get("/jobs", headers=header)).status_code == 401

    at_two_desks(tmp_path, postgresql, story, keys_required=True)


def test_the_limits_of_a_key_hold_over_both(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Desk, two: Desk) -> None:
        header = one.key("compile")
        job = (await one.compile("hang", header)).json()
        events = f"/jobs/{job['id']}/events"
        following = asyncio.create_task(one.client.get(events, headers=header))
        while (await used(two, header))["max_streams"] != 1:
            await asyncio.sleep(0.05)
        refusals = [await two.client.get(events, headers=header)]
        refusals.append(await two.compile("other", header, model_bytes("x" * 9_400)))
        for answer, setting in zip(
            refusals, ("max_streams", "max_upload_bytes_per_hour"), strict=True
        ):
            assert answer.status_code == 429, answer.text
            assert setting in answer.json()["error"]
        await two.client.delete(f"/jobs/{job['id']}", headers=header)
        assert "event: cancelled" in (await following).text

    limits = {"max_upload_bytes": 10_000, "max_upload_bytes_per_hour": 10_000}
    at_two_desks(tmp_path, postgresql, story, keys_required=True, max_streams=1, **limits)


def test_failed_sign_ins_at_both_count_together(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Desk, two: Desk) -> None:
        wrong = {"Authorization": "Bearer wrong"}
        for _ in range(MAX_FAILURES):
            assert (await one.client.get("/jobs", headers=wrong)).status_code == 401
        refused = await two.client.get("/jobs", headers=wrong)
        assert (refused.status_code, int(refused.headers["Retry-After"]) > 0) == (429, True)
        right = one.key("compile")
        assert (await two.client.get("/jobs", headers=right)).status_code == 200

    at_two_desks(tmp_path, postgresql, story, keys_required=True)


async def used(desk: Desk, headers: dict[str, str]) -> dict[str, int]:
    view = (await desk.client.get("/limits", headers=headers)).json()
    return {row["setting"]: row["used"] for row in view["limits"]}


def test_requests_at_both_count_together(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Desk, two: Desk) -> None:
        header, statuses = one.key("compile"), set[int]()
        row = {
            "key": header["Authorization"].split("_")[1],
            "requests_until": database_clock_s() + 3600,  # used up at another server
            "hour_begin": 0.0,
            "uploaded_bytes": 0,
        }
        with one.service.database.write() as rows:
            rows.execute(sa.insert(key_counts).values(row))
        for desk in (one, two):
            statuses.add((await desk.client.get("/jobs", headers=header)).status_code)
        assert statuses == {429}

    at_two_desks(tmp_path, postgresql, story, keys_required=True, max_requests_per_s=100)


def test_a_home_of_postgresql_is_not_opened_without_it(tmp_path: Path, postgresql: str) -> None:
    """SQLite would know none of its jobs, and the server deletes uploads without a job."""

    async def run() -> None:
        async with opened_desk(tmp_path, database_url=postgresql) as desk:
            job = await desk.end_of("succeed")
        with pytest.raises(StoreError, match="PostgreSQL") as refused:
            async with opened_desk(tmp_path):
                pass
        assert "DATABASE_URL" in refused.value.next_step
        assert Folders(tmp_path).uploads(job["id"]).is_dir()

    asyncio.run(run())


def test_without_its_database_a_server_says_so_but_not_where_it_is(
    tmp_path: Path, postgresql: str
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        with refusing_connections(postgresql):
            answer = await one.client.get("/jobs")
            body = answer.json()
            assert (answer.status_code, body["code"]) == (503, "host.store")
            assert "try again" in body["next"]
            assert "postgresql" not in answer.text
            assert str(sa.make_url(postgresql).database) not in answer.text
        assert (await two.end_of("succeed"))["state"] == "succeeded"

    at_two_desks(tmp_path, postgresql, story)
