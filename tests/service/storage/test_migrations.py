"""Migrations: every database, new or old, gets the same tables and keeps its rows."""

import datetime as dt
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from pipeline.errors import StoreError
from service.jobs.state import CancelAsked
from service.jobs.store import DamagedRow, JobStore, Once
from service.registry.repository import Repository
from service.storage.audit import Audit
from service.storage.audit_entry import SERVICE, Entry, Filter
from service.storage.database import Database
from service.storage.keys import Keys
from service.storage.layout import Folders
from service.storage.migrations import FOLDER, HEAD, Schema
from service.storage.tables import METADATA, jobs
from tests.service.builders.postgresql import Server
from tests.service.builders.schemas import newer_schema
from tests.service.jobs.test_store import job

OLD = (Path(__file__).parent / "version_5.sql").read_text(encoding="utf-8")
NOW = dt.datetime(2026, 1, 2, 4, tzinfo=dt.UTC)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The file of an old home."""
    path = tmp_path / "crucible.db"
    with closing(sqlite3.connect(path)) as rows:
        rows.executescript(OLD)
    return path


@pytest.fixture
def postgresql(postgresql_server: Server) -> Iterator[str]:
    """The address of an empty database, in place of one with tables."""
    with postgresql_server.database() as url:
        yield url


def differences(database: Database) -> list[tuple[Any, ...]]:
    """What Alembic would change to get the tables of the code."""
    with database.read() as rows:
        changes = compare_metadata(MigrationContext.configure(rows), METADATA)
    return [*chain.from_iterable(one if isinstance(one, list) else [one] for one in changes)]


def version(path: Path) -> int:
    with closing(sqlite3.connect(path)) as rows:
        return int(rows.execute("PRAGMA user_version").fetchone()[0])


def test_a_new_database_has_the_tables_of_the_code(database: Database) -> None:
    assert differences(database) == []


def test_the_newest_revision_is_the_one_that_the_code_knows() -> None:
    assert ScriptDirectory(str(FOLDER)).get_heads() == [HEAD]


def structure(path: Path) -> dict[str, object]:
    """What SQLite says of a file's tables, in whatever words they were created. Keys of text could
    be NULL in the old ones, which nothing ever stored.
    """
    with closing(sqlite3.connect(path)) as rows:
        tables = rows.execute("SELECT name, strict FROM pragma_table_list WHERE schema = 'main'")
        found: dict[str, object] = {
            name: (
                strict,
                rows.execute(
                    'SELECT name, type, pk OR "notnull", dflt_value, pk FROM pragma_table_info(?)'
                    " ORDER BY name",
                    (name,),
                ).fetchall(),
                rows.execute("SELECT * FROM pragma_foreign_key_list(?)", (name,)).fetchall(),
            )
            for name, strict in tables.fetchall()
        }
        others = "SELECT name FROM sqlite_master WHERE sql IS NOT NULL AND type != 'table'"
        return {**found, "others": sorted(rows.execute(others).fetchall())}


def test_an_old_home_gets_the_tables_of_a_new_one(old: Path, tmp_path: Path) -> None:
    assert version(old) == 5
    Database(old).close()
    Database(tmp_path / "new.db").close()
    assert structure(old) == structure(tmp_path / "new.db")
    assert version(old) == int(HEAD), "an older Crucible refuses the file"


def test_an_old_home_keeps_its_jobs_and_goes_on(old: Path, tmp_path: Path) -> None:
    with closing(Database(old)) as database:
        store = JobStore(database)
        assert [(each.id, each.state) for each in store.list().jobs] == [
            ("0004", "succeeded"),
            ("0002", "failed"),
            ("0001", "running"),
        ]
        with pytest.raises(DamagedRow):
            store.get("0003")
        stages = store.newest_of_stages("0001")
        assert [(each.seq, each.data["subject"]) for each in stages] == [(5, "fp32"), (4, "a\0b")]
        columns = (jobs.c.id, jobs.c.device, jobs.c.started, jobs.c.attempt)
        with database.read() as rows:
            found = rows.execute(sa.select(*columns).order_by(jobs.c.id)).all()
        assert [tuple(row) for row in found] == [
            ("0001", "cpu", "2026-01-02T03:04:06.000+00:00", 1),
            ("0002", "gpu:0", "2026-01-02T03:04:10.000+00:00", 1),
            ("0003", "", None, 0),
            ("0004", "cpu", "2026-01-02T03:04:12.000+00:00", 1),
        ]
        assert store.add(job(9), NOW, Once("key-1", "digest"))[0].id == "0001"
        cancelled, seq = store.append("0001", CancelAsked(), NOW)
        assert (cancelled.state, seq) == ("cancelling", 15), "14 was of a removed job"
        (model,) = Repository(database, Folders(tmp_path)).list()
        assert (model.name, model.current, model.deployed) == ("m", 2, True)
        assert [each.memory_bytes for each in model.versions] == [2**31, None]


def test_a_damaged_job_of_an_old_home_stops_no_migration(old: Path) -> None:
    with closing(sqlite3.connect(old)) as rows, rows:
        rows.execute("UPDATE jobs SET job = json_set(job, '$.attempt', 'x') WHERE id = '0001'")
        rows.execute("UPDATE jobs SET job = '{' WHERE id = '0002'")
    with closing(Database(old)) as database:
        store = JobStore(database)
        assert {"0001", "0002"} <= store.ids()
        with pytest.raises(DamagedRow):
            store.get("0001")


def test_an_old_home_keeps_its_keys_and_its_audit(old: Path) -> None:
    with closing(Database(old)) as database:
        assert [(key.prefix, bool(key.revoked)) for key in Keys(database).list()] == [
            ("0123456789", False),
            ("abcdefabcd", True),
        ]
        assert Keys(database).verify(f"cru_0123456789_{'A' * 43}").owner == "me"
        audit = Audit(database)
        audit.record(Entry(SERVICE, "key.created", "key/1"))
        assert [entry.seq for entry in audit.entries(Filter(), 100)] == [*range(1, 9)]
        with pytest.raises(sa.exc.IntegrityError, match="an audit entry"), database.write() as rows:
            rows.exec_driver_sql("DELETE FROM audit")


def test_many_that_open_a_new_database_at_once_migrate_it_once(
    open_database: Callable[[], Database],
) -> None:
    with ThreadPoolExecutor(4) as threads:
        opened = list(threads.map(lambda _: open_database(), range(4)))
    assert [differences(database) for database in opened] == [[]] * 4


def test_a_failed_migration_changes_nothing(location: Path | str, tmp_path: Path) -> None:
    Database(location).close()
    newer = newer_schema(tmp_path, "op.drop_table('sessions')", "raise ArithmeticError")
    with pytest.raises(ArithmeticError):
        Database(location, newer)
    with closing(Database(location)) as database:
        assert differences(database) == []


def test_a_newer_database_is_refused(location: Path | str, tmp_path: Path) -> None:
    Database(location, newer_schema(tmp_path, "op.drop_table('sessions')")).close()
    with pytest.raises(StoreError, match=f"this Crucible knows up to {int(HEAD)}"):
        Database(location)


@pytest.mark.parametrize("revision", ["0001", "0002", "0003", "0004", "0005"])
def test_every_older_revision_is_brought_up_to_date(
    location: Path | str, tmp_path: Path, revision: str
) -> None:
    Database(location, Schema(revision)).close()
    with closing(Database(location)) as database:
        assert differences(database) == []
