"""Two servers on one PostgreSQL and one home: each job runs once, and all works from each of
them.
"""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline.errors import StoreError
from service.devices.leases import utc_now
from service.errors import TooMany
from service.jobs.claims import LEASE_S, Claims, Held
from service.jobs.state import Job, JobEvent, Requeued, Started
from service.jobs.store import JobStore
from service.sandbox.process_tree import of_jobs
from service.settings import Settings
from service.storage.database import Database
from service.storage.layout import Folders
from service.storage.tables import jobs
from tests.service.builders.jobs import Bench, new_job, running, write_out
from tests.service.builders.postgresql import Server, missing, running_server

Story = Callable[[Bench, Bench], Awaitable[None]]


def is_running(job: Job) -> bool:
    return job.state == "running"


def trying(
    home: Path, url: str, story: Story, max_running: int | None = None, max_queued: int = 1000
) -> None:
    options = Settings(home=home, database_url=url, max_running=max_running, max_queued=max_queued)

    async def run() -> None:
        async with (
            running(home, options=options) as one,
            running(home, options=options) as two,
        ):
            try:
                await story(one, two)
            finally:  # together: else one may start what the other one has left
                await asyncio.gather(one.runner.stop(), two.runner.stop())

    asyncio.run(run())


def test_jobs_of_both_run_once_on_either(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Bench, two: Bench) -> None:
        submitted = [await bench.submit("succeed") for bench in (one, one, two, two)]
        for bench in (one, two):
            ended = [await bench.until(job) for job in submitted]
            assert [(job.state, job.attempt) for job in ended] == [("succeeded", 1)] * 4
        for job in submitted:
            kinds = one.kinds(job)
            assert (kinds.count("running"), kinds.count("succeeded")) == (1, 1)
            assert one.folders.report(job.id).is_dir()

    trying(tmp_path, postgresql, story)


def test_events_of_the_other_server_wake_a_client(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Bench, two: Bench) -> None:
        job = await one.submit("hang")
        await one.until(job, is_running)
        changed = [bench.runner.changed(job.id) for bench in (one, two)]
        await one.runner.cancel(job.id)
        for event in changed:
            await asyncio.wait_for(event.wait(), 30)

    trying(tmp_path, postgresql, story)


@pytest.mark.parametrize("canceller", [0, 1])
def test_either_server_cancels_a_running_job(
    tmp_path: Path, postgresql: str, canceller: int
) -> None:
    async def story(*both: Bench) -> None:
        job = await both[0].submit("hang")
        await both[0].until(job, is_running)
        await both[canceller].runner.cancel(job.id)
        ended = await both[1 - canceller].until(job)
        assert ended.state == "cancelled"
        assert of_jobs([job.id]) == []

    trying(tmp_path, postgresql, story)


def test_limits_of_an_owner_hold_over_both(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Bench, two: Bench) -> None:
        first = await one.submit("hang")
        await one.until(first, is_running)
        second = await two.submit("hang")
        await asyncio.sleep(3)  # both have looked for jobs meanwhile
        assert one.store.get(second.id).state == "queued"
        with pytest.raises(TooMany):
            await one.submit("succeed")

    trying(tmp_path, postgresql, story, max_running=1, max_queued=1)


def test_the_job_of_a_dead_server_runs_on_the_other_one(tmp_path: Path, postgresql: str) -> None:
    """Its claim is that of a server which sends no heartbeat. A late write of it is refused."""

    async def story(one: Bench, two: Bench) -> None:
        job = await one.submit("hang")
        await one.until(job, is_running)
        with one.store.database.write() as rows:
            rows.execute(
                sa.update(jobs).values(
                    server="dead",
                    fencing_token=jobs.c.fencing_token + 1,
                    heartbeat_at=jobs.c.heartbeat_at - 2 * LEASE_S,
                )
            )
        again = await two.until(job, lambda job: job.attempt == 2)
        assert again.interruptions == 1
        assert one.kinds(job).count("running") == 2
        await one.runner.cancel(job.id)
        assert (await two.until(job)).state == "cancelled"
        assert of_jobs([job.id]) == []

    trying(tmp_path, postgresql, story)


def test_a_take_over_that_the_database_interrupts_is_finished_later(
    tmp_path: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.jobs.queue.LEASE_S", 2.0)
    failed = list[str]()

    class Lost(JobStore):
        def append(self, job_id: str, event: JobEvent, *rest: Any, **more: Any) -> tuple[Job, int]:
            if isinstance(event, Requeued) and not failed:
                failed.append(job_id)
                raise StoreError("cannot use the database", "")
            return super().append(job_id, event, *rest, **more)

    dead = new_job(Folders(tmp_path), "succeed")
    with closing(Database(postgresql)) as database:
        store = JobStore(database)
        store.add(dead, utc_now())
        store.append(dead.id, Started(1, 1.0), utc_now())
        with database.write() as rows:
            rows.execute(sa.update(jobs).values(server="dead", heartbeat_at=0.0))

    async def story() -> None:
        async with running(tmp_path, store_kind=Lost, database_url=postgresql) as bench:
            ended = await bench.until(dead)
            assert (ended.state, ended.interruptions) == ("succeeded", 1)
            assert failed == [dead.id]

    asyncio.run(story())


def test_a_job_outlives_a_restart_of_the_database(tmp_path: Path, postgresql: str) -> None:
    failed = list[JobEvent]()

    class Restarting(JobStore):
        def append(self, job_id: str, event: JobEvent, *rest: Any, **more: Any) -> tuple[Job, int]:
            if len(failed) < 3:
                failed.append(event)
                raise StoreError("cannot use the database", "")
            return super().append(job_id, event, *rest, **more)

    async def story() -> None:
        async with running(tmp_path, store_kind=Restarting, database_url=postgresql) as bench:
            job = await bench.end_of("succeed")
            assert (job.state, job.attempt) == ("succeeded", 1)
            assert len(failed) == 3

    asyncio.run(story())


def test_a_server_whose_database_does_not_answer_ends_its_job(
    tmp_path: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server takes the job soon: its process must be gone by then."""
    monkeypatch.setattr("service.jobs.queue.MARGIN_S", LEASE_S - 3)
    answers = threading.Event()
    renew = Claims.renew

    async def story() -> None:
        async with running(tmp_path, database_url=postgresql) as bench:
            job = await bench.submit("hang")
            await bench.until(job, is_running)

            def hung(claims: Claims, jobs_here: Collection[str]) -> dict[str, Held]:
                answers.wait()
                return renew(claims, jobs_here)

            monkeypatch.setattr(Claims, "renew", hung)
            try:
                end = time.monotonic() + 30
                while of_jobs([job.id]):
                    assert time.monotonic() < end
                    await asyncio.sleep(0.1)
            finally:
                answers.set()
            await bench.until(job, lambda job: job.attempt == 2)
            await bench.runner.cancel(job.id)
            await bench.until(job)

    asyncio.run(story())


def test_a_stopped_server_leaves_its_job_to_the_other_one(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Bench, two: Bench) -> None:
        jobs_of_both = [await one.submit("hang") for _ in range(2)]  # one on each server
        for job in jobs_of_both:
            await one.until(job, is_running)
        third = await one.submit("succeed")
        await two.runner.stop()
        states = sorted(one.store.get(job.id).state for job in jobs_of_both)
        assert states == ["queued", "running"]
        for job in jobs_of_both:
            await one.runner.cancel(job.id)
        assert (await one.until(third)).state == "succeeded"

    trying(tmp_path, postgresql, story)


@pytest.mark.slow
def test_the_job_of_a_killed_server_runs_on_the_other_one(tmp_path: Path, postgresql: str) -> None:
    """SIGKILL, so that nothing is said to the database: its heartbeats cease."""
    environment = {**os.environ, "CRUCIBLE_SERVICE_DATABASE_URL": postgresql}
    command = (sys.executable, "-m", "tests.service.builders.server_double", str(tmp_path), "hang")
    write_out(tmp_path / "template", tmp_path / "template-store")

    def kill_when_it_runs(doomed: "subprocess.Popen[str]") -> str:
        assert doomed.stdout is not None
        job_id = next(line.split()[1] for line in doomed.stdout if line.startswith("accepted "))
        with closing(Database(postgresql)) as database:
            while JobStore(database).get(job_id).state != "running":
                assert doomed.poll() is None
                time.sleep(0.1)
        doomed.kill()
        return job_id

    async def story() -> None:
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True
        ) as doomed:
            try:
                job_id = await asyncio.to_thread(kill_when_it_runs, doomed)
            finally:
                doomed.kill()
        plan = Folders(tmp_path).load_plan(job_id).model_copy(update={"name": "succeed"})
        Folders(tmp_path).save_plan(job_id, plan)
        async with running(tmp_path, database_url=postgresql) as other:
            ended = await other.until(other.store.get(job_id))
            assert (ended.state, ended.attempt, ended.interruptions) == ("succeeded", 2, 1)

    asyncio.run(story())


def test_a_job_goes_on_while_the_database_is_restarted(tmp_path: Path) -> None:
    """Its events wait for the database; its attempt is the first."""
    if reason := missing():
        pytest.skip(f"PostgreSQL test: {reason}")

    async def story(server: Server, url: str) -> None:
        async with running(tmp_path, database_url=url) as bench:
            job = await bench.until(await bench.submit("succeed-3"), is_running)
            with bench.store.database.write() as rows:  # else the crash may lose the last commits
                rows.execute(sa.text("SET LOCAL synchronous_commit = on"))
                rows.execute(sa.update(jobs).values(created=jobs.c.created))
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(4)  # the job ends meanwhile
            await asyncio.to_thread(server.start)
            ended = await bench.until(job)
            assert (ended.state, ended.attempt) == ("succeeded", 1)
            assert bench.kinds(job)[-2:] == ["stage", "succeeded"]

    with running_server() as server, server.database() as url:
        asyncio.run(story(server, url))
