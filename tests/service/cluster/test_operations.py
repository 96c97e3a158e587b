"""`crucible ray status` and `crucible ray stop` on a cluster that is a double."""

import asyncio
from dataclasses import replace

from service.cluster.operations import NodeStatus, statuses_of, stop_nodes
from service.cluster.ray_cluster import HostFacts
from tests.service.cluster.test_supervisor import FACTS, ClusterDouble, ray_node

POOL = {"pool": "crucible"}


def test_the_status_says_what_runs_and_what_cannot() -> None:
    async def run() -> tuple[NodeStatus, ...]:
        cluster = ClusterDouble()
        cluster.found = [ray_node("a"), ray_node("b"), ray_node("c", labels={})]
        cluster.facts = {"a": replace(FACTS, node="node-a"), "b": HostFacts("0.0.1", "")}
        return await statuses_of(cluster, POOL)

    one, two = asyncio.run(run())
    assert one == NodeStatus("host-a", "10.0.0.1", ("cpu",), "node-a", False, "")
    assert "another version of Crucible" in two.fault


def test_all_nodes_end_also_those_that_no_actor_keeps() -> None:
    async def run() -> None:
        cluster = ClusterDouble()
        cluster.found.append(ray_node("c"))
        cluster.facts |= {"b": replace(FACTS, node="node-b"), "c": FACTS}
        cluster.living, cluster.requested = {"b"}, [{"measure": 1}]
        cluster.running["a"] = asyncio.get_running_loop().create_future()
        assert await stop_nodes(cluster, POOL, 1.0) == ("host-a", "host-b")
        assert (cluster.starts, sorted(cluster.stops)) == (["b"], ["a", "b"])
        assert cluster.requested == [], "the autoscaler need keep nothing"

    asyncio.run(run())
