"""One deployed version: what goes in, what comes out, and when."""

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper

from pipeline.core.artifacts import Engine
from pipeline.core.shapes import DimRange, Profile
from pipeline.errors import HostError
from pipeline.host.gpu import VISIBLE
from pipeline.serving_inputs import BatchSpec, Padding
from service.errors import TimedOut, TooMany, Unavailable, Unprocessable
from service.inference import InferAnswer, ServedDevice
from service.regions import Region, RegionTensor
from service.registry.traffic import MAX_SHAPES, SeenBatch, SeenShape
from service.serving.deployment import Deployment
from service.serving.stats import InputValues, Traffic
from tests.service.builders.regions import shared_file
from tests.service.registry.test_repository import version
from tests.service.serving.engines import (
    MODEL,
    PROVED,
    Bench,
    asking,
    deployed,
    direct,
    engine_of,
    linear,
    marked,
    play,
    processes_of,
)

SLOW = (sys.executable, str(Path(__file__).with_name("engine_double.py")), "slow-0.05")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return linear(tmp_path_factory.mktemp("engine"), layers=3)


async def outcome(bench: Bench, number: float, **more: Any) -> Any:
    """The answer, or what was raised; an answer must be this request's."""
    try:
        answer = await bench.ask(marked(number), **more)
    except (TimedOut, TooMany, Unavailable) as error:
        return error
    assert answer.outputs["y"].tolist() == marked(number).tolist(), (
        f"request {number} got another's answer"
    )
    return answer


def test_an_answer_is_that_of_a_direct_session_on_the_same_batch(
    tmp_path: Path, engine: Engine
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine) as bench:
            answer = await bench.ask(marked(3), id="7")
            assert np.array_equal(answer.outputs["y"], direct(engine, {"x": marked(3)})["y"])
            assert (answer.model, answer.version, answer.device, answer.id) == (
                MODEL,
                1,
                "cpu",
                "7",
            )
            assert answer.timing.batch_size == 1
            together = await asyncio.gather(*(bench.ask(marked(n)) for n in range(5)))
            assert [each.timing.batch_size for each in together] == [5] * 5
            expected = direct(engine, {"x": np.concatenate([marked(n) for n in range(5)])})["y"]
            assert np.array_equal(
                np.concatenate([each.outputs["y"] for each in together]), expected
            )

    play(story)


def test_times_are_told_and_all_is_counted(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine, PROVED.model_copy(update={"maximum": 4})) as bench:
            answers = await asyncio.gather(*(bench.ask(marked(n)) for n in range(10)))
            for answer in answers:
                timing = answer.timing
                parts = (timing.queue_s, timing.copy_in_s, timing.compute_s, timing.copy_out_s)
                assert min(parts) >= 0
                assert sum(parts) > 0
            stats = bench.deployment.statistics()
            assert (stats.succeeded.count, stats.failed.count, stats.rows, stats.dropped) == (
                10,
                0,
                10,
                0,
            )
            assert sum(rows * batch.count for rows, batch in stats.batches.items()) == 10
            assert stats.executions == sum(batch.count for batch in stats.batches.values()) >= 3
            assert stats.compute.seconds == pytest.approx(
                sum(answer.timing.compute_s for answer in answers)
            )
            assert stats.last_request_ms > 1.6e12
            assert bench.count("executed") == 10
            served = bench.deployment.served()
            assert (served.state, served.reason, served.backend, served.inputs) == (
                "ready",
                "",
                "onnxruntime",
                engine.inputs,
            )
            view = bench.deployment.traffic.view(bench.deployment.spec.version)
            assert view.shapes == (SeenShape(sizes={"batch": 1}, requests=10),)
            rows = {batch.sizes["batch"]: batch.runs for batch in view.batches}
            assert rows == {rows: batch.count for rows, batch in stats.batches.items()}
            assert (view.answered, view.padding, view.other_runs) == (10, 0, 0)

    play(story)


def test_a_region_that_became_shorter_fails_only_its_own_request(
    tmp_path: Path, engine: Engine
) -> None:
    async def story() -> None:
        with shared_file(marked(1).tobytes()) as good, shared_file(marked(2).tobytes()) as short:
            async with deployed(tmp_path, engine) as bench:
                parts = [
                    RegionTensor(Region("r", file.name, 0, 32), np.dtype(np.float32), (1, 8))
                    for file in (good, short)
                ]
                tensors: list[Any] = [marked(0), *parts]
                answers = await asyncio.gather(*map(bench.ask, tensors))
                assert [answer.timing.batch_size for answer in answers] == [3, 3, 3]
                expected = direct(engine, {"x": np.concatenate([marked(n) for n in range(3)])})
                joined = np.concatenate([answer.outputs["y"] for answer in answers])
                assert np.array_equal(joined, expected["y"])

                os.truncate(short, 31)
                first, second, error = await asyncio.gather(
                    *map(bench.ask, tensors), return_exceptions=True
                )
                assert isinstance(error, Unprocessable)
                assert "has 31 bytes, expected at least 32" in error.message
                for number, answer in enumerate((first, second)):
                    assert isinstance(answer, InferAnswer)
                    alone = direct(engine, {"x": marked(number)})["y"]
                    assert np.array_equal(answer.outputs["y"], alone)
                assert bench.count("failed") == 1

    play(story)


def test_without_proof_every_request_runs_alone(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        async with deployed(
            tmp_path, engine, BatchSpec(axes={"x": 0, "y": 0}, maximum=16, reason="rows differ")
        ) as bench:
            answers = await asyncio.gather(*(bench.ask(marked(n, rows=2)) for n in range(5)))
            assert bench.deployment.statistics().executions == 5
            for number, answer in enumerate(answers):
                assert np.array_equal(
                    answer.outputs["y"], direct(engine, {"x": marked(number, rows=2)})["y"]
                )

    play(story)


def test_what_does_not_fit_is_refused_before_it_waits(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine) as bench:
            with pytest.raises(Unprocessable, match="expected inputs 'x'"):
                await bench.deployment.infer(asking({"z": marked(1)}))
            with pytest.raises(Unprocessable, match=r"no output 'z'; the model has 'y'"):
                await bench.ask(marked(1), outputs=("z",))
            assert list((await bench.ask(marked(1), outputs=("y",))).outputs) == ["y"]
            assert bench.deployment.statistics().executions == 1

    play(story)


def test_a_full_queue_is_refused_with_a_time_to_come_back(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine, worker=SLOW, max_batch=1, queue_limit=3) as bench:
            outcomes = await asyncio.gather(*(outcome(bench, n) for n in range(8)))
            refused = [outcome for outcome in outcomes if isinstance(outcome, TooMany)]
            assert len(refused) == 5  # all came at once: nothing ran yet
            assert int(refused[0].headers["Retry-After"]) >= 1
            assert bench.count("refused") == 5

    play(story)


def test_timeouts_at_half_load_leave_every_answer_to_its_request(
    tmp_path: Path, engine: Engine
) -> None:
    """A slot whose requests have all timed out is not used again before its worker has answered for
    it.
    """

    async def story() -> None:
        async with deployed(tmp_path, engine, worker=SLOW, max_batch=2) as bench:
            outcomes = await asyncio.gather(
                *(outcome(bench, n, timeout_s=0.02 if n % 2 else None) for n in range(40))
            )
            timed_out = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, TimedOut)]
            assert timed_out == list(range(1, 40, 2))
            assert bench.deployment.statistics().succeeded.count == 20
            assert bench.count("timed_out") == 20
            again = await asyncio.gather(*(outcome(bench, n) for n in range(100, 110)))
            assert not any(isinstance(outcome, Exception) for outcome in again)

    play(story)


def test_clients_that_went_do_not_run(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        half_a_second = (*SLOW[:2], "slow-0.5")  # so that none ends before all clients are gone
        async with deployed(tmp_path, engine, worker=half_a_second, max_batch=4) as bench:
            clients = [asyncio.ensure_future(bench.ask(marked(n))) for n in range(200)]
            await asyncio.sleep(0.01)
            for client in clients:
                client.cancel()
            answer = await bench.ask(marked(1000))
            assert answer.outputs["y"].tolist() == marked(1000).tolist()
            stats = bench.deployment.statistics()
            assert stats.executions <= 3
            assert bench.count("executed") + bench.count("dropped") == 201
            assert stats.dropped == bench.count("dropped") >= 192
            assert all(each.cancelled() for each in await asyncio.gather(*map(_settled, clients)))

    play(story)


async def _settled(task: "asyncio.Task[Any]") -> "asyncio.Task[Any]":
    await asyncio.wait([task])
    return task


def test_one_model_does_not_hinder_another(tmp_path: Path, engine: Engine) -> None:
    """20 requests of a quick one are answered while one of a slow one runs."""

    async def story() -> None:
        slow = (*SLOW[:2], "slow-20")
        async with (
            deployed(tmp_path, engine, worker=slow, model=f"slow-{MODEL}") as other,
            deployed(tmp_path, engine) as bench,
        ):
            waiting = asyncio.ensure_future(other.ask(marked(1)))
            for number in range(20):
                await bench.ask(marked(number))
            assert not waiting.done()
            waiting.cancel()

    play(story)


def test_several_instances_share_the_work(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        async with deployed(
            tmp_path, engine, worker=(*SLOW[:2], "slow-2"), max_batch=1, instances=2
        ) as bench:
            assert bench.deployment.served().instances == 2
            pending = [asyncio.ensure_future(outcome(bench, n)) for n in range(2)]
            await asyncio.sleep(0.01)
            assert [instance.load for instance in bench.deployment._instances] == [1, 1]
            await asyncio.gather(*pending)

    play(story)


def test_instances_that_share_weights_are_threads_of_one_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Engine
) -> None:
    monkeypatch.setattr(Engine, "shares_weights", True)

    async def story() -> None:
        threads = {}
        for instances in (1, 3):
            async with deployed(tmp_path, engine, max_batch=4, instances=instances) as bench:
                assert bench.deployment.served().instances == instances
                assert len(bench.deployment.pids) == 1
                answers = await asyncio.gather(*(bench.ask(marked(n)) for n in range(200)))
                for number, answer in enumerate(answers):
                    np.testing.assert_allclose(
                        answer.outputs["y"], direct(engine, {"x": marked(number)})["y"], rtol=1e-5
                    )
                assert {answer.timing.batch_size for answer in answers} == {4}
                threads[instances] = sum(
                    psutil.Process(pid).num_threads() for pid in processes_of(f"serve-{MODEL}-")
                )
        assert threads[3] == threads[1] + 2

    play(story)


GPUS = ("gpu:0", "gpu:1")


def gpus_of_workers() -> Counter[str]:
    """The number of workers for each CUDA_VISIBLE_DEVICES."""
    found = map(psutil.Process, processes_of(f"serve-{MODEL}-"))
    workers = [each for each in found if "service.sandbox.guardian" not in each.cmdline()]
    return Counter(worker.environ()[VISIBLE] for worker in workers)


def test_every_device_has_instances_which_share_one_queue(tmp_path: Path, engine: Engine) -> None:
    """Real engines; that they see another GPU each changes nothing on the CPU."""

    async def story() -> None:
        async with deployed(tmp_path, engine, devices=GPUS, instances=2, max_batch=1) as bench:
            served = bench.deployment.served()
            assert (served.instances, served.device) == (2, "gpu:0, gpu:1")
            assert gpus_of_workers() == {"0": 2, "1": 2}
            answers = await asyncio.gather(*(bench.ask(marked(n)) for n in range(200)))
            for number, answer in enumerate(answers):
                np.testing.assert_allclose(
                    answer.outputs["y"], direct(engine, {"x": marked(number)})["y"], rtol=1e-5
                )
            counted = Counter(answer.device for answer in answers)
            assert set(counted) == set(GPUS)
            for device in GPUS:
                labels = {"model": MODEL, "version": "1", "device": device}
                rows = bench.registry.get_sample_value("crucible_inference_batch_rows_sum", labels)
                assert rows == counted[device]

    play(story)


def test_a_batch_goes_to_the_device_with_the_fewest(tmp_path: Path, engine: Engine) -> None:
    """The second GPU takes 10 s for a batch, so the first one runs all others."""

    async def story() -> None:
        worker = (*SLOW[:2], "slow-10@1")
        async with deployed(tmp_path, engine, worker=worker, devices=GPUS, max_batch=1) as bench:
            slow = [asyncio.ensure_future(outcome(bench, n)) for n in range(2)]
            done, waiting = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result().device for task in done} == {"gpu:0"}
            for number in range(20):
                assert (await outcome(bench, number)).device == "gpu:0"
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()

    play(story)


def test_a_device_whose_workers_die_leaves_the_others(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        worker = (*SLOW[:2], "unasked@1")
        async with deployed(tmp_path, engine, worker=worker, devices=GPUS, max_batch=1) as bench:

            def second() -> ServedDevice:
                return bench.deployment.served().devices[1]

            number = 0
            while second().state != "failed":
                answer = await outcome(bench, number)
                # a batch may be on its way to a worker that dies
                assert isinstance(answer, Unavailable) or answer.device == "gpu:0"
                number += 1
                await asyncio.sleep(0.05)
            for _ in range(10):
                assert (await outcome(bench, number)).device == "gpu:0"
            served = bench.deployment.served()
            assert (served.state, served.reason) == ("ready", "")
            first = ServedDevice(device="gpu:0", state="ready", memory_bytes=1000)
            assert served.devices == (first, second())
            assert (second().device, second().memory_bytes) == ("gpu:1", 0)
            assert "does not keep to the protocol" in second().reason
            assert bench.deployment.memory_bytes >= 1000

    play(story)


@pytest.mark.parametrize("behaviour", ["stillborn", "unloadable"])
def test_a_load_that_fails_on_one_device_is_undone_on_all(
    tmp_path: Path, engine: Engine, behaviour: str
) -> None:
    async def story() -> None:
        worker = (*SLOW[:2], f"{behaviour}@1")
        with pytest.raises(HostError, match=r"^the worker of '.*' on gpu:1 ") as raised:
            async with deployed(tmp_path, engine, worker=worker, devices=GPUS):
                raise AssertionError("it was loaded")
        assert raised.value.message.endswith("; so the load on gpu:0 was undone, too")
        assert raised.value.next_step.endswith("; or give a `device` without gpu:1")
        assert processes_of(f"serve-{MODEL}-") == []
        assert list(tmp_path.glob("work-*")) == []

    play(story)


def test_draining_answers_what_waits_and_takes_nothing_new(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine, worker=SLOW, max_batch=1) as bench:
            pending = [asyncio.ensure_future(outcome(bench, n)) for n in range(5)]
            await asyncio.sleep(0)
            draining = asyncio.ensure_future(bench.deployment.drain())
            await asyncio.sleep(0)
            assert bench.deployment.served().state == "draining"
            with pytest.raises(Unavailable, match=f"'{MODEL}' is draining"):
                await bench.ask(marked(1))
            assert not draining.done()
            await draining
            assert not any(isinstance(each, Exception) for each in await asyncio.gather(*pending))
            await bench.deployment.drain()

    play(story)


def test_closing_answers_what_still_waits(tmp_path: Path, engine: Engine) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine, worker=(*SLOW[:2], "slow-20"), max_batch=1) as bench:
            pending = [asyncio.ensure_future(outcome(bench, n)) for n in range(5)]
            await asyncio.sleep(0.01)
            await bench.deployment.close()
            assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*pending))

    play(story)


def test_outputs_whose_size_only_a_run_tells_come_whole(tmp_path: Path) -> None:
    """NonZero: [1, n], n by the values; more bytes than anybody could foresee."""
    profile = Profile(dims={"n": DimRange(min=1, opt=4, max=100_000)})
    engine = engine_of(
        tmp_path,
        [helper.make_node("NonZero", ["x"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n"])},
        {"y": (TensorProto.INT64, [1, "found"])},
        profiles=(profile,),
    )

    async def story() -> None:
        async with deployed(tmp_path, engine, BatchSpec(axes={})) as bench:
            for size in (3, 100_000, 1):
                answer = await bench.ask(np.ones(size, np.float32))
                assert np.array_equal(answer.outputs["y"], [np.arange(size)])
            assert (await bench.ask(np.zeros(5, np.float32))).outputs["y"].shape == (1, 0)

    play(story)


def test_rows_along_another_axis_and_a_scalar_beside_them(tmp_path: Path) -> None:
    """x [4, batch] * scale, which is one for all of a batch."""
    engine = engine_of(
        tmp_path,
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        {"x": (TensorProto.FLOAT, [4, "batch"]), "scale": (TensorProto.FLOAT, [])},
        {"y": (TensorProto.FLOAT, [4, "batch"])},
    )
    batch = BatchSpec(axes={"x": 1, "scale": None, "y": 1}, maximum=16, proved=True)

    async def story() -> None:
        async with deployed(tmp_path, engine, batch) as bench:
            feeds = [
                {"x": np.full((4, 1), n, np.float32), "scale": np.array(n % 2, np.float32)}
                for n in range(8)
            ]
            answers = await asyncio.gather(
                *(bench.deployment.infer(asking(feed)) for feed in feeds)
            )
            for number, answer in enumerate(answers):
                assert answer.outputs["y"].tolist() == [[number * (number % 2)]] * 4
                assert answer.timing.batch_size == 4

    play(story)


def texts(folder: Path, longest: int) -> tuple[Engine, BatchSpec]:
    """tokens = x, pooled = the sum of x where the mask is 1."""
    shape = (TensorProto.FLOAT, ["batch", "sequence"])
    nodes = [
        helper.make_node("Identity", ["x"], ["tokens"]),
        helper.make_node("Mul", ["x", "mask"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "last"], ["pooled"], keepdims=0),
    ]
    profile = Profile(
        dims={
            "batch": DimRange(min=1, opt=4, max=16),
            "sequence": DimRange(min=1, opt=8, max=longest),
        }
    )
    outputs = {"tokens": shape, "pooled": (TensorProto.FLOAT, ["batch"])}
    engine = engine_of(
        folder, nodes, {"x": shape, "mask": shape}, outputs, {"last": np.array([1])}, (profile,)
    )
    padding = (Padding(input="x", axis=1, value=9), Padding(input="mask", axis=1))
    batch = BatchSpec(
        axes={"x": 0, "mask": 0, "tokens": 0, "pooled": 0}, maximum=16, padding=padding, proved=True
    )
    return engine, batch


def text(length: int) -> dict[str, np.ndarray[Any, Any]]:
    """One row of `length` tokens, each with the value `length`."""
    x = np.full((1, length), length, np.float32)
    return {"x": x, "mask": np.ones((1, length), np.float32)}


def test_texts_of_unequal_length_run_together_as_if_alone(tmp_path: Path) -> None:
    """Lengths 1 to 20, in buckets."""
    engine, batch = texts(tmp_path, longest=20)

    async def story() -> None:
        async with deployed(tmp_path, engine, batch) as bench:
            answers = await asyncio.gather(
                *(bench.deployment.infer(asking(text(n))) for n in range(1, 21))
            )
            for n, answer in enumerate(answers, 1):
                assert answer.outputs["tokens"].tolist() == [[n] * n]
                assert answer.outputs["pooled"].tolist() == [n * n]
            assert [answer.timing.batch_size for answer in answers] == [
                1,
                1,
                2,
                2,
                *[4] * 4,
                *[8] * 8,
                *[4] * 4,
            ]  # 1, 2, 4, 8, 16, 20
            view = bench.deployment.traffic.view(bench.deployment.spec.version)
            longest = {(seen.sizes["batch"], seen.sizes["sequence"]) for seen in view.batches}
            assert longest == {(1, 1), (1, 2), (2, 4), (4, 8), (8, 16), (4, 20)}
            assert [seen.padding for seen in view.batches if seen.sizes["batch"] == 2] == [1 / 8]
            with pytest.raises(Unprocessable, match="sequence = 21"):
                await bench.deployment.infer(asking(text(21)))

    play(story)


def test_the_counted_values_are_those_that_were_sent_and_run(tmp_path: Path) -> None:
    engine, batch = texts(tmp_path, longest=128)
    lengths = range(16, 129)

    async def story() -> None:
        async with deployed(tmp_path, engine, batch) as bench:
            await asyncio.gather(*(bench.deployment.infer(asking(text(n))) for n in lengths))
            view = bench.deployment.traffic.view(bench.deployment.spec.version)
            runs = [
                2 * seen.runs * seen.sizes["batch"] * seen.sizes["sequence"]
                for seen in view.batches
            ]
            sent, run, at_max = 2 * sum(lengths), sum(runs), 2 * len(lengths) * 128
            assert sent < run < at_max
            labels = {"model": MODEL, "version": "1"}
            counted = [
                bench.registry.get_sample_value(f"crucible_inference_values_{name}_total", labels)
                for name in ("sent", "run", "at_max")
            ]
            assert counted == [sent, run, at_max]
            assert view.padding == (run - sent) / run
            assert view.padding_at_max == (at_max - sent) / at_max

    play(story)


def test_a_load_that_fails_leaves_the_figures_of_the_one_that_serves(
    tmp_path: Path, engine: Engine
) -> None:
    async def story() -> None:
        async with deployed(tmp_path, engine) as bench:
            stillborn = (*SLOW[:2], "stillborn")
            with pytest.raises(HostError):
                await Deployment.start(
                    bench.deployment.spec, tmp_path / "again", bench.figures, stillborn
                )
            assert (
                bench.registry.get_sample_value(
                    "crucible_inference_queue", {"model": MODEL, "version": "1"}
                )
                == 0.0
            )
        assert (
            bench.registry.get_sample_value(
                "crucible_inference_queue", {"model": MODEL, "version": "1"}
            )
            is None
        )

    play(story)


def test_the_share_of_padding_is_told(tmp_path: Path, engine: Engine) -> None:
    four = engine.model_copy(
        update={"profiles": (Profile(dims={"batch": DimRange(min=4, opt=4, max=16)}),)}
    )

    async def story() -> None:
        async with deployed(tmp_path, four) as bench:
            answer = await bench.ask(marked(3))
            expected = direct(
                engine, {"x": np.concatenate([marked(3), np.zeros((3, 8), np.float32)])}
            )["y"]
            assert np.array_equal(answer.outputs["y"], expected[:1])
            labels = {"model": MODEL, "version": "1"}
            assert (
                bench.registry.get_sample_value("crucible_inference_padding_ratio", labels) == 0.75
            )
            assert bench.registry.get_sample_value("crucible_inference_queue", labels) == 0
            view = bench.deployment.traffic.view(bench.deployment.spec.version)
            one_row = SeenBatch(sizes={"batch": 1}, runs=1, requests=1, padding=0.75)
            assert (view.batches, view.padding) == ((one_row,), 0.75)

    play(story)


def test_shapes_beyond_the_limit_are_counted_together() -> None:
    traffic = Traffic()
    for rows in range(1, MAX_SHAPES + 3):
        for _ in range(2):
            traffic.requested((("batch", rows),))
            traffic.ran((("batch", rows),), 3, InputValues(sent=6, run=10, at_max=10))
    view = traffic.view(version())
    assert (len(view.shapes), len(view.batches)) == (MAX_SHAPES, MAX_SHAPES)
    assert (view.other_requests, view.other_runs) == (4, 4)
    assert view.answered == 6 * (MAX_SHAPES + 2)
    assert view.padding == view.batches[0].padding == 0.4
    assert view.suggestion is None  # this version has no profiles
