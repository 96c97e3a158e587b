"""Jobs in the database: event and job together or not at all, equal requests once, owners apart,
damaged rows named.
"""

import datetime as dt
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import sqlalchemy as sa

from pipeline.core.progress import CandidateFigures
from pipeline.errors import DiskFull
from pipeline.execution.stage_event import StageEvent, StageStatus
from service.errors import Conflict, NotFound, TooMany
from service.jobs.state import (
    CancelAsked,
    Died,
    Failure,
    Job,
    JobEvent,
    ModelVersion,
    Requeued,
    StaleEvent,
    Started,
    Succeeded,
)
from service.jobs.store import DamagedRow, JobStore, Once
from service.storage.database import Database
from service.storage.tables import events, jobs
from tests.pipeline.execution.figures import accuracy, candidate, latency

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)
DIED = Died(Failure(code="job.memory", message="too much", next_step="less"))
SEEN = StageEvent("build", "onnxruntime fp32", state="finished", seconds=1.5)
STATUS = {
    "stage": "build",
    "subject": "onnxruntime fp32",
    "fraction": None,
    "text": "",
    "elapsed_s": 0.0,
    "estimate_s": None,
}


def job(number: int, identity: str = "", owner: str = "me") -> Job:
    return Job(
        id=f"{number:04}",
        owner=owner,
        identity=identity or f"i{number}",
        name="n",
        device="cpu",
        created=NOW.isoformat(timespec="milliseconds"),
    )


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


def take(store: JobStore, job_id: str, *events: JobEvent) -> Job:
    for event in events:
        store.append(job_id, event, NOW)
    return store.get(job_id)


def test_each_event_is_stored_with_the_job_after_it(store: JobStore) -> None:
    added, is_new = store.add(job(1), NOW)
    assert is_new
    running, seq = store.append(added.id, Started(42, 1.0), NOW)
    assert (running.state, store.get(added.id)) == ("running", running)
    take(store, added.id, SEEN, Requeued("why"), Started(43, 1.0), Succeeded("accepted", "w"))
    events = [(event.kind, event.data) for event in store.events(added.id)]
    assert events == [
        ("queued", {}),
        ("running", {"attempt": 1}),
        ("stage", {**STATUS, "state": "finished", "seconds": 1.5}),
        ("queued", {"why": "why"}),
        ("running", {"attempt": 2}),
        ("succeeded", {"verdict": "accepted", "winner": "w"}),
    ]
    later = store.events(added.id, after=seq)
    assert [event.kind for event in later] == ["stage", "queued", "running", "succeeded"]
    assert all(event.seq > seq for event in later)
    assert len(store.events(added.id, limit=2)) == 2


def test_a_job_keeps_the_status_of_its_stage(store: JobStore) -> None:
    store.add(job(1), NOW)
    running = take(store, "0001", Started(42, 1.0), SEEN)
    assert running.progress == StageStatus("build", "onnxruntime fp32")
    assert running.model_dump()["progress"] == STATUS


def test_of_each_stage_the_newest_event_is_found(store: JobStore) -> None:
    """However many there are; and those of the last attempt only."""
    store.add(job(1), NOW)
    take(
        store,
        "0001",
        Started(42, 1.0),
        StageEvent("export", state="started"),
        StageEvent("build", "int8", state="started"),
        *[StageEvent("export", state="progress")] * 1001,
        StageEvent("export", state="finished"),
    )
    found = [(each.data["stage"], each.data["state"]) for each in store.newest_of_stages("0001")]
    assert found == [("export", "finished"), ("build", "started")]
    take(store, "0001", Requeued("why"), Started(43, 1.0))
    assert store.newest_of_stages("0001") == ()


def figures_event(*figures: CandidateFigures) -> list[StageEvent]:
    return [StageEvent("benchmark", state="progress", figures=each) for each in figures]


def test_figures_are_events_of_their_own_and_those_of_the_last_attempt_are_found(
    store: JobStore, database: Database
) -> None:
    store.add(job(1), NOW)
    assert store.figures("0001") == ()
    checked, measured = candidate("int8", accuracy()), candidate("int8", latency=latency())
    running = take(store, "0001", Started(42, 1.0), SEEN, *figures_event(checked, measured))
    assert running.progress is not None
    assert running.progress.stage == "benchmark"
    joined = candidate("int8", accuracy(), latency())
    assert store.figures("0001") == (joined,)
    event = store.events("0001")[-1]
    assert (event.kind, event.data) == ("figures", asdict(measured))
    assert [each.data["stage"] for each in store.newest_of_stages("0001")] == ["build"]
    with database.write() as rows:
        rows.execute(sa.update(events).where(events.c.seq == event.seq).values(data="{"))
    assert store.figures("0001") == (checked,)
    take(store, "0001", Requeued("why"), Started(43, 1.0))
    assert store.figures("0001") == ()


def test_how_a_job_ends_is_told(store: JobStore) -> None:
    store.add(job(1), NOW)
    store.add(job(2), NOW)
    take(store, "0001", Started(1, 1.0), DIED)
    take(store, "0002", Started(1, 1.0), CancelAsked(), DIED)
    assert (store.events("0001")[-1].kind, store.events("0001")[-1].data) == (
        "failed",
        DIED.failure.model_dump(),
    )
    assert [(event.kind, event.data) for event in store.events("0002")[-2:]] == [
        ("cancelling", {}),
        ("cancelled", {}),
    ]


def test_an_event_that_comes_too_late_changes_nothing(store: JobStore) -> None:
    store.add(job(1), NOW)
    ended = take(store, "0001", Started(1, 1.0), DIED)
    count = len(store.events("0001"))
    with pytest.raises(StaleEvent):
        store.append("0001", DIED, NOW)
    assert (store.get("0001"), len(store.events("0001"))) == (ended, count)


def test_a_full_disk_stores_neither_event_nor_job(tmp_path: Path) -> None:
    database = Database(tmp_path / "crucible.db")
    store = JobStore(database)
    store.add(job(1), NOW)
    with database.write() as rows:
        rows.exec_driver_sql(
            "CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'injected'); END"
        )
    with pytest.raises(sa.exc.IntegrityError, match="injected"):
        store.append("0001", Started(1, 1.0), NOW)
    assert store.get("0001").state == "queued"
    with database.write() as rows:
        rows.exec_driver_sql("DROP TRIGGER full")
    with database.read() as rows:
        pages = rows.exec_driver_sql("PRAGMA page_count").scalar_one()
        rows.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull):
        take(
            store,
            "0001",
            Started(1, 1.0),
            *[StageEvent("s", text="x" * 500, state="progress")] * 200,
        )
    running = store.get("0001")
    assert len(store.events("0001")) >= 2
    assert running.state == "running"


def test_equal_requests_are_one_job_until_it_fails(store: JobStore) -> None:
    first, _ = store.add(job(1, "same"), NOW)
    assert store.add(job(2, "same"), NOW) == (first, False)
    assert store.add(job(3, "same", owner="you"), NOW)[1]
    take(store, first.id, Started(1, 1.0), Succeeded("accepted", None))
    assert store.add(job(4, "same"), NOW)[0].state == "succeeded"
    other, _ = store.add(job(5, "other"), NOW)
    take(store, other.id, CancelAsked())
    again, is_new = store.add(job(6, "other"), NOW)
    assert (again.id, is_new) == ("0006", True)
    take(store, again.id, Started(1, 1.0), CancelAsked())
    assert store.get(again.id).state == "cancelling"
    assert store.add(job(7, "other"), NOW)[1]  # that one will come to nothing


def test_the_usual_time_is_the_median_of_the_owners_last_jobs_of_that_name(store: JobStore) -> None:
    def ran(
        number: int,
        seconds: float,
        *events: JobEvent,
        owner: str = "me",
        name: str = "n",
        device: str = "cpu",
        **more: object,
    ) -> None:
        added, _ = store.add(
            job(number, owner=owner).model_copy(update={"name": name, "device": device, **more}),
            NOW,
        )
        for event in (*events, Started(1, 1.0)):
            store.append(added.id, event, NOW)
        store.append(added.id, Succeeded("accepted", None), NOW + dt.timedelta(seconds=seconds))

    assert store.usual_s("me", "n", "cpu") is None
    for number, seconds in enumerate((900.0, 68.0, 70.0, 66.0, 1.0, 67.0)):
        ran(number, seconds)
    ran(10, 5.0, owner="you")
    ran(11, 5.0, name="other")
    ran(12, 5.0, device="gpu:0")
    ran(
        13, 5.0, Started(1, 1.0), Requeued("the server was restarted")
    )  # its last attempt found much of what it needed
    ran(14, 3.0, measures=ModelVersion(model="m", version=1))
    assert store.usual_s("me", "n", "cpu") == 67.0
    assert store.usual_s("me", "n", "cpu", measures=True) == 3.0
    assert store.usual_s("me", "n", "gpu:0") == 5.0


def test_threads_that_ask_for_the_same_at_once_get_one_job(
    store: JobStore, database: Database
) -> None:
    answers: list[tuple[Job, bool]] = []

    def ask(number: int) -> None:
        answers.append(store.add(job(number, "same"), NOW))
        database.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.id for answer, _ in answers}) == 1
    assert sum(is_new for _, is_new in answers) == 1


def test_a_limit_holds_when_many_submit_at_once(store: JobStore) -> None:
    def ask(number: int) -> bool:
        try:
            return store.add(job(number), NOW, most_queued=3)[1]
        except TooMany:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(ask, range(24))) == 3
    assert store.counts() == {"queued": 3}


def test_a_client_misses_no_event_while_many_are_written(store: JobStore) -> None:
    """Two jobs, so that numbers of one lie between those of the other; four writers of each."""
    for number in (1, 2):
        store.add(job(number), NOW)
        store.append(f"{number:04}", Started(1, 1.0), NOW)
    followed, after = list[int](), 0

    def write(number: int) -> None:
        for _ in range(25):
            store.append(f"{number % 2 + 1:04}", SEEN, NOW)

    with ThreadPoolExecutor(8) as threads:
        writing = [threads.submit(write, number) for number in range(8)]
        while not all(each.done() for each in writing):
            events = store.events("0001", after)
            followed += [event.seq for event in events]
            after = followed[-1] if followed else 0
        for each in writing:
            each.result()
    followed += [event.seq for event in store.events("0001", after)]
    assert followed == [event.seq for event in store.events("0001")]
    assert len(followed) == 2 + 100


def test_an_idempotency_key_holds_for_a_day_and_for_one_request(store: JobStore) -> None:
    first, _ = store.add(job(1, "a"), NOW, Once("key", "digest"))
    take(store, first.id, CancelAsked())
    again, is_new = store.add(job(2, "a"), NOW + dt.timedelta(hours=23), Once("key", "digest"))
    assert (again.id, is_new) == (first.id, False)
    with pytest.raises(Conflict, match="'key' came with another request"):
        store.add(job(3, "b"), NOW, Once("key", "other"))
    assert store.add(job(4, "b", owner="you"), NOW, Once("key", "other"))[1]
    assert store.add(job(5, "b"), NOW + dt.timedelta(hours=24, seconds=1), Once("key", "other"))[1]
    with pytest.raises(NotFound):
        store.get("0003")


def test_others_see_nothing_of_a_job(store: JobStore) -> None:
    store.add(job(1), NOW)
    assert store.get("0001", "me") == store.get("0001")
    for job_id, owner in (("0001", "you"), ("0009", "me"), ("0009", None), ("' OR 1", None)):
        with pytest.raises(NotFound, match=f"no job '{job_id}'"):
            store.get(job_id, owner)


def test_pages_hold_all_newest_first(store: JobStore) -> None:
    for number in range(7):
        store.add(job(number, owner="you" if number == 3 else "me"), NOW)
    store.append("0005", CancelAsked(), NOW)
    pages, after = [], None
    while True:
        page = store.list(limit=3, after=after)
        pages.append([job.id for job in page.jobs])
        if (after := page.after) is None:
            break
    assert pages == [["0006", "0005", "0004"], ["0003", "0002", "0001"], ["0000"]]
    assert [job.id for job in store.list("you").jobs] == ["0003"]
    assert [job.id for job in store.list("me", "cancelled").jobs] == ["0005"]
    assert [job.id for job in store.unfinished()] == [
        "0000",
        "0001",
        "0002",
        "0003",
        "0004",
        "0006",
    ]
    assert store.counts() == {"queued": 6, "cancelled": 1}


def test_no_more_wait_than_may(store: JobStore) -> None:
    store.add(job(1), NOW, most_queued=1)
    with pytest.raises(TooMany, match="1 of your jobs are waiting, expected at most 1"):
        store.add(job(2), NOW, most_queued=1)
    assert not store.add(job(3, "i1"), NOW, most_queued=1)[1]
    assert store.add(job(4, owner="you"), NOW, most_queued=1)[1]


DAMAGE = [
    "{",
    "",
    "null",
    "[]",
    '{"id": "0001"}',
    job(9).model_dump_json(),
    job(1).model_copy(update={"state": "failed"}).model_dump_json(),
]


@pytest.mark.parametrize("text", DAMAGE)
def test_a_damaged_row_is_named_and_left_out(
    store: JobStore, database: Database, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        store.add(job(number), NOW)
    with database.write() as rows:
        rows.execute(sa.update(jobs).where(jobs.c.id == "0001").values(job=text))
    assert (
        [job.id for job in store.list().jobs] == [job.id for job in store.unfinished()] == ["0002"]
    )
    assert "job=0001" in capsys.readouterr().out
    for call in (lambda: store.get("0001"), lambda: store.append("0001", CancelAsked(), NOW)):
        with pytest.raises(DamagedRow, match="0001"):
            call()
    assert store.add(job(3, "i1"), NOW)[1]


def test_a_damaged_event_is_left_out(store: JobStore, database: Database) -> None:
    store.add(job(1), NOW)
    take(store, "0001", Started(1, 1.0), DIED)
    with database.write() as rows:
        rows.execute(sa.update(events).where(events.c.kind == "running").values(data="{"))
    assert [event.kind for event in store.events("0001")] == ["queued", "failed"]


def test_only_what_has_ended_is_removed_with_its_events(store: JobStore) -> None:
    for number in (1, 2):
        store.add(job(number), NOW, Once(str(number), "d"))
    take(store, "0001", CancelAsked())
    assert [job.id for job in store.ended()] == ["0001"]
    store.remove("0001")
    assert store.events("0001") == ()
    with pytest.raises(NotFound):
        store.get("0001")
    with pytest.raises(Conflict, match="has not ended"):
        store.remove("0002")
