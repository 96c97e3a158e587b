"""One loaded version of a model: its queue, its batches, its workers.

deployment = await Deployment.start(spec, work, figures)     ready: every worker has loaded the
                                                             engine and warmed up
answer = await deployment.infer(request)                     cancelling it drops what still waits
await deployment.drain()                                     takes nothing new, and answers what it
                                                             has
await deployment.close()                                     ends the workers; what still waits is
                                                             Unavailable
"""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Literal

from pipeline.core import Engine
from pipeline.errors import CrucibleError
from pipeline.execution.exit_causes import crucible_error
from pipeline.measurement.measure import usable_cores
from pipeline.serving_inputs import BatchSpec, InputRecipe
from service import logs
from service.errors import ServiceError, TimedOut, TooMany, Unavailable, Unprocessable
from service.inference import InferAnswer, InferRequest, ModelState, Served, Statistics, Timing
from service.registry.models import version_name
from service.serving.batch_assembly import Array, BatchAssembler, BatchPart, JoinedBatch
from service.serving.batching import (
    Batch,
    Queue,
    Rules,
    WaitingRequest,
    deadline,
    drop,
    offer,
    put_back,
    take,
)
from service.serving.replica import Instance
from service.serving.request_shapes import MatchedShapes, ShapeMatcher, captures
from service.serving.stats import Figures, Tally
from service.serving.worker_client import SLOTS, BatchResult, Order, Task, worker_for
from service.storage.layout import Work

RUNS_TO_CAPTURE = 3  # of a shape: plain, captured, launched
# a worker that answers a batch later than this many time-outs hangs: nobody waits for it any more
STUCK_TIMEOUTS = 3.0
MIN_STUCK_S = 10.0  # but not before this
MAX_SHAPES = 1000  # that are told apart
LOADS = itertools.count(
    1
    # a version that is loaded anew has two deployments for a moment, whose processes must not be
    # mistaken
)

log = logs.get("service.deployment")


@dataclass(frozen=True)
class DeploymentSpec:
    """What is to be loaded, and how it is to be served."""

    model: str
    version: int
    owner: str
    engine_folder: Path  # where the engine's files lie
    engine: Engine
    batch: BatchSpec  # unless it is proved, every request runs alone
    device: str  # "cpu", "gpu:0", ...
    instances: int = 1  # workers, each with an engine of its own
    overlap: bool = False  # copy a batch while another one computes
    max_batch: int | None = None  # rows that may run together; None: what `batch` allows
    max_delay_s: float = (
        0.002  # how long the first request of a batch waits for others while every worker has work
    )
    queue_limit: int = 256  # requests that may wait
    timeout_s: float = 30.0
    load_s: float = 180.0  # until a worker is ready
    image: InputRecipe | None = None
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _PendingRequest:
    """A request that has no answer yet."""

    request: InferRequest
    fit: MatchedShapes
    wants: frozenset[str] | None  # outputs; None: all
    since: float
    answer: asyncio.Future[InferAnswer]


class Deployment:
    """One loaded version. Lives in one event loop; a request costs no thread and no other task than
    its own.
    """

    def __init__(
        self, spec: DeploymentSpec, work: Path, figures: Figures, worker: Sequence[str]
    ) -> None:
        self.spec = spec
        self._loop = asyncio.get_running_loop()
        self._work = work
        engine = spec.engine.model_copy(
            update={"root": spec.engine_folder, "threads": _threads(spec)}
        )
        self._matcher = ShapeMatcher(engine, spec.batch, spec.max_batch)
        self._rows = BatchAssembler(engine.inputs, engine.outputs, self._matcher.axes)
        self._outputs = tuple(each.name for each in engine.outputs)
        self._queue = Queue(Rules(self._matcher.maximum, spec.max_delay_s))
        self._asked: dict[int, _PendingRequest] = {}
        self._numbers = itertools.count()
        self._tally = Tally(figures, spec.model, spec.version, lambda: len(self._queue.waiting))
        self._shapes: Counter[tuple[tuple[str, int], ...]] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = self._draining = self._closed = False
        self._quiet = asyncio.Event()
        order = partial(
            Order,
            engine_name=version_name(spec.model, spec.version),
            engine=engine,
            warm=self._matcher.warm_sizes(),
            runs=RUNS_TO_CAPTURE if captures(engine) else 1,
            device=spec.device,
            load_s=spec.load_s,
            sessions=SLOTS if spec.overlap else 1,
            stuck_s=max(MIN_STUCK_S, STUCK_TIMEOUTS * spec.timeout_s),
            command=worker,
        )
        load = next(LOADS)
        self._instances = [
            Instance(
                order(
                    f"{spec.model}-{spec.version}-{load}-{number}", work=Work(work / str(number))
                ),
                self._changed,
            )
            for number in range(spec.instances)
        ]

    @classmethod
    async def start(
        cls,
        spec: DeploymentSpec,
        work: Path,
        figures: Figures,
        worker: Sequence[str] = (),
    ) -> Deployment:
        """Load and warm up, with logs and temporary files below `work`. What keeps a worker from
        being ready is raised, and leaves nothing behind.
        """
        deployment = cls(spec, work, figures, worker or worker_for(spec.engine))
        starting = [asyncio.ensure_future(instance.start()) for instance in deployment._instances]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for each in starting:
                each.cancel()
            await asyncio.wait(starting)
            await deployment.close()
            raise
        deployment._tally.show()
        return deployment

    async def infer(self, request: InferRequest) -> InferAnswer:
        """As `Serving.infer` says."""
        self._admit()
        fit = self._matcher.match(request.inputs)
        wants = self._wanted(request.outputs)
        if len(self._queue.waiting) >= self.spec.queue_limit:
            self._tally.failed("refused", 0.0)
            raise TooMany(
                f"{self.spec.queue_limit} requests wait for '{self.spec.model}'",
                "send it again later",
                self._retry_after_s(),
            )
        number, since = next(self._numbers), monotonic()
        asked = self._asked[number] = _PendingRequest(
            request, fit, wants, since, self._loop.create_future()
        )
        self._see(fit)
        self._queue = offer(self._queue, WaitingRequest(number, fit.rows, since, fit.kind))
        self._pump_soon()
        timeout_s = (
            self.spec.timeout_s
            if request.timeout_s is None
            else min(request.timeout_s, self.spec.timeout_s)
        )
        timer = self._loop.call_later(timeout_s, self._time_out, number, timeout_s)
        try:
            return await asked.answer
        except asyncio.CancelledError:
            if self._leave(number):
                self._tally.dropped()
            raise
        finally:
            timer.cancel()
            self._asked.pop(number, None)
            self._look_quiet()

    def served(self) -> Served:
        """As clients are told of it: `loading` also while a worker that died is started again and
        no other is there.
        """
        spec, state = self.spec, self._state()
        return Served(
            model=spec.model,
            version=spec.version,
            owner=spec.owner,
            device=spec.device,
            backend=spec.engine.target.backend,
            inputs=spec.engine.inputs,
            outputs=spec.engine.outputs,
            batch=spec.batch,
            max_batch=self._matcher.maximum,
            state=state,
            reason=(
                ""
                if state == "ready"
                else next((each.reason for each in self._instances if each.reason), "")
            ),
            instances=spec.instances,
            image=spec.image,
            labels=spec.labels,
        )

    def statistics(self) -> Statistics:
        """Since it was loaded."""
        return self._tally.statistics()

    def shapes(self) -> Mapping[tuple[tuple[str, int], ...], int]:
        """How many requests came with which sizes of the symbols, the batch's among them. After
        MAX_SHAPES others no more are told apart.
        """
        return dict(self._shapes)

    @property
    def memory_bytes(self) -> int:
        """What the workers held of their device's memory once they were ready."""
        return sum(instance.memory_bytes for instance in self._instances)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the guardians of its workers."""
        return tuple(instance.pid for instance in self._instances if instance.pid)

    async def drain(self) -> None:
        """Take nothing new; returns when all that waited is answered."""
        self._draining = True
        self._look_quiet()
        await self._quiet.wait()

    async def close(self) -> None:
        """End the workers, and give their memory back. Harmless if repeated."""
        if self._closed:
            return
        self._closed = self._draining = True
        self._fail_waiting(Unavailable(f"'{self.spec.model}' was unloaded", "deploy it again"))
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(instance.close() for instance in self._instances))
        self._tally.close()
        await asyncio.to_thread(shutil.rmtree, self._work, True)

    # -- requests ----------------------------------------------------------------

    def _state(self) -> ModelState:
        if self._draining:
            return "draining"
        states = {instance.state for instance in self._instances}
        return "ready" if "ready" in states else "loading" if "starting" in states else "failed"

    def _admit(self) -> None:
        """Unavailable unless a worker is ready."""
        if self._draining or not any(instance.state == "ready" for instance in self._instances):
            served = self.served()
            because = f": {served.reason}" if served.reason else ""
            next_step = (
                "look at its log, and deploy it again"
                if served.state == "failed"
                else "send the request again"
            )
            raise Unavailable(
                f"'{served.model}' is {served.state}{because}",
                next_step,
                60 if served.state == "failed" else 1,
            )

    def _wanted(self, outputs: tuple[str, ...]) -> frozenset[str] | None:
        unknown = [name for name in outputs if name not in self._outputs]
        if unknown:
            raise Unprocessable(
                f"no output {', '.join(map(repr, unknown))}; there is"
                f" {', '.join(map(repr, self._outputs))}",
                "ask for those, or for none",
            )
        return frozenset(outputs) or None

    def _retry_after_s(self) -> int:
        """When what waits now will have run, as fast as it went so far."""
        batches = len(self._queue.waiting) / self._queue.rules.maximum / len(self._instances)
        return max(1, math.ceil(batches * self._tally.seconds_per_batch))

    def _see(self, fit: MatchedShapes) -> None:
        if fit.sizes in self._shapes or len(self._shapes) < MAX_SHAPES:
            self._shapes[fit.sizes] += 1

    def _time_out(self, number: int, timeout_s: float) -> None:
        self._leave(number)
        message = f"no answer of '{self.spec.model}' within {timeout_s:g} s"
        self._fail(
            number, TimedOut(message, "allow more time, or send fewer requests"), "timed_out"
        )

    def _leave(self, number: int) -> bool:
        """Take a request out of the queue; False if it runs already."""
        before, self._queue = self._queue, drop(self._queue, number)
        return before is not self._queue

    def _fail_waiting(self, error: ServiceError) -> None:
        waiting = self._queue.waiting
        self._queue = Queue(self._queue.rules)
        for each in waiting:
            self._fail(each.number, error)

    def _fail(
        self, number: int, error: Exception, state: Literal["failed", "timed_out"] = "failed"
    ) -> None:
        asked = self._asked.get(number)
        if asked is not None and not asked.answer.done():
            self._tally.failed(state, monotonic() - asked.since)
            asked.answer.set_exception(error)

    # -- batches -----------------------------------------------------------------

    def _changed(self) -> None:
        """A worker has come or gone."""
        if self._closed:
            return
        if not any(instance.state == "ready" for instance in self._instances):
            self._fail_waiting(
                Unavailable(
                    f"the worker of '{self.spec.model}' was lost", "send the request again", 1
                )
            )
        self._pump_soon()

    def _pump_soon(self) -> None:
        """Once the event loop has taken in what has arrived: requests that came at the same time
        run together.
        """
        if not self._pumping:
            self._pumping = True
            self._loop.call_soon(self._pump)

    def _pump(self, now: float = 0.0) -> None:
        """Give batches to workers, as long as there are both."""
        self._pumping = False
        now = max(now, monotonic())
        while self._queue.waiting and (instance := self._freest()) is not None:
            self._queue, batch = take(self._queue, now, instance.load == 0)
            if batch is None:
                self._wake_at(deadline(self._queue) or now)
                return
            self._run(instance, batch)

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(
            max(0.0, when - monotonic()), self._pump, when
        )  # which may be early by a clock's tick: `when` it is

    def _freest(self) -> Instance | None:
        return min(
            (each for each in self._instances if each.has_room),
            key=lambda each: each.load,
            default=None,
        )

    def _run(self, instance: Instance, batch: Batch) -> None:
        asked = [self._asked[each.number] for each in batch.requests]
        try:
            parts = [BatchPart(each.request.inputs, each.fit) for each in asked]
            joined = self._rows.join(batch.requests[0].kind, parts, batch.size)
            output_bytes = self._rows.output_bytes(joined.shapes)
        except Exception as error:  # noqa: BLE001  the edge of a batch
            self._fault(batch, error)
            return
        began = monotonic()
        filled = began

        def fill(targets: Sequence[Array]) -> None:
            nonlocal filled
            self._rows.fill(joined, targets)
            filled = monotonic()

        def then(result: BatchResult | CrucibleError) -> None:
            if isinstance(result, BatchResult):
                self._answer(batch, asked, joined, result, filled - began)
            elif (
                isinstance(result, Unprocessable) and len(batch.requests) > 1
            ):  # one is to blame: each is to be judged by its own inputs
                self._queue = put_back(
                    self._queue,
                    [
                        each
                        for each, one in zip(batch.requests, asked, strict=True)
                        if not one.answer.done()
                    ],
                )
            else:
                for each in batch.requests:
                    self._fail(each.number, result)
            self._pump_soon()

        instance.run(Task(joined.shapes, output_bytes, fill, then))

    def _fault(self, batch: Batch, error: Exception) -> None:
        """A bug of ours met a batch: its requests fail, and the log has the trace."""
        spec = self.spec
        log.error("deployment.fault", model=spec.model, version=spec.version, exc_info=error)
        for each in batch.requests:
            self._fail(each.number, crucible_error(error))

    def _answer(
        self,
        batch: Batch,
        asked: Sequence[_PendingRequest],
        joined: JoinedBatch,
        ran: BatchResult,
        filling_s: float,
    ) -> None:
        """Give each request its own rows, and count."""
        began = monotonic()
        there = [not one.answer.done() for one in asked]
        wanted = [
            one.wants if is_there else frozenset[str]()
            for one, is_there in zip(asked, there, strict=True)
        ]
        try:
            outputs = self._rows.cut(joined, ran.outputs, wanted)
        except Exception as error:  # noqa: BLE001  the edge of a batch
            self._fault(batch, error)
            return
        now = monotonic()
        values = sum(math.prod(shape) for shape in joined.shapes)
        of_batch = Timing(
            0.0, ran.copy_in_s + filling_s, ran.compute_s, ran.copy_out_s + now - began, batch.rows
        )
        working = of_batch.copy_in_s + of_batch.compute_s + of_batch.copy_out_s
        self._tally.ran(len(asked), of_batch, values, values - joined.values)
        for one, is_there, mine in zip(asked, there, outputs, strict=True):
            if is_there:
                total = now - one.since
                timing = Timing(
                    max(0.0, total - working),
                    of_batch.copy_in_s,
                    of_batch.compute_s,
                    of_batch.copy_out_s,
                    batch.rows,
                )
                self._tally.answered(timing, total)
                one.answer.set_result(
                    InferAnswer(
                        self.spec.model,
                        self.spec.version,
                        self.spec.device,
                        mine,
                        timing,
                        one.request.id,
                    )
                )

    def _look_quiet(self) -> None:
        if self._draining and not self._asked:
            self._quiet.set()


def _threads(spec: DeploymentSpec) -> int:
    """Of one worker: several on the CPU share its cores."""
    if spec.engine.threads or spec.instances == 1 or spec.device != "cpu":
        return spec.engine.threads
    return max(1, usable_cores() // spec.instances)
