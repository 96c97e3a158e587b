"""Workers that crash, hang and lie: what it costs, and what is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop
from onnx import TensorProto, helper
from structlog.testing import capture_logs

from pipeline.core.artifacts import Engine
from pipeline.errors import HostError, InternalError
from service.errors import TimedOut, Unavailable, Unprocessable
from service.inference import InferAnswer
from service.serving.batch_assembly import BatchAssembler
from service.serving.replica import MAX_CRASHES, MAX_PAUSE_S, Instance, pause_after
from service.serving.worker_client import BatchResult, Order, Task, Worker
from service.storage.layout import Work
from tests.service.serving.engines import (
    MODEL,
    Bench,
    asking,
    deployed,
    direct,
    engine_of,
    linear,
    looked_up,
    marked,
    play,
    processes_of,
)

DOUBLE = str(Path(__file__).with_name("engine_double.py"))
EVIL = np.full((1, 8), 666, np.float32)

BATCHES = 4  # twice the slots of a worker with one session


def double(behaviour: str) -> tuple[str, ...]:
    return (sys.executable, DOUBLE, behaviour)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return linear(tmp_path_factory.mktemp("engine"))


async def until(reached: Any, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def state(bench: Bench) -> str:
    return bench.deployment.served().state


def test_pauses_double_and_end() -> None:
    pauses = [pause_after(crashes) for crashes in range(1, MAX_CRASHES + 1)]
    assert pauses[-1] is None
    lasting = [pause for pause in pauses if pause is not None]
    assert lasting == pauses[:-1]
    assert all(later == 2 * earlier for earlier, later in pairwise(lasting))
    assert max(lasting) <= MAX_PAUSE_S


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("unloadable", "its files are damaged"), ("stillborn", "ended with exit code 3|code 3")],
)
def test_a_worker_that_does_not_load_is_an_error_and_leaves_nothing(
    tmp_path: Path, engine: Engine, behaviour: str, message: str
) -> None:
    async def story() -> None:
        with pytest.raises(HostError, match=message):
            async with deployed(tmp_path, engine, worker=double(behaviour), instances=2):
                pass
        assert processes_of(f"serve-{MODEL}-") == []
        assert list(tmp_path.iterdir()) == []

    play(story)


def test_a_worker_that_hangs_while_it_loads_has_its_time_and_no_more(
    tmp_path: Path, engine: Engine
) -> None:
    async def story() -> None:
        with pytest.raises(TimedOut, match=r"did not load its engine within 0.5 s") as error:
            async with deployed(tmp_path, engine, worker=double("mute"), load_s=0.5):
                pass
        assert "raise `load_timeout_s`" in error.value.next_step
        assert processes_of(f"serve-{MODEL}-") == []
        assert list(tmp_path.iterdir()) == []

    play(story)


def test_loading_can_be_given_up(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1), deployed(tmp_path, engine, worker=double("mute")):
                pass
        assert processes_of(f"serve-{MODEL}-") == []

    play(story)


@pytest.mark.parametrize("behaviour", ["segfault", "outside", "huge", "rank", "greedy"])
def test_a_worker_that_crashes_or_lies_costs_its_requests_only(
    tmp_path: Path, engine: Engine, behaviour: str
) -> None:
    async def story() -> None:
        async with (
            deployed(tmp_path, engine, worker=double(behaviour)) as bench,
            deployed(tmp_path, engine, model=f"other-{MODEL}") as other,
        ):
            with pytest.raises(Unavailable, match="lost") as error:
                await bench.ask(EVIL)
            assert int(error.value.headers["Retry-After"]) >= 1
            assert np.allclose(
                np.linalg.norm((await other.ask(marked(1))).outputs["y"]), np.linalg.norm(marked(1))
            )
            await until(lambda: state(bench) == "ready")
            assert (await bench.ask(marked(2))).outputs["y"].tolist() == marked(2).tolist()
            assert bench.deployment.statistics().failed.count == 1

    play(story)


@pytest.mark.parametrize("behaviour", ["rubbish", "twice", "unasked"])
def test_a_worker_that_never_keeps_to_the_protocol_is_given_up(
    tmp_path: Path, engine: Engine, behaviour: str
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine, worker=double(behaviour)) as bench:
            await until(lambda: state(bench) == "failed")
            assert "protocol" in bench.deployment.served().reason
            with pytest.raises(
                Unavailable, match=f"'{MODEL}' is failed: its worker does not keep to the protocol"
            ):
                await bench.ask(marked(1))

    play(story)


def order_of(work: Work, engine: Engine, behaviour: str, stuck_s: float = 60.0) -> Order:
    return Order(
        name=f"{MODEL}-{behaviour}",
        engine_name="it",
        engine=engine,
        warm=(),
        runs=1,
        device="cpu",
        work=work,
        load_s=60,
        stuck_s=stuck_s,
        command=double(behaviour),
    )


def written(array: Any, targets: Sequence[Any]) -> None:
    np.copyto(targets[0], array)


def test_a_task_that_cannot_be_written_costs_no_slot(tmp_path: Path, engine: Engine) -> None:
    """Two such batches, whatever was raised, used to leave the worker without a slot for ever."""

    def broken(targets: Sequence[Any]) -> None:
        raise ValueError("could not broadcast input array")

    async def story() -> None:
        worker = await Worker.start(order_of(Work(tmp_path / "work"), engine, "echo"))
        try:
            failed: list[object] = []
            for _ in range(BATCHES):
                worker.run(Task(((1, 8),), 32, broken, failed.append))
            assert [type(error) for error in failed] == [InternalError] * BATCHES
            assert (worker.has_room, worker.load) == (True, 0)
            answered: list[object] = []
            for _ in range(BATCHES):
                await until(lambda: worker.has_room)
                worker.run(Task(((1, 8),), 32, partial(written, marked(1)), answered.append))
            await until(lambda: len(answered) == BATCHES)
            assert {type(answer) for answer in answered} == {BatchResult}
        finally:
            await worker.end()

    play(story)


class Faulty(BatchAssembler):
    """Rows with a bug: `fault` says in which step."""

    def __init__(self, rows: BatchAssembler, fault: str) -> None:
        self._rows, self._fault = rows, fault

    def join(self, *arguments: Any) -> Any:
        return self._do("join", *arguments)

    def unchanged(self, *arguments: Any) -> Any:
        return self._do("unchanged", *arguments)

    def fill(self, *arguments: Any) -> Any:
        return self._do("fill", *arguments)

    def cut(self, *arguments: Any) -> Any:
        return self._do("cut", *arguments)

    def output_bytes(self, shapes: Any) -> int:  # type: ignore[override]  # not cached
        return int(self._do("output_bytes", shapes))

    def _do(self, step: str, *arguments: Any) -> Any:
        if step == self._fault:
            raise ValueError(f"a bug in {step}")
        return getattr(self._rows, step)(*arguments)


@pytest.mark.parametrize("fault", ["join", "output_bytes", "unchanged", "fill", "cut"])
def test_a_bug_of_ours_is_answered_at_once_and_the_model_goes_on(
    tmp_path: Path,
    engine: Engine,
    fault: str,
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine, worker=double("echo")) as bench:
            rows = bench.deployment._rows
            bench.deployment._rows = Faulty(rows, fault)
            with capture_logs() as logged:
                for _ in range(BATCHES):
                    with pytest.raises(InternalError, match=f"ValueError: a bug in {fault}"):
                        await bench.ask(marked(1))
            assert sum(event["log_level"] == "error" for event in logged) == BATCHES
            assert all(isinstance(event["exc_info"], ValueError) for event in logged)
            bench.deployment._rows = rows
            assert (await bench.ask(marked(2))).outputs["y"].tolist() == marked(2).tolist()
            assert state(bench) == "ready"

    play(story)


class Crumbling(Work):
    """A folder that cannot be prepared a second time, for a reason that nobody thought of."""

    prepared: int

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        object.__setattr__(self, "prepared", 0)

    def prepare(self) -> None:
        object.__setattr__(self, "prepared", self.prepared + 1)
        if self.prepared > 1:
            raise RuntimeError("nobody thought of this")
        super().prepare()


def test_an_instance_that_cannot_be_started_again_says_so(tmp_path: Path, engine: Engine) -> None:
    """It was `starting` for ever, and nothing was logged."""

    async def story() -> None:
        changes: list[str] = []
        order = order_of(Crumbling(tmp_path / "work"), engine, "echo")
        instance = Instance(order, lambda: changes.append(instance.state))
        await instance.start()
        with capture_logs() as logged:
            assert instance._worker is not None
            instance._worker._break("was broken by a test")
            await until(lambda: instance.state == "failed")
        assert "nobody thought of this" in instance.reason
        assert changes[-1] == "failed"
        faults = [event for event in logged if isinstance(event.get("exc_info"), RuntimeError)]
        assert len(faults) == MAX_CRASHES - 1
        await instance.close()

    play(story)


def test_a_worker_that_hangs_is_stopped(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        order = order_of(Work(tmp_path / "work"), engine, "hang", stuck_s=0.2)
        worker = await Worker.start(order)
        outcomes: list[object] = []
        worker.run(
            Task(((1, 8),), 32, lambda targets: np.copyto(targets[0], EVIL), outcomes.append)
        )
        assert "did not answer any more" in await worker.broken()
        await worker.end()
        assert [type(outcome) for outcome in outcomes] == [Unavailable]
        assert not worker.has_room
        assert processes_of(f"serve-{MODEL}-hang") == []

    play(story)


def test_an_output_without_its_rows_is_our_fault_and_not_the_workers_end(
    tmp_path: Path, engine: Engine
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine, worker=double("rows")) as bench:
            answers = await asyncio.gather(
                bench.ask(EVIL), bench.ask(marked(1)), return_exceptions=True
            )
            assert [type(each).__name__ for each in answers] == ["InternalError", "InternalError"]

    play(story)


def workers_of(bench: Bench) -> list[psutil.Process]:
    return [child for pid in bench.deployment.pids for child in psutil.Process(pid).children()]


def test_killed_in_mid_request_it_is_started_again_and_another_instance_goes_on(
    tmp_path: Path, engine: Engine
) -> None:
    async def story() -> None:
        async with deployed(
            tmp_path, engine, worker=double("slow-1"), instances=2, max_batch=1
        ) as bench:
            requests = [asyncio.ensure_future(bench.ask(marked(n))) for n in range(6)]
            await asyncio.sleep(0.1)
            workers_of(bench)[0].kill()
            answers = await asyncio.gather(*requests, return_exceptions=True)
            lost = [answer for answer in answers if isinstance(answer, Exception)]
            assert [type(error) for error in lost] == [Unavailable]  # what ran
            for number, answer in enumerate(answers):
                assert (
                    isinstance(answer, BaseException)
                    or answer.outputs["y"].tolist() == marked(number).tolist()
                )
            await until(lambda: len(bench.deployment.pids) == 2)

    play(story)


@pytest.mark.parametrize("behaviour", ["segfault", "short"])
def test_a_crash_loses_what_ran_and_the_replacement_runs_what_had_not_begun(
    tmp_path: Path, engine: Engine, behaviour: str
) -> None:
    """A batch that is too short for its outputs is behind the others when it runs again."""

    async def story() -> None:
        async with deployed(tmp_path, engine, worker=double(behaviour), max_batch=1) as bench:
            inputs = [marked(1), EVIL, marked(2), EVIL, marked(3), marked(4)]
            answers = await asyncio.gather(*map(bench.ask, inputs), return_exceptions=True)
            for sent, answer in zip(inputs, answers, strict=True):
                if sent is EVIL:
                    assert isinstance(answer, Unavailable)
                    assert "the worker of this request was lost" in answer.message
                else:
                    assert isinstance(answer, InferAnswer)
                    assert answer.outputs["y"].tolist() == sent.tolist()
            assert (bench.count("failed"), bench.count("executed")) == (2, 4)

    play(story)


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_answers_that_a_worker_sent_before_it_was_killed_arrive(
    tmp_path: Path, engine: Engine, new_event_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """The worker ends with a message unread, so the kernel resets the connection."""
    answers: list[Any] = []

    async def story() -> None:
        order = order_of(Work(tmp_path / "work"), engine, "segfault")
        worker = await Worker.start(replace(order, sessions=2))
        try:
            (process,) = psutil.Process(worker.pid).children()
            for array in (marked(1), EVIL, marked(2)):
                worker.run(Task(((1, 8),), 32, partial(written, array), answers.append))
            psutil.wait_procs([process], timeout=60)  # the event loop does not read meanwhile
            await worker.broken()
        finally:
            await worker.end()
        assert [type(answer) for answer in answers] == [BatchResult, Unavailable, Unavailable]

    play(story, new_event_loop)


@pytest.mark.parametrize(
    ("replacement", "timeout_s", "message"),
    [("mute", 3.0, "is loading: its worker"), ("stillborn", 60.0, "is failed: the worker")],
)
def test_requests_whose_replacement_does_not_come_are_refused_as_unavailable(
    tmp_path: Path, engine: Engine, replacement: str, timeout_s: float, message: str
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine, worker=double("segfault"), max_batch=1) as bench:
            (instance,) = bench.deployment._instances
            instance._order = replace(instance._order, command=double(replacement))
            lost, waited = await asyncio.gather(
                bench.ask(EVIL), bench.ask(marked(1), timeout_s=timeout_s), return_exceptions=True
            )
            assert isinstance(lost, Unavailable)
            assert isinstance(waited, Unavailable)
            assert message in waited.message
            assert int(waited.headers["Retry-After"]) >= 1

    play(story)


# -- real workers ------------------------------------------------------------


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_the_worker_has_no_torch_and_few_privileges_and_sleeps_when_idle(
    tmp_path: Path, backend: str
) -> None:
    engine = linear(tmp_path, layers=8, width=256, backend=backend).model_copy(
        update={"threads": 2}
    )

    async def story() -> None:
        async with deployed(tmp_path, engine) as bench:
            (worker,) = workers_of(bench)
            for number in range(20):
                answer = await bench.ask(marked(number, width=256))
                assert np.array_equal(
                    answer.outputs["y"], direct(engine, {"x": marked(number, width=256)})["y"]
                )
            before = sum(worker.cpu_times()[:2])
            await asyncio.sleep(1.0)
            assert sum(worker.cpu_times()[:2]) - before < 0.1
            maps = Path(f"/proc/{worker.pid}/maps").read_text()
            assert backend in maps
            assert "libtorch" not in maps
            assert "NoNewPrivs:\t1" in Path(f"/proc/{worker.pid}/status").read_text()
            assert bench.deployment.memory_bytes > 0

    play(story)


def test_inputs_that_an_engine_refuses_cost_nobody_else_in_their_batch(tmp_path: Path) -> None:
    engine = looked_up(tmp_path)

    async def story() -> None:
        async with deployed(tmp_path, engine) as bench:
            requests = [
                bench.deployment.infer(asking({"x": np.array([number])})) for number in (3, 99, 5)
            ]
            good, bad, also_good = await asyncio.gather(*requests, return_exceptions=True)
            assert isinstance(bad, Unprocessable)
            assert "indices element out of data bounds" in bad.message
            assert not isinstance(good, BaseException)
            assert not isinstance(also_good, BaseException)
            assert (good.outputs["y"].tolist(), also_good.outputs["y"].tolist()) == ([3.0], [5.0])
            assert (await bench.deployment.infer(asking({"x": np.array([7, 8])}))).outputs[
                "y"
            ].tolist() == [7.0, 8.0]

    play(story)


SERVES = """
import asyncio, sys
from pathlib import Path
from pipeline.core.artifacts import Engine
from tests.service.serving.engines import deployed, marked
async def main(folder, engine):
    async with deployed(folder, engine, model=sys.argv[2]) as bench:
        array = marked(1)
        assert (await bench.ask(array)).outputs["y"].shape == array.shape
        print("ready", flush=True)
        while True:
            await asyncio.gather(*(bench.ask(array) for _ in range(8)))
folder = Path(sys.argv[1])
asyncio.run(main(folder, Engine.model_validate_json((folder / "engine.json").read_text())))
"""


def serving(
    folder: Path, engine: Engine, model: str, code: str = SERVES, before: Sequence[str] = ()
) -> "subprocess.Popen[str]":
    """A server of its own."""
    (folder / "engine.json").write_text(
        engine.model_dump_json()[:-1] + f', "root": "{engine.root}"}}'
    )
    command = (*before, sys.executable, "-c", code, str(folder), model)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def memfds(pids: Sequence[int] | None = None) -> set[int]:
    """Inodes of the shared memory that these processes have open; None: all processes."""
    inodes = set()
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if (pids is None or int(path.parts[2]) in pids) and "memfd:crucible" in str(
                path.readlink()
            ):
                inodes.add(path.stat().st_ino)
        except OSError:
            continue
    return inodes


def test_nothing_is_left_of_a_server_that_was_killed_in_mid_request(
    tmp_path: Path, engine: Engine
) -> None:
    model = f"killed-{os.getpid()}"
    shared = set(Path("/dev/shm").iterdir())
    with serving(tmp_path, engine, model) as server:
        assert server.stdout is not None
        assert any(line == "ready\n" for line in server.stdout)
        ours, theirs = memfds([server.pid]), memfds(processes_of(f"serve-{model}-"))
        assert ours
        assert ours == theirs
        assert not {
            each for each in set(Path("/dev/shm").iterdir()) - shared if "crucible" in each.name
        }
        server.send_signal(signal.SIGKILL)
        server.wait()
    end = time.monotonic() + 60
    while processes_of(f"serve-{model}-") or memfds() & ours:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_small_dev_shm_is_enough(tmp_path: Path) -> None:
    """1 MB, and batches of 16 MB."""
    shape = (TensorProto.FLOAT, ["batch", 1 << 18])
    wide = engine_of(tmp_path, [helper.make_node("Neg", ["x"], ["y"])], {"x": shape}, {"y": shape})
    inside = (
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"',
        "sh",
    )
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small /dev/shm")
    code = SERVES.replace("marked(1)", "__import__('numpy').ones((16, 1 << 18), 'f4')").replace(
        "while True:", "for _ in range(3):"
    )
    with serving(tmp_path, wide, f"small-{os.getpid()}", code, inside) as server:
        assert server.wait(120) == 0
