"""A Ray cluster: its nodes, the actors of our nodes on them, and its autoscaler.

    cluster = connect("auto", {"pool": "crucible"})
    await cluster.nodes()              the living Ray nodes that match the selector
    await cluster.inspect(node)        what is installed there, and its devices
    await cluster.start(node, ...)     an actor, which starts or adopts a node of ours
    await cluster.watch(node)          until that node ends
    await cluster.stop(node, grace_s)
    await cluster.request(bundles)     what the autoscaler is to keep

Only this module imports Ray.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline import distribution
from pipeline.distribution import install_command
from pipeline.errors import BackendUnavailable, HostError
from pipeline.host.labels import Labels
from service.cluster.agent import START_S, Agent, AgentOptions, AgentState
from service.cluster.scaling import Bundle, bundle_of, devices_of

NAMESPACE = "crucible"
NAME = "node-"  # of an actor, before the id of its Ray node
INSPECT_S = 120.0  # a worker of Ray starts, and imports what it needs
CONNECT_S = 10.0
END_S = 30.0  # for an actor to end, after its node has
# Of this process, unless its environment has others. Ray ends it when the head is gone for so long.
TIME_OUTS = {
    "RAY_gcs_rpc_server_connect_timeout_s": "10",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "60",
}


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living node of the cluster."""

    id: str
    host: str
    address: str
    labels: Mapping[str, str]  # of Ray
    resources: Bundle
    has_actor: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        return devices_of(self.resources)

    def matches(self, selector: Mapping[str, str]) -> bool:
        return all(self.labels.get(name) == value for name, value in selector.items())


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What is installed on a Ray node."""

    version: str  # of Crucible; empty if it is not installed
    fault: str  # why no node of ours can start there; empty if one can
    labels: Mapping[str, Labels] = field(default_factory=dict)  # by device
    node: str = ""  # the id of the node of ours that runs there, with or without an actor


class RayCluster:
    """The cluster that this process is connected to."""

    def __init__(self, ray: Any, address: str) -> None:
        self._ray, self.address = ray, address

    async def nodes(self) -> tuple[RayNode, ...]:
        """Return the living nodes of the cluster."""
        return await asyncio.to_thread(self._nodes)

    def _nodes(self) -> tuple[RayNode, ...]:
        named = self._ray.util.list_named_actors(all_namespaces=True)
        names = {actor["name"] for actor in named if actor["namespace"] == NAMESPACE}
        return tuple(
            RayNode(
                node["NodeID"],
                node["NodeManagerHostname"],
                node["NodeManagerAddress"],
                node["Labels"],
                node["Resources"],
                NAME + node["NodeID"] in names,
            )
            for node in self._ray.nodes()
            if node["Alive"]
        )

    async def inspect(self, node: RayNode) -> HostFacts:
        """Return what is installed on a Ray node. HostError if it does not answer."""
        task = self._ray.remote(num_cpus=0, max_retries=0)(inspection())
        pinned = task.options(scheduling_strategy=self._only(node))
        found = await self._answer(node, pinned.remote(), INSPECT_S)
        return HostFacts(found["version"], found["fault"], found["labels"], found["node"])

    async def start(self, node: RayNode, options: AgentOptions) -> AgentState:
        """Start the actor of a Ray node, unless it is there, and through it a node of ours.

        HostError says why it does not start. Then no actor is left.
        """
        bundle = dict(bundle_of(options.devices))
        actor = (
            self._ray.remote(Agent)
            .options(
                name=NAME + node.id,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,  # the journal decides about retries
                max_task_retries=0,
                num_cpus=0,
                num_gpus=bundle.pop("GPU", 0),
                resources=bundle,
                scheduling_strategy=self._only(node),
            )
            .remote(options)
        )
        try:
            state: AgentState = await self._answer(node, actor.start.remote(), 2 * START_S)
        except HostError:
            self._ray.kill(actor)
            raise
        return state

    async def watch(self, node: RayNode) -> str:
        """Return the end of the log of the node of ours, once it has ended. HostError if its actor
        has: the node may go on.
        """
        return str(await self._answer(node, self._actor(node).watch.remote(), None))

    async def stop(self, node: RayNode, grace_s: float) -> None:
        """End the node of ours, and then its actor."""
        try:
            actor = self._actor(node)
            await self._answer(node, actor.stop.remote(grace_s), grace_s + END_S)
            # graceful, so that Ray gives the resources back before the name
            await self._answer(node, actor.__ray_terminate__.remote(), END_S)
        except HostError:
            await self._kill(node)

    async def request(self, bundles: Sequence[Bundle], selector: Mapping[str, str]) -> None:
        """Tell the autoscaler what to keep. It replaces all that was requested before."""
        from ray.autoscaler.sdk import request_resources

        selectors = [dict(selector)] * len(bundles)
        plain = [dict(bundle) for bundle in bundles]
        await asyncio.to_thread(request_resources, None, plain, selectors)

    async def _kill(self, node: RayNode) -> None:
        """End an actor that does not end by itself. Its node of ours is no child of it."""
        try:
            self._ray.kill(self._actor(node))
        except HostError:
            return

    def _actor(self, node: RayNode) -> Any:
        try:
            return self._ray.get_actor(NAME + node.id, NAMESPACE)
        except ValueError:
            raise HostError(f"no actor runs on the Ray node {node.host} any more") from None

    def _only(self, node: RayNode) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node.id, soft=False)

    async def _answer(self, node: RayNode, reference: Any, within_s: float | None) -> Any:
        """Wait for the answer of a task or an actor. HostError for every failure."""
        from ray.exceptions import RayError, RayTaskError

        try:
            return await asyncio.wait_for(reference, within_s)
        except TimeoutError:
            raise HostError(
                f"the Ray node {node.host} has not answered within {within_s:.0f} s",
                "`ray status` shows whether its resources are taken by other programs",
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, HostError):
                raise error.cause from None
            raise HostError(f"the Ray node {node.host} failed: {error.cause!r}") from error
        except RayError as error:
            reason = str(error).partition("\n")[0]
            raise HostError(f"the Ray node {node.host} does not answer: {reason}") from error


def connect(address: str) -> RayCluster:
    """Connect to the cluster at HOST:PORT, or to that of this host ("auto").

    BackendUnavailable without Ray; HostError if no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise not_installed() from error
    for name, value in TIME_OUTS.items():
        os.environ.setdefault(name, value)
    try:
        _check_listens(address)
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise HostError(
            f"no Ray cluster answers at '{address}': {error}",
            "run this on a host of the cluster, after `ray start`; give HOST:PORT of its head",
        ) from error
    return RayCluster(ray, address)


def _check_listens(address: str) -> None:
    """OSError or ValueError if nobody listens there. Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), CONNECT_S):
        return


def not_installed() -> BackendUnavailable:
    """Return the error that names the extra."""
    return BackendUnavailable("Ray is not installed on this host", install_command("ray"))


def inspection() -> Callable[[], dict[str, Any]]:
    """Return the function that inspects a host. Ray sends its code, so that it also runs where
    Crucible is not installed.
    """

    def inspect() -> dict[str, Any]:
        try:
            from pipeline import distribution
            from pipeline.host.labels import device_labels
            from service.cluster.agent import living_node, settings_fault
        except ImportError as error:
            return {"version": "", "fault": str(error), "labels": {}, "node": ""}
        fault = settings_fault()
        return {
            "version": distribution.version(),
            "fault": fault,
            "labels": device_labels(),
            "node": "" if fault else living_node(),
        }

    return inspect


def why_unusable(node: RayNode, facts: HostFacts) -> str:
    """Return why no node of ours can start on a Ray node; empty if one can."""
    own = distribution.version()
    if facts.version != own:
        found = facts.version or f"none ({facts.fault})"
        return (
            f"the Ray node {node.host} has another version of Crucible: expected {own}, found"
            f" {found}; install the same one in the Python of its Ray"
        )
    if facts.fault:
        return f"the Ray node {node.host} cannot run a node: {facts.fault}"
    if not node.devices:
        return (
            f"the Ray node {node.host} has no resource `measure`: start it with `ray start"
            """ --resources '{"measure": 1}'`, 1 for each device"""
        )
    if absent := [device for device in node.devices if device not in facts.labels]:
        return (
            f"the Ray node {node.host} has the resources of '{absent[0]}', but no such device;"
            f" it has {', '.join(facts.labels)}"
        )
    return ""
