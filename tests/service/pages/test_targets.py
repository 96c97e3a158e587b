"""The devices of the cluster in the form of a compile."""

from __future__ import annotations

from pathlib import Path

from service.jobs.claims import LEASE_S
from service.jobs.nodes import Node, Nodes, RunningJob
from service.pages.forms.targets import Target, elsewhere, targets_of
from service.storage.database import Database
from tests.service.builders.app import Desk, at_desk
from tests.service.pages.test_new_compile import dynamic_model, upload
from tests.service.pages.test_pages import HOSTILE

CPU = {"cpu": {"name": "AMD EPYC", "onnxruntime": "1.23.2"}}
GPU = {"gpu:0": {"name": "NVIDIA H200", "tensorrt": "10.9.0"}}
NODES = (
    Node("a", "one", "server", "1", CPU, jobs=(RunningJob("j", "n", "a", "cpu"),)),
    Node("b", "two", "node", "1", CPU | GPU, jobs=(RunningJob("k", "n", "b", "cpu"),)),
    Node("c", "three", "node", "1", GPU, silent_s=LEASE_S),
)


def test_the_devices_of_live_nodes_are_free_or_run_a_job() -> None:
    assert targets_of(NODES) == (
        Target("gpu:0", "NVIDIA H200, tensorrt 10.9.0", True),
        Target("cpu", "AMD EPYC, onnxruntime 1.23.2", False),
        Target("cpu", "AMD EPYC, onnxruntime 1.23.2", False),
    )


def test_what_this_host_refuses_is_named_where_another_node_has_its_backend() -> None:
    candidates = {"onnxruntime fp32": "", "tensorrt fp16": "no GPU", "tensorrt int8": "no GPU"}
    assert elsewhere(candidates, NODES, "a") == ["tensorrt fp16, int8: on gpu:0 (NVIDIA H200)"]
    assert elsewhere(candidates, NODES, "b") == []  # only a node that has gone


def test_the_form_shows_the_devices_of_another_node(tmp_path: Path, postgresql: str) -> None:
    async def story(desk: Desk) -> None:
        database = Database(postgresql)
        other = Nodes(database, "other", "node")
        other.send_heartbeat({"gpu:0": {"name": f"H200 {HOSTILE}", "tensorrt": "10.9.0"}})
        draft = (await upload(desk, dynamic_model())).headers["location"]
        page = (await desk.client.get(draft)).text
        assert "tensorrt fp16: on gpu:0 (H200 &lt;script" in page
        assert HOSTILE not in page
        assert page.count("<td>free</td>") == 2
        other.leave()
        assert "gpu:0" not in (await desk.client.get(draft)).text
        database.close()

    at_desk(tmp_path, story, database_url=postgresql)
