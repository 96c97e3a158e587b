"""Two servers on one PostgreSQL and one S3, with the real worker in its sandbox."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.jobs.queue import WORKER
from tests.service.builders.app import Desk, opened_desk
from tests.service.integration.test_benchmark import ended
from tests.service.integration.test_compiled_uploads import Parts, task

MEASURED = {"baseline", "benchmark", "throughput", "width"}
MADE = {"finished", "reused"}


@pytest.mark.slow
def test_a_server_reuses_what_the_job_of_the_other_one_has_made(
    tmp_path: Path, postgresql: str, s3: Any
) -> None:
    settings = {"database_url": postgresql, "files_url": "s3://bucket/files", "worker": WORKER}
    for name in "ab":
        (tmp_path / name).mkdir()

    async def run() -> None:
        async with (
            opened_desk(tmp_path / "a", **settings) as one,
            opened_desk(tmp_path / "b", **settings) as two,
        ):
            parts = task(tmp_path)
            first = await job_of(one, parts, runs=two, idle=one)
            assert "build" in {stage for stage, state in first if state == "finished"}
            second = await job_of(one, renamed(parts), runs=one, idle=two)
            again = {stage for stage, state in second if state == "finished"} - MEASURED
            assert again == set(), second
            assert ("build", "reused") in second

    asyncio.run(run())


async def job_of(desk: Desk, parts: Parts, runs: Desk, idle: Desk) -> set[tuple[str, str]]:
    """Submit at `desk` and run on `runs`. Returns the stages with how they ended."""
    idle.service.runner._labels = {}
    runs.service.runner._labels = {"cpu": {}}
    job = await ended(desk, await desk.client.post("/compile", files=parts))
    assert (await desk.client.get(f"/reports/{job['id']}")).status_code == 200
    events = desk.service.jobs.events(job["id"])
    stages = [each.data for each in events if each.kind == "stage"]
    return {(data["stage"], data["state"]) for data in stages if data["state"] in MADE}


def renamed(parts: Parts) -> Parts:
    """The same upload under another name: a job of its own."""
    plan = yaml.safe_load(parts["plan"][1]) | {"name": "renamed"}
    return parts | {"plan": ("plan.yaml", yaml.safe_dump(plan).encode())}
