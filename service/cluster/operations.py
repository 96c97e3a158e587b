"""The commands of `crucible ray`, once their options are read."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from pipeline.errors import HostError, UserError
from pipeline.execution.child_process import die_with_parent
from service.cluster.agent import AgentOptions
from service.cluster.ray_cluster import (
    HostFacts,
    RayNode,
    connect,
    not_installed,
    why_unusable,
)
from service.cluster.supervisor import Cluster, Supervisor, SupervisorOptions
from service.settings import Settings
from service.storage.database import database_from

AGAIN_S = 10.0  # after the connection to Ray is lost


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A Ray node that a selector names, as `crucible ray status` prints it."""

    host: str
    address: str
    devices: tuple[str, ...]
    node: str  # of ours; empty if none runs there
    has_actor: bool
    fault: str


def supervise(settings: Settings, address: str, options: SupervisorOptions) -> None:
    """Keep the nodes of a cluster until SIGTERM or Ctrl-C; they then go on. HostError if no cluster
    answers. Ray ends this process if the head of the cluster is gone.
    """
    asyncio.run(_supervise(settings, address, options))


def check_requirements(settings: Settings) -> None:
    """UserError without a database that the nodes can share; BackendUnavailable without Ray."""
    if settings.database_url is None:
        raise UserError(
            "nodes on Ray need the PostgreSQL database of the servers, and none is set",
            "set CRUCIBLE_SERVICE_DATABASE_URL here, and for `ray start` on each host",
        )
    if find_spec("ray") is None:
        raise not_installed()


def supervise_again(command: Sequence[str]) -> None:
    """Run a command that supervises, and run it again whenever it ends, until SIGTERM or Ctrl-C."""
    parent = os.getpid()
    while True:
        with subprocess.Popen(command, preexec_fn=lambda: die_with_parent(parent)) as process:
            try:
                status = process.wait()
            finally:
                process.terminate()  # an exit by SIGTERM or Ctrl-C
        print(f"no connection to Ray (exit code {status}); the next try is in {AGAIN_S:.0f} s")
        sys.stdout.flush()
        time.sleep(AGAIN_S)


async def _supervise(settings: Settings, address: str, options: SupervisorOptions) -> None:
    cluster = connect(address)
    database = await asyncio.to_thread(database_from, settings)
    try:
        supervisor = Supervisor(cluster, database, options, lambda text: print(text, flush=True))
        running = asyncio.create_task(supervisor.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)
        print(f"connected to Ray at {address}", flush=True)
        await asyncio.gather(running, return_exceptions=True)
        if not running.cancelled() and (fault := running.exception()) is not None:
            raise fault
    finally:
        await asyncio.to_thread(database.close)


def statuses(address: str, selector: Mapping[str, str]) -> tuple[NodeStatus, ...]:
    """Return the Ray nodes with these labels."""
    return asyncio.run(statuses_of(connect(address), selector))


def stop_all(address: str, selector: Mapping[str, str], grace_s: float) -> tuple[str, ...]:
    """End the nodes of ours on Ray nodes with these labels, at once for all. Returns the hosts."""
    return asyncio.run(stop_nodes(connect(address), selector, grace_s))


async def stop_nodes(
    cluster: Cluster, selector: Mapping[str, str], grace_s: float
) -> tuple[str, ...]:
    await cluster.request((), selector)
    found = [node for node in await cluster.nodes() if node.matches(selector)]
    ended = await asyncio.gather(*(_stop(cluster, node, grace_s) for node in found))
    return tuple(host for host in ended if host)


async def _stop(cluster: Cluster, node: RayNode, grace_s: float) -> str:
    """End what runs on a Ray node, also without an actor. Returns its host; "" if nothing did."""
    if not node.has_actor:
        if not (await cluster.inspect(node)).node:
            return ""
        await cluster.start(node, AgentOptions(node.devices))  # adopts it
    await cluster.stop(node, grace_s)
    return node.host


async def statuses_of(cluster: Cluster, selector: Mapping[str, str]) -> tuple[NodeStatus, ...]:
    found = [node for node in await cluster.nodes() if node.matches(selector)]
    return tuple(await asyncio.gather(*(_status(cluster, node) for node in found)))


async def _status(cluster: Cluster, node: RayNode) -> NodeStatus:
    try:
        facts = await cluster.inspect(node)
        fault = why_unusable(node, facts)
    except HostError as error:
        facts, fault = HostFacts("", ""), str(error)
    return NodeStatus(node.host, node.address, node.devices, facts.node, node.has_actor, fault)
