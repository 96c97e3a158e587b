"""Large inputs are written by a thread: what goes on meanwhile, and what ends it."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper

from pipeline.core.artifacts import Engine
from pipeline.errors import InternalError
from service.errors import TimedOut, Unavailable, Unprocessable
from service.inference import InferAnswer
from service.regions import Region, RegionTensor
from service.serving.worker_client import LARGE_BYTES, NotStarted, Task, Worker
from service.storage.layout import Work
from tests.service.serving.engines import (
    MODEL,
    Bench,
    deployed,
    engine_of,
    linear,
    marked,
    play,
)
from tests.service.serving.test_worker_client import order_of

WIDE = LARGE_BYTES // 4  # float32 values: one row is large
WAIT_S = 60.0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class HeldTensor(RegionTensor):
    """A row of `value`, which is written when `go` is set; or `error` is raised then."""

    value: float = 1.0
    error: Exception | None = None
    began: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def read_into(self, target: np.ndarray[Any, Any]) -> None:
        self.began.set()
        assert self.go.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        target[...] = self.value


def held(value: float = 1.0, error: Exception | None = None) -> HeldTensor:
    region = Region("r", "held", 0, LARGE_BYTES)
    return HeldTensor(region, np.dtype(np.float32), (1, WIDE), value, error)


def row(value: float) -> np.ndarray[Any, Any]:
    return np.full((1, WIDE), value, np.float32)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """x float32 [batch, WIDE] -> y = -x."""
    shape = (TensorProto.FLOAT, ["batch", WIDE])
    node = helper.make_node("Neg", ["x"], ["y"])
    return engine_of(tmp_path_factory.mktemp("wide"), [node], {"x": shape}, {"y": shape})


async def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


async def copying(bench: Bench, tensor: HeldTensor, **more: Any) -> "asyncio.Task[InferAnswer]":
    """A request whose inputs a thread writes now."""
    request = asyncio.ensure_future(bench.ask(tensor, **more))
    await until(tensor.began.is_set)
    return request


def load(bench: Bench) -> int:
    (instance,) = bench.deployment._instances
    return instance.load


async def check_answers(bench: Bench) -> None:
    """More requests than a worker has slots get their own answers."""
    values = [float(number) for number in range(2, 8)]
    answers = await asyncio.gather(*(bench.ask(row(value)) for value in values))
    for value, answer in zip(values, answers, strict=True):
        assert np.array_equal(answer.outputs["y"], row(-value))


def test_the_loop_and_a_second_copy_go_on_meanwhile(tmp_path: Path, wide: Engine) -> None:
    small = linear(tmp_path)

    async def story() -> None:
        async with (
            deployed(tmp_path, wide, max_batch=1) as bench,
            deployed(tmp_path, small, model=f"other-{MODEL}") as other,
        ):
            one, two = held(1), held(2)
            first, second = await copying(bench, one), await copying(bench, two)
            assert (await other.ask(marked(1))).outputs["y"].shape == (1, 8)
            assert load(bench) == 2
            two.go.set()
            assert np.array_equal((await second).outputs["y"], row(-2))
            assert not first.done()
            one.go.set()
            assert np.array_equal((await first).outputs["y"], row(-1))
            await check_answers(bench)

    play(story)


def test_a_request_that_is_given_up_keeps_its_slot_and_inputs_until_they_are_written(
    tmp_path: Path, wide: Engine
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, wide, max_batch=1) as bench:
            tensor = held()
            go, inputs = tensor.go, weakref.ref(tensor)
            request = await copying(bench, tensor)
            del tensor
            request.cancel()
            await asyncio.wait([request])
            assert request.cancelled()
            await check_answers(bench)  # in the other slot
            assert load(bench) == 1
            assert inputs() is not None
            go.set()
            await until(lambda: load(bench) == 0)
            await check_answers(bench)

            late = held()
            request = await copying(bench, late, timeout_s=0.1)
            with pytest.raises(TimedOut):
                await request
            assert load(bench) == 1
            late.go.set()
            await until(lambda: load(bench) == 0)
            await check_answers(bench)

    play(story)


def test_a_batch_that_was_being_written_for_a_lost_worker_runs_on_the_next_one(
    tmp_path: Path, wide: Engine
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, wide, max_batch=1) as bench:
            tensor = held()
            request = await copying(bench, tensor)
            (pid,) = bench.deployment.pids
            for process in psutil.Process(pid).children():
                process.kill()
            await until(lambda: bench.deployment.served().state == "loading")
            assert not request.done()
            tensor.go.set()
            assert np.array_equal((await request).outputs["y"], row(-1))
            assert bench.deployment.pids != (pid,)
            assert load(bench) == 0
            await check_answers(bench)

    play(story)


def test_an_error_costs_its_own_request_and_no_slot(tmp_path: Path, wide: Engine) -> None:
    async def story() -> None:
        async with deployed(tmp_path, wide) as bench:
            for error, expected in (
                (Unprocessable("it is too short", "send more"), Unprocessable),
                (ValueError("could not broadcast"), InternalError),
            ):
                for _ in range(3):
                    tensor = held(error=error)
                    tensor.go.set()
                    with pytest.raises(expected, match=str(error.args[0])):
                        await bench.ask(tensor)
            bad = held(error=Unprocessable("it is too short", "send more"))
            bad.go.set()
            answers = await asyncio.gather(
                bench.ask(row(2)), bench.ask(bad), return_exceptions=True
            )
            assert isinstance(answers[0], InferAnswer)
            assert np.array_equal(answers[0].outputs["y"], row(-2))
            assert isinstance(answers[1], Unprocessable)
            await check_answers(bench)

    play(story)


@pytest.mark.parametrize("error", [None, ValueError("could not broadcast")])
def test_a_copy_that_ends_after_its_worker_changes_nothing(
    tmp_path: Path, wide: Engine, error: Exception | None
) -> None:
    async def story() -> None:
        worker = await Worker.start(order_of(Work(tmp_path / "work"), wide, "echo"))
        tensor = held(error=error)
        outcomes: list[object] = []

        def fill(targets: Sequence[Any]) -> None:
            tensor.read_into(targets[0])

        worker.run(Task(((1, WIDE),), LARGE_BYTES, fill, outcomes.append))
        await until(tensor.began.is_set)
        worker._break("was broken by a test")
        assert [type(outcome) for outcome in outcomes] == [NotStarted]
        tensor.go.set()
        await worker.end()
        assert len(outcomes) == 1
        assert (worker.load, worker.has_room) == (0, False)

    play(story)


def test_close_answers_the_request_and_waits_for_the_thread(tmp_path: Path, wide: Engine) -> None:
    async def story() -> None:
        async with deployed(tmp_path, wide) as bench:
            tensor = held()
            request = await copying(bench, tensor)
            closing = asyncio.ensure_future(bench.deployment.close())
            with pytest.raises(Unavailable):
                await request
            done, _ = await asyncio.wait([closing], timeout=1.0)
            assert not done
            tensor.go.set()
            await closing

    play(story)


def test_drain_waits_for_a_copy(tmp_path: Path, wide: Engine) -> None:
    async def story() -> None:
        async with deployed(tmp_path, wide) as bench:
            tensor = held()
            request = await copying(bench, tensor)
            draining = asyncio.ensure_future(bench.deployment.drain())
            await asyncio.sleep(0)
            assert not draining.done()
            tensor.go.set()
            await draining
            assert np.array_equal((await request).outputs["y"], row(-1))

    play(story)
