"""What a race needs, without processes: a host with a clock of its own, a session that takes time
there, and children that live here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.backends.base import run_session
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import (
    LONG_BLOCK_S,
    SLOW_RUN_S,
    MeasureGpuCost,
    RaceEntry,
    Ready,
    Take,
    Workload,
    race,
    take_block,
)
from pipeline.core.artifacts import Engine, Target
from pipeline.core.progress import Progress, silent
from pipeline.core.recipe import Precision, Recipe
from pipeline.core.shapes import DimRange, Profile, Tensors, TensorSpec
from pipeline.errors import ChildDied
from pipeline.host.contention import CpuClock
from pipeline.measurement.clock import WarmUpOptions, warm_up
from pipeline.plan.schema import BenchmarkConfig
from pipeline.results.gpu_cost import GpuCost
from pipeline.stages.benchmark import BusyHost, results

X = TensorSpec(name="x", dtype="float32", shape=("batch", 4))
Y = TensorSpec(name="y", dtype="float32", shape=("batch", 3))
PROFILE = Profile(dims={"batch": DimRange(min=1, opt=2, max=8)})
QUIET_HOST = BusyHost(0.5, 2)
SHORT = BenchmarkConfig(duration_s=0.12, warmup_s=0.01, warmup_runs=2)
WORKLOAD = Workload(
    sizes={"batch": 2},
    feeds={"x": np.zeros((2, 4), np.float32)},
    rows=2,
    flops=48.0,
    moved_bytes=None,
)


@dataclass
class Host:
    """A synthetic clock; every run takes its time with some noise.

    Other work makes it half as fast in every other spell of `spell_s`.
    """

    seed: int = 0
    spell_s: float = 0.0
    now_s: float = 0.0
    running: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def clock(self) -> float:
        return self.now_s

    def spend(self, seconds: float) -> None:
        in_spell = bool(self.spell_s) and int(self.now_s / self.spell_s) % 2 == 1
        self.now_s += seconds * (1 + in_spell) * float(np.exp(self.random.normal(0, 0.03)))


@dataclass
class HostTimer:
    host: Host
    started_s: float = 0.0
    stopped_s: float = 0.0

    def start(self) -> None:
        self.started_s = self.host.now_s

    def stop(self) -> None:
        self.stopped_s = self.host.now_s

    def elapsed_s(self) -> float:
        return self.stopped_s - self.started_s


@dataclass
class TimedSession:
    """Upload, execute and download take 1, 8 and 1 tenths of a run."""

    host: Host
    run_s: float
    inputs: tuple[TensorSpec, ...] = (X,)
    outputs: tuple[TensorSpec, ...] = (Y,)
    calls: list[str] = field(default_factory=list)

    def bind(self, feeds: Tensors) -> None:
        self.calls.append("bind")

    def upload(self) -> None:
        self.calls.append("upload")
        self.host.spend(self.run_s / 10)

    def execute(self) -> None:
        self.calls.append("execute")
        self.host.spend(self.run_s * 8 / 10)

    def download(self) -> None:
        self.calls.append("download")
        self.host.spend(self.run_s / 10)

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def fetch(self) -> Tensors:
        self.calls.append("fetch")
        return {"y": np.zeros((2, 3), np.float32)}

    def timer(self) -> HostTimer:
        return HostTimer(self.host)

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class LocalPeer:
    """What the parent sees of the children of one engine, without a process; `dies_at` is the
    message at which one is lost.
    """

    name: str
    session: TimedSession
    dies_at: int = 1_000_000
    received: list[object] = field(default_factory=list)
    starts: int = 0
    stopped: bool = True
    death: Exception | None = None
    stalled: Mapping[int, float] = field(
        default_factory=dict
    )  # by the number of a child: how many times as slow it is
    waits_in: frozenset[int] = (
        frozenset()
    )  # numbers of the children that are kept from a CPU for half of their time
    gpu_cost: GpuCost | None = None
    silent_for: int = 0  # how often it is asked in vain whether it has answered

    def __post_init__(self) -> None:
        self.usual_s = self.session.run_s
        self.random = np.random.default_rng(
            [self.session.host.seed, *self.name.encode()]
        )  # its own: the order of starts is up to the real clock

    def start(self, spread: float) -> LocalPeer:
        """The next child, some share faster or slower than usual for as long as it lives."""
        assert self.stopped, "one process of an engine at a time"
        self.starts, self.stopped = self.starts + 1, False
        noise = float(np.exp(self.random.normal(0, spread))) if spread else 1.0
        self.session.run_s = self.usual_s * noise * self.stalled.get(self.starts, 1.0)
        return self

    def send(self, payload: object) -> None:
        self.received.append(payload)

    def answered(self, timeout_s: float) -> bool:
        self.silent_for -= 1
        return self.silent_for < 0

    def receive(self, timeout_s: float | None = None) -> Any:
        if len(self.received) >= self.dies_at:
            raise self.death or ChildDied(
                f"the child process for '{self.name}' was killed by signal 9 (SIGKILL)"
            )
        message = self.received[-1] if self.received else None
        host = self.session.host
        host.running.append(self.name)
        if isinstance(message, WarmUpOptions):
            return warm_up(partial(run_session, self.session, WORKLOAD.feeds), message, host.clock)
        if isinstance(message, Take):
            is_slow = self.session.run_s >= SLOW_RUN_S
            feeds = WORKLOAD.feeds
            return take_block(self.session, feeds, message, host.clock, self.cpu, is_slow)
        return self.gpu_cost if isinstance(message, MeasureGpuCost) else Ready()

    def cpu(self) -> CpuClock:
        """What the kernel counts: nothing, or that this child waits for half of its time."""
        now_s = self.session.host.now_s
        waited_s = now_s if self.starts in self.waits_in else 0.0
        return CpuClock(ran_s=now_s, waited_s=waited_s, interruptions=int(now_s * 1e6))

    def stop(self) -> None:
        self.stopped = True


def engine_named(variant: str, root: Path = Path("unused")) -> Engine:
    """Engine of onnxruntime that is never loaded, with this variant in its label."""
    recipe = Recipe(backend="onnxruntime", precision=Precision.FP32, variant=variant)
    target = Target(backend="onnxruntime", version="1", device="cpu")
    return Engine(
        root=root,
        file="x",
        digest=variant,
        target=target,
        recipe=recipe,
        inputs=(X,),
        outputs=(Y,),
        profiles=(PROFILE,),
        threads=1,
        size_bytes=0,
    )


def run_race(
    host: Host,
    runs_s: Sequence[float],
    dies_at: Sequence[int] = (),
    options: BenchmarkConfig = SHORT,
    spread: float = 0.0,
    roles: Sequence[Role] = (),
    stalled: Mapping[int, Mapping[int, float]] | None = None,
    waits_in: Mapping[int, frozenset[int]] | None = None,
    loading_s: float = 0.0,
    enough_runs: int | None = None,
    progress: Progress = silent,
    block_s: float = LONG_BLOCK_S,
) -> tuple[list[LocalPeer], Any]:
    """A race whose first engine is the baseline unless `roles` say otherwise; `stalled` and
    `waits_in` are by engine.

    Loading a child takes `loading_s` on the clock of the race, and nothing else takes time there.
    """
    wall_s = 0.0

    def start(engine: Engine) -> LocalPeer:
        nonlocal wall_s
        wall_s += loading_s
        return peers[int(engine.digest)].start(spread)

    engines = [engine_named(str(index)) for index in range(len(runs_s))]
    lives = dict(enumerate(dies_at))
    peers = [
        LocalPeer(
            str(index),
            TimedSession(host, run_s),
            lives.get(index, 1_000_000),
            stalled=(stalled or {}).get(index, {}),
            waits_in=(waits_in or {}).get(index, frozenset()),
        )
        for index, run_s in enumerate(runs_s)
    ]
    parts = roles or [Role.BASELINE, *[Role.CANDIDATE] * (len(engines) - 1)]
    entries = [RaceEntry(engine, role) for engine, role in zip(engines, parts, strict=True)]
    contestants = race(
        entries,
        [WORKLOAD.shape],
        options,
        start,
        progress,
        clock=lambda: wall_s,
        enough_runs=enough_runs,
        block_s=block_s,
    )
    assert all(peer.stopped for peer in peers)
    return peers, results(contestants, [WORKLOAD], QUIET_HOST)
