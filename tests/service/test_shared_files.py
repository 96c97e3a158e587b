"""Two servers on one PostgreSQL and one S3, with homes of their own: each finds the files that the
other has stored.
"""

import asyncio
import datetime as dt
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline.errors import StoreError
from pipeline.host.labels import Labels
from service.auth import LOCAL
from service.devices.leases import utc_now
from service.inference import InferRequest
from service.jobs.retention import collect
from service.storage.running_logs import RunningLogs
from service.storage.tables import files, jobs
from tests.pipeline.execution.s3 import BUCKET, S3Server, object_names
from tests.service.builders.app import MODEL, Desk, model_bytes, opened_desk
from tests.service.builders.jobs import WITHIN_S, write_out
from tests.service.pages.test_new_compile import OK, dynamic_model, upload
from tests.service.serving.engines import linear, marked

URL = "s3://bucket/files"
Story = Callable[[Desk, Desk], Awaitable[None]]
pytestmark = pytest.mark.usefixtures("s3")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.storage.files.WAIT_S", 0.5)


@asynccontextmanager
async def desk_of(home: Path, url: str, **settings: Any) -> AsyncIterator[Desk]:
    home.mkdir(exist_ok=True)
    async with opened_desk(home, database_url=url, files_url=URL, **settings) as desk:
        yield desk


def at_two_desks(folder: Path, url: str, story: Story, **settings: Any) -> None:
    async def run() -> None:
        async with (
            desk_of(folder / "a", url, **settings) as one,
            desk_of(folder / "b", url, **settings) as two,
        ):
            await story(one, two)

    asyncio.run(run())


def leave_jobs_to(one: Desk, other: Desk) -> None:
    """Let only `one` claim jobs: the other server has no device for them."""
    of_one: dict[str, Labels] = {"cpu": {}}
    for desk, labels in ((one, of_one), (other, dict[str, Labels]())):
        desk.service.runner._labels = labels
        # at once: else a server may look when none has the device by the database
        desk.service.runner.all_nodes.send_heartbeat(labels)


def test_an_upload_at_one_server_runs_on_the_other_and_its_report_is_at_both(
    tmp_path: Path, postgresql: str
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


def test_the_log_of_a_running_job_is_read_from_each_server(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(two, one)
        job_id = (await one.compile("hang")).json()["id"]
        await one.until(job_id, "running")
        end = time.monotonic() + WITHIN_S
        while "I am hang" not in (text := await log_at(one, job_id)):
            assert time.monotonic() < end
            await asyncio.sleep(0.1)
        assert text == await log_at(two, job_id)
        assert not one.service.folders.work(job_id).log.exists()
        await one.client.delete(f"/jobs/{job_id}")
        await one.until(job_id, "cancelled")
        assert await log_at(one, job_id) == await log_at(two, job_id)
        while RunningLogs(one.service.database).end_of(job_id, 10):
            assert time.monotonic() < end + WITHIN_S
            await asyncio.sleep(0.1)

    at_two_desks(tmp_path, postgresql, story)


async def log_at(desk: Desk, job_id: str) -> str:
    return (await desk.client.get(f"/jobs/{job_id}/log")).text


def test_the_report_of_a_job_is_that_of_the_server_which_took_it_over(
    tmp_path: Path, postgresql: str
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(one, two)
        job_id = (await one.compile("succeed-4")).json()["id"]
        await one.until(job_id, "running")
        leave_jobs_to(two, one)
        with two.service.database.write() as rows:  # as if `one` had sent no heartbeat
            token = jobs.c.fencing_token + 1
            rows.execute(
                sa.update(jobs).values(server="dead", fencing_token=token, heartbeat_at=0.0)
            )
        job = await one.until(job_id, "succeeded", "failed")
        assert (job["state"], job["attempt"]) == ("succeeded", 2)
        with two.service.database.read() as rows:
            query = sa.select(files.c.object).where(files.c.folder == f"reports/{job_id}")
            tokens = {name.split("/")[2].partition("-")[0] for name in rows.scalars(query)}
            assert tokens == {str(rows.scalar(sa.select(jobs.c.fencing_token)))}
        for desk in (one, two):
            assert (await desk.client.get(f"/reports/{job_id}")).status_code == 200

    at_two_desks(tmp_path, postgresql, story)


def test_a_failed_job_is_retried_at_the_other_server(
    tmp_path: Path, postgresql: str, s3: Any
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(one, two)
        failed = await one.end_of("fail")
        before = set(object_names(s3))
        leave_jobs_to(two, one)
        answer = await two.client.post(f"/jobs/{failed['id']}/retry")
        assert answer.status_code == 202, answer.text
        again = await one.until(answer.json()["id"], "failed")
        assert again["failure"]["code"] == "model.invalid", "it ran"
        model = two.service.folders.load_plan(again["id"]).model.path
        assert model is not None
        assert model.is_relative_to(tmp_path / "b" / "uploads" / again["id"])
        assert model.read_bytes() == MODEL
        new = set(object_names(s3)) - before
        assert {name.split("/")[1] for name in new} == {"jobs"}, "the upload is shared, not copied"

    at_two_desks(tmp_path, postgresql, story)


def test_a_draft_of_one_server_becomes_a_job_at_the_other(tmp_path: Path, postgresql: str) -> None:
    async def story(one: Desk, two: Desk) -> None:
        place = (await upload(one, dynamic_model())).headers["Location"]
        page = await two.client.get(place)
        assert page.status_code == 200, page.text
        draft = place.rpartition("/")[2]
        leave_jobs_to(one, two)
        form = {**OK, "candidate": "onnxruntime fp32"}
        accepted = await two.client.post(f"/ui/drafts/{draft}", data=form)
        assert accepted.status_code == 303, accepted.text
        job = accepted.headers["Location"].removeprefix("/ui/jobs/")
        assert (await two.until(job, "succeeded", "failed"))["state"] == "succeeded"
        for desk in (one, two):
            assert (await desk.client.get(place)).status_code == 404, "it has become a job"

    at_two_desks(tmp_path, postgresql, story)


def test_a_version_promoted_at_one_server_is_loaded_and_measured_at_the_other(
    tmp_path: Path, postgresql: str, s3: Any
) -> None:
    write_out(tmp_path / "a" / "template", tmp_path / "store", real=linear(tmp_path / "made"))

    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(one, two)
        job = await one.end_of("succeed")
        before = object_names(s3)
        leave_jobs_to(two, one)
        promotion = {"report": job["id"]}
        two.service.runner._labels = {"cpu": {}}
        promoted = await two.client.post("/models/m/promote", json=promotion)
        assert promoted.status_code == 200, promoted.text
        assert object_names(s3) == before, "the version shares the objects of its report"
        one.service.runner._labels = {"cpu": {}}
        loaded = await two.client.put("/models/m/deployment", json={})
        assert loaded.status_code == 200, loaded.text
        assert [state["state"] for state in loaded.json()["servers"]] == ["ready", "ready"]
        page = await one.client.get("/ui/models/m")
        assert all(state["server"] in page.text for state in loaded.json()["servers"])
        for desk in (one, two):
            answer = await desk.service.serving.infer(InferRequest(LOCAL, "m", {"x": marked(2.0)}))
            assert answer.version == 1
        assert (tmp_path / "a" / "models" / "m" / "1" / "engine").is_dir()
        measured = await one.client.post("/models/m/benchmark", json={})
        assert measured.status_code == 202, measured.text
        names = {"compiled/report.json", "compiled/engine/artifact.json"}
        with two.service.database.read() as rows:
            folder = f"uploads/{measured.json()['id']}"
            paths = rows.scalars(sa.select(files.c.path).where(files.c.folder == folder))
            assert names < set(paths)

    at_two_desks(tmp_path, postgresql, story)


def test_a_report_that_is_promoted_at_both_at_once_becomes_one_version(
    tmp_path: Path, postgresql: str
) -> None:
    """As a client does whose first request has got no answer."""
    write_out(tmp_path / "a" / "template", tmp_path / "store", real=linear(tmp_path / "made"))

    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(one, two)
        body = {"report": (await one.end_of("succeed"))["id"]}
        promotions = (desk.client.post("/models/m/promote", json=body) for desk in (one, two))
        answers = await asyncio.gather(*promotions)
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        views = [answer.json() for answer in answers]
        assert [[each["version"] for each in view["versions"]] for view in views] == [[1], [1]]

    at_two_desks(tmp_path, postgresql, story)


@pytest.mark.parametrize("damage", ["is missing", "has another digest than when it was written"])
def test_a_damaged_object_is_an_error_that_names_it(
    tmp_path: Path, postgresql: str, s3: Any, damage: str
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(two, one)
        job = await one.end_of("succeed")
        with one.service.database.read() as rows:
            query = sa.select(files.c.object).where(files.c.path == "report.json")
            name = rows.scalars(query).one()
        if damage == "is missing":
            s3.delete_object(Bucket=BUCKET, Key=f"files/{name}")
        else:
            s3.put_object(Bucket=BUCKET, Key=f"files/{name}", Body=b"{}")
        answer = await one.client.get(f"/reports/{job['id']}")
        body = answer.json()
        assert (answer.status_code, body["code"]) == (500, "host.damaged")
        assert f"the object '{name}' {damage}" in body["error"]
        assert "backup" in body["next"]
        assert (await two.client.get(f"/reports/{job['id']}")).status_code == 200, "its copy"

    at_two_desks(tmp_path, postgresql, story)


def test_without_s3_copies_are_read_uploads_refused_and_an_ended_job_waits(
    tmp_path: Path, postgresql: str, s3_server: S3Server
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(two, one)
        read = await one.end_of("succeed")
        assert (await one.client.get(f"/reports/{read['id']}")).status_code == 200
        unread = await one.compile("succeed", model=model_bytes("other"))
        ended = await two.until(unread.json()["id"], "succeeded", "failed")
        running = (await one.compile("succeed-3")).json()["id"]
        await one.until(running, "running")
        s3_server.stop()
        try:
            assert (await one.client.get(f"/reports/{read['id']}")).status_code == 200
            for answer in (
                await one.compile("other"),
                await one.client.get(f"/reports/{ended['id']}"),
            ):
                assert (answer.status_code, answer.json()["code"]) == (503, "host.store")
                assert int(answer.headers["Retry-After"]) > 0
                assert "127.0.0.1" not in answer.text
            await until_waiting(one, running)
            assert (await one.until(running, "running"))["state"] == "running"
        finally:
            s3_server.start()
        assert (await one.until(running, "succeeded", "failed"))["state"] == "succeeded"
        assert (await one.client.get(f"/reports/{running}")).status_code == 200

    at_two_desks(tmp_path, postgresql, story)


async def until_waiting(desk: Desk, job: str) -> None:
    end = time.monotonic() + WITHIN_S
    while not [event for event in desk.service.jobs.events(job) if is_waiting(event.data)]:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


def is_waiting(data: dict[str, Any]) -> bool:
    return (data.get("stage"), data.get("state")) == ("files", "waiting")


def test_a_job_whose_files_cannot_be_stored_in_its_time_says_so(
    tmp_path: Path, postgresql: str, s3_server: S3Server
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        job = (await one.compile("gated")).json()["id"]
        await one.until(job, "running")
        s3_server.stop()
        try:
            for name in ("a", "b"):
                (tmp_path / name / "go").touch()
            await until_waiting(one, job)
            for desk in (one, two):
                for attempt in desk.service.runner._attempts.values():
                    attempt._ends_s = 0.0  # its time is over
            ended = await one.until(job, "succeeded", "failed")
        finally:
            s3_server.start()
        assert ended["failure"]["code"] == "host.store"
        assert "the store of the service's files cannot be used" in ended["failure"]["message"]

    at_two_desks(tmp_path, postgresql, story)


def test_only_the_newest_versions_are_kept_with_their_rows(tmp_path: Path, postgresql: str) -> None:
    home = tmp_path / "a"
    write_out(home / "template", tmp_path / "store", real=linear(tmp_path / "made"))

    async def story(one: Desk, two: Desk) -> None:
        leave_jobs_to(one, two)
        for number in range(3):
            answer = await one.compile("succeed", model=model_bytes(f"g{number}"))
            job = await one.until(answer.json()["id"], "succeeded", "failed")
            promoted = await one.client.post("/models/m/promote", json={"report": job["id"]})
            assert promoted.status_code == 200, promoted.text
        with two.service.database.read() as rows:
            query = sa.select(files.c.folder).where(files.c.folder.startswith("models/"))
            assert set(rows.scalars(query)) == {"models/m/2", "models/m/3"}

    at_two_desks(tmp_path, postgresql, story, versions_kept=1)


def test_an_expired_job_goes_with_its_rows_and_objects(
    tmp_path: Path, postgresql: str, s3: Any
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        job = await one.end_of("succeed")
        service = two.service

        def later() -> dt.datetime:
            return utc_now() + dt.timedelta(days=31)

        removed = await asyncio.to_thread(
            lambda: collect(service.settings, service.jobs, later, files=service.files)
        )
        assert (removed.jobs, removed.objects > 5) == (1, True)
        assert {name.split("/")[1] for name in object_names(s3)} == {"databases"}
        assert (await one.client.get(f"/reports/{job['id']}")).status_code == 404

    at_two_desks(tmp_path, postgresql, story)


def test_each_server_needs_a_home_of_its_own(tmp_path: Path, postgresql: str) -> None:
    async def run() -> None:
        async with desk_of(tmp_path / "a", postgresql):
            with pytest.raises(StoreError, match="another server uses"):
                async with desk_of(tmp_path / "a", postgresql):
                    pass

    asyncio.run(run())


def test_two_jobs_on_two_servers_make_the_same_artifact_once(
    tmp_path: Path, postgresql: str, s3: Any
) -> None:
    async def story(one: Desk, two: Desk) -> None:
        sent = [await one.compile("share", model=model_bytes(name)) for name in ("g", "h")]
        ids, answers = [job.json()["id"] for job in sent], []
        for job_id in ids:  # each server has one device: so each runs one of them
            await one.until(job_id, "running")
        for name in ("a", "b"):
            (tmp_path / name / "go").touch()
        for job_id in ids:
            assert (await one.until(job_id, "succeeded", "failed"))["state"] == "succeeded"
            events = one.service.jobs.events(job_id)
            answers += [each.data["text"] for each in events if each.data.get("stage") == "share"]
        assert sorted(answers) == ["make", "there"]
        (made,) = (tmp_path / "a" / "template-store" / "artifacts" / "build").iterdir()
        for home in (tmp_path / "a", tmp_path / "b"):
            assert (home / "artifacts" / "build" / made.name / "artifact.json").is_file()
        assert f"files/builds/manifests/build/{made.name}" in object_names(s3)

    at_two_desks(tmp_path, postgresql, story)
