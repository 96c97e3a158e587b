"""`crucible ray start`: keeps as many nodes on a Ray cluster as the jobs that wait need.

    supervisor = Supervisor(cluster, database, options, tell)
    await supervisor.run()            until it is cancelled; the nodes then go on

For each Ray node that the selector names, a task inspects it, starts an actor there once `decide`
wants one, and watches it. A Ray node on which nothing runs is announced in the database, so that
jobs wait for it instead of failing with `job.no_node`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline import distribution
from pipeline.errors import CrucibleError, HostError
from service.cluster.agent import NODE, AgentOptions, AgentState
from service.cluster.ray_cluster import HostFacts, RayNode, why_unusable
from service.cluster.scaling import Bundle, Decision, Limits, Place, bundle_of, decide
from service.jobs.claims import Claims
from service.jobs.nodes import BEAT_S, Node, Nodes
from service.storage.database import Database

TICK_S = 2.0
MIN_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0  # after a node that did not start, before the next try


class Cluster(Protocol):
    """What a supervisor needs of a cluster: see RayCluster."""

    async def nodes(self) -> tuple[RayNode, ...]: ...
    async def inspect(self, node: RayNode) -> HostFacts: ...
    async def start(self, node: RayNode, options: AgentOptions) -> AgentState: ...
    async def watch(self, node: RayNode) -> str: ...
    async def stop(self, node: RayNode, grace_s: float) -> None: ...
    async def request(self, bundles: Sequence[Bundle], selector: Mapping[str, str]) -> None: ...


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """What runs where, and how much of it."""

    limits: Limits
    selector: Mapping[str, str] = field(default_factory=dict)  # labels of Ray nodes
    labels: str = ""  # of all devices, as `--labels` of `crucible node start`
    extra_labels: Mapping[str, str] = field(default_factory=dict)  # the same, read
    grace_s: float = 60.0  # for a node to queue its jobs again when it is stopped
    command: tuple[str, ...] = NODE


@dataclass(slots=True)
class Slot:
    """A Ray node that the selector names."""

    node: RayNode
    facts: HostFacts | None = None
    agent: AgentState | None = None
    task: asyncio.Task[None] | None = None  # inspects it, or starts and watches its actor
    failures: int = 0
    pause_until_s: float = 0.0
    idle_since_s: float | None = None
    is_orphaned: bool = False  # a node of ours runs there, without its actor
    stops: bool = False

    @property
    def is_busy(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def announced_id(self) -> str:
        return f"ray-{self.node.id}"

    def labels(self, extra: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Return the labels that a node of ours has there, by device."""
        assert self.facts is not None
        return {device: {**self.facts.labels[device], **extra} for device in self.node.devices}

    def pause(self, now_s: float) -> None:
        """Leave it alone for a while, longer after each failure."""
        self.failures += 1
        pause_s = min(MAX_PAUSE_S, MIN_PAUSE_S * 2.0 ** (self.failures - 1))
        self.pause_until_s = now_s + pause_s


class Supervisor:
    """Keeps the nodes of one cluster. Lives in one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        database: Database,
        options: SupervisorOptions,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._cluster, self.options, self._tell = cluster, options, tell
        self.limits = options.limits
        self._nodes = Nodes(database, "", "ray")
        self._claims = Claims(database, "")
        self.slots: dict[str, Slot] = {}
        self._announced: set[str] = set()
        self._beat_s = -BEAT_S
        self._requested: tuple[Bundle, ...] | None = None
        self._complaints: dict[str, str] = {}  # by what they are of

    async def run(self) -> None:
        """Keep the nodes until this is cancelled. What runs then goes on."""
        try:
            while True:
                await self.tick()
                await asyncio.sleep(TICK_S)
        finally:
            await self.close()

    async def tick(self) -> None:
        """Look at the cluster and the queue once, and do what they need."""
        await self._update_slots()
        try:
            rows = await asyncio.to_thread(self._nodes.list)
            waiting = await asyncio.to_thread(self._claims.count_waiting)
        except CrucibleError as error:  # the nodes need no supervisor meanwhile
            self._complain("queue", f"the queue cannot be read: {error.message}")
            return
        self._complain("queue", "")
        now_s = asyncio.get_running_loop().time()
        usable = [slot for slot in self.slots.values() if self._is_usable(slot, now_s)]
        places = [self._place(slot, rows, now_s) for slot in usable]
        decision = decide(waiting, places, self.limits)
        self._act(decision)
        await self._request(decision.bundles)
        await self._announce([slot for slot in usable if slot.agent is None], now_s)

    async def _update_slots(self) -> None:
        found = {node.id: node for node in await self._cluster.nodes()}
        named = {key: node for key, node in found.items() if node.matches(self.options.selector)}
        for key in self.slots.keys() - named.keys():
            slot = self.slots.pop(key)
            if slot.task is not None:
                slot.task.cancel()
            if slot.agent is not None:
                self._tell(
                    f"the Ray node {slot.node.host} has gone; its node {slot.agent.node} may go on"
                )
        for key, node in named.items():
            slot = self.slots.setdefault(key, Slot(node))
            slot.node = node
            if slot.facts is None and self._is_rested(slot):
                slot.task = asyncio.create_task(self._inspect(slot))
            elif (node.has_actor or slot.is_orphaned) and self._is_rested(slot):
                slot.task = asyncio.create_task(self._keep(slot))
        self._complain("labels", "" if named else self._no_match(list(found.values())))

    def _no_match(self, found: Sequence[RayNode]) -> str:
        wanted = ", ".join(f"{name}={value}" for name, value in self.options.selector.items())
        labels = sorted(
            f"{node.host} ({', '.join(f'{name}={value}' for name, value in node.labels.items())})"
            for node in found
        )
        return (
            f"no Ray node has the labels {wanted}; there are {'; '.join(labels)}. Waiting for the"
            " autoscaler, or for `ray start --labels` on a host"
        )

    def _is_rested(self, slot: Slot) -> bool:
        return not slot.is_busy and asyncio.get_running_loop().time() >= slot.pause_until_s

    def _is_usable(self, slot: Slot, now_s: float) -> bool:
        """Whether a node runs there, or can be started."""
        if slot.facts is None or not slot.node.devices:
            return False
        if why_unusable(slot.node, slot.facts):
            return False
        return slot.is_busy or slot.agent is not None or now_s >= slot.pause_until_s

    def _place(self, slot: Slot, rows: Sequence[Node], now_s: float) -> Place:
        row = next((row for row in rows if slot.agent and row.id == slot.agent.node), None)
        jobs = len(row.jobs) if row else 0
        if jobs or slot.idle_since_s is None:
            slot.idle_since_s = now_s
        return Place(
            slot.node.id,
            slot.labels(self.options.extra_labels),
            bundle_of(slot.node.devices),
            slot.is_busy,
            jobs,
            now_s - slot.idle_since_s if slot.agent else 0.0,
        )

    def _act(self, decision: Decision) -> None:
        for key in decision.start:
            slot = self.slots[key]
            slot.task = asyncio.create_task(self._keep(slot))
        for key in decision.stop:
            slot = self.slots[key]
            if slot.agent is not None and not slot.stops:
                slot.stops = True
                self._tell(f"the node {slot.agent.node} on {slot.node.host} is idle: it ends")
                stopping = self._cluster.stop(slot.node, self.options.grace_s)
                slot.task = asyncio.create_task(self._stop(slot, stopping, slot.task))

    async def _stop(
        self,
        slot: Slot,
        stopping: Awaitable[None],
        watching: asyncio.Task[None] | None,
    ) -> None:
        if watching is not None:
            watching.cancel()
        try:
            await stopping
        finally:
            slot.agent, slot.stops, slot.idle_since_s = None, False, None

    async def _inspect(self, slot: Slot) -> None:
        try:
            slot.facts = await self._cluster.inspect(slot.node)
        except HostError as error:
            self._fail(slot, str(error))
            return
        slot.is_orphaned = bool(slot.facts.node)
        if why := why_unusable(slot.node, slot.facts):
            self._tell(why)

    async def _keep(self, slot: Slot) -> None:
        """Start the actor of a Ray node, and watch it until its node has ended."""
        options = AgentOptions(slot.node.devices, self.options.labels, self.options.command)
        slot.idle_since_s, slot.is_orphaned = None, False
        try:
            slot.agent = agent = await self._cluster.start(slot.node, options)
        except HostError as error:
            self._fail(slot, str(error))
            return
        where = f"the node {agent.node} on {agent.host}"
        self._tell(
            f"{where} {'goes on' if agent.adopted else 'runs'} with {', '.join(slot.node.devices)}"
        )
        slot.failures = 0
        try:
            end = await self._cluster.watch(slot.node)
            self._fail(slot, f"{where} has ended; its log ends with:\n{end}")
            await self._cluster.stop(slot.node, 0.0)
        except HostError as error:
            slot.is_orphaned = True
            self._tell(f"{error}; {where} may go on: another actor adopts it")
        finally:
            slot.agent = None

    def _fail(self, slot: Slot, why: str) -> None:
        slot.pause(asyncio.get_running_loop().time())
        self._tell(why)

    async def _request(self, bundles: tuple[Bundle, ...]) -> None:
        if bundles != self._requested:
            await self._cluster.request(bundles, self.options.selector)
            self._requested = bundles

    async def _announce(self, slots: Sequence[Slot], now_s: float) -> None:
        """Let jobs wait for the Ray nodes on which nothing runs."""
        ids = {slot.announced_id for slot in slots}
        if ids == self._announced and now_s - self._beat_s < BEAT_S:
            return
        try:
            if gone := self._announced - ids:
                await asyncio.to_thread(self._nodes.leave, *gone)
            for slot in slots:
                labels = slot.labels(self.options.extra_labels)
                version = distribution.version()
                row = Node(slot.announced_id, slot.node.host, "ray", version, labels)
                await asyncio.to_thread(self._nodes.send_heartbeat_of, row)
        except CrucibleError as error:
            self._complain("queue", f"the database cannot be written: {error.message}")
            return
        self._announced, self._beat_s = ids, now_s

    def _complain(self, about: str, text: str) -> None:
        """Tell it once, not with each tick. No text: all is well again."""
        if text and text != self._complaints.get(about):
            self._tell(text)
        self._complaints[about] = text

    async def close(self) -> None:
        """Watch no node any more, and announce none."""
        for slot in self.slots.values():
            if slot.task is not None:
                slot.task.cancel()
        with contextlib.suppress(CrucibleError):
            if self._announced:
                await asyncio.to_thread(self._nodes.leave, *self._announced)
            await self._cluster.request((), self.options.selector)
