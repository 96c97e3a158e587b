"""A race of all engines of a row: the pipeline's own, with ways to run an engine that it has no
need of.

session   an engine by `crucible`'s session
bare      by a bare loop on TensorRT's API
torch     PyTorch
flow      k sessions of one engine that run at once, with or without copying the input: for
          throughput
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from benchmarks.gpu.bare import BareSession
from benchmarks.gpu.torch_peers import open_peer
from pipeline import backends
from pipeline.backends import cuda
from pipeline.backends.base import Session, run_session
from pipeline.backends.tensorrt import library as trt_library
from pipeline.backends.tensorrt.session import TrtLoaded
from pipeline.benchmark.elimination import Role
from pipeline.benchmark.interleaved import (
    REWARM_SHARE,
    VALUES_PER_BLOCK,
    Block,
    Peer,
    RaceEntry,
    Take,
    Workload,
    race,
    take_block,
)
from pipeline.core.artifacts import Engine
from pipeline.core.progress import Progress, silent
from pipeline.core.shapes import Tensors
from pipeline.execution.child_process import Channel, Child
from pipeline.host.environment import peak_memory_bytes, usable_cores
from pipeline.measurement.clock import WarmUpOptions, measure_block, monotonic, thinned, warm_up
from pipeline.plan.schema import BenchmarkConfig
from pipeline.results.benchmarks import BenchmarkFailure, BenchmarkReport
from pipeline.stages.benchmark import BusyHost, results

ROUND_S, DEPTHS = (
    0.2,
    (4, 64),
    # of a flow between two synchronisations, and runs of each session in it: waiting costs a small
    # share of it
)

NOT_TOLD_APART = (1e-9,)  # seconds of a phase of a flow; not 0, which has no ratio


@dataclass(frozen=True, slots=True)
class Entrant:
    """One engine and how it is to be run."""

    name: str
    engine: Engine
    way: Literal["session", "bare", "torch", "flow"] = "session"
    sessions: int = 1  # of a flow
    upload: bool = False  # a flow copies the input in every run
    mode: str = ""  # of torch.compile
    pinned: bool = False  # inputs are in page-locked memory, which only some openers look at


@dataclass(frozen=True, slots=True)
class Loaded:
    """Child to parent: ready, how long that took, what it answers, and what else is to be told."""

    seconds: float
    outputs: Tensors
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the race showed of one entrant."""

    entrant: Entrant
    result: BenchmarkReport | BenchmarkFailure
    loaded: Loaded | None


@dataclass(slots=True)
class Listening:
    """A peer whose first words are kept: the race itself does not need them."""

    peer: Peer
    keep: Callable[[Loaded], object]

    def send(self, payload: object) -> None:
        self.peer.send(payload)

    def answered(self, timeout_s: float) -> bool:
        return self.peer.answered(timeout_s)

    def receive(self, timeout_s: float | None = None) -> Any:
        message = self.peer.receive(timeout_s)
        if isinstance(message, Loaded):
            self.keep(message)
        return message

    def stop(self) -> None:
        self.peer.stop()


def contest(
    entrants: Sequence[Entrant],
    workload: Workload,
    options: BenchmarkConfig,
    progress: Progress = silent,
    opener: Opener | None = None,
) -> list[Outcome]:
    """All entrants at one shape, interleaved, each in processes of its own.

    `opener` opens an entrant in its process; None: `opened`.
    """
    engines = [_called(entrant) for entrant in entrants]
    loaded: dict[str, Loaded] = {}

    def start(engine: Engine) -> Peer:
        index = next(number for number, each in enumerate(engines) if each is engine)
        entrant = entrants[index]
        child = Child(contend, entrant, workload, opener or opened, name=entrant.name)
        return Listening(child, partial(loaded.setdefault, entrant.name))

    entries = [RaceEntry(engine, Role.COMPARED) for engine in engines]
    host = BusyHost(os.getloadavg()[0], usable_cores())
    found = results(race(entries, (workload.shape,), options, start, progress), (workload,), host)
    return [
        Outcome(entrant, result, loaded.get(entrant.name))
        for entrant, result in zip(entrants, found, strict=True)
    ]


def _called(entrant: Entrant) -> Engine:
    """The engine under the entrant's name, which progress and failures show."""
    return entrant.engine.model_copy(
        update={"recipe": entrant.engine.recipe.model_copy(update={"variant": entrant.name})}
    )


# -- in the child ------------------------------------------------------------


class Runner(Protocol):
    """An entrant that has been opened."""

    def run(self) -> Tensors:
        """One run, or one round of several."""
        ...

    def take(self, seconds: float) -> Block:
        """The times of a block."""
        ...


Opener = Callable[[Entrant, Tensors], AbstractContextManager[tuple[Runner, dict[str, Any]]]]
"""Opens an entrant for these feeds: how it is run, and what is to be told of it."""


def contend(channel: Channel, entrant: Entrant, workload: Workload, opener: Opener) -> None:
    """Load an engine and run a block whenever the parent asks, as the pipeline's own contestants
    do.
    """
    begin = monotonic()
    with opener(entrant, workload.feeds) as (runner, facts):
        outputs = runner.run()
        gc.collect()
        gc.disable()
        channel.send(Loaded(monotonic() - begin, outputs, facts))
        take_turns(channel, runner)


def take_turns(channel: Channel, runner: Runner) -> None:
    """Warm up once, then a block for each Take, until anything else comes."""
    options: WarmUpOptions = channel.receive()
    channel.send(thinned(warm_up(runner.run, options), VALUES_PER_BLOCK))
    while isinstance(message := channel.receive(), Take):
        channel.send(runner.take(message.seconds))


@dataclass(slots=True)
class Single:
    """One session, run after run from numpy arrays to numpy arrays."""

    session: Session
    feeds: Tensors

    def run(self) -> Tensors:
        return run_session(self.session, self.feeds)

    def take(self, seconds: float) -> Block:
        """As the pipeline takes it, with as much time for the GPU's work as for whole runs: it is
        what the targets are about.
        """
        block = take_block(self.session, self.feeds, Take(seconds))
        return replace(
            block,
            compute_s=thinned(device_times(self.session, self.feeds, seconds), VALUES_PER_BLOCK),
        )


def device_times(session: Session, feeds: Tensors, seconds: float) -> list[float]:
    """The GPU's work by events, one synchronised run after another, right after the upload: so it
    does not wait for its own launch.
    """
    times: list[float] = []
    timer = session.timer()
    session.bind(feeds)

    def run() -> None:
        session.upload()
        timer.start()
        session.execute()
        timer.stop()
        session.synchronize()
        times.append(timer.elapsed_s())

    measure_block(run, min_s=seconds)
    return times


@dataclass(slots=True)
class Flow:
    """Several sessions at once. `run` is a round of `depth` runs of each, about ROUND_S.

    Times are those of one run, so that rows per run over them is throughput.
    """

    sessions: Sequence[Session]
    feeds: Tensors
    upload: bool
    depth: int = 0  # 0: to be found by the first run

    def bind(self) -> Tensors:
        """Fill the buffers of every session, run each often enough for its graph to be captured,
        and find the depth.
        """
        answer, self.depth = begun(self.sessions, self.feeds, partial(self.rounds, 1))
        return answer

    def run(self) -> Tensors:
        if not self.depth:
            return self.bind()
        self.rounds(self.depth)
        return {}

    def rounds(self, depth: int) -> None:
        for _ in range(depth):
            for session in self.sessions:
                if self.upload:
                    session.upload()
                session.execute()
        for session in self.sessions:
            session.synchronize()

    def take(self, seconds: float) -> Block:
        return take_rounds(self.run, self.depth * len(self.sessions), seconds)


def begun(
    sessions: Sequence[Session], feeds: Tensors, one_round: Callable[[], object]
) -> tuple[Tensors, int]:
    """Run each session often enough for its graph to be captured. Return an answer, and the number
    of runs in a round of about ROUND_S.
    """
    for _ in range(3):
        answers = [run_session(session, feeds) for session in sessions]
    begin = monotonic()
    one_round()
    return answers[0], int(np.clip(ROUND_S / (monotonic() - begin), *DEPTHS))


def take_rounds(run: Callable[[], object], runs: int, seconds: float) -> Block:
    """A block of rounds of so many runs; its times are those of one run."""
    rewarm = measure_block(run, min_s=seconds * REWARM_SHARE)
    rounds = measure_block(run, min_s=seconds)
    each = thinned([time / runs for time in rounds], VALUES_PER_BLOCK)
    return Block(
        runs=len(rounds),
        run_s=sum(rounds),
        timed_runs=len(rounds),
        timed_compute_s=sum(rounds),
        rewarm_s=thinned(rewarm, VALUES_PER_BLOCK),
        end_to_end_s=each,
        latency_s=each,
        upload_s=NOT_TOLD_APART,
        enqueue_s=NOT_TOLD_APART,
        compute_s=each,
        download_s=NOT_TOLD_APART,
        peak_memory_bytes=peak_memory_bytes(),
    )


@contextmanager
def opened(entrant: Entrant, feeds: Tensors) -> Iterator[tuple[Runner, dict[str, Any]]]:
    """The entrant's engine in memory, and what is to be told of it."""
    with ExitStack() as stack:
        if entrant.way == "bare":
            trt = trt_library.library()
            session: Session = stack.enter_context(
                closing(BareSession(trt, cuda.runtime(), entrant.engine, feeds))
            )
            yield Single(session, feeds), {}
        elif entrant.way == "torch":
            peer, facts = open_peer(entrant.engine, feeds, entrant.mode)
            stack.enter_context(closing(peer))
            yield Single(peer, feeds), facts
        else:
            loaded = stack.enter_context(closing(backends.load(entrant.engine)))
            sessions = [
                stack.enter_context(closing(loaded.session(0))) for _ in range(entrant.sessions)
            ]
            facts = (
                {"activation_bytes": int(loaded.cuda_engine.device_memory_size_v2)}
                if isinstance(loaded, TrtLoaded)
                else {}
            )
            yield (
                (
                    Flow(sessions, feeds, entrant.upload)
                    if entrant.way == "flow"
                    else Single(sessions[0], feeds)
                ),
                facts,
            )


# -- what it says ------------------------------------------------------------


def cosine(found: Tensors, expected: Tensors) -> float | None:
    """The smallest cosine over all outputs; None where an answer is missing or is not finite."""
    values = []
    for name, wanted in expected.items():
        if name not in found or found[name].shape != wanted.shape:
            return None
        a, b = (np.asarray(array, np.float64).ravel() for array in (found[name], wanted))
        length = float(np.linalg.norm(a) * np.linalg.norm(b))
        if not np.isfinite(length) or not length:
            return None
        values.append(float(a @ b) / length)
    return min(values, default=None)
