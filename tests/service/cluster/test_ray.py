"""The whole line on a real Ray: a job that Ray's node runs survives all that Ray consists of."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.cluster.record import NodeRecord, read_record
from service.jobs.nodes import Nodes
from service.jobs.state import FINAL
from service.sandbox.process_tree import alive
from tests.builders.cli import crucible
from tests.service.builders.app import MODEL, Desk, opened_desk
from tests.service.builders.jobs import write_out
from tests.service.cluster.ray_cluster import RayCluster, end_node, missing, running_ray

WITHIN_S = 240.0  # beside busy processes; Ray itself takes up to 60 s to notice what is gone
HOSTS = ("a", "b")
ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=f"Ray test: {missing()}"),
    pytest.mark.usefixtures("s3"),
    pytest.mark.timeout(1800),
    pytest.mark.slow,
]


class Lab:
    """A Ray cluster of two hosts, a supervisor and a server."""

    def __init__(self, folder: Path, cluster: RayCluster, desk: Desk) -> None:
        self._folder, self.cluster, self.desk = folder, cluster, desk

    def home(self, host: str) -> Path:
        return self._folder / host

    def told(self) -> str:
        return (self._folder / "supervisor.log").read_text()

    def join(self) -> None:
        for host in HOSTS:
            environment = {"CRUCIBLE_HOME": str(self.home(host)), "PYTHONPATH": str(ROOT)}
            self.cluster.join(host, "pool=crucible", environment)

    def records(self) -> dict[str, NodeRecord]:
        """The records of living nodes, by host."""
        found = {}
        for host in HOSTS:
            for file in self.home(host).glob("ray/*/node.json"):
                record = read_record(file)
                if record is not None and record.process() is not None:
                    found[host] = record
        return found

    async def until(self, reached: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + WITHIN_S
        while not (value := await asyncio.to_thread(reached)):
            assert time.monotonic() < end, f"not in time: {what}\n{self.told()}"
            await asyncio.sleep(0.2)
        return value

    async def submit(self, name: str) -> str:
        """Add a job that only a node of Ray may run."""
        plan = f"name: {name}\ntargets: ['cpu, ray']"
        files = {"model": ("model.onnx", MODEL), "plan": ("plan.yaml", plan.encode())}
        answer = await self.desk.client.post("/compile", files=files)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["targets"][0]["job"]["id"])

    async def job(self, job_id: str, *states: str) -> dict[str, Any]:
        """Wait until a job is in one of these states."""
        end = time.monotonic() + WITHIN_S
        while True:
            job = (await self.desk.client.get(f"/jobs/{job_id}")).json()
            if job["state"] in states:
                return dict(job)
            assert job["state"] not in FINAL, f"{job}\n{self.told()}"
            assert time.monotonic() < end, f"{job}\n{self.told()}"
            await asyncio.sleep(0.2)

    def announced(self) -> set[str]:
        """The ids of Ray nodes for which jobs may wait."""
        rows = Nodes(self.desk.service.database, "", "server").list()
        return {row.id for row in rows if row.kind == "ray" and row.is_live}

    async def node_of(self, job_id: str) -> tuple[str, NodeRecord]:
        """The host of the node that runs a job, and its record."""
        nodes = Nodes(self.desk.service.database, "", "server")
        rows = await asyncio.to_thread(nodes.list)
        (node,) = (row.id for row in rows for job in row.jobs if job.id == job_id)
        ((host, record),) = (
            (host, record) for host, record in self.records().items() if record.node == node
        )
        return host, record


@contextmanager
def supervising(folder: Path, address: str) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.service.cluster.supervisor_process", address]
    # so that the loss of the head shows soon
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
    with (folder / "supervisor.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield
        process.send_signal(signal.SIGTERM)
        process.wait(WITHIN_S)
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def opened_lab(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    files = "s3://bucket/files"
    monkeypatch.setenv("CRUCIBLE_SERVICE_DATABASE_URL", url)
    monkeypatch.setenv("CRUCIBLE_SERVICE_FILES_URL", files)
    (folder / "server").mkdir()
    for host in HOSTS:
        write_out(folder / host / "template", folder / host / "template-store")
    short = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need short paths
    try:
        with running_ray(short) as cluster:
            async with opened_desk(folder / "server", database_url=url, files_url=files) as desk:
                lab = Lab(folder, cluster, desk)
                await asyncio.to_thread(lab.join)
                try:
                    with supervising(folder, cluster.address):
                        await lab.until(lambda: len(lab.announced()) == len(HOSTS), "Ray nodes")
                        yield lab
                finally:
                    for record in lab.records().values():
                        end_node(record.pid)
    finally:
        shutil.rmtree(short, ignore_errors=True)


def test_a_job_survives_the_parts_of_ray(
    tmp_path: Path, postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with opened_lab(tmp_path, postgresql, monkeypatch) as lab:
            host, record = await without_its_actor(lab)
            await without_ray(lab, record)
            await with_a_new_cluster(lab, host, record)
            await without_its_node(lab)
            await stopped(lab)

    asyncio.run(run())


async def without_its_actor(lab: Lab) -> tuple[str, NodeRecord]:
    """A node starts for a waiting job. Its actor is killed: the next one adopts it."""
    job_id = await lab.submit("succeed-45")
    await lab.job(job_id, "running")
    host, record = await lab.node_of(job_id)
    ray_host = lab.cluster.hosts[host]
    (actor,) = await lab.until(lambda: ray_host.processes("ray::Agent"), "the actor")
    assert os.getsid(record.pid) != os.getsid(actor.pid), "a session of its own"
    assert record.pid not in {each.pid for each in ray_host.processes("")}, "no child of Ray"
    actor.kill()
    await lab.until(lambda: f"the node {record.node} on" in adopted(lab.told()), "adoption")
    (other,) = await lab.until(lambda: ray_host.processes("ray::Agent"), "the next actor")
    assert other.pid != actor.pid
    assert lab.records() == {host: record}
    ended = await lab.job(job_id, "succeeded", "failed")
    assert (ended["state"], ended["attempt"]) == ("succeeded", 1), ended
    return host, record


def adopted(told: str) -> str:
    return "\n".join(line for line in told.splitlines() if "goes on with" in line)


async def without_ray(lab: Lab, record: NodeRecord) -> None:
    """Raylets and head are killed while a job runs: it ends, and the node takes another one."""
    job_id = await lab.submit("succeed-20")
    await lab.job(job_id, "running")
    for ray_host in lab.cluster.hosts.values():
        ray_host.kill("raylet")
    lab.cluster.head.close()
    for ray_host in lab.cluster.hosts.values():
        ray_host.close()
    for each in (job_id, await lab.submit("succeed")):
        ended = await lab.job(each, "succeeded", "failed")
        assert (ended["state"], ended["attempt"]) == ("succeeded", 1), ended
    assert record in lab.records().values()


async def with_a_new_cluster(lab: Lab, host: str, record: NodeRecord) -> None:
    """Another cluster at the same address adopts the node."""
    before = adopted(lab.told()).count(record.node)
    await asyncio.to_thread(lab.cluster.restart_head)
    await asyncio.to_thread(lab.join)
    await lab.until(lambda: adopted(lab.told()).count(record.node) > before, "adoption")
    assert lab.records()[host] == record


async def without_its_node(lab: Lab) -> None:
    """The node is killed: the journal runs its job once more, on another node."""
    job_id = await lab.submit("succeed-15")
    await lab.job(job_id, "running")
    _, record = await lab.node_of(job_id)
    end_node(record.pid)
    ended = await lab.job(job_id, "succeeded", "failed")
    assert (ended["state"], ended["attempt"]) == ("succeeded", 2), ended
    assert f"the node {record.node} on" in lab.told()
    assert alive(record.pid, record.started_s) == []
    assert record not in lab.records().values()


async def stopped(lab: Lab) -> None:
    """`crucible ray status` lists the nodes, and `crucible ray stop` ends them, also those that no
    actor keeps.
    """
    select = ("--address", lab.cluster.address, "--select", "pool=crucible")
    listed = await asyncio.to_thread(crucible, "ray", "status", "--json", *select)
    assert listed.code == 0, listed.err
    nodes = {each["node"] for each in listed.summary["nodes"] if each["node"]}
    assert nodes == {record.node for record in lab.records().values()} != set()
    result = await asyncio.to_thread(crucible, "ray", "stop", *select)
    assert result.code == 0, result.err
    assert lab.records() == {}
