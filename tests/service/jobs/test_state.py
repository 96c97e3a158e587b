"""A job ends exactly once, whatever comes in whatever order."""

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as some

from pipeline.execution.stage_event import StageEvent
from service.jobs.state import (
    FINAL,
    CancelAsked,
    Died,
    Failure,
    Job,
    JobEvent,
    Requeued,
    StaleEvent,
    Started,
    Succeeded,
    after_a_crash,
    new_id,
    step,
)

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
QUEUED = Job(id="1", owner="me", identity="i", name="n", device="cpu", created=NOW.isoformat())
SEEN = StageEvent("build", "onnxruntime fp32", 0.5, state="progress")
DIED = Died(Failure(code="host.child_died", message="killed"))
ACCEPTED = Succeeded("accepted", "onnxruntime fp32")


def after(*events: JobEvent, job: Job = QUEUED) -> Job:
    for event in events:
        job = step(job, event, NOW)
    return job


def test_the_usual_way() -> None:
    running = after(Started(10, 1.0), SEEN)
    assert (running.state, running.attempt, running.pid, running.started) == (
        "running",
        1,
        10,
        "2026-01-02T03:04:05.000+00:00",
    )
    assert running.progress == SEEN
    state = after(ACCEPTED, job=running)
    assert (state.state, state.verdict, state.winner, state.pid, state.is_final) == (
        "succeeded",
        "accepted",
        "onnxruntime fp32",
        None,
        True,
    )
    assert state.finished == "2026-01-02T03:04:05.000+00:00"


def test_a_child_that_dies_fails_the_job_unless_it_was_to_end() -> None:
    assert after(Started(1, 1.0), DIED).failure == DIED.failure
    assert after(Started(1, 1.0), CancelAsked(), DIED).state == "cancelled"
    assert after(Started(1, 1.0), CancelAsked(), ACCEPTED).state == "cancelled"
    assert after(CancelAsked()).state == "cancelled"
    assert after(DIED).state == "failed"


def test_a_server_that_stops_gives_another_attempt_but_not_to_what_was_cancelled() -> None:
    again = after(Started(1, 1.0), SEEN, Requeued("restart"))
    assert (again.state, again.progress, again.pid) == ("queued", None, None)
    assert after(Started(2, 2.0), job=again).attempt == 2
    assert after(Started(1, 1.0), CancelAsked(), Requeued("restart")).state == "cancelled"


def test_a_job_under_which_the_server_dies_again_and_again_fails() -> None:
    job, states = QUEUED, []
    while not job.is_final:
        job = after(Started(1, 1.0), job=job)
        job = step(job, after_a_crash(job, most=3), NOW)
        states.append(job.state)
    assert states == ["queued", "queued", "failed"]
    assert job.failure is not None
    assert (job.failure.code, job.failure.message) == (
        "job.interrupted",
        "the server died 3 times while this job ran",
    )
    assert after(Started(1, 1.0), Requeued("in order")).interruptions == 0


EVENTS = some.sampled_from(
    [Started(1, 1.0), SEEN, ACCEPTED, DIED, CancelAsked(), Requeued("restart")]
)


@given(some.lists(EVENTS, max_size=30))
def test_it_ends_at_most_once_and_then_stays_as_it_is(events: list[JobEvent]) -> None:
    job, ends = QUEUED, 0
    for event in events:
        before = job
        try:
            job = step(job, event, NOW)
        except StaleEvent:
            assert job is before
            continue
        assert not before.is_final
        ends += job.state in FINAL
        assert (job.finished is not None) == job.is_final
        assert (job.pid is not None) == (job.state in ("running", "cancelling"))
        assert (job.verdict is not None) == (job.state == "succeeded")
        assert (job.failure is not None) == (job.state == "failed")
    assert ends <= 1


@pytest.mark.parametrize(
    "event", [Started(1, 1.0), SEEN, ACCEPTED, DIED, CancelAsked(), Requeued("x")]
)
def test_a_final_job_takes_nothing_more(event: JobEvent) -> None:
    with pytest.raises(StaleEvent, match="is succeeded and cannot take"):
        after(Started(1, 1.0), ACCEPTED, event)


def test_ids_sort_by_time_and_differ() -> None:
    ids = [new_id(NOW + dt.timedelta(milliseconds=n)) for n in range(50)]
    assert ids == sorted(set(ids))
    assert len({new_id(NOW) for _ in range(50)}) == 50
