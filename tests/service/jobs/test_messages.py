"""Messages: what is sent is what is read, and nothing that a child says is believed."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from pipeline.errors import DataError
from pipeline.execution.stage_event import StageEvent
from service.jobs.messages import (
    FROM_CHILD,
    FROM_SERVER,
    MAX_FIGURES,
    Finished,
    FromChild,
    Granted,
    Pace,
    Returned,
    Returns,
    Stage,
    Start,
    Wants,
    within_limits,
)
from service.sandbox.framing import MAX_HEAD_BYTES, BadMessage, Failed, decode, failed_from_error
from tests.pipeline.execution.figures import accuracy, candidate, latency

STAGE = Stage(event=StageEvent("build", state="finished", seconds=1.5))
FAILED = Failed(code="data.invalid", message="bad\ndata", next_step="send good data")


@pytest.mark.parametrize(
    "message",
    [STAGE, Wants(), Returns(), Finished(), FAILED],
)
def test_what_a_child_says_comes_whole(message: FromChild) -> None:
    assert decode(FROM_CHILD, FROM_CHILD.dump_json(message)) == message


def test_what_the_server_says_comes_whole() -> None:
    for message in (
        Granted(contended=True),
        Returned(contended=True),
        Start.model_validate({"plan": "/p", "work": "/w", "shared": "/s", "command": "c"}),
    ):
        assert decode(FROM_SERVER, FROM_SERVER.dump_json(message)) == message


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\n",
        b"hello",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"kind": "start"}',
        b'{"kind": "stage", "event": {"stage": "build", "state": "well"}}',
        b'{"kind": "stage", "event": {"stage": "build", "state": "started", "extra": 1}}',
        b'{"kind": "stage", "event": {"stage": "build", "state": "progress", "fraction": NaN}}',
        b'{"kind": "stage", "event": {"stage": "build", "state": "progress", "fraction": 2}}',
        b'{"kind": "stage", "event": {"stage": "build", "state": "finished", "seconds": -1}}',
        b'{"kind": "stage", "event": {"stage": "build", "state": "finished", "seconds": 1e999}}',
        b'{"kind": "stage", "event": {"stage": "build", "state": "finished", "seconds": "1"}}',
        json.dumps({"kind": "stage", "event": {"stage": "b" * 101, "state": "started"}}).encode(),
        json.dumps(
            {"kind": "stage", "event": {"stage": "b", "text": "t" * 501, "state": "started"}}
        ).encode(),
        json.dumps({"kind": "failed", "code": "<b>", "message": ""}).encode(),
        json.dumps({"kind": "failed", "code": "x", "message": "m" * 8001}).encode(),
        b'{"kind": "wants", "use": "everything"}',
        b"[" * 100_000,
        b" " * (MAX_HEAD_BYTES + 1),
    ],
)
def test_what_no_child_may_say_is_refused(head: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(FROM_CHILD, head)


FIGURES = StageEvent(
    "benchmark", figures=candidate("int8", accuracy(), latency()), state="progress"
)


@pytest.mark.parametrize(
    "damage",
    [
        {"state": "finished"},
        {"figures": "many"},
        {"figures": [1]},
        {"label": "l" * 201},
        {"label": None},
        {"precision": "int3"},
        {"is_baseline": "no"},
        {"number": 1},
        {"latency.median_s": 0},
        {"latency.median_s": -0.1},
        {"latency.median_s": float("nan")},
        {"latency.high_s": float("inf")},
        {"latency.low_s": 1e10},
        {"latency.low_s": None},
        {"latency.shape": "s" * 201},
        {"accuracy.drop": float("-inf")},
        {"accuracy.high": 1e31},
        {"accuracy.measure": "m" * 101},
        {"accuracy.passed": 1},
        {"accuracy.more": 1},
    ],
)
def test_figures_that_no_plot_can_show_are_refused(damage: dict[str, object]) -> None:
    message = json.loads(FROM_CHILD.dump_json(Stage(event=FIGURES)))
    assert decode(FROM_CHILD, json.dumps(message).encode()) == Stage(event=FIGURES)
    event = message["event"]
    ((name, value),) = damage.items()
    part, _, field = name.rpartition(".")
    target = event["figures"][part] if part else event["figures"]
    (event if name in event else target)[field] = value
    with pytest.raises(BadMessage):
        decode(FROM_CHILD, json.dumps(message).encode())


@given(some.text(), some.text(), some.text())
def test_whatever_the_figures_are_called_fits(label: str, measure: str, shape: str) -> None:
    figures = candidate(
        label * 50,
        accuracy(measure=measure * 50),
        replace(latency(), shape=shape * 50),
    )
    message = Stage(event=within_limits(replace(FIGURES, figures=figures)))
    head = FROM_CHILD.dump_json(message)
    assert len(head) < MAX_HEAD_BYTES
    assert decode(FROM_CHILD, head) == message


def test_figures_always_come_until_there_are_too_many() -> None:
    pace = Pace()
    progress = StageEvent("benchmark", state="progress")
    assert pace.lets(progress, 0.0)
    assert all(pace.lets(FIGURES, 0.1) for _ in range(MAX_FIGURES))
    assert not pace.lets(FIGURES, 0.2)
    assert not pace.lets(progress, 0.2), "figures do not make progress come more often"
    assert pace.lets(progress, 0.6)


@given(some.binary(max_size=200))
def test_any_bytes_are_refused_in_few_words(head: bytes) -> None:
    with pytest.raises(BadMessage) as error:
        decode(FROM_CHILD, head)
    assert len(str(error.value)) < 1000


@given(some.text(), some.text(), some.floats(-5, 5) | some.none())
def test_whatever_a_stage_says_fits(subject: str, text: str, fraction: float | None) -> None:
    event = StageEvent("build", subject * 50, fraction, text * 50, state="progress")
    message = Stage(event=within_limits(event))
    head = FROM_CHILD.dump_json(message)
    assert len(head) < MAX_HEAD_BYTES
    assert decode(FROM_CHILD, head) == message


@pytest.mark.parametrize("character", ["x", "\0", "é", "\udc80", "😀"])
def test_the_longest_failure_fits(character: str) -> None:
    message = failed_from_error(DataError(character * 20_000, character * 20_000))
    assert decode(FROM_CHILD, FROM_CHILD.dump_json(message)) == message
    assert message.code == "data.invalid"


def test_progress_of_a_stage_comes_twice_a_second_and_all_else_always() -> None:
    pace = Pace()
    progress, other = (
        StageEvent("build", state="progress"),
        StageEvent("build", "b", state="progress"),
    )
    assert [pace.lets(progress, now) for now in (0.0, 0.1, 0.49, 0.5, 0.7, 1.0)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert pace.lets(other, 1.1)
    assert [pace.lets(StageEvent("build", state="finished"), 1.1) for _ in range(3)] == [True] * 3
    assert pace.lets(progress, 1.2)
