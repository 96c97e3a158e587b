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


def elsewhere(candidates: Mapping[str, str], nodes: Iterable[Node], this: str) -> list[str]:
    """Return a sentence for each backend that this host refuses and whose label a device of another
    live node has.

    `candidates`: every `backend precision` with this host's reason against it. `this`: the id of
    this node.
    """
    others = [
        (device, labels)
        for node in nodes
        if node.is_live and node.id != this
        for device, labels in node.labels.items()
    ]
    sentences = []
    for backend in BACKENDS:
        precisions = [
            name.partition(" ")[2]
            for name, reason in candidates.items()
            if reason and name.startswith(f"{backend} ")
        ]
        devices = sorted(
            {
                f"{device} ({labels.get('name', '')})"
                for device, labels in others
                if backend in labels
            }
        )
        if precisions and devices:
            sentences.append(f"{backend} {', '.join(precisions)}: on {'; '.join(devices)}")
    return sentences
