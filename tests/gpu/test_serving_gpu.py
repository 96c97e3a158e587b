"""Deployed engines on a real GPU, through a real server: right answers over every wire, and what a
lost worker or full memory costs.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from pipeline.benchmark.batch_invariance import TOLERANCE
from service.client import RemoteError
from service.registry.models import DeploymentOptions
from tests.builders.cli import FEATURES
from tests.gpu.fixtures.gpu import MIB, SLACK_BYTES, full_gpu, used_bytes, wait_for
from tests.gpu.fixtures.serving import (
    RESNET,
    ROWS,
    SMALL,
    Array,
    Call,
    Site,
    ask,
    ask_all,
    assert_agree,
    images,
    only_output,
    padding_ratio,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning"
    ),  # of tritonclient.http, which leaves sockets to the garbage collector
]
CALLS, CLIENTS = 1000, 16
CYCLES = 20
HELD_BYTES = 100 * MIB  # a worker has at least a CUDA context
LEFT_BYTES = (
    300 * MIB
)  # room for the engine's file, but not for a CUDA context with TensorRT's kernels
WITHIN_S = 120.0  # for another worker: it loads and warms up


@pytest.fixture
def both(site: Site) -> Iterator[Site]:
    """Two engines on one GPU."""
    with site.loaded(RESNET, SMALL):
        yield site


def tolerance_of(site: Site) -> float:
    return TOLERANCE[site.direct.engine.recipe.precision]


@pytest.mark.parametrize("instances", [1, 2])
def test_a_thousand_batched_calls_are_answered_as_by_a_session(site: Site, instances: int) -> None:
    inputs = [images(1, seed) for seed in range(ROWS)]
    expected = site.direct.answers(inputs)
    with site.loaded(RESNET, instances=instances):
        calls = ask_all(site, RESNET, inputs, CALLS, CLIENTS)
    assert Counter(call.status for call in calls) == {200: CALLS}
    for call in calls:
        assert call.answer is not None
        assert_agree(only_output(call.answer), expected[call.number], tolerance_of(site))
    sizes = Counter(call.answer.batch_size for call in calls if call.answer)
    assert max(sizes) > 1, "no requests ran together"
    assert {(call.answer.version, call.answer.device) for call in calls if call.answer} == {
        (1, site.kind.device)
    }
    rows = [expected[number] for number in range(ROWS)]
    apart = min(
        float(np.abs(one - other).max()) for index, one in enumerate(rows) for other in rows[:index]
    )
    assert apart > 0, "requests cannot be told apart by their answers"


def test_the_same_batch_is_answered_bit_for_bit_as_by_a_session(site: Site) -> None:
    batch = images(ROWS, 20)
    (expected,) = site.direct.answers([batch])
    with site.loaded(RESNET), site.client() as client:
        for _ in range(5):
            answer = ask(client, RESNET, batch)
            assert answer.batch_size == ROWS
            np.testing.assert_array_equal(only_output(answer), expected)


def test_answers_of_padded_graphs_are_those_of_plain_runs(site: Site) -> None:
    inputs = [
        images(rows, 30 + rows) for rows in (3, 5, 6, 7)
    ]  # graphs are captured for 1, 2, 4 and 8 rows
    expected = site.direct.answers(inputs, graphs=False)
    with site.loaded(RESNET), site.client() as client:
        for x, rows in zip(inputs, expected, strict=True):
            for _ in range(3):
                assert_agree(only_output(ask(client, RESNET, x)), rows, tolerance_of(site))
        captured = site.direct.engine.target.backend == "tensorrt"
        assert padding_ratio(site, RESNET) == pytest.approx(
            1 - (3 + 5 + 6 + 7) / (4 + 8 + 8 + 8) if captured else 0
        )


@pytest.mark.parametrize("instances", [1, 2])
def test_the_device_times_of_an_answer_fit_into_its_whole_time(site: Site, instances: int) -> None:
    """By each answer alone: how they compare with `crucible bench` depends on what else runs on the
    host.
    """
    with site.loaded(RESNET, instances=instances), site.client() as client:
        for _ in range(20):
            begin = time.perf_counter()
            answer = ask(client, RESNET, images(ROWS, 40))
            whole_ms = 1e3 * (time.perf_counter() - begin)
            parts = [answer.times_ms[part] for part in ("queue", "copy_in", "compute", "copy_out")]
            assert min(parts) >= 0
            assert answer.times_ms["compute"] > 0
            assert sum(parts) <= whole_ms


def test_tritonclient_asks_over_http_and_grpc(site: Site) -> None:
    x = images(2, 50)
    (expected,) = site.direct.answers([x])
    with (
        site.loaded(RESNET),
        tritonclient.http.InferenceServerClient(site.url.removeprefix("http://")) as http,
        tritonclient.grpc.InferenceServerClient(site.rpc) as grpc,
    ):
        for library, client in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
            assert client.is_model_ready(RESNET)
            tensor = library.InferInput("image", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            answer = client.infer(RESNET, [tensor])
            assert_agree(answer.as_numpy("logits"), expected, tolerance_of(site))
            response = (
                answer.get_response()
                if library is tritonclient.http
                else answer.get_response(as_json=True)
            )
            assert site.kind.device in str(
                response["parameters"]["device"]
            )  # in gRPC's JSON with the type around it
            assert re.search(r"[1-9]", str(response["parameters"]["compute_ms"]))


def test_two_engines_on_one_gpu_answer_at_once(both: Site) -> None:
    inputs = {RESNET: [images(1, seed) for seed in range(4)], SMALL: small_rows()}
    alone = {
        model: [call.answer for call in ask_all(both, model, inputs[model], 4, 1)]
        for model in inputs
    }
    calls: dict[str, list[Call]] = {}
    threads = [
        threading.Thread(
            target=lambda model=model: calls.update(
                {model: ask_all(both, model, inputs[model], 200, 4)}
            )
        )
        for model in inputs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in inputs:
        for call in calls[model]:
            assert call.answer is not None, call.status
            expected = alone[model][call.number]
            assert expected is not None
            assert call.answer.model == model
            assert_agree(only_output(call.answer), only_output(expected), tolerance_of(both))


def small_rows() -> list[Array]:
    return [
        np.random.default_rng(seed).normal(0, 1, (1, FEATURES)).astype(np.float32)
        for seed in range(4)
    ]


def test_twenty_loads_and_unloads_give_the_memory_back(site: Site) -> None:
    before = used_bytes()
    for cycle in range(CYCLES):
        with site.loaded(SMALL), site.client() as client:
            only_output(ask(client, SMALL, small_rows()[0]))
            deployment = client.model(SMALL).deployment
            assert deployment.memory_bytes, cycle
            assert used_bytes() > before + HELD_BYTES, cycle
    wait_for(before + SLACK_BYTES, above=False)


class Asking(threading.Thread):
    """A client that asks the same again and again as long as the context lasts."""

    def __init__(self, site: Site, model: str, x: Array) -> None:
        super().__init__(daemon=True)
        self.calls: list[Call] = []
        self._site, self._model, self._x = site, model, x
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            self.calls += ask_all(self._site, self._model, [self._x], 1, 1)

    def statuses(self) -> Counter[int]:
        return Counter(call.status for call in self.calls)

    def __enter__(self) -> Asking:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self.join(WITHIN_S)


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.05)


def first_answer(site: Site, model: str, x: Array) -> Array:
    """Once there is a worker again; until then a request is refused as one that may be sent
    again.
    """
    calls: list[Call] = []

    def is_answered() -> bool:
        calls[:] = ask_all(site, model, [x], 1, 1)
        assert calls[0].status in (200, 503)
        return calls[0].answer is not None

    wait_until(is_answered)
    assert calls[0].answer is not None
    return only_output(calls[0].answer)


def test_two_instances_of_one_engine_share_a_worker_and_give_the_memory_back(site: Site) -> None:
    before = used_bytes()
    batch = images(ROWS, 70)
    (expected,) = site.direct.answers([batch])
    clients = [Asking(site, RESNET, batch) for _ in range(6)]

    def all_have_answers() -> bool:
        return all(len(client.calls) > 20 for client in clients)

    with site.loaded(RESNET, instances=2):
        assert used_bytes() > before + HELD_BYTES
        assert len(site.workers(RESNET)) == 1
        with ExitStack() as stack:
            for client in clients:
                stack.enter_context(client)
            wait_until(all_have_answers)
    for call in (call for client in clients for call in client.calls):
        assert call.answer is not None, call.status
        np.testing.assert_array_equal(only_output(call.answer), expected)
    wait_for(before + SLACK_BYTES, above=False)


def test_a_worker_killed_in_mid_request_costs_its_requests_and_nothing_else(both: Site) -> None:
    batch = images(ROWS, 60)
    (expected,) = both.direct.answers([batch])
    busy, other = (
        [Asking(both, RESNET, batch) for _ in range(4)],
        Asking(both, SMALL, small_rows()[0]),
    )
    with ExitStack() as stack:
        for each in (*busy, other):
            stack.enter_context(each)
        wait_until(lambda: min(len(each.calls) for each in (*busy, other)) >= 5)
        (worker,) = both.workers(RESNET)
        worker.kill()
        wait_until(lambda: any(client.statuses()[503] for client in busy))
        answer = first_answer(both, RESNET, batch)
    assert set(other.statuses()) == {200}
    assert set().union(*(client.statuses() for client in busy)) == {200, 503}
    np.testing.assert_array_equal(answer, expected)
    for call in (call for client in busy for call in client.calls if call.answer is not None):
        assert call.answer is not None
        np.testing.assert_array_equal(only_output(call.answer), expected)


def test_a_load_without_memory_is_refused_and_leaves_the_other_engine_serving(site: Site) -> None:
    x = small_rows()[0]
    with site.loaded(SMALL), site.client() as client:
        before = only_output(ask(client, SMALL, x))
        # of loads by other tests: else a load that the device would refuse is not tried
        site.forget_memory()
        with Asking(site, SMALL, x) as other, full_gpu(LEFT_BYTES):
            with pytest.raises(
                RemoteError
            ) as by_size:  # the files alone are larger than what is free
                client.load(RESNET, DeploymentOptions(instances=64))
            with pytest.raises(RemoteError) as by_device:  # the file would fit, the engine does not
                client.load(RESNET)
            np.testing.assert_array_equal(only_output(ask(client, SMALL, x)), before)
        assert by_size.value.status == 409
        assert re.search(
            r"needs at least [\d.]+ MiB \(its files alone\), [\d.]+ MiB of gpu:0 are free",
            by_size.value.message,
        )
        assert "memory" in by_device.value.message
        assert client.model(RESNET).deployment.state == "unloaded"
        assert set(other.statuses()) == {200}
        with site.loaded(RESNET):
            assert np.isfinite(only_output(ask(client, RESNET, images(1)))).all()
        with (
            full_gpu(LEFT_BYTES),
            pytest.raises(RemoteError, match=r"\(as when it was loaded before\)"),
        ):  # now it is known
            client.load(RESNET)
