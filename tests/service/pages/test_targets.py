"""The devices of the cluster in the form of a compile."""

from __future__ import annotations

from pathlib import Path

from service.jobs.claims import LEASE_S
from service.jobs.nodes import Node, Nodes, RunningJob
from service.pages.forms.targets import Elsewhere, Target, elsewhere, targets_of
from service.storage.database import Database
from tests.service.builders.app import Desk, at_desk
from tests.service.pages.test_new_compile import dynamic_model, upload
from tests.service.pages.test_pages import HOSTILE

CPU = {"cpu": {"name": "AMD EPYC", "onnxruntime": "1.23.2"}}
GPU = {"gpu:0": {"name": "NVIDIA H200", "tensorrt": "10.9.0"}}
NODES = (
    Node("a", "one", "server", "1", CPU, jobs=(RunningJob("j", "n", "a", "cpu"),)),
    Node(
        "b",
        "two",
        "node",
        "1",
        CPU | GPU,
        jobs=(RunningJob("k", "n", "b", "cpu"),),
        candidates=("onnxruntime fp32", "tensorrt fp16", "tensorrt int8"),
    ),
    Node("c", "three", "node", "1", GPU, silent_s=LEASE_S, candidates=("tensorrt fp8",)),
)


def test_the_devices_of_live_nodes_are_free_or_run_a_job() -> None:
    assert targets_of(NODES) == (
        Target("gpu:0", "NVIDIA H200, tensorrt 10.9.0", True),
        Target("cpu", "AMD EPYC, onnxruntime 1.23.2", False),
        Target("cpu", "AMD EPYC, onnxruntime 1.23.2", False),
    )


def test_what_this_host_refuses_is_offered_where_another_live_node_runs_it() -> None:
    refused = dict.fromkeys(("tensorrt fp16", "tensorrt int8", "tensorrt fp8"), "no GPU")
    candidates = {"onnxruntime fp32": ""} | refused
    here, _, gone = NODES
    assert elsewhere(candidates, NODES) == [
        Elsewhere("tensorrt", "gpu:0 (NVIDIA H200)", ("fp16", "int8"))
    ]
    assert elsewhere(candidates, (here, gone)) == []
    assert elsewhere({"onnxruntime fp32": "", "tensorrt fp16": ""}, NODES) == []


def test_the_form_shows_the_devices_of_another_node(tmp_path: Path, postgresql: str) -> None:
    async def story(desk: Desk) -> None:
        database = Database(postgresql)
        other = Nodes(database, "other", "node")
        other.candidates = ("tensorrt fp16",)
        other.send_heartbeat({"gpu:0": {"name": f"H200 {HOSTILE}", "tensorrt": "10.9.0"}})
        draft = (await upload(desk, dynamic_model())).headers["location"]
        page = (await desk.client.get(draft)).text
        assert "<legend>tensorrt on gpu:0 (H200 &lt;script" in page
        assert '<input type="checkbox" name="candidate" value="tensorrt fp16">' in page
        assert HOSTILE not in page
        assert page.count("<td>free</td>") == 2
        other.leave()
        assert "gpu:0" not in (await desk.client.get(draft)).text
        database.close()

    at_desk(tmp_path, story, database_url=postgresql)
