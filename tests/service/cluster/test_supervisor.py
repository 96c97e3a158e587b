"""The supervisor on a cluster that is a double: what starts, what is adopted, what ends, what the
database says.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline import distribution
from pipeline.errors import HostError
from service.cluster.agent import AgentOptions, AgentState
from service.cluster.ray_cluster import HostFacts, RayNode
from service.cluster.scaling import Bundle, Limits
from service.cluster.supervisor import Supervisor, SupervisorOptions
from service.devices.leases import utc_now
from service.jobs.nodes import Nodes, why_no_node
from service.jobs.store import JobStore
from service.storage.database import Database
from service.storage.layout import Folders
from tests.service.builders.jobs import new_job

LABELS = {"cpu": {"name": "a CPU"}}
FACTS = HostFacts(distribution.version(), "", LABELS)
Story = Callable[[Supervisor, "ClusterDouble", JobStore], Awaitable[None]]


def ray_node(name: str, **more: object) -> RayNode:
    node = RayNode(name, f"host-{name}", "10.0.0.1", {"pool": "crucible"}, {"measure": 1})
    return replace(node, **more)  # type: ignore[arg-type]


class ClusterDouble:
    """Starts nothing, and remembers what it was told."""

    def __init__(self) -> None:
        self.found = [ray_node("a"), ray_node("b")]
        self.facts = dict.fromkeys("ab", FACTS)
        self.running: dict[str, asyncio.Future[str]] = {}
        self.starts: list[str] = []
        self.stops: list[str] = []
        self.requested: list[Bundle] = []
        self.refusal = ""
        self.living: set[str] = set()  # nodes that run without an actor

    async def nodes(self) -> tuple[RayNode, ...]:
        return tuple(replace(node, has_actor=node.id in self.running) for node in self.found)

    async def inspect(self, node: RayNode) -> HostFacts:
        return self.facts[node.id]

    async def start(self, node: RayNode, options: AgentOptions) -> AgentState:
        self.starts.append(node.id)
        if self.refusal:
            raise HostError(self.refusal)
        self.running.setdefault(node.id, asyncio.get_running_loop().create_future())
        adopted = node.id in self.living
        return AgentState(f"node-{node.id}", node.host, 1, adopted, "log")

    async def watch(self, node: RayNode) -> str:
        return await asyncio.shield(self.running[node.id])

    async def stop(self, node: RayNode, grace_s: float) -> None:
        self.stops.append(node.id)
        self.running.pop(node.id, None)

    async def request(self, bundles: Sequence[Bundle], selector: Mapping[str, str]) -> None:
        self.requested = list(bundles)


def supervised(folder: Path, story: Story, **limits: float) -> list[str]:
    """Run a story, and return what the supervisor tells."""
    told = list[str]()

    async def run() -> None:
        bounds: dict[str, Any] = {"min_nodes": 0, "max_nodes": 4, "idle_s": 60.0} | limits
        options = SupervisorOptions(Limits(**bounds), {"pool": "crucible"})
        database = Database(folder / "crucible.db")
        cluster = ClusterDouble()
        supervisor = Supervisor(cluster, database, options, told.append)
        try:
            await ticks(supervisor)
            await story(supervisor, cluster, JobStore(database))
        finally:
            await supervisor.close()
            database.close()

    asyncio.run(run())
    return told


async def ticks(supervisor: Supervisor, count: int = 2) -> None:
    """Look at the cluster, and let the tasks that this starts go on."""
    for _ in range(count):
        await supervisor.tick()
        for _ in range(5):
            await asyncio.sleep(0)


def add_job(store: JobStore, folder: Path, device: str = "cpu") -> None:
    store.add(new_job(Folders(folder), "succeed", device), utc_now())


def test_a_node_starts_for_a_job_and_jobs_may_wait_for_the_others(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor, cluster: ClusterDouble, store: JobStore) -> None:
        nodes = Nodes(store.database, "this", "server")
        assert cluster.starts == []
        assert {(row.name, row.kind) for row in nodes.list()} == {
            ("host-a", "ray"),
            ("host-b", "ray"),
        }
        assert why_no_node("cpu", nodes.list()) == "", "a job waits until one starts"
        add_job(store, tmp_path)
        await ticks(supervisor)
        assert cluster.starts == ["a"]
        assert cluster.requested == [{"measure": 1}]
        live = [row.name for row in nodes.list() if row.is_live]
        assert live == ["host-b"], "the node itself sends the heartbeat of the other"

    told = supervised(tmp_path, story)
    assert told == ["the node node-a on host-a runs with cpu"]


def test_idle_nodes_end(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor, cluster: ClusterDouble, store: JobStore) -> None:
        assert cluster.starts == ["a", "b"]
        supervisor.limits = Limits(1, 4, 0.0)
        await ticks(supervisor)
        assert len(cluster.stops) == 1
        assert len(cluster.running) == 1

    told = supervised(tmp_path, story, min_nodes=2)
    assert sum("is idle: it ends" in line for line in told) == 1


def test_a_node_that_has_ended_starts_again_after_a_pause(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor, cluster: ClusterDouble, store: JobStore) -> None:
        cluster.running["a"].set_result("Killed")
        await ticks(supervisor)
        assert (cluster.stops, cluster.starts) == (["a"], ["a", "b"])
        supervisor.slots["a"].pause_until_s = 0.0
        del cluster.found[1]
        await ticks(supervisor)
        assert cluster.starts == ["a", "b", "a"]

    told = supervised(tmp_path, story, min_nodes=1)
    assert "the node node-a on host-a has ended; its log ends with:\nKilled" in told
    assert "the Ray node host-b has gone; its node node-b may go on" in told


def test_a_node_whose_actor_has_died_is_adopted(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor, cluster: ClusterDouble, store: JobStore) -> None:
        cluster.living.add("a")
        cluster.running.pop("a").set_exception(HostError("the actor has ended"))
        await ticks(supervisor)
        assert cluster.starts == ["a", "a"]

    told = supervised(tmp_path, story, min_nodes=1)
    assert told[1].startswith("the actor has ended; the node node-a on host-a may go on")
    assert told[2] == "the node node-a on host-a goes on with cpu"


def test_nodes_of_an_earlier_supervisor_are_adopted(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor, cluster: ClusterDouble, store: JobStore) -> None:
        other = Supervisor(cluster, store.database, supervisor.options, print)
        cluster.facts["b"] = replace(FACTS, node="node-b")  # without an actor
        cluster.running["a"] = asyncio.get_running_loop().create_future()
        await ticks(other)
        assert sorted(cluster.starts) == ["a", "b"]
        await other.close()

    supervised(tmp_path, story)


def test_a_node_that_does_not_start_is_tried_later_and_not_offered_meanwhile(
    tmp_path: Path,
) -> None:
    async def story(supervisor: Supervisor, cluster: ClusterDouble, store: JobStore) -> None:
        cluster.refusal = "no room"
        del cluster.found[1]
        add_job(store, tmp_path)
        await ticks(supervisor, 4)
        assert cluster.starts == ["a"]
        rows = Nodes(store.database, "this", "server").list()
        assert why_no_node("cpu", rows), "nobody can run it now"

    assert "no room" in supervised(tmp_path, story)


def test_what_keeps_a_ray_node_from_use_is_told_once(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor, cluster: ClusterDouble, store: JobStore) -> None:
        cluster.found = [ray_node(name) for name in "cdef"]
        cluster.found[3] = ray_node("f", resources={"CPU": 4})
        cluster.facts = {
            "c": HostFacts("0.0.1", ""),
            "d": HostFacts("", "No module named 'pipeline'"),
            "e": HostFacts(distribution.version(), "CRUCIBLE_SERVICE_DATABASE_URL is not set"),
            "f": FACTS,
        }
        add_job(store, tmp_path)
        await ticks(supervisor, 3)
        assert cluster.starts == []

    version = distribution.version()
    told = supervised(tmp_path, story)
    assert len(told) == 4, told
    assert f"host-c has another version of Crucible: expected {version}, found 0.0.1" in told[0]
    assert "found none (No module named 'pipeline'); install the same one" in told[1]
    assert "host-e cannot run a node: CRUCIBLE_SERVICE_DATABASE_URL is not set" in told[2]
    assert "host-f has no resource `measure`: start it with" in told[3]


def test_without_a_ray_node_of_these_labels_it_says_which_there_are(tmp_path: Path) -> None:
    async def story(supervisor: Supervisor, cluster: ClusterDouble, store: JobStore) -> None:
        cluster.found = [ray_node("a", labels={"pool": "other"})]
        await ticks(supervisor, 3)

    (told,) = supervised(tmp_path, story)
    assert "no Ray node has the labels pool=crucible; there are host-a (pool=other)" in told
