"""Messages with workers: what is sent is what is read, and nothing that a worker says is
believed.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from pipeline.errors import DataError
from service.sandbox.framing import MAX_HEAD_BYTES, BadMessage, Failed, decode, failed_from_error
from service.serving.worker_messages import (
    FROM_SERVER,
    FROM_WORKER,
    Done,
    FromServer,
    FromWorker,
    Load,
    Placed,
    Ready,
    Refused,
    Run,
    Short,
)

DONE = Done(3, (Placed((2, 1000), 64), Placed((), 0)), 0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    "message",
    [
        Ready(5),
        DONE,
        Short(3, 70),
        Refused(3, "bad\nids", "send others"),
        Failed(code="host.store", message="no", next_step="go"),
    ],
)
def test_what_a_worker_says_comes_whole(message: FromWorker) -> None:
    assert decode(FROM_WORKER, FROM_WORKER.dump_json(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Load(Path("/e/engine.json"), ({"batch": 1}, {}), 3, "it"),
        Run(0, 1, (Placed((1, 3), 0),), ("inputs", "outputs")),
        Run(9, 0, ()),
    ],
)
def test_what_the_server_says_comes_whole(message: FromServer) -> None:
    assert decode(FROM_SERVER, FROM_SERVER.dump_json(message)) == message


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "run"},
        {"extra": 1},
        {"number": -1},
        {"number": "3"},
        {"number": 1 << 60},
        {"outputs": [{"shape": [-1], "offset": 0}]},
        {"outputs": [{"shape": [1.5], "offset": 0}]},
        {"outputs": [{"shape": [1] * 65, "offset": 0}]},
        {"outputs": [{"shape": [1], "offset": -64}]},
        {"outputs": [{"shape": [1]}]},
        {"outputs": [{"shape": [], "offset": 0}] * 1001},
        {"compute_s": -1},
        {"compute_s": float("nan")},
        {"compute_s": float("inf")},
        {"compute_s": None},
    ],
)
def test_what_no_worker_may_say_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadMessage):
        decode(FROM_WORKER, json.dumps(json.loads(FROM_WORKER.dump_json(DONE)) | change).encode())


@given(some.binary(max_size=200))
def test_any_bytes_are_refused_in_few_words(packet: bytes) -> None:
    with pytest.raises(BadMessage) as error:
        decode(FROM_WORKER, packet)
    assert len(str(error.value)) < 1000


def test_the_longest_failure_and_the_largest_batch_fit() -> None:
    for character in ("x", "\0", "é", "\udc80", "😀"):
        message = failed_from_error(DataError(character * 20_000, character * 20_000))
        assert decode(FROM_WORKER, FROM_WORKER.dump_json(message)) == message
    batch = Run(1 << 48, 1, (Placed((1000, 1000, 1000, 1000), 1 << 40),) * 1000)
    assert len(FROM_SERVER.dump_json(batch)) < MAX_HEAD_BYTES
    with pytest.raises(BadMessage):
        decode(FROM_WORKER, b" " * (MAX_HEAD_BYTES + 1))
