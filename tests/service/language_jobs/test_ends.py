"""A compile of a language model by the real worker that a client or a limit ends in the middle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from service.jobs.queue import WORKER
from service.sandbox.process_tree import of_jobs
from tests.pipeline.llm.models import write_model
from tests.service.builders.app import Desk, opened_desk
from tests.service.language_jobs.test_compile import upload

LONG_S = 600.0  # for stages of the real worker on a busy host
EXPORT = "export_language_model"


def compiling(folder: Path, story: Callable[[Desk, str], Awaitable[None]], **settings: Any) -> None:
    """Run `story` with the id of a job that compiles a tiny language model."""
    parts = upload(folder, write_model(folder / "model", scale=0.2))

    async def run() -> None:
        async with opened_desk(folder / "home", worker=WORKER, **settings) as desk:
            answer = await desk.client.post("/compile", files=parts)
            assert answer.status_code == 202, answer.text
            await story(desk, answer.json()["id"])

    asyncio.run(run())


async def until_stage(desk: Desk, job_id: str, stage: str, *states: str) -> None:
    """Wait until a stage of a job has come to one of these states."""
    end_s = time.monotonic() + LONG_S
    while True:
        events = [event.data for event in desk.service.jobs.events(job_id)]
        if any(data.get("stage") == stage and data.get("state") in states for data in events):
            return
        job = (await desk.client.get(f"/jobs/{job_id}")).json()
        assert job["state"] in ("queued", "running"), job
        assert time.monotonic() < end_s, job
        await asyncio.sleep(0.05)


async def ended(desk: Desk, job_id: str) -> dict[str, Any]:
    """Wait for the end of a job: nothing of it is left running, and there is no report."""
    job = await desk.until(job_id, "succeeded", "failed", "cancelled")
    assert of_jobs([job_id]) == []
    report = await desk.client.get(f"/reports/{job_id}")
    assert report.status_code == 404
    assert (await desk.client.delete(f"/jobs/{job_id}")).status_code == 409
    return job


@pytest.mark.slow
def test_a_compile_is_cancelled_in_the_middle_and_its_retry_reuses_what_was_built(
    tmp_path: Path,
) -> None:
    async def story(desk: Desk, job_id: str) -> None:
        await until_stage(desk, job_id, EXPORT, "finished")
        assert of_jobs([job_id])
        answer = await desk.client.delete(f"/jobs/{job_id}")
        assert (answer.status_code, answer.json()["state"]) == (202, "cancelling")
        job = await ended(desk, job_id)
        assert (job["state"], job["failure"]) == ("cancelled", None)

        again = await desk.client.post(f"/jobs/{job_id}/retry")
        assert again.status_code == 202, again.text
        await until_stage(desk, again.json()["id"], EXPORT, "reused")
        await desk.client.delete(f"/jobs/{again.json()['id']}")
        assert (await ended(desk, again.json()["id"]))["state"] == "cancelled"

    compiling(tmp_path, story)


@pytest.mark.slow
def test_a_compile_that_takes_too_long_is_stopped_and_says_so(tmp_path: Path) -> None:
    async def story(desk: Desk, job_id: str) -> None:
        job = await ended(desk, job_id)
        assert (job["state"], job["failure"]["code"]) == ("failed", "job.timeout"), job
        assert "longer than its limit of 5 s" in job["failure"]["message"]
        assert "job_timeout_s" in job["failure"]["next_step"]

    compiling(tmp_path, story, job_timeout_s=5.0)  # the imports of its first stages take longer
