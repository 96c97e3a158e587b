"""What the form of a compile says of the cluster: the devices of all live nodes, which of them are
free, and the candidates that only other nodes may run.

It names no host and no job: they may be those of other owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.host.labels import BACKENDS, labels_text
from service.jobs.nodes import Node


@dataclass(frozen=True, slots=True)
class Target:
    """A device of a live node."""

    device: str
    labels: str  # for people
    is_free: bool  # runs no job now


def targets_of(nodes: Iterable[Node]) -> tuple[Target, ...]:
    """Return the devices of all live nodes, the free ones first."""
    targets = [
        Target(device, labels_text(labels), all(job.device != device for job in node.jobs))
        for node in nodes
        if node.is_live
        for device, labels in node.labels.items()
    ]
    return tuple(sorted(targets, key=lambda each: (not each.is_free, each.device, each.labels)))


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What only other nodes run of a backend."""

    backend: str
    devices: str  # of these nodes, for people
    precisions: tuple[str, ...]


def elsewhere(candidates: Mapping[str, str], nodes: Iterable[Node]) -> list[Elsewhere]:
    """Return what this host refuses and live nodes run on a device that has the backend's label.

    `candidates`: every `backend precision` with this host's reason against it.
    """
    found = []
    live = [node for node in nodes if node.is_live]
    for backend in BACKENDS:
        refused = [
            name for name, why in candidates.items() if why and name.startswith(f"{backend} ")
        ]
        devices: set[str] = set()
        possible: set[str] = set()
        for node in live:
            having = {
                f"{device} ({labels.get('name', '')})"
                for device, labels in node.labels.items()
                if backend in labels
            }
            if having and not set(refused).isdisjoint(node.candidates):
                devices |= having
                possible.update(node.candidates)
        precisions = tuple(name.partition(" ")[2] for name in refused if name in possible)
        if precisions:
            found.append(Elsewhere(backend, "; ".join(sorted(devices)), precisions))
    return found
