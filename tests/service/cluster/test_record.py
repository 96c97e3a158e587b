"""The file from which whoever starts nodes knows the one that runs."""

import os
import subprocess
import sys
from pathlib import Path

from service.cluster.record import NodeRecord, read_record, write_record
from service.sandbox.process_tree import started_at


def test_a_record_names_a_process_until_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "node.json"
    assert read_record(file) is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = NodeRecord(node="a", pid=process.pid, started_s=started_at(process.pid))
        write_record(file, record)
        found = read_record(file)
        assert found == record
        assert found.process() is not None
        process.kill()
    assert record.process() is None


def test_the_last_one_to_write_stays_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    for node in ("a", "b"):
        write_record(file, NodeRecord.of_this_process(node))
    assert [each.name for each in tmp_path.iterdir()] == ["node.json"]
    record = read_record(file)
    assert record is not None
    assert (record.node, record.pid) == ("b", os.getpid())


def test_another_process_with_the_same_pid_is_not_the_node() -> None:
    record = NodeRecord(node="a", pid=os.getpid(), started_s=started_at(os.getpid()) - 60)
    assert record.process() is None


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    file.write_text('{"node": "a"')
    assert read_record(file) is None
