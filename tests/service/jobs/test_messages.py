"""Messages: what is sent is what is read, and nothing that a child says is believed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as some

from pipeline.errors import DataError
from pipeline.execution.stage_runner import StageEvent
from service.jobs.messages import (
    LINE_BYTES,
    BadMessage,
    Failed,
    Finished,
    FromChild,
    Granted,
    Pace,
    Returned,
    Returns,
    Stage,
    Start,
    Wants,
    failed_from_error,
    from_child,
    from_server,
    line_of,
    stage_from_event,
)

FAILED = Failed(code="data.invalid", message="bad\ndata", next_step="send good data")


@pytest.mark.parametrize(
    "message",
    [Stage(stage="build", state="finished", seconds=1.5), Wants(), Returns(), Finished(), FAILED],
)
def test_what_a_child_says_comes_whole_and_on_one_line(message: FromChild) -> None:
    line = line_of(message)
    assert line.count(b"\n") == 1
    assert from_child(line) == message


def test_what_the_server_says_comes_whole() -> None:
    for message in (
        Granted(contended=True),
        Returned(contended=True),
        Start.model_validate({"plan": "/p", "work": "/w", "shared": "/s", "command": "c"}),
    ):
        assert from_server(line_of(message)) == message
    with pytest.raises(EOFError):
        from_server(b"")
    with pytest.raises(EOFError):
        from_server(b'{"kind": "gran')


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"hello\n",
        b"[]\n",
        b"null\n",
        b"\xff\xfe\n",
        b'{"kind": "start"}\n',
        b'{"kind": "stage", "stage": "build", "state": "well"}\n',
        b'{"kind": "stage", "stage": "build", "state": "started", "extra": 1}\n',
        b'{"kind": "stage", "stage": "build", "state": "progress", "fraction": NaN}\n',
        b'{"kind": "stage", "stage": "build", "state": "progress", "fraction": 2}\n',
        b'{"kind": "stage", "stage": "build", "state": "finished", "seconds": -1}\n',
        b'{"kind": "stage", "stage": "build", "state": "finished", "seconds": 1e999}\n',
        b'{"kind": "stage", "stage": "build", "state": "finished", "seconds": "1"}\n',
        json.dumps({"kind": "stage", "stage": "b" * 101, "state": "started"}).encode(),
        json.dumps({"kind": "failed", "code": "<b>", "message": ""}).encode(),
        json.dumps({"kind": "failed", "code": "x", "message": "m" * 8001}).encode(),
        b'{"kind": "wants", "use": "everything"}\n',
        b"[" * 100_000,
        b" " * (LINE_BYTES + 1),
    ],
)
def test_what_no_child_may_say_is_refused(line: bytes) -> None:
    with pytest.raises(BadMessage):
        from_child(line)


@given(some.binary(max_size=200))
def test_any_bytes_are_refused_in_few_words(line: bytes) -> None:
    with pytest.raises(BadMessage) as error:
        from_child(line)
    assert len(str(error.value)) < 1000


@given(some.text(), some.text(), some.floats(-5, 5) | some.none())
def test_whatever_a_stage_says_fits(subject: str, text: str, fraction: float | None) -> None:
    message = stage_from_event(StageEvent("build", subject * 50, "progress", fraction, text * 50))
    line = line_of(message)
    assert len(line) < LINE_BYTES
    assert from_child(line) == message


@pytest.mark.parametrize("character", ["x", "\0", "é", "\udc80", "😀"])
def test_the_longest_failure_fits(character: str) -> None:
    message = failed_from_error(DataError(character * 20_000, character * 20_000))
    assert from_child(line_of(message)) == message
    assert message.code == "data.invalid"


def test_progress_of_a_stage_comes_twice_a_second_and_all_else_always() -> None:
    pace = Pace()
    progress, other = (
        Stage(stage="build", state="progress"),
        Stage(stage="build", subject="b", state="progress"),
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
    assert [pace.lets(Stage(stage="build", state="finished"), 1.1) for _ in range(3)] == [True] * 3
    assert pace.lets(progress, 1.2)
