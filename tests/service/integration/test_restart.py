"""The server is killed: its children are gone within 5 s, and the next server ends every job
exactly once.
"""

import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.jobs.state import FINAL, Job
from service.jobs.store import JobStore
from service.sandbox.process_tree import of_jobs
from service.storage.database import Database
from service.storage.layout import Folders
from tests.service.builders.app import model_bytes, parts
from tests.service.builders.jobs import WITHIN_S, write_out
from tests.service.integration.test_server import serving, until

KILLS, SEED = 20, 8
WEB_KILLS = 4  # fewer than MAX_INTERRUPTIONS
GONE_S = 60.0  # for what takes less than a second on a quiet host


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_out(tmp_path / "template", tmp_path / "template-store")
    return tmp_path


def serve(home: Path, *names: str) -> "subprocess.Popen[bytes]":
    with (home / "server.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.service.builders.server_double", str(home), *names],
            stdout=log,
            stderr=log,
        )


def kill(server: "subprocess.Popen[Any]", jobs: list[str]) -> None:
    """SIGKILL the server alone, and list /proc until its jobs' processes are gone."""
    server.kill()
    server.wait()
    end = time.monotonic() + GONE_S
    while left := of_jobs(jobs):
        assert time.monotonic() < end, f"{left} outlive the server"
        time.sleep(0.05)


def all_jobs(home: Path) -> list[Job]:
    database = Database(home / "crucible.db")
    try:
        return list(JobStore(database).list(limit=1000).jobs)
    finally:
        database.close()


def accepted(home: Path) -> list[str]:
    """What the servers told their clients that they had taken."""
    file = home / "server.log"
    return (
        [line.split()[1] for line in file.read_text().splitlines() if line.startswith("accepted ")]
        if file.exists()
        else []
    )


def first_job(home: Path, reached: Callable[[Job], bool]) -> Job:
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        for job in all_jobs(home):
            if reached(job):
                return job
        time.sleep(0.05)
    raise AssertionError((home / "server.log").read_text())


def test_what_left_its_session_dies_with_the_server_too_and_the_job_goes_on(home: Path) -> None:
    server = serve(home, "grandchild")
    job = first_job(
        home, lambda job: job.progress is not None and job.progress.stage == "grandchild"
    )
    processes = of_jobs([job.id])
    assert len(processes) >= 4
    kill(server, [job.id])
    end = (
        time.monotonic() + GONE_S
    )  # one that is dying has no environment any more, by which `kill` finds them
    while left := [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < end, f"{left} outlive the server"
    assert all_jobs(home)[0].state == "running"
    Folders(home).save_plan(
        job.id, Folders(home).load_plan(job.id).model_copy(update={"name": "succeed"})
    )
    assert serve(home).wait(WITHIN_S) == 0
    (ended,) = all_jobs(home)
    assert (ended.state, ended.attempt) == ("succeeded", 2)


@pytest.mark.slow
def test_killed_at_any_moment_every_accepted_job_ends_exactly_once(home: Path) -> None:
    moments = random.Random(SEED)
    for number in range(KILLS):
        before = len(accepted(home))
        server = serve(home, *(f"succeed-{moments.uniform(0, 0.5):.2f}" for _ in range(2)))
        while (
            number % 2 and len(accepted(home)) == before
        ):  # of the others some die while they start, or queue jobs again
            time.sleep(0.02)
        time.sleep(moments.uniform(0.0, 1.5))
        kill(server, [job.id for job in all_jobs(home)])
    assert serve(home).wait(2 * WITHIN_S) == 0
    assert len(accepted(home)) >= KILLS // 2
    assert set(accepted(home)) <= {job.id for job in all_jobs(home)}
    assert any(job.attempt > 1 for job in all_jobs(home))
    check_that_each_ended_once(home)


def check_that_each_ended_once(home: Path) -> None:
    database = Database(home / "crucible.db")
    store = JobStore(database)
    for job in all_jobs(home):
        kinds = [event.kind for event in store.events(job.id)]
        assert job.state == "succeeded", job
        assert [kind for kind in kinds if kind in FINAL] == ["succeeded"]
        assert kinds[-1] == "succeeded"
        assert (Folders(home).report(job.id) / "report.json").is_file()
    database.close()


class Sender(threading.Thread):
    """A client that sends one model after another, each until that is taken, whatever becomes of
    the server meanwhile.
    """

    def __init__(self, name: str, **headers: str) -> None:
        super().__init__(name=name, daemon=True)
        self.url, self.enough, self.cut = (
            "",
            False,
            0,
        )  # where a server is; begin with no other model; requests under which it died
        self.taken: dict[str, int] = {}  # the bytes of each model, by its job
        self._headers = headers

    def run(self) -> None:
        unkept = httpx.Limits(max_keepalive_connections=0)  # each request fails for itself
        with httpx.Client(timeout=WITHIN_S, limits=unkept) as client:
            for number in itertools.count():
                if self.enough:
                    return
                times = (
                    1 if number % 2 else 200_000
                )  # megabytes, which a kill cuts, or bytes: then it meets what follows the upload
                model = model_bytes(f"{self.name} {number} " * times)
                headers = {name: value.format(number) for name, value in self._headers.items()}
                self.taken[self._sent(client, model, headers)] = len(model)

    def _sent(self, client: httpx.Client, model: bytes, headers: dict[str, str]) -> str:
        while True:
            try:
                answer = client.post(
                    f"{self._there()}/compile", files=parts("succeed", model), headers=headers
                )
            except httpx.ConnectError:
                continue
            except httpx.HTTPError:
                self.cut += 1
                continue
            assert answer.status_code in (200, 202), (
                answer.text
            )  # 200: it was taken, the answer was lost, and meanwhile the job has ended
            return str(answer.json()["id"])

    def _there(self) -> str:
        while not self.url:
            time.sleep(0.02)
        return self.url


@pytest.mark.slow
def test_a_kill_while_clients_send_leaves_one_job_for_each_accepted_upload(home: Path) -> None:
    moments = random.Random(SEED)
    senders = [Sender("with key", **{"Idempotency-Key": "model {}"}), Sender("without")]

    def tell(url: str) -> None:
        for sender in senders:
            sender.url = url

    def taken() -> dict[str, int]:
        return {job_id: size for sender in senders for job_id, size in list(sender.taken.items())}

    for sender in senders:
        sender.start()
    for _ in range(WEB_KILLS):
        with serving(home) as server:
            count = len(taken()) + moments.randint(0, 3)
            tell(server.url)
            until(lambda: len(taken()) >= count)  # noqa: B023  # called before the next round
            time.sleep(moments.uniform(0, 0.3))
            tell("")  # another's server may get the port
            kill(server.process, [job.id for job in all_jobs(home)])
    for sender in senders:
        sender.enough = True
    with serving(home) as server:
        tell(server.url)
        for sender in senders:
            sender.join(WITHIN_S)
            assert not sender.is_alive()
        until(lambda: all(job.is_final for job in all_jobs(home)))
        assert server.end() == 0
    assert sum(sender.cut for sender in senders) > 0
    assert len(taken()) == sum(len(sender.taken) for sender in senders)
    assert {job.id for job in all_jobs(home)} == taken().keys()
    check_that_each_ended_once(home)
    for folder in ("uploads", "jobs", "reports"):
        assert {path.name for path in (home / folder).iterdir()} == taken().keys()
    assert {
        path.parent.name: path.stat().st_size for path in (home / "uploads").glob("*/model*")
    } == taken()


def test_children_that_an_earlier_server_left_are_killed_before_anything_begins(home: Path) -> None:
    """Such as after a kernel that did not send PR_SET_PDEATHSIG: here somebody who carries the
    job's mark.
    """
    server = serve(home, "hang")
    job = first_job(home, lambda job: job.state == "running")
    kill(server, [job.id])
    with subprocess.Popen(
        ["sleep", "600"], env={"CRUCIBLE_JOB": job.id}, start_new_session=True
    ) as left:
        again = serve(home)
        try:
            first_job(home, lambda job: job.attempt == 2)
            assert left.poll() == -9
        finally:
            left.kill()
            kill(again, [job.id])
