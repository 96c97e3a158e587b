"""Two servers on one PostgreSQL and one S3, with homes of their own: each finds the files that the
other has stored.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.service.builders.app import Desk, opened_desk

URL = "s3://bucket/files"
Story = Callable[[Desk, Desk], Awaitable[None]]


@asynccontextmanager
async def desk_of(home: Path, url: str, **settings: Any) -> AsyncIterator[Desk]:
    home.mkdir(exist_ok=True)
    async with opened_desk(home, database_url=url, files_url=URL, **settings) as desk:
        yield desk


def at_two_desks(folder: Path, url: str, story: Story, **settings: Any) -> None:
    """Run `story` with two servers. Only the second one runs jobs."""

    async def run() -> None:
        async with (
            desk_of(folder / "a", url, **settings) as one,
            desk_of(folder / "b", url, **settings) as two,
        ):
            await story(one, two)

    asyncio.run(run())


def test_an_upload_at_one_server_runs_on_the_other_and_its_report_is_at_both(
    tmp_path: Path, postgresql: str, s3: Any
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(two, one)
        job = await one.end_of("succeed")
        assert job["state"] == "succeeded", job
        assert two.service.folders.report(job["id"]).is_dir()
        assert not one.service.folders.report(job["id"]).exists()
        for path in (
            f"/reports/{job['id']}",
            f"/reports/{job['id']}/latency",
            f"/reports/{job['id']}/engine.tar",
            f"/jobs/{job['id']}/log",
        ):
            answers = [await desk.client.get(path) for desk in (one, two)]
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            assert answers[0].content == answers[1].content
        assert "I am succeed" in answers[0].text
        again = await one.compile("succeed")
        assert again.json()["id"] == job["id"], "an equal request gets the same job"

    at_two_desks(tmp_path, postgresql, story)


def leave_jobs_to(runs: Desk, submits: Desk) -> None:
    """Let only one of two servers claim jobs: the other one has no device."""
    submits.service._leases.devices = type(submits.service._leases.devices)(())
