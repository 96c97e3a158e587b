"""The audit: entries are only added, and each is also a line of the log."""

import contextlib
import datetime as dt

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from service.storage.audit import Audit
from service.storage.audit_entry import SERVICE, Actor, Entry, Filter
from service.storage.database import Database

NOW = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
ME = Actor("me", "0123456789", "10.0.0.1", "r1")
ALL = Filter()


class Days:
    """A clock in days before NOW."""

    ago = 0.0

    def __call__(self) -> dt.datetime:
        return NOW - dt.timedelta(days=self.ago)


def cancelled(job: str, actor: Actor = ME) -> Entry:
    return Entry(actor, "job.cancelled", f"job/{job}", {"owner": "you"})


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE audit SET owner = 'you'",
        "DELETE FROM audit",
        "DELETE FROM audit WHERE seq = 1",
        "INSERT OR REPLACE INTO audit SELECT seq, at, action, object, key, 'you', address, request,"
        " details FROM audit",
    ],
)
def test_no_entry_is_changed_or_deleted(database: Database, change: str) -> None:
    audit = Audit(database, Days())
    audit.record(cancelled("1"))
    before = audit.entries(ALL, 10)
    if "REPLACE" in change and database.path is None:
        change = "TRUNCATE audit"  # the nearest that PostgreSQL has
    with pytest.raises(sa.exc.IntegrityError, match="an audit entry"), database.write() as rows:
        rows.exec_driver_sql(change)
    assert audit.entries(ALL, 10) == before
    assert before[0].model_dump() == {
        "seq": 1,
        "at": "2026-03-01T12:00:00.000+00:00",
        "action": "job.cancelled",
        "object": "job/1",
        "owner": "me",
        "key": "0123456789",
        "address": "10.0.0.1",
        "request": "r1",
        "details": {"owner": "you"},
    }


def test_what_has_expired_goes_and_an_entry_says_so(database: Database) -> None:
    days = Days()
    audit = Audit(database, days)
    for number, days.ago in enumerate((400.0, 366.0, 364.0, 0.0)):
        audit.record(cancelled(str(number)))
    before = NOW - dt.timedelta(days=365)
    assert audit.expire(before, dry_run=True) == 2
    assert len(audit.entries(ALL, 10)) == 4
    assert audit.expire(before) == 2
    left = audit.entries(ALL, 10)
    assert [(entry.seq, entry.action, entry.object) for entry in left] == [
        (3, "job.cancelled", "job/2"),
        (4, "job.cancelled", "job/3"),
        (5, "audit.expired", "2025-03-01T12:00:00.000+00:00"),
    ]
    assert (left[-1].owner, left[-1].details) == ("service", {"entries": 2})
    assert audit.expire(before) == 0  # and adds no entry
    with pytest.raises(sa.exc.IntegrityError, match="has not expired"), database.write() as rows:
        rows.exec_driver_sql("DELETE FROM audit WHERE seq = 3")
    # nobody can announce a time to come, to delete the present too
    with pytest.raises(sa.exc.IntegrityError, match=r"(?i)check"):
        audit.record(Entry(SERVICE, "audit.expired", "2999-01-01T00:00:00.000+00:00"))


def test_an_entry_is_part_of_its_transaction_in_the_table_and_in_the_log(
    database: Database,
) -> None:
    audit = Audit(database)
    with capture_logs() as lines:
        with contextlib.suppress(ZeroDivisionError), database.write() as rows:
            audit.add(rows, cancelled("1"))
            raise ZeroDivisionError
        audit.record(cancelled("2"))
    (entry,) = audit.entries(ALL, 10)
    assert (entry.seq, entry.object) == (1, "job/2")  # numbers have no gaps
    (line,) = lines
    assert line == {
        "event": "audit",
        "log_level": "info",
        **entry.model_dump(exclude={"seq"}),
    }


def test_entries_are_chosen_by_time_action_owner_and_object(database: Database) -> None:
    days = Days()
    audit = Audit(database, days)
    days.ago = 2.0
    audit.record(cancelled("1"))
    days.ago = 0.0
    audit.record(Entry(Actor("you"), "key.created", "key/1"))
    audit.record(Entry(SERVICE, "job.removed", "job/1"))

    def found(which: Filter, limit: int = 10) -> list[int]:
        return [entry.seq for entry in audit.entries(which, limit)]

    assert found(ALL) == [1, 2, 3]
    assert found(ALL, 2) == [2, 3]
    assert found(Filter(since=NOW - dt.timedelta(days=1))) == [2, 3]
    assert found(Filter(action="job")) == [1, 3]
    assert found(Filter(action="job.removed")) == [3]
    assert found(Filter(owner="you")) == [2]
    assert found(Filter(object="job/1", owner="me")) == [1]
    assert found(Filter(action="job.", object="%")) == []
