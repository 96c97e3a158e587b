"""Nodes: each runs the jobs whose target its labels fulfil, and a job that none can run says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from pipeline.plan.sections.targets import requirement_from
from service.devices.leases import Leases, utc_now
from service.devices.policy import Devices
from service.jobs.claims import LEASE_S
from service.jobs.nodes import NO_NODE, RETURN_S, Node, Nodes, waits_until_s, why_no_node
from service.jobs.queue import JobRunner
from service.jobs.state import Job
from service.jobs.store import JobStore
from service.sandbox.process_tree import of_jobs
from service.settings import Settings
from service.storage.database import Database
from service.storage.tables import nodes
from tests.service.builders.jobs import WORKER, Bench, new_job, write_out

CPU = {"cpu": {"name": "AMD EPYC", "threads": "2", "avx2": ""}}
L4 = {"gpu:0": {"name": "NVIDIA L4", "tensorrt": "10.6.0"}}
H200 = {"gpu:0": {"name": "NVIDIA H200", "tensorrt": "10.9.0"}}


def node(labels: dict[str, dict[str, str]], silent_s: float = 0.0) -> Node:
    return Node("id", "host", "node", "1", labels, silent_s)


@contextlib.asynccontextmanager
async def joined(home: Path, url: str, labels: dict[str, dict[str, str]]) -> AsyncIterator[Bench]:
    """A runner with these devices, on a database that others use."""
    if not (home / "template").exists():
        write_out(home / "template", home / "template-store")
    database = Database(url)
    settings, store = Settings(home=home, database_url=url), JobStore(database)
    runner = JobRunner(settings, store, Leases(Devices(tuple(labels))), WORKER, kind="node")
    await runner.start(labels)
    try:
        yield Bench(home, runner, store)
    finally:
        await runner.stop()
        everyone = [job.id for job in store.list(limit=1000).jobs if job.is_final]
        database.close()
        assert of_jobs(everyone) == []


async def submit(bench: Bench, target: str, name: str = "succeed", wait_s: float = 0.0) -> Job:
    new = new_job(bench.folders, name, target)
    job, _ = await bench.runner.submit(
        new.model_copy(update={"target": target, "wait_for_node_s": wait_s})
    )
    return job


async def both_are_live(bench: Bench) -> None:
    """Wait until each node has written its row."""
    async with asyncio.timeout(60):
        while sum(node.is_live for node in await bench.runner.nodes()) < 2:
            await asyncio.sleep(0.1)


def test_each_node_runs_the_jobs_that_it_fulfils(tmp_path: Path, postgresql: str) -> None:
    async def story() -> None:
        async with (
            joined(tmp_path, postgresql, {**CPU, **L4}) as one,
            joined(tmp_path, postgresql, H200) as two,
        ):
            await both_are_live(one)
            hanging = [
                await submit(one, target, "hang") for target in ("gpu:h200", "gpu, tensorrt<10.9")
            ]
            for job in hanging:
                running = await two.until(job, lambda job: job.state == "running")
                assert running.device == "gpu:0"
            by_node = {
                next(iter(node.labels["gpu:0"].values())): [job.id for job in node.jobs]
                for node in await one.runner.nodes()
            }
            assert by_node == {"NVIDIA H200": [hanging[0].id], "NVIDIA L4": [hanging[1].id]}
            ended = await two.until(await submit(two, "cpu, avx2"))
            assert (ended.state, ended.device, ended.target) == ("succeeded", "cpu", "cpu, avx2")
            for job in hanging:
                await one.runner.cancel(job.id)
                await one.until(job)

    asyncio.run(story())


def test_a_job_without_a_node_fails_at_once_and_says_why(tmp_path: Path, postgresql: str) -> None:
    async def story() -> None:
        async with (
            joined(tmp_path, postgresql, CPU) as one,
            joined(tmp_path, postgresql, L4) as two,
        ):
            await both_are_live(one)
            for target, why in (
                ("gpu:H200", "no server and no node has a device 'gpu:H200'"),
                (
                    "gpu, tensorrt>=10.7",
                    "device 'gpu' of a server or a node has the label 'tensorrt>=10.7'",
                ),
            ):
                job = await two.until(await submit(one, target))
                assert (job.state, job.attempt) == ("failed", 0)
                assert job.failure is not None
                assert job.failure.code == NO_NODE
                assert why in job.failure.message
                assert "gpu:0 (NVIDIA L4, tensorrt 10.6.0)" in job.failure.message
                assert one.kinds(job) == ["queued", "failed"]

    asyncio.run(story())


def test_a_job_waits_for_its_node(tmp_path: Path, postgresql: str) -> None:
    async def story() -> None:
        async with joined(tmp_path, postgresql, CPU) as one:
            job = await submit(one, "gpu", wait_s=600)
            waiting = await one.until(job, lambda job: bool(job.waits_for_node))
            assert waiting.state == "queued"
            (_, event) = one.store.events(job.id)
            assert event.data == {"why": "no server and no node has a device 'gpu'"}
            async with joined(tmp_path, postgresql, L4):
                ended = await one.until(job)
                assert (ended.state, ended.device, ended.waits_for_node) == (
                    "succeeded",
                    "gpu:0",
                    "",
                )
            assert one.kinds(job).count("queued") == 2

    asyncio.run(story())


def test_a_job_waits_for_a_node_that_may_only_be_restarted(tmp_path: Path, postgresql: str) -> None:
    async def story() -> None:
        async with joined(tmp_path, postgresql, CPU) as one:
            async with joined(tmp_path, postgresql, L4) as two:
                await both_are_live(one)
                job = await submit(one, "gpu", "hang")
                await one.until(job, lambda job: job.state == "running")
                await two.runner.stop()
            waiting = await one.until(job, lambda job: bool(job.waits_for_node))
            assert (waiting.state, waiting.attempt) == ("queued", 1)
            late = await one.until(await submit(one, "gpu"))
            assert late.state == "failed", "it was submitted when the node had gone"
            with one.store.database.write() as rows:
                rows.execute(
                    sa.update(nodes).values(heartbeat_at=nodes.c.heartbeat_at - RETURN_S - 60)
                )
            assert (await one.until(job)).state == "failed"

    asyncio.run(story())


def test_a_server_alone_on_its_database_fails_what_it_cannot_run(tmp_path: Path) -> None:
    async def story() -> None:
        write_out(tmp_path / "template", tmp_path / "template-store")
        database = Database(tmp_path / "crucible.db")
        store, leases = JobStore(database), Leases(Devices(("cpu",)))
        runner = JobRunner(Settings(home=tmp_path), store, leases, WORKER)
        await runner.start(CPU)
        bench = Bench(tmp_path, runner, store)
        try:
            assert (await bench.until(await submit(bench, "cpu, avx2"))).state == "succeeded"
            assert (await bench.until(await submit(bench, "cpu, amx_int8"))).state == "failed"
            (this,) = await runner.nodes()
            assert (this.kind, this.labels, this.is_live) == ("server", CPU, True)
        finally:
            await runner.stop()
            database.close()

    asyncio.run(story())


def test_nodes_are_written_and_leave(open_database: Callable[[], Database]) -> None:
    database = open_database()
    one, two = Nodes(database, "one", "server"), Nodes(database, "two", "node")
    one.send_heartbeat(CPU)
    two.send_heartbeat(L4)
    two.send_heartbeat(H200)
    found = {node.id: node for node in one.list()}
    assert {each: (node.kind, node.labels) for each, node in found.items()} == {
        "one": ("server", CPU),
        "two": ("node", H200),
    }
    assert all(node.is_live for node in found.values())
    two.leave()
    assert [node.is_live for node in one.list()] == [True, False]
    with database.write() as rows:
        rows.execute(sa.update(nodes).where(nodes.c.id == "two").values(heartbeat_at=0.0))
    one.send_heartbeat(CPU)
    assert [node.id for node in one.list()] == ["one"], "it has gone long ago"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("cpu", ""),
        ("gpu:L4", ""),
        ("gpu:H200", "no server and no node has a device 'gpu:H200'"),  # it has gone
        ("cpu, a", "no device 'cpu' of a server or a node has the label 'a'"),
        ("tpu", "expected cpu, gpu"),
    ],
)
def test_what_the_live_nodes_lack(target: str, why: str) -> None:
    found = why_no_node(target, [node({**CPU, **L4}), node(H200, LEASE_S)])
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize(
    ("created_s", "wait_s", "until_s"),
    [(1000, 0, 1000), (1000, 50, 1050), (890, 0, 920 + RETURN_S), (890, 400, 1290)],
)
def test_how_long_a_job_waits(created_s: float, wait_s: float, until_s: float) -> None:
    """The only node that fulfils it was silent for 100 s at 1000 s: it was gone at 920 s."""
    job = Job(id="1", owner="", identity="", name="", device="gpu", created=str(utc_now()))
    job = job.model_copy(update={"wait_for_node_s": wait_s})
    assert not requirement_from("gpu").missing("gpu:0", L4["gpu:0"])
    known = [node(CPU), node(L4, 100)]
    assert waits_until_s(job, created_s, known, 1000) == until_s
