"""`crucible node`: a process that runs jobs of a database without HTTP."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.errors import PlanError, UserError
from service.cli.node import labels_from
from service.cli.node_process import labels_of_devices, run_node
from service.cluster.record import NodeRecord, read_record, write_record
from service.devices.leases import utc_now
from service.jobs.nodes import Node, Nodes
from service.jobs.store import JobStore
from service.sandbox.process_tree import of_jobs
from service.settings import Settings
from service.storage.database import Database
from service.storage.layout import Folders
from tests.builders.cli import crucible
from tests.service.builders.app import HOST
from tests.service.builders.jobs import WITHIN_S, new_job, write_out

NODE = """
import os, sys
from pathlib import Path
from service.cli.node_process import run_node
from service.settings import settings_from
from tests.service.builders.app import known_host
from tests.service.builders.jobs import WORKER
settings = settings_from(os.environ, home=Path(sys.argv[1]), sandbox="off")
run_node(settings, ("cpu",), {"rack": "a"}, WORKER, known_host, Path(sys.argv[1]) / "record")
"""
ROOT = Path(__file__).parents[3]


def until(reached: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + 2 * WITHIN_S
    while not reached():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)


def by_signal(process: "subprocess.Popen[str]", record: Path) -> None:
    process.send_signal(signal.SIGTERM)


def by_another_node(process: "subprocess.Popen[str]", record: Path) -> None:
    write_record(record, NodeRecord.of_this_process("another node"))


@pytest.mark.parametrize("end", [by_signal, by_another_node])
def test_a_node_runs_a_job_and_queues_it_again_at_its_end(
    tmp_path: Path, postgresql: str, end: Callable[["subprocess.Popen[str]", Path], None]
) -> None:
    write_out(tmp_path / "template", tmp_path / "template-store")
    environment = {**os.environ, "CRUCIBLE_SERVICE_DATABASE_URL": postgresql}
    job = new_job(Folders(tmp_path), "hang", "cpu, rack==a")
    with closing(Database(postgresql)) as database:
        store, nodes = JobStore(database), Nodes(database, "this test", "server")
        store.add(job.model_copy(update={"target": "cpu, rack==a"}), utc_now())
        command = (sys.executable, "-c", NODE, str(tmp_path))
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                until(lambda: store.get(job.id).state == "running", process)
                until(lambda: bool(nodes.list()), process)
                (node,) = nodes.list()
                assert (node.kind, node.labels, node.is_live) == (
                    "node",
                    {"cpu": {"rack": "a"}},
                    True,
                )
                assert [each.id for each in node.jobs] == [job.id]
                record = read_record(tmp_path / "record")
                assert record is not None
                assert (record.node, record.pid) == (node.id, process.pid)
                end(process, tmp_path / "record")
                assert process.stdout is not None
                assert f"node {node.id} runs jobs on cpu" in process.stdout.read()
                assert process.wait(WITHIN_S) == 0
            finally:
                process.kill()
        ended = store.get(job.id)
        assert (ended.state, ended.attempt, ended.interruptions) == ("queued", 1, 0)
        assert of_jobs([job.id]) == []
        assert not nodes.list()[0].is_live


def test_a_node_needs_the_database_of_the_servers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs the PostgreSQL database"):
        run_node(Settings(home=tmp_path))
    result = crucible("node", "start", "--home", tmp_path)
    assert (result.code, "CRUCIBLE_SERVICE_DATABASE_URL" in result.err) == (1, True)


def test_the_devices_and_labels_of_a_node() -> None:
    assert labels_of_devices(HOST, (), {"fast": ""}) == {"cpu": {"fast": ""}}
    with pytest.raises(UserError, match="this host has no device 'gpu:0'; it has cpu"):
        labels_of_devices(HOST, ("gpu:0",), {})
    assert labels_from("rack=a, fast,") == {"rack": "a", "fast": ""}
    for wrong in ("two words", "=a", "a=", "a=b c"):
        with pytest.raises(PlanError, match=f"expected --labels as .* got '{wrong}'"):
            labels_from(wrong)


def test_a_node_without_a_heartbeat_is_gone() -> None:
    node = Node("1", "host", "node", "1", {"cpu": {}})
    assert node.is_live
    assert not Node("1", "host", "node", "1", {"cpu": {}}, silent_s=60).is_live
