"""How many nodes a Ray cluster runs, and where. Pure: `decide` takes what is there and returns what
to do.

Each Ray node runs one node of ours, on the devices that its resource `measure` counts. A waiting
job goes to a free device of a node that runs, else to a Ray node on which one can start, else to a
Ray node that the autoscaler is to add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.host.labels import Labels
from pipeline.plan.sections.targets import Requirement, requirement_from

MEASURE = "measure"
"""The resource of Ray that counts the devices of a Ray node, each to build or measure alone."""

Bundle = Mapping[str, float]
"""Resources of one Ray node, by name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many nodes run at once, and how long one runs without a job."""

    min_nodes: int
    max_nodes: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class Place:
    """A Ray node, with the node of ours that runs there or may start there."""

    id: str  # of the Ray node
    labels: Mapping[str, Labels]  # by device
    bundle: Bundle  # what a node of ours takes of it
    runs: bool = False
    jobs: int = 0
    idle_s: float = 0.0

    def fulfils(self, required: Requirement) -> bool:
        return any(not required.missing(*device) for device in self.labels.items())

    @property
    def free(self) -> int:
        """How many more jobs can run there."""
        return len(self.labels) - self.jobs


@dataclass(frozen=True, slots=True)
class Decision:
    """The Ray nodes on which a node is to start or to stop, and what the autoscaler is to keep."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    bundles: tuple[Bundle, ...] = ()


@dataclass(slots=True)
class _Draft:
    """A decision as it grows."""

    running: list[Place]
    idle: list[Place]  # on which one may start
    limits: Limits
    started: list[Place] = field(default_factory=list)
    needed: set[str] = field(default_factory=set)  # running ones to which a waiting job goes
    asked: list[Bundle] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        count = len(self.running) + len(self.started) + len(self.asked)
        return count < self.limits.max_nodes

    def place(self, required: Requirement) -> None:
        """Find a place for one job."""
        for places in (self.running, self.started):
            for index, place in enumerate(places):
                if place.free > 0 and place.fulfils(required):
                    places[index] = replace(place, jobs=place.jobs + 1)
                    self.needed.add(place.id)
                    return
        if not self.has_room:
            return
        for place in self.idle:
            if place.fulfils(required):
                self.idle.remove(place)
                self.started.append(replace(place, jobs=1))
                return
        self.asked.append(bundle_for(required))


def decide(waiting: Mapping[str, int], places: Sequence[Place], limits: Limits) -> Decision:
    """Decide for these waiting jobs, counted by what they require."""
    draft = _Draft(
        [place for place in places if place.runs],
        [place for place in places if not place.runs],
        limits,
    )
    for text, count in waiting.items():
        try:
            required = requirement_from(text)
        except ValueError:  # no node can ever run it
            continue
        for _ in range(min(count, limits.max_nodes * _most_devices(places))):
            draft.place(required)
    missing = limits.min_nodes - len(draft.running) - len(draft.started) - len(draft.asked)
    for _ in range(max(0, missing)):
        if draft.idle:
            draft.started.append(draft.idle.pop(0))
        else:
            draft.asked.append({MEASURE: 1})
    stopped = _unneeded(draft)
    kept = [place for place in draft.running if place.id not in stopped]
    return Decision(
        tuple(place.id for place in draft.started),
        stopped,
        (*(place.bundle for place in (*kept, *draft.started)), *draft.asked),
    )


def bundle_for(required: Requirement) -> Bundle:
    """Return what a Ray node needs to have for a job."""
    if required.device.partition(":")[0] == "gpu":
        return {MEASURE: 1, "GPU": 1}
    return {MEASURE: 1}


def devices_of(resources: Bundle) -> tuple[str, ...]:
    """Return the devices of a Ray node that `measure` counts: its GPUs first, then the CPU."""
    count, gpus = int(resources.get(MEASURE, 0)), int(resources.get("GPU", 0))
    devices = tuple(f"gpu:{number}" for number in range(min(count, gpus)))
    return (*devices, "cpu") if count > gpus else devices


def bundle_of(devices: Sequence[str]) -> Bundle:
    """Return what a node of ours on these devices takes of its Ray node."""
    gpus = sum(device != "cpu" for device in devices)
    return {MEASURE: len(devices)} | ({"GPU": gpus} if gpus else {})


def _most_devices(places: Sequence[Place]) -> int:
    return max((len(place.labels) for place in places), default=1)


def _unneeded(draft: _Draft) -> tuple[str, ...]:
    """Return the running nodes that have been idle for too long, longest first, down to the
    least number, and those above the greatest.
    """
    limits, total = draft.limits, len(draft.running) + len(draft.started)
    idle = sorted(
        (place for place in draft.running if not place.jobs and place.id not in draft.needed),
        key=lambda place: -place.idle_s,
    )
    late = [place for place in idle if place.idle_s >= limits.idle_s]
    surplus = max(min(len(late), total - limits.min_nodes), total - limits.max_nodes, 0)
    return tuple(place.id for place in idle[:surplus])
