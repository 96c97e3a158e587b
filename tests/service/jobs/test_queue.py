"""The runner with a double for its worker: every way in which a child can end, each with real
processes.
"""

import asyncio
import datetime as dt
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import DiskFull
from pipeline.execution.stage_event import StageEvent
from service.devices.leases import utc_now
from service.devices.policy import Lease
from service.errors import Conflict, NotFound, TooMany, Unavailable
from service.jobs.attempt import PATIENCE_S
from service.jobs.claims import Claim, Claims
from service.jobs.publish import DIGESTS, REPORT_FILES
from service.jobs.queue import MAX_INTERRUPTIONS
from service.jobs.state import Job, JobEvent, Requeued, Started
from service.jobs.store import JobStore, Once
from service.sandbox.process_tree import of_jobs
from service.storage.audit_entry import Entry
from service.storage.database import Database
from service.storage.files import StoredFile
from service.storage.layout import Folders
from tests.service.builders.jobs import Bench, new_job, running


def trying(
    home: Path,
    story: Callable[[Bench], Awaitable[object]],
    devices: tuple[str, ...] = ("cpu",),
    **settings: Any,
) -> None:
    async def run() -> None:
        async with running(home, devices=devices, **settings) as bench:
            await story(bench)

    asyncio.run(run())


def is_running(job: Job) -> bool:
    return job.state == "running" and job.progress is not None


def test_a_job_succeeds_and_its_report_is_published(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        job = await bench.end_of("succeed")
        assert (job.state, job.verdict, job.winner, job.attempt) == (
            "succeeded",
            "accepted",
            "openvino int8 nncf u8s8",
            1,
        )
        assert bench.kinds(job) == ["queued", "running", "stage", "stage", "succeeded"]
        published = {path.name for path in bench.folders.report(job.id).iterdir()}
        assert published == {*REPORT_FILES, DIGESTS, "engine"}
        assert "I am succeed" in bench.folders.work(job.id).log.read_text()

    trying(tmp_path, story)
    (work,) = (tmp_path / "jobs").iterdir()
    assert [path.name for path in work.iterdir()] == ["log"]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("fail", "model.invalid", "no such model"),
        ("die", "host.child_died", "ended by signal 11 (SIGSEGV)"),
        ("leave", "host.child_died", "ended with exit code 3"),
        ("rubbish", "job.protocol", "at most 131072 bytes, got 200"),
        ("huge", "job.protocol", "at most 131072 bytes, got 9223372036854775808"),
        ("body", "job.protocol", "at most 0 bytes, got 1"),
        ("babble", "job.protocol", "not a message: b'hello'"),
        ("half", "host.child_died", "ended with exit code 0"),
        ("flood", "job.protocol", "more than 20000 messages"),
        ("share", "job.protocol", "seeks, although nothing is shared"),
        ("lie", "host.store", "an invalid report"),
    ],
)
def test_a_job_that_fails_says_how(tmp_path: Path, name: str, code: str, message: str) -> None:
    async def story(bench: Bench) -> None:
        job = await bench.end_of(name)
        assert job.failure is not None
        assert (job.state, job.failure.code) == ("failed", code)
        assert message in job.failure.message
        assert job.failure.next_step
        assert not bench.folders.report(job.id).exists()
        assert (await bench.end_of("succeed")).state == "succeeded"

    trying(tmp_path, story)


def test_a_job_that_takes_too_long_is_stopped_and_says_so(tmp_path: Path) -> None:
    """What takes too much memory or disk meets a real server in test_faults.py."""

    async def story(bench: Bench) -> None:
        job = await bench.end_of("hang")
        assert job.failure is not None
        assert (job.state, job.failure.code) == ("failed", "job.timeout"), job.failure
        assert "longer than its limit of 1 s" in job.failure.message

    trying(tmp_path, story, job_timeout_s=1.0)
    (work,) = (
        tmp_path / "jobs"
    ).iterdir()  # tidied after the end was stored, before the server ended
    assert (work / "home").exists()  # what it stored, for a retry


@pytest.mark.parametrize("name", ["hang", "deaf", "grandchild"])
def test_cancelling_kills_the_child_and_all_that_it_started(tmp_path: Path, name: str) -> None:
    async def story(bench: Bench) -> None:
        job = await bench.submit(name)
        await bench.until(
            job,
            lambda job: (
                job.progress is not None
                and is_running(job)
                and (name != "grandchild" or job.progress.stage == "grandchild")
            ),
        )
        assert len(of_jobs([job.id])) >= (4 if name == "grandchild" else 2)
        assert (await bench.runner.cancel(job.id, "me")).state == "cancelling"
        job = await bench.until(job)
        assert (job.state, job.failure, job.pid) == ("cancelled", None, None)
        assert of_jobs([job.id]) == []
        assert bench.kinds(job)[-2:] == ["cancelling", "cancelled"]
        with pytest.raises(Conflict, match="has ended"):
            await bench.runner.cancel(job.id)

    trying(tmp_path, story)


def test_a_killed_guardian_takes_the_worker_along_and_the_job_says_so(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        job = await bench.until(
            await bench.submit("grandchild"),
            lambda job: job.progress is not None and job.progress.stage == "grandchild",
        )
        assert job.pid is not None
        psutil.Process(job.pid).kill()
        job = await bench.until(job)
        assert job.failure is not None
        assert "signal 9 (SIGKILL)" in job.failure.message or "memory" in job.failure.message
        assert of_jobs([job.id]) == []

    trying(tmp_path, story)


def test_a_queued_job_is_cancelled_before_it_begins(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        first, second = await bench.submit("hang"), await bench.submit("succeed")
        await bench.until(first, is_running)
        assert (await bench.runner.cancel(second.id)).state == "cancelled"
        assert bench.kinds(second) == ["queued", "cancelled"]
        await bench.runner.cancel(first.id)
        assert (await bench.until(first)).state == "cancelled"
        assert bench.store.get(second.id).attempt == 0
        with pytest.raises(NotFound):
            await bench.runner.cancel(second.id, "somebody else")

    trying(tmp_path, story)


class FullDisk(JobStore):
    """The disk fills up while a job runs: after its child was started three writes fail."""

    faults = 3

    def append(
        self,
        job_id: str,
        event: JobEvent,
        now: dt.datetime,
        entry: Entry | None = None,
        token: int | None = None,
        files: Sequence[StoredFile] = (),
    ) -> tuple[Job, int]:
        if not isinstance(event, Started) and self.faults:
            self.faults -= 1
            raise DiskFull("the disk is full while writing 'crucible.db'", "free some space")
        return super().append(job_id, event, now, entry, token, files)


def test_a_disk_that_is_full_ends_the_job_and_how_is_stored_once_there_is_space(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with running(tmp_path, store_kind=FullDisk) as bench:
            job = await bench.until(await bench.submit("hang"))
            assert job.failure is not None
            assert (job.state, job.failure.code) == ("failed", "host.disk_full")
            assert of_jobs([job.id]) == []
            assert (await bench.end_of("succeed")).state == "succeeded"

    asyncio.run(story())


@pytest.mark.parametrize("fault", [DiskFull("the disk is full", ""), ZeroDivisionError("injected")])
def test_a_job_that_cannot_be_claimed_now_starts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    claim, faults = Claims.claim, list[Exception]()

    def failing_once(claims: Claims, device: str, most_running: int | None) -> Claim | None:
        claimed = claim(claims, device, most_running)
        if claimed and faults:
            claims.release(claimed)
            raise faults.pop()
        return claimed

    monkeypatch.setattr(Claims, "claim", failing_once)

    async def story(bench: Bench) -> None:
        faults.append(fault)
        assert (await bench.end_of("succeed")).state == "succeeded"
        assert not faults

    trying(tmp_path, story)


def test_the_failure_of_a_job_for_a_missing_device_is_stored_once_there_is_space(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with running(tmp_path, store_kind=FullDisk) as bench:
            job = await bench.until(await bench.submit("succeed", "gpu:7"))
            assert job.failure is not None
            assert job.failure.code == "job.no_node"

    asyncio.run(story())


class Faulty(JobStore):
    """A bug of ours in the middle of a job."""

    def append(
        self,
        job_id: str,
        event: JobEvent,
        now: dt.datetime,
        entry: Entry | None = None,
        token: int | None = None,
        files: Sequence[StoredFile] = (),
    ) -> tuple[Job, int]:
        if isinstance(event, StageEvent) and self.get(job_id).name == "hang":
            raise ZeroDivisionError("injected")
        return super().append(job_id, event, now, entry, token, files)


def test_a_bug_fails_its_job_only(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, store_kind=Faulty) as bench:
            job = await bench.end_of("hang")
            assert job.failure is not None
            assert (job.failure.code, job.failure.message) == (
                "internal",
                "ZeroDivisionError: injected",
            )
            assert (await bench.end_of("succeed")).state == "succeeded"

    asyncio.run(story())


@pytest.mark.parametrize("end", ["cancel", "stop"])
def test_a_job_that_waits_for_its_device_ends_without_a_child(tmp_path: Path, end: str) -> None:
    async def story(bench: Bench) -> None:
        await bench.runner._leases.ask(Lease("cpu", "measure", "somebody else"))
        job = await bench.submit("succeed")
        await asyncio.sleep(0)
        if end == "cancel":
            assert (await bench.runner.cancel(job.id)).state == "cancelled"
            bench.runner._leases.give_back("somebody else", "cpu")
            assert (await bench.end_of("succeed")).state == "succeeded"
        else:
            await bench.runner.stop()
        assert bench.store.get(job.id).state == ("cancelled" if end == "cancel" else "queued")
        assert bench.store.get(job.id).attempt == 0

    trying(tmp_path, story)


class DamagedWhileRunning(JobStore):
    """The row of a job is damaged under it."""

    def append(
        self,
        job_id: str,
        event: JobEvent,
        now: dt.datetime,
        entry: Entry | None = None,
        token: int | None = None,
        files: Sequence[StoredFile] = (),
    ) -> tuple[Job, int]:
        if isinstance(event, StageEvent) and self.get(job_id).name == "hang":
            with self.database.write() as rows:
                rows.exec_driver_sql("UPDATE jobs SET job = '{' WHERE id = ?", (job_id,))
        return super().append(job_id, event, now, entry, token, files)


def test_a_row_that_is_damaged_under_a_job_does_not_stop_the_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with running(tmp_path, store_kind=DamagedWhileRunning) as bench:
            job = await bench.submit("hang")
            assert (await bench.end_of("succeed")).state == "succeeded"
            assert of_jobs([job.id]) == []

    asyncio.run(story())


def test_one_job_at_a_time_on_each_device_in_order_and_two_devices_make_two_queues(
    tmp_path: Path,
) -> None:
    async def story(bench: Bench) -> None:
        first, second = await bench.submit("hang", "gpu:0"), await bench.submit("succeed", "gpu:0")
        other, unknown = (
            await bench.submit("succeed", "gpu:1"),
            await bench.submit("succeed", "gpu:7"),
        )
        assert (await bench.until(other)).state == "succeeded"
        failed = await bench.until(unknown)
        assert failed.failure is not None
        assert "has a device 'gpu:7'" in failed.failure.message
        await bench.until(first, is_running)
        assert bench.store.get(second.id).state == "queued"
        await bench.runner.cancel(first.id)
        assert (await bench.until(second)).state == "succeeded"

    trying(tmp_path, story, devices=("gpu:0", "gpu:1"))


def test_a_child_measures_when_the_device_is_its_own(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        job = await bench.end_of("measure")
        assert job.state == "succeeded"
        assert granted(bench, job) == {"kind": "granted", "contended": False}
        assert granted(bench, job, "validate") == {"kind": "returned", "contended": False}
        assert bench.runner._leases.devices.held == ()

    trying(tmp_path, story)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_child_that_measures_beside_what_serves_waits_and_is_told_if_that_stays(
    tmp_path: Path, leaves: bool
) -> None:
    async def story() -> None:
        now = [utc_now()]
        async with running(tmp_path, devices=("gpu:0", "gpu:1"), clock=lambda: now[0]) as bench:
            leases = bench.runner._leases
            leases.serve("resnet50", "gpu:0")
            job, other = (
                await bench.submit("measure", "gpu:0"),
                await bench.submit("measure", "gpu:1"),
            )
            assert granted(bench, await bench.until(other)) == {
                "kind": "granted",
                "contended": False,
            }
            while not leases.devices.waiting:
                await asyncio.sleep(0.01)
            assert bench.store.get(job.id).state == "running"
            now[0] += dt.timedelta(seconds=PATIENCE_S)
            leases.give_back("resnet50" if leaves else "nobody", "gpu:0")
            assert granted(bench, await bench.until(job)) == {
                "kind": "granted",
                "contended": not leaves,
            }
            assert granted(bench, await bench.until(job), "validate") == {
                "kind": "returned",
                "contended": not leaves,
            }
            assert leases.devices.held == (() if leaves else (Lease("gpu:0", "serve", "resnet50"),))

    asyncio.run(story())


def granted(bench: Bench, job: Job, stage: str = "benchmark") -> object:
    """What the double was told when it asked to measure; or, as `validate`, when it had
    measured.
    """
    (stage_event,) = [
        event.data for event in bench.store.events(job.id) if event.data.get("stage") == stage
    ]
    return json.loads(stage_event["text"])


def test_a_chattering_child_fills_no_database(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        job = await bench.end_of("chatter")
        assert job.state == "succeeded"
        assert len(bench.store.events(job.id)) < 100

    trying(tmp_path, story)


def test_twenty_equal_requests_at_once_make_one_job(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        jobs = [new_job(bench.folders, "succeed", identity="same") for _ in range(20)]
        answers = await asyncio.gather(*(bench.runner.submit(job) for job in jobs))
        assert len({job.id for job, _ in answers}) == 1
        assert [is_new for _, is_new in answers].count(True) == 1
        assert (await bench.until(answers[0][0])).attempt == 1

    trying(tmp_path, story)


def test_retry_makes_a_job_that_goes_on_from_what_is_stored(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        failed = await bench.end_of("fail")
        (bench.folders.work(failed.id).home / "kept").touch()
        again = await bench.runner.retry(failed.id, "me")
        assert again.id != failed.id
        assert (again.identity, again.state) == (failed.identity, "queued")
        assert (await bench.until(again)).state == "failed"
        assert (bench.folders.work(again.id).home / "kept").exists()
        assert str(bench.folders.uploads(again.id)) in str(
            bench.folders.load_plan(again.id).model.path
        )
        assert (
            bench.folders.load_plan(failed.id).model.path
            == bench.folders.uploads(failed.id) / "model.onnx"
        )
        job = await bench.end_of("succeed")
        with pytest.raises(Conflict, match="is succeeded"):
            await bench.runner.retry(job.id)

    trying(tmp_path, story)


def test_a_retry_whose_upload_is_gone_says_so(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        failed = await bench.end_of("fail")
        bench.folders.remove(failed.id)
        again = await bench.runner.retry(failed.id)
        assert again.failure is not None
        assert "cannot be used again" in again.failure.message

    trying(tmp_path, story)


def test_an_upload_that_is_gone_fails_its_job_only(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        job = new_job(bench.folders, "succeed")
        (bench.folders.uploads(job.id) / "plan.json").write_text("{")
        ended = await bench.until((await bench.runner.submit(job))[0])
        assert ended.failure is not None
        assert "cannot be read" in ended.failure.message

    trying(tmp_path, story)


def test_no_more_jobs_wait_than_may(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        await bench.until(await bench.submit("hang"), is_running)
        await bench.submit("succeed")
        with pytest.raises(TooMany, match="at most 1"):
            await bench.submit("succeed")
        first = bench.store.list(state="queued").jobs[0]
        once = Once("key", "digest")
        assert (await bench.runner.submit(first, once))[1] is False
        with pytest.raises(Conflict, match="Idempotency-Key"):
            await bench.runner.submit(first, Once("key", "other"))

    trying(tmp_path, story, max_queued=1)


def test_an_owner_runs_no_more_jobs_than_it_may(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        first = await bench.submit("hang", "gpu:0")
        waiting = await bench.submit("succeed", "gpu:1")
        other = new_job(bench.folders, "succeed", "gpu:1").model_copy(update={"owner": "other"})
        await bench.until((await bench.runner.submit(other))[0])
        assert bench.store.get(waiting.id).state == "queued"
        await bench.runner.cancel(first.id)
        assert (await bench.until(waiting)).state == "succeeded"

    trying(tmp_path, story, devices=("gpu:0", "gpu:1"), max_running=1)


def test_a_running_job_ends_when_the_disk_is_full(small_disk: Path) -> None:
    async def story(bench: Bench) -> None:
        job = await bench.until(await bench.submit("hang"), is_running)
        free = shutil.disk_usage(small_disk).free
        (small_disk / "other").write_bytes(b"x" * (free - 200_000))  # not the job's own file
        ended = await bench.until(job)
        assert ended.failure is not None
        assert ended.failure.code == "host.disk_full"
        assert "the disk of the service is full" in ended.failure.message

    trying(small_disk, story, disk_reserve_bytes=4 * 2**20)


def test_a_job_that_fills_the_disk_itself_leaves_its_space(small_disk: Path) -> None:
    async def story(bench: Bench) -> None:
        job = await bench.end_of("fill")
        assert job.failure is not None
        assert job.failure.code == "host.disk_full"
        assert not bench.folders.work(job.id).home.exists()
        assert shutil.disk_usage(small_disk).free > 4 * 2**20

    trying(small_disk, story, disk_reserve_bytes=40 * 2**20)


def test_a_job_under_which_the_server_died_often_is_not_started_again(tmp_path: Path) -> None:
    now, database = utc_now(), Database(tmp_path / "crucible.db")
    store, jobs = JobStore(database), [new_job(Folders(tmp_path), "succeed") for _ in range(2)]
    for job, deaths in zip(jobs, (MAX_INTERRUPTIONS - 2, MAX_INTERRUPTIONS - 1), strict=True):
        store.add(job, now)
        for _ in range(deaths):
            store.append(job.id, Started(1, 1.0), now)
            store.append(job.id, Requeued("", interrupted=True), now)
        store.append(job.id, Started(1, 1.0), now)
    database.close()

    async def story(bench: Bench) -> None:
        patient, suspect = [await bench.until(job) for job in jobs]
        assert patient.state == "succeeded"
        assert suspect.failure is not None
        assert (
            suspect.failure.message
            == f"the server died {MAX_INTERRUPTIONS} times while this job ran"
        )
        assert bench.kinds(suspect)[-1] == "failed"

    trying(tmp_path, story)


def test_owners_take_turns_also_after_a_restart(tmp_path: Path) -> None:
    trying(tmp_path, lambda bench: bench.end_of("succeed"))
    database = Database(tmp_path / "crucible.db")
    jobs = [
        new_job(Folders(tmp_path), "succeed").model_copy(update={"owner": owner})
        for owner in ("me", "me", "other", "other")
    ]
    for job in jobs:
        JobStore(database).add(job, utc_now())
    database.close()

    async def story(bench: Bench) -> None:
        ended = [await bench.until(job) for job in jobs]
        in_order = sorted(ended, key=lambda job: job.started or "")
        assert [job.owner for job in in_order] == ["other", "me", "other", "me"]

    trying(tmp_path, story)


def test_a_stopping_server_queues_its_jobs_again_and_the_next_ends_them(tmp_path: Path) -> None:
    async def first_server() -> tuple[Job, Job]:
        async with running(tmp_path) as bench:
            hanging, waiting = await bench.submit("succeed-3"), await bench.submit("succeed")
            await bench.until(hanging, is_running)
            changed = bench.runner.changed(hanging.id)
            stopping = asyncio.create_task(bench.runner.stop())
            await asyncio.wait_for(changed.wait(), 60)
            await stopping
            assert [bench.store.get(job.id).state for job in (hanging, waiting)] == [
                "queued",
                "queued",
            ]
            assert of_jobs([hanging.id]) == []
            with pytest.raises(Unavailable):
                await bench.runner.submit(waiting)
            return hanging, waiting

    jobs = asyncio.run(first_server())

    async def story(bench: Bench) -> None:
        ended = [await bench.until(job) for job in jobs]
        assert [job.state for job in ended] == ["succeeded", "succeeded"]
        assert [job.attempt for job in ended] == [2, 1]
        assert bench.kinds(jobs[0])[-4:] == ["running", "stage", "stage", "succeeded"]
        assert "queued" in bench.kinds(jobs[0])[1:]

    trying(tmp_path, story)
