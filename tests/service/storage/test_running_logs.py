"""Logs of running jobs: what another server reads, and who may write."""

import datetime as dt

import sqlalchemy as sa

from service.jobs.claims import Claims
from service.jobs.store import JobStore
from service.storage.database import Database
from service.storage.layout import MAX_LOG_BYTES
from service.storage.running_logs import RunningLogs
from service.storage.tables import running_logs
from tests.service.jobs.test_store import job

NOW = dt.datetime(2026, 1, 2, 4, tzinfo=dt.UTC)
ID = "0001"


def test_the_parts_of_a_claim_are_read_as_one_text(database: Database) -> None:
    JobStore(database).add(job(1), NOW)
    claim = Claims(database, "one").claim(["cpu"], None)
    assert claim is not None
    logs = RunningLogs(database)
    assert logs.end_of(ID, 100) == ""
    logs.append(ID, claim.token, 4, "one\n")
    logs.append(ID, claim.token, 10, "two \N{SNOWMAN}\n")
    assert logs.end_of(ID, 100) == "one\ntwo \N{SNOWMAN}\n"
    assert logs.end_of(ID, 5).endswith("\N{SNOWMAN}\n")
    logs.append(ID, claim.token + 1, 20, "no claim\n")
    assert "no claim" not in logs.end_of(ID, 100)


def test_a_new_claim_replaces_the_parts_of_the_old_one(database: Database) -> None:
    JobStore(database).add(job(1), NOW)
    logs, old = RunningLogs(database), Claims(database, "one").claim(["cpu"], None)
    assert old is not None
    logs.append(ID, old.token, 4, "old\n")
    (new,) = Claims(database, "two").expired(None)
    logs.append(ID, old.token, 9, "late\n")
    assert logs.end_of(ID, 100) == "old\n"
    logs.append(ID, new.token, 4, "new\n")
    assert logs.end_of(ID, 100) == "new\n"
    logs.forget(ID, new.token)
    assert logs.end_of(ID, 100) == ""


def test_only_the_end_that_clients_can_read_is_kept(database: Database) -> None:
    JobStore(database).add(job(1), NOW)
    claim = Claims(database, "one").claim(["cpu"], None)
    assert claim is not None
    for part in range(1, 5):
        text = f"{part}\n"
        RunningLogs(database).append(ID, claim.token, part * MAX_LOG_BYTES // 2, text)
    assert RunningLogs(database).end_of(ID, 100) == "3\n4\n"
    with database.write() as rows:
        assert rows.scalar(sa.select(sa.func.count()).select_from(running_logs)) == 2
