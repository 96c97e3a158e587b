"""One loaded version of a model: its queue, its batches, its workers.

deployment = await Deployment.start(spec, work, figures)     every worker has loaded the engine and
                                                             warmed up
answer = await deployment.infer(request)                     cancelling drops a waiting request
await deployment.drain()                                     refuse new requests, answer the others
await deployment.close()                                     end the workers; waiting requests get
                                                             Unavailable
"""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import math
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Literal

from pipeline.core.artifacts import Engine
from pipeline.errors import CrucibleError
from pipeline.execution.exit_causes import crucible_error
from pipeline.host.environment import usable_cores
from pipeline.serving_inputs import with_made_inputs
from pipeline.text_inputs import lengths_of
from service import logs
from service.errors import ServiceError, TimedOut, TooMany, Unavailable, Unprocessable
from service.inference import (
    InferAnswer,
    InferRequest,
    ModelState,
    Served,
    ServedDevice,
    Statistics,
    Timing,
)
from service.regions import Inputs
from service.registry.models import DeploymentOptions, Version, version_name
from service.sandbox.layers import Sandbox
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
from service.serving.stats import Figures, InputValues, Tally, Traffic
from service.serving.worker_client import BatchResult, NotStarted, Order, Task, worker_for
from service.storage.layout import Work

RUNS_TO_CAPTURE = 3  # of a shape: plain, captured, launched
# A worker hangs if a batch takes longer than this many request time-outs: it is stopped.
STUCK_TIMEOUTS = 3.0
MIN_STUCK_S = 10.0  # at least this long
# A reloaded version has two deployments for a moment: the number keeps their processes apart.
LOADS = itertools.count(1)

log = logs.get("service.deployment")


@dataclass(frozen=True)
class DeploymentSpec:
    """The version to load, and the options for serving it."""

    version: Version
    engine: Engine
    options: DeploymentOptions
    devices: tuple[str, ...]  # "cpu", "gpu:0", ...
    load_s: float  # time-out for a worker to become ready
    most_instances: int | None = None  # that fit into the memory, if no number was requested
    note: str = ""  # the devices that were left out, and why

    @property
    def instances(self) -> int:
        """The number of batches that run at once on each device.

        As requested, or as the compile found it best.
        """
        if self.options.instances:
            return self.options.instances
        best = self.version.best_point.sessions if self.version.best_point else 1
        return min(best, self.most_instances or best)

    @property
    def all_instances(self) -> int:
        """The number of batches that run at once on all devices."""
        return self.instances * len(self.devices)

    @property
    def sessions(self) -> int:
        """The number of instances in one worker: all, if they share the weights."""
        return self.instances if self.engine.shares_weights else 1

    @property
    def max_batch(self) -> int | None:
        """The rows that may run together: as requested, or as the compile found it best."""
        best = self.version.best_point
        return self.options.max_batch or (best.batch if best else None)


@dataclass(slots=True)
class _PendingRequest:
    """A request without an answer yet."""

    request: InferRequest
    inputs: Inputs
    shapes: MatchedShapes
    selection: frozenset[str] | None  # outputs; None: all
    since: float
    answer: asyncio.Future[InferAnswer]


class Deployment:
    """One loaded version. Belongs to one event loop; a request needs only its own task."""

    def __init__(
        self,
        spec: DeploymentSpec,
        work: Path,
        figures: Figures,
        worker: Sequence[str],
        sandbox: Sandbox,
    ) -> None:
        self.spec = spec
        version, options = spec.version, spec.options
        self._loop = asyncio.get_running_loop()
        self._work = work
        engine = spec.engine.model_copy(update={"threads": _threads(spec)})
        self._matcher = ShapeMatcher(engine, version.batch, spec.max_batch)
        self._rows = BatchAssembler(engine.inputs, engine.outputs, self._matcher.axes)
        self._outputs = tuple(spec.name for spec in engine.outputs)
        self._served = replace(
            served_version(version, spec.devices, "ready", ""),
            max_batch=self._matcher.maximum,
            instances=spec.instances,
        )
        self._queue = Queue(Rules(self._matcher.maximum, options.max_delay_s))
        self._pending: dict[int, _PendingRequest] = {}
        self._numbers = itertools.count()
        self._tally = Tally(
            figures,
            version.model,
            version.version,
            spec.devices,
            lambda: len(self._queue.waiting),
        )
        self.traffic = Traffic()
        self._timer: asyncio.TimerHandle | None = None
        self._is_scheduled = self._draining = self._closed = False
        self._is_empty = asyncio.Event()
        order = partial(
            Order,
            engine_name=version_name(version.model, version.version),
            engine=engine,
            warm=self._matcher.warm_sizes(),
            runs=RUNS_TO_CAPTURE if captures(engine) else 1,
            load_s=spec.load_s,
            sessions=spec.sessions,
            stuck_s=max(MIN_STUCK_S, STUCK_TIMEOUTS * options.timeout_s),
            command=worker,
            sandbox=sandbox,
        )
        load = next(LOADS)
        workers_of_device = spec.instances // spec.sessions
        self._instances = [
            Instance(
                order(
                    f"{version.model}-{version.version}-{load}-{number}",
                    device=device,
                    work=Work(work / str(number)),
                ),
                self._changed,
            )
            for number, device in enumerate(
                device for device in spec.devices for _ in range(workers_of_device)
            )
        ]

    @classmethod
    async def start(
        cls,
        spec: DeploymentSpec,
        work: Path,
        figures: Figures,
        worker: Sequence[str] = (),
        sandbox: Sandbox | None = None,
    ) -> Deployment:
        """Load and warm up, with logs and temporary files below `work`.

        If a worker does not become ready, its error is raised and everything is cleaned up, on all
        devices.
        """
        deployment = cls(
            spec, work, figures, worker or worker_for(spec.engine), sandbox or Sandbox(work)
        )
        tasks = [
            asyncio.ensure_future(deployment._start(instance)) for instance in deployment._instances
        ]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await deployment.close()
            raise
        deployment._tally.show()
        return deployment

    async def _start(self, instance: Instance) -> None:
        """Start an instance. Its error tells what becomes of the other devices."""
        try:
            await instance.start()
        except CrucibleError as error:
            others = ", ".join(name for name in self.spec.devices if name != instance.device)
            if not others:
                raise
            raise type(error)(
                f"{error.message}; so the load on {others} was undone, too",
                f"{error.next_step}; or give a `device` without {instance.device}",
            ) from error

    async def infer(self, request: InferRequest) -> InferAnswer:
        """Run one request; see `Serving.infer`."""
        self._admit()
        inputs = self._matcher.settled(request.inputs)
        shapes = self._matcher.match(inputs)
        selection = self._selection(request.outputs)
        options = self.spec.options
        if len(self._queue.waiting) >= options.queue_limit:
            self._tally.failed("refused", 0.0)
            raise TooMany(
                f"{options.queue_limit} requests already wait for '{self.model}', its queue limit"
                " (`queue_limit`)",
                "send the request again later, or raise `queue_limit` of its deployment",
                self._retry_after_s(),
            )
        number, since = next(self._numbers), monotonic()
        answer = self._loop.create_future()
        pending = _PendingRequest(request, inputs, shapes, selection, since, answer)
        self._pending[number] = pending
        self.traffic.requested(shapes.sizes)
        length = shapes.lengths[0] if shapes.kind.room else 0
        waiting = WaitingRequest(number, shapes.rows, since, shapes.kind, length)
        self._queue = offer(self._queue, waiting)
        self._schedule()
        timeout_s = options.timeout_s
        if request.timeout_s is not None:
            timeout_s = min(request.timeout_s, timeout_s)
        timer = self._loop.call_later(timeout_s, self._time_out, number, timeout_s)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            if self._remove_waiting(number):
                self._tally.dropped()
            raise
        finally:
            timer.cancel()
            self._pending.pop(number, None)
            self._check_empty()

    def served(self) -> Served:
        """Describe the deployment to clients.

        Its state is `loading` also while the only worker is restarted after a crash. It is `ready`
        as long as one device is.
        """
        if not self._draining and all(instance.state == "ready" for instance in self._instances):
            return self._served
        return self._described()

    def statistics(self) -> Statistics:
        """The statistics since the version was loaded."""
        return self._tally.statistics()

    @property
    def model(self) -> str:
        """The model's name."""
        return self.spec.version.model

    @property
    def memory_bytes(self) -> int:
        """The device memory that the workers held when they became ready."""
        return sum(instance.memory_bytes for instance in self._instances)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the guardians of the workers."""
        return tuple(instance.pid for instance in self._instances if instance.pid)

    async def drain(self) -> None:
        """Refuse new requests; return when all others are answered."""
        self._draining = True
        self._check_empty()
        await self._is_empty.wait()

    async def close(self) -> None:
        """End the workers and free their memory. It can be called again."""
        if self._closed:
            return
        self._closed = self._draining = True
        self._fail_waiting(ended(self.spec.version))
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(instance.close() for instance in self._instances))
        self._tally.close()
        await asyncio.to_thread(shutil.rmtree, self._work, True)

    # -- requests ----------------------------------------------------------------

    def _state(self, instances: Sequence[Instance]) -> tuple[ModelState, str]:
        """The state of these instances, and the first reason why none is ready."""
        reason = next((each.reason for each in instances if each.reason), "")
        if self._draining:
            return "draining", reason
        states = {each.state for each in instances}
        if "ready" in states:
            return "ready", ""
        return ("loading" if "starting" in states else "failed"), reason

    def _described(self) -> Served:
        state, reason = self._state(self._instances)
        devices = tuple(map(self._served_device, self.spec.devices))
        return replace(self._served, state=state, reason=reason, devices=devices)

    def _served_device(self, device: str) -> ServedDevice:
        instances = [instance for instance in self._instances if instance.device == device]
        # the memory of a worker that has gone is free
        memory_bytes = sum(instance.memory_bytes for instance in instances if instance.pid)
        state, reason = self._state(instances)
        return ServedDevice(device=device, state=state, reason=reason, memory_bytes=memory_bytes)

    def _admit(self) -> None:
        """Refuse the request with Unavailable unless a worker is ready."""
        if self._draining or not self._has_ready_instance:
            raise self._not_ready()

    @property
    def _has_ready_instance(self) -> bool:
        return any(instance.state == "ready" for instance in self._instances)

    def _not_ready(self) -> Unavailable:
        """The refusal of a deployment that is not ready, with the reason."""
        served = self.served()
        reason = f": {served.reason}" if served.reason else ""
        next_step = (
            "read the service's log, and deploy the model again"
            if served.state == "failed"
            else "send the request again"
        )
        return Unavailable(
            f"'{served.model}' is {served.state}{reason}",
            next_step,
            60 if served.state == "failed" else 1,
        )

    def _selection(self, outputs: tuple[str, ...]) -> frozenset[str] | None:
        unknown = [name for name in outputs if name not in self._outputs]
        if unknown:
            raise Unprocessable(
                f"no output {', '.join(map(repr, unknown))}; the model has"
                f" {', '.join(map(repr, self._outputs))}",
                "request these outputs, or leave them out for all",
            )
        return frozenset(outputs) or None

    def _retry_after_s(self) -> int:
        """Estimate the time for the waiting requests, at the average speed so far."""
        batches = len(self._queue.waiting) / self._queue.rules.maximum / self.spec.all_instances
        return max(1, math.ceil(batches * self._tally.seconds_per_batch))

    def _time_out(self, number: int, timeout_s: float) -> None:
        if self._remove_waiting(number) and not self._has_ready_instance:
            self._fail(number, self._not_ready())
            return
        message = f"'{self.model}' did not answer within {timeout_s:g} s"
        self._fail(
            number, TimedOut(message, "allow more time, or send fewer requests"), "timed_out"
        )

    def _remove_waiting(self, number: int) -> bool:
        """Remove a request from the queue; False if it runs already."""
        previous, self._queue = self._queue, drop(self._queue, number)
        return previous is not self._queue

    def _fail_waiting(self, error: ServiceError) -> None:
        waiting = self._queue.waiting
        self._queue = Queue(self._queue.rules)
        for request in waiting:
            self._fail(request.number, error)

    def _fail(
        self, number: int, error: Exception, state: Literal["failed", "timed_out"] = "failed"
    ) -> None:
        pending = self._pending.get(number)
        if pending is not None and not pending.answer.done():
            self._tally.failed(state, monotonic() - pending.since)
            pending.answer.set_exception(error)

    # -- batches -----------------------------------------------------------------

    def _changed(self) -> None:
        """React to a worker that became ready, was lost or was given up.

        Requests wait for the replacement of a lost worker.
        """
        if self._closed:
            return
        self._served = self._described()
        if all(instance.state == "failed" for instance in self._instances):
            self._fail_waiting(self._not_ready())
        self._schedule()

    def _schedule(self) -> None:
        """Dispatch batches after the event loop has read all arrived requests.

        So requests that arrive at the same time run together.
        """
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self, now: float = 0.0) -> None:
        """Give batches to workers while there are both."""
        self._is_scheduled = False
        now = max(now, monotonic())
        while self._queue.waiting:
            instance = self._least_loaded()
            if instance is None:
                return
            self._queue, batch = take(self._queue, now, instance.is_idle)
            if batch is None:
                self._wake_at(deadline(self._queue) or now)
                return
            self._run(instance, batch)

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # The timer may fire a clock tick early: `_dispatch` takes `when` as the time then.
        self._timer = self._loop.call_later(max(0.0, when - monotonic()), self._dispatch, when)

    def _least_loaded(self) -> Instance | None:
        """The instance with room that has the fewest batches."""
        with_room = (instance for instance in self._instances if instance.has_room)
        return min(with_room, key=lambda instance: instance.load, default=None)

    def _run(self, instance: Instance, batch: Batch) -> None:
        requests = [self._pending[request.number] for request in batch.requests]
        try:
            parts = [
                BatchPart(self._engine_inputs(pending.inputs), pending.shapes, place)
                for pending, place in zip(requests, batch.places, strict=True)
            ]
            joined = self._rows.join(batch.requests[0].kind, parts, batch.size)
            output_bytes = self._rows.output_bytes(joined.shapes)
            inputs = self._rows.unchanged(joined)
        except Exception as error:  # noqa: BLE001  the edge of a batch
            self._fail_batch(batch, error)
            return
        filling_s = 0.0

        def fill(targets: Sequence[Array]) -> None:
            nonlocal filling_s
            began = monotonic()
            self._rows.fill(joined, targets)
            filling_s = monotonic() - began

        def then(result: BatchResult | CrucibleError) -> None:
            if isinstance(result, BatchResult):
                self._answer(batch, requests, joined, result, filling_s)
            elif isinstance(result, Unprocessable) and len(batch.requests) > 1:
                # One of the requests has bad inputs.
                self._put_back(replace(each, alone=True) for each in batch.requests)
            elif isinstance(result, NotStarted) and not self._closed:
                self._put_back(batch.requests)
            else:
                for request in batch.requests:
                    self._fail(request.number, result)
            self._schedule()

        instance.run(Task(joined.shapes, output_bytes, fill, then, inputs))

    def _engine_inputs(self, inputs: Inputs) -> Inputs:
        """Add the inputs that clients do not send."""
        spec = self.spec
        return with_made_inputs(inputs, spec.engine.inputs, spec.version.batch.packing)

    def _put_back(self, requests: Iterable[WaitingRequest]) -> None:
        """Queue the requests of a batch again, but for those that are answered."""
        waiting = [
            request
            for request in requests
            if (pending := self._pending.get(request.number)) and not pending.answer.done()
        ]
        self._queue = put_back(self._queue, waiting)

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        """Fail the requests of a batch after a bug of ours, and log the traceback."""
        version = self.spec.version.version
        log.error("deployment.fault", model=self.model, version=version, exc_info=error)
        for request in batch.requests:
            self._fail(request.number, crucible_error(error))

    def _answer(
        self,
        batch: Batch,
        requests: Sequence[_PendingRequest],
        joined: JoinedBatch,
        result: BatchResult,
        filling_s: float,
    ) -> None:
        """Answer each request with its own rows, and update the statistics."""
        began = monotonic()
        is_open = [not pending.answer.done() for pending in requests]
        selections = [
            pending.selection if waits else frozenset[str]()
            for pending, waits in zip(requests, is_open, strict=True)
        ]
        try:
            outputs = self._rows.cut(joined, result.outputs, selections)
        except Exception as error:  # noqa: BLE001  the edge of a batch
            self._fail_batch(batch, error)
            return
        now = monotonic()
        values = InputValues(
            sent=joined.values,
            run=sum(math.prod(shape) for shape in joined.sent_shapes),
            at_max=self._matcher.values_at_max(
                joined.sent_shapes, sum(pending.shapes.rows for pending in requests)
            ),
        )
        of_batch = Timing(
            queue_s=0.0,
            copy_in_s=result.copy_in_s + filling_s,
            compute_s=result.compute_s,
            copy_out_s=result.copy_out_s + now - began,
            batch_size=batch.rows,
        )
        working_s = of_batch.copy_in_s + of_batch.compute_s + of_batch.copy_out_s
        self._tally.ran(result.device, len(requests), of_batch, values)
        self.traffic.ran(joined.sizes, len(requests), values)
        for pending, waits, own_outputs in zip(requests, is_open, outputs, strict=True):
            if waits:
                total_s = now - pending.since
                timing = Timing(
                    max(0.0, total_s - working_s),
                    of_batch.copy_in_s,
                    of_batch.compute_s,
                    of_batch.copy_out_s,
                    batch.rows,
                )
                self._tally.answered(timing, total_s)
                pending.answer.set_result(
                    InferAnswer(
                        self.model,
                        self.spec.version.version,
                        result.device,
                        own_outputs,
                        timing,
                        pending.request.id,
                    )
                )

    def _check_empty(self) -> None:
        if self._draining and not self._pending:
            self._is_empty.set()


def _threads(spec: DeploymentSpec) -> int:
    """The threads of one worker: several workers on the CPU share its cores."""
    if spec.engine.threads or spec.instances == 1 or spec.devices != ("cpu",):
        return spec.engine.threads
    return max(1, usable_cores() // spec.instances)


def ended(version: Version) -> Unavailable:
    """Return the error of requests that a version has not answered when it ends."""
    return Unavailable(
        f"{version_name(version.model, version.version)} ended before it answered this request",
        "send the request again; `drain_s` of the deployment is the time that a version has to"
        " finish",
        1,
    )


def served_version(
    version: Version, devices: Iterable[str], state: ModelState, reason: str
) -> Served:
    """Describe a version to clients, with as many rows together as were proved."""
    return Served(
        model=version.model,
        version=version.version,
        owner=version.owner,
        devices=tuple(
            ServedDevice(device=device, state=state, reason=reason) for device in devices
        ),
        backend=version.backend,
        inputs=version.inputs,
        outputs=version.outputs,
        batch=version.batch,
        max_batch=version.most_together,
        state=state,
        reason=reason,
        image=version.image,
        labels=version.labels,
        text=version.text,
        lengths=_lengths(version),
        created_s=int(dt.datetime.fromisoformat(version.created).timestamp()),
    )


def _lengths(version: Version) -> tuple[tuple[int, int], ...]:
    """The lengths of texts that a version takes."""
    if version.text is None:
        return ()
    name = version.text.recipe.input
    spec = next(spec for spec in version.inputs if spec.name == name)
    return lengths_of(spec, version.profiles)
