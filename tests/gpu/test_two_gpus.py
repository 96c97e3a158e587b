"""One deployment on several GPUs of a host, through a real server: all of them answer, alike, and
a worker that is killed on one does not stop the others.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack

import pytest

from pipeline.benchmark.batch_invariance import TOLERANCE
from pipeline.host.gpu import find_gpus, memory_in_use
from service.client import RemoteError
from service.registry.models import DeploymentOptions
from tests.gpu.fixtures.gpu import SLACK_BYTES, full_gpu
from tests.gpu.fixtures.serving import (
    RESNET,
    ROWS,
    Site,
    ask_all,
    assert_agree,
    images,
    only_output,
)
from tests.gpu.test_serving_gpu import HELD_BYTES, LEFT_BYTES, Asking, wait_until

pytestmark = pytest.mark.gpu
CALLS, CLIENTS = 600, 24
ALIVE = 20  # answers


@pytest.fixture
def host(request: pytest.FixtureRequest) -> Site:
    """The server, on a host whose GPUs are at least two, all of one kind."""
    kinds = Counter((gpu.name, gpu.compute_capability) for gpu in find_gpus().devices)
    if len(kinds) != 1 or kinds.total() < 2:
        here = ", ".join(f"{count} {name}" for (name, _), count in kinds.items()) or "none"
        pytest.skip(f"expected at least two GPUs of one kind, and no other; here: {here}")
    site: Site = request.getfixturevalue("site")
    return site


def devices_of(site: Site) -> tuple[str, ...]:
    with site.client() as client:
        return tuple(each.device for each in client.model(RESNET).deployment.devices)


def batches_of(site: Site, device: str) -> float:
    pattern = rf'crucible_inference_batch_rows_count{{device="{device}",model="{RESNET}".*}} (\S+)'
    return sum(map(float, re.findall(pattern, site.figures())))


@pytest.mark.parametrize("instances", [1, 2])
def test_all_gpus_answer_as_a_session_does(host: Site, instances: int) -> None:
    inputs = [images(1, seed) for seed in range(ROWS)]
    expected = host.direct.answers(inputs)
    tolerance = TOLERANCE[host.direct.engine.recipe.precision]
    with host.loaded(RESNET, device="all", instances=instances), host.client() as client:
        deployment = client.model(RESNET).deployment
        devices = devices_of(host)
        assert devices == tuple(f"gpu:{number}" for number in range(len(find_gpus().devices)))
        assert (deployment.device, deployment.note) == (", ".join(devices), "")
        assert min(each.memory_bytes for each in deployment.devices) > HELD_BYTES
        assert [len(host.workers(RESNET, device)) for device in devices] == [1] * len(devices)
        before = {device: batches_of(host, device) for device in devices}
        calls = ask_all(host, RESNET, inputs, CALLS, CLIENTS)
        ran = {device: batches_of(host, device) - before[device] for device in devices}
    assert Counter(call.status for call in calls) == {200: CALLS}
    assert {call.answer.device for call in calls if call.answer} == set(devices)
    assert min(ran.values()) > 0, ran
    for call in calls:
        assert call.answer is not None
        assert_agree(only_output(call.answer), expected[call.number], tolerance)


def test_a_list_names_the_gpus(host: Site) -> None:
    with host.loaded(RESNET, device=("gpu:1",)), host.client() as client:
        calls = ask_all(host, RESNET, [images(1)], 20, 4)
        assert {call.answer.device for call in calls if call.answer} == {"gpu:1"}
        assert client.model(RESNET).deployment.device == "gpu:1"


def test_a_worker_that_is_killed_on_one_gpu_leaves_the_other(host: Site) -> None:
    batch = images(ROWS, 80)
    (expected,) = host.direct.answers([batch])
    clients = [Asking(host, RESNET, batch) for _ in range(6)]
    tolerance = TOLERANCE[host.direct.engine.recipe.precision]

    def answered(device: str) -> int:
        calls = [call for each in clients for call in tuple(each.calls)]
        return sum(call.answer is not None and call.answer.device == device for call in calls)

    with ExitStack() as stack:
        stack.enter_context(host.loaded(RESNET, device=("gpu:0", "gpu:1")))
        client = stack.enter_context(host.client())

        def is_second_ready() -> bool:
            deployment = client.model(RESNET).deployment
            assert deployment.state == "ready", "the first GPU is"
            return deployment.devices[1].state == "ready"

        for each in clients:
            stack.enter_context(each)
        wait_until(lambda: min(answered("gpu:0"), answered("gpu:1")) > ALIVE)
        (worker,) = host.workers(RESNET, "gpu:1")
        worker.kill()
        wait_until(lambda: not is_second_ready())
        before = answered("gpu:0")
        wait_until(is_second_ready)
        assert answered("gpu:0") > before, "it went on while the second worker loaded"
        before = answered("gpu:1")
        wait_until(lambda: answered("gpu:1") > before + ALIVE)
    calls = [call for each in clients for call in each.calls]
    statuses = Counter(call.status for call in calls)
    assert set(statuses) <= {200, 503}
    assert statuses[503] <= len(clients), "only what the worker had begun is lost"
    for call in calls:
        if call.answer is not None:
            assert_agree(only_output(call.answer), expected, tolerance)


def test_a_load_that_fails_on_one_gpu_is_undone_on_the_other(host: Site) -> None:
    """The first GPU has room for the engine's file, but not for the engine."""
    host.forget_memory()  # else the load is refused before it is tried
    second = find_gpus().devices[1].uuid
    before = memory_in_use(second)
    options = DeploymentOptions(device=("gpu:0", "gpu:1"))
    with host.client() as client:
        with full_gpu(LEFT_BYTES), pytest.raises(RemoteError) as refused:
            client.load(RESNET, options)
        assert "on gpu:0" in refused.value.message
        assert refused.value.message.endswith("; so the load on gpu:1 was undone, too")
        assert client.model(RESNET).deployment.state == "unloaded"
    after = memory_in_use(second)
    assert before is not None
    assert after is not None
    assert after <= before + SLACK_BYTES
