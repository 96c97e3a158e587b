"""Claims: each job is run by one server at a time, and one that has lost a job writes no more of
it.
"""

import datetime as dt
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from service.jobs.claims import Claims, Held
from service.jobs.state import CancelAsked, Requeued, Started, Succeeded, after_a_crash
from service.jobs.store import ClaimLost, JobStore
from service.storage.database import Database
from service.storage.tables import jobs
from tests.service.jobs.test_store import NOW, job

ROOT = Path(__file__).parents[3]
EVERY = tuple(f"{number:04}" for number in range(10))  # as if all jobs ran on this server
STARTED, SUCCEEDED = Started(1, 1.0), Succeeded("accepted", None)


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


@pytest.fixture
def server(open_database: Callable[[], Database]) -> Callable[[str], Claims]:
    """A server of this name, with connections of its own."""
    return lambda name: Claims(open_database(), name)


def in_order(store: JobStore, claims: Claims, starts: int) -> list[int]:
    """The numbers of the first jobs that start and end, one a minute."""
    order = list[int]()
    for minute in range(1, starts + 1):
        claim = claims.claim(["cpu"], None)
        assert claim is not None
        now = NOW + dt.timedelta(minutes=minute)
        for event in (STARTED, SUCCEEDED):
            store.append(claim.job.id, event, now, token=claim.token)
        order.append(int(claim.job.id))
    return order


def add(store: JobStore, owners: str, device: str = "cpu", first: int = 0) -> None:
    for number, owner in enumerate(owners, first):
        created = (NOW + dt.timedelta(seconds=number)).isoformat(timespec="milliseconds")
        update = {"device": device, "created": created}
        store.add(job(number, owner=owner).model_copy(update=update), NOW)


def test_a_job_is_claimed_once(store: JobStore, server: Callable[[str], Claims]) -> None:
    add(store, "a")
    one, two = server("one"), server("two")
    claim = one.claim(["cpu"], None)
    assert claim is not None
    assert (claim.job.id, claim.token) == ("0000", 1)
    assert two.claim(["cpu"], None) is None
    assert one.renew(EVERY) == {"0000": Held(1, "queued")}
    assert two.renew(EVERY) == {}


def test_a_released_job_is_claimed_again_under_another_token(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "a")
    one, two = server("one"), server("two")
    claim = one.claim(["cpu"], None)
    assert claim is not None
    one.release(claim)
    again = two.claim(["cpu"], None)
    assert again is not None
    assert again.token == 2
    one.release(claim)  # too late: no effect
    assert two.renew(EVERY) == {"0000": Held(2, "queued")}


def test_a_claimed_job_that_does_not_run_is_claimed_again(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    """The database failed after the claim: the server knows of none, and still sends heartbeats."""
    add(store, "ab")
    one = server("one")
    assert one.claim(["cpu"], None) is not None
    runs = one.claim(["cpu"], None)
    assert runs is not None
    time.sleep(0.1)
    assert one.renew([runs.job.id]) == {"0001": Held(1, "queued")}
    assert [claim.job.id for claim in one.expired(0.05)] == ["0000"]


def test_jobs_wait_in_the_queue_of_their_device(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "a", "gpu:0")
    one = server("one")
    assert one.claim(["cpu"], None) is None
    assert one.waiting() == ("gpu:0",)
    assert one.count_waiting() == {"gpu:0": 1}
    assert [job.id for job, _ in one.waiting_for("gpu:0")] == ["0000"]
    claim = one.claim(["cpu", "gpu:0"], None)
    assert claim is not None
    assert claim.job.id == "0000"
    assert (one.waiting(), one.waiting_for("gpu:0"), one.claim_waiting("0000")) == ((), (), None)
    assert one.count_waiting() == {}


def test_a_waiting_job_is_claimed_by_its_id(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "aa", "gpu:0")
    claim = server("one").claim_waiting("0001")
    assert claim is not None
    assert (claim.job.id, claim.token) == ("0001", 1)
    assert server("two").claim_waiting("0001") is None


def test_owners_take_turns_with_their_oldest_jobs(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "aaabbcc")
    assert in_order(store, server("one"), 7) == [0, 3, 5, 1, 4, 6, 2]


def test_many_jobs_of_one_owner_delay_another_owners_job_by_one(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "a" * 50 + "b")
    assert in_order(store, server("one"), 4) == [0, 50, 1, 2]


def test_a_start_on_one_device_costs_no_turn_on_another(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "b")
    one = server("one")
    in_order(store, one, 1)
    add(store, "a", "gpu:0", 1)
    later = NOW + dt.timedelta(hours=1)
    store.append("0001", STARTED, later)
    add(store, "ba", first=2)
    assert in_order(store, one, 2) == [3, 2]


def test_an_interrupted_job_comes_first(store: JobStore, server: Callable[[str], Claims]) -> None:
    add(store, "aab")
    for event in (STARTED, Requeued("stopped")):
        store.append("0001", event, NOW)
    assert in_order(store, server("one"), 3)[0] == 1


def test_the_limit_of_an_owner_holds_over_all_servers(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "aaab")
    one, two = server("one"), server("two")
    claims = [claims.claim(["cpu"], 2) for claims in (one, two, one, two, one)]
    assert [claim and claim.job.owner for claim in claims] == ["a", "a", "b", None, None]


def test_a_damaged_row_is_left_and_the_next_job_is_claimed(
    store: JobStore,
    database: Database,
    server: Callable[[str], Claims],
    capsys: pytest.CaptureFixture[str],
) -> None:
    add(store, "aa")
    with database.write() as rows:
        rows.execute(sa.update(jobs).where(jobs.c.id == "0000").values(job="{"))
    one = server("one")
    claim = one.claim(["cpu"], None)
    assert claim is not None
    assert claim.job.id == "0001"
    assert "job=0000" in capsys.readouterr().out
    assert one.claim(["cpu"], None) is None


def test_a_server_that_lost_a_job_writes_nothing_more_of_it(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "a")
    cut_off, other = server("cut off"), server("other")
    lost = cut_off.claim(["cpu"], None)
    assert lost is not None
    store.append("0000", STARTED, NOW, token=lost.token)
    assert other.expired(3600) == (), "its heartbeat is fresh"
    (taken,) = other.expired(-1)  # as if its lease had ended
    store.append("0000", after_a_crash(taken.job, 5), NOW, token=taken.token)
    before = store.events("0000")
    for event in (SUCCEEDED, Requeued("late")):
        with pytest.raises(ClaimLost, match="another server"):
            store.append("0000", event, NOW, token=lost.token)
    assert store.events("0000") == before
    assert cut_off.renew(EVERY) == {}
    again = other.claim(["cpu"], None)
    assert again is not None
    assert again.job.interruptions == 1
    assert again.token > taken.token > lost.token


def test_a_heartbeat_keeps_a_job(
    store: JobStore, database: Database, server: Callable[[str], Claims]
) -> None:
    add(store, "a")
    one, two = server("one"), server("two")
    assert one.claim(["cpu"], None) is not None
    with database.write() as rows:  # an hour passes
        rows.execute(sa.update(jobs).values(heartbeat_at=jobs.c.heartbeat_at - 3600))
    one.renew(EVERY)
    assert two.expired(60) == ()
    with database.write() as rows:
        rows.execute(sa.update(jobs).values(heartbeat_at=jobs.c.heartbeat_at - 61))
    (claim,) = two.expired(60)
    assert claim.job.id == "0000"
    assert one.renew(EVERY) == {}


def test_a_restarted_server_takes_all_jobs_of_the_one_before(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    """Also those that a Crucible without claims has started."""
    add(store, "aaa")
    before = server("before")
    claimed = before.claim(["cpu"], None)
    assert claimed is not None
    store.append("0001", STARTED, NOW)
    assert [claim.job.id for claim in server("after").expired(None)] == ["0000", "0001"]


def test_a_job_that_does_not_run_has_no_server(
    store: JobStore, server: Callable[[str], Claims]
) -> None:
    add(store, "aaa")
    one = server("one")
    tokens = [claim.token for _ in range(3) if (claim := one.claim(["cpu"], None))]
    for job_id, token in zip(("0000", "0001"), tokens, strict=False):
        store.append(job_id, STARTED, NOW, token=token)
    store.append("0000", SUCCEEDED, NOW, token=tokens[0])
    store.append("0002", CancelAsked(), NOW)  # by any server, without a claim
    store.append("0001", CancelAsked(), NOW)
    assert one.renew(EVERY) == {"0001": Held(1, "cancelling")}


RACER = """
import sys
from pathlib import Path
from service.jobs.claims import Claims
from service.jobs.state import Started, Succeeded
from service.jobs.store import JobStore
from service.storage.database import Database
from tests.service.jobs.test_store import NOW

name, location = sys.argv[1:]
database = Database(location if "://" in location else Path(location))
store, claims = JobStore(database), Claims(database, name)
print("ready", flush=True)
sys.stdin.readline()
while (claim := claims.claim(["cpu"], None)) is not None:
    for event in (Started(1, 1.0), Succeeded("accepted", None)):
        store.append(claim.job.id, event, NOW, token=claim.token)
    print(claim.job.id, flush=True)
database.close()
"""
RACES, RACERS = 200, 3


def test_in_two_hundred_races_of_processes_every_job_runs_once(
    store: JobStore, location: Path | str
) -> None:
    add(store, "abcd" * (RACES // 4))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, f"racer {number}", str(location)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(RACERS)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:  # all are ready: they begin at once
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    claimed = [racer.communicate(timeout=300)[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * RACERS
    assert sorted(job_id for ids in claimed for job_id in ids) == [f"{n:04}" for n in range(RACES)]
    assert min(map(len, claimed)) > 0, "a racer that claims nothing has not raced"
    for job_id in (f"{number:04}" for number in range(RACES)):
        kinds = Counter(event.kind for event in store.events(job_id))
        assert kinds == {"queued": 1, "running": 1, "succeeded": 1}
