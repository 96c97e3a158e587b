"""Nodes: the servers and agents that run the jobs of one database, with the labels of their
devices.

    nodes = Nodes(database, id, "server")
    nodes.send_heartbeat(labels)      each few seconds; silent for LEASE_S, a node counts as gone
    nodes.list()                      all nodes, also those that are gone since a short time
    why_no_node(required, nodes)      what all of them lack; "" if a live one fulfils it

A job that no live node fulfils fails at once. It waits for its `wait_for_node_s` instead, and for
RETURN_S if a node that fulfils it has gone since the job was submitted: it may only be restarted.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from pipeline import distribution
from pipeline.host.labels import Labels, labels_text
from pipeline.plan.sections.targets import Requirement, requirement_from
from service.jobs.claims import LEASE_S
from service.jobs.state import Failure, Job
from service.storage.database import Database, delete_unlocked
from service.storage.tables import database_clock_s, jobs, nodes

# ray: a host on which Ray starts a node as soon as a job waits for it
Kind = Literal["server", "node", "ray"]
BEAT_S = 4.0  # between two heartbeats
RETURN_S = 300.0  # how long a job waits for a node that has gone
FORGET_S = 3600.0  # how long a node that has gone is listed
NO_NODE = "job.no_node"


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that a node has claimed."""

    id: str
    name: str
    node: str
    device: str = ""  # of the node


@dataclass(frozen=True, slots=True)
class Node:
    """A server or an agent, as the database has it."""

    id: str
    name: str  # of its host
    kind: Kind
    version: str
    labels: Mapping[str, Labels]  # by device
    silent_s: float = 0.0  # since its last heartbeat
    jobs: tuple[RunningJob, ...] = ()
    address: str = ""  # of its HTTP; empty: it has none, or has left
    candidates: tuple[str, ...] = ()  # every `backend precision` that its host runs

    @property
    def is_live(self) -> bool:
        return self.silent_s < LEASE_S

    def fulfils(self, required: Requirement) -> bool:
        return any(not required.missing(*device) for device in self.labels.items())


class Nodes:
    """All nodes of a database, and the row of this one. Safe for threads."""

    def __init__(self, database: Database, node_id: str, kind: Kind, address: str = "") -> None:
        self._database, self.id, self._kind, self._address = database, node_id, kind, address
        self.candidates: tuple[str, ...] = ()

    def this(self, labels: Mapping[str, Labels]) -> Node:
        """Return this node with these labels of its devices."""
        return Node(
            self.id,
            platform.node(),
            self._kind,
            distribution.version(),
            labels,
            address=self._address,
            candidates=self.candidates,
        )

    def send_heartbeat(self, labels: Mapping[str, Labels]) -> None:
        """Write this node's row, and delete those of nodes that have gone long ago."""
        self.send_heartbeat_of(self.this(labels))

    def send_heartbeat_of(self, node: Node) -> None:
        """Write the row of a node that cannot do it itself."""
        values = {
            "name": node.name,
            "kind": node.kind,
            "version": node.version,
            "labels": json.dumps(dict(node.labels)),
            "heartbeat_at": database_clock_s(),
            "address": node.address,
            "candidates": json.dumps(node.candidates),
        }
        old = delete_unlocked(nodes, nodes.c.heartbeat_at < database_clock_s() - FORGET_S)
        row = insert(nodes).values(values | {"id": node.id})
        with self._database.write() as rows:
            rows.execute(old)
            # in one statement: two threads may write the first row of a node at the same time
            rows.execute(row.on_conflict_do_update(index_elements=["id"], set_=values))

    def leave(self, *others: str) -> None:
        """Let this node, or the others instead, count as gone from now on."""
        gone = sa.update(nodes).where(nodes.c.id.in_(others or (self.id,)))
        with self._database.write() as rows:
            rows.execute(gone.values(heartbeat_at=database_clock_s() - LEASE_S, address=""))

    def list(self) -> tuple[Node, ...]:
        """Return all nodes, those with the newest heartbeat first."""
        silent_s = (database_clock_s() - nodes.c.heartbeat_at).label("silent_s")
        claimed = sa.select(jobs.c.id, jobs.c.job, jobs.c.server).where(jobs.c.server.is_not(None))
        with self._database.read() as rows:
            found = rows.execute(sa.select(nodes, silent_s).order_by(silent_s)).all()
            running = [
                RunningJob(row.id, str(job.get("name")), row.server, str(job.get("device")))
                for row in rows.execute(claimed)
                for job in (json.loads(row.job),)
            ]
        return tuple(
            Node(
                row.id,
                row.name,
                row.kind,
                row.version,
                json.loads(row.labels),
                row.silent_s,
                tuple(job for job in running if job.node == row.id),
                row.address,
                tuple(json.loads(row.candidates)),
            )
            for row in found
        )


def why_no_node(text: str, nodes: Iterable[Node]) -> str:
    """Return what all live nodes lack of a requirement; "" if one of them fulfils it."""
    try:
        required = requirement_from(text)
    except ValueError as error:
        return str(error)
    live = [node for node in nodes if node.is_live]
    if any(node.fulfils(required) for node in live):
        return ""
    devices = [device for node in live for device in node.labels.items()]
    lacks = {required.missing(*device) for device in devices}
    # where the kind of device is there, its labels are what is missing
    if missing := " or ".join(f"'{each}'" for each in sorted(lacks - {required.device})):
        return f"no device '{required.device}' of a server or a node has the label {missing}"
    return f"no server and no node has a device '{required.device}'"


def waits(job: Job, waited_s: float, nodes: Iterable[Node]) -> bool:
    """Return whether a job that has waited for so long goes on waiting for a node, where none
    fulfils it now. No clock is compared with that of another host.
    """
    try:
        required = requirement_from(job.queue)
    except ValueError:  # no node ever will
        return False
    gone_s = [node.silent_s - LEASE_S for node in nodes if node.fulfils(required)]
    returns = any(each_s <= waited_s and each_s < RETURN_S for each_s in gone_s)
    return returns or waited_s < job.wait_for_node_s


def no_node_failure(why: str, nodes: Iterable[Node]) -> Failure:
    """Return the failure of a job that no node can run, with what the live ones have."""
    have = {
        f"{device} ({labels_text(labels)})"
        for node in nodes
        if node.is_live
        for device, labels in node.labels.items()
    }
    return Failure(
        code=NO_NODE,
        message=f"{why}; they have {'; '.join(sorted(have)) or 'no device'}",
        next_step=(
            "start a node that has it with `crucible node start`, or change `targets`;"
            " `wait_for_node_s` lets the job wait for one"
        ),
    )
