"""The database: whole transactions, migrations, and clear words for what is full, damaged or
newer.
"""

import contextlib
import stat
import subprocess
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from pipeline.errors import DiskFull, StoreError
from service.storage.database import Database
from service.storage.layout import HOME_MODE
from service.storage.migrations import HEAD
from service.storage.sqlite import FILE_MODE
from service.storage.tables import keys
from tests.service.builders.schemas import newer_schema

KEY = sa.insert(keys).values(sha256="x", name="n", owner="o", scopes="", created="now")


def add(database: Database, *prefixes: str, fault: Exception | None = None) -> None:
    with database.write() as rows:
        for prefix in prefixes:
            rows.execute(KEY.values(prefix=prefix))
        if fault:
            raise fault


def count(database: Database) -> int:
    with database.read() as rows:
        return rows.execute(sa.select(sa.func.count()).select_from(keys)).scalar_one()


def test_a_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    database = Database(tmp_path / "home" / "crucible.db")
    add(database, "a")
    with pytest.raises(ZeroDivisionError):
        add(database, "b", fault=ZeroDivisionError())
    assert count(database) == 1
    database.close()
    assert count(Database(tmp_path / "home" / "crucible.db")) == 1


def test_threads_write_one_after_another(tmp_path: Path) -> None:
    database = Database(tmp_path / "crucible.db")

    def write(number: int) -> None:
        for turn in range(20):
            add(database, f"{number}-{turn}")
        database.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(database) == 80


COLOUR = "op.execute(\"ALTER TABLE keys ADD COLUMN colour TEXT NOT NULL DEFAULT 'red'\")"


def test_an_older_file_is_migrated_and_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "crucible.db"
    before = Database(path)
    add(before, "a")
    before.close()
    after = Database(path, newer_schema(tmp_path, COLOUR))
    with after.read() as rows:
        found = rows.exec_driver_sql("SELECT prefix, colour FROM keys").all()
        assert [tuple(row) for row in found] == [("a", "red")]


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "crucible.db"
    Database(path).close()
    with pytest.raises(StoreError):
        Database(path, newer_schema(tmp_path, COLOUR, "op.execute('nonsense')"))
    with Database(path).read() as rows:
        assert rows.exec_driver_sql("PRAGMA user_version").scalar_one() == int(HEAD)
        assert "colour" not in [column["name"] for column in sa.inspect(rows).get_columns("keys")]


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
def test_only_the_user_of_the_service_may_read_the_files(tmp_path: Path, suffix: str) -> None:
    path, file = tmp_path / "home" / "crucible.db", tmp_path / "home" / f"crucible.db{suffix}"

    def mode() -> int:
        return stat.S_IMODE(file.stat().st_mode)

    database = Database(path)
    add(database, "a")
    assert stat.S_IMODE(path.parent.stat().st_mode) == HOME_MODE
    assert mode() == FILE_MODE
    file.chmod(0o644)  # as an earlier build left it, and the server was killed
    again = Database(path)
    assert (mode(), count(again)) == (FILE_MODE, 1)


def test_what_follows_a_transaction_follows_only_its_commit(tmp_path: Path) -> None:
    database, calls = Database(tmp_path / "crucible.db"), []
    for fault in (None, ZeroDivisionError()):
        with contextlib.suppress(ZeroDivisionError), database.write() as rows:
            rows.execute(KEY.values(prefix=str(fault)))
            database.after_commit(lambda: calls.append(count(database)))
            assert calls == ([1] if fault else [])
            if fault:
                raise fault
    assert calls == [1]


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "crucible.db"
    Database(path, newer_schema(tmp_path, "op.execute('SELECT 1')")).close()
    version = int(HEAD)
    with pytest.raises(
        StoreError, match=f"schema version {version + 1}, this Crucible knows up to {version}"
    ):
        Database(path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "crucible.db"
    path.write_bytes(b"not a database at all " * 100)
    with pytest.raises(StoreError, match=r"crucible\.db' is damaged"):
        Database(path)


def test_a_broken_rule_of_the_schema_is_our_bug_and_not_the_disks(tmp_path: Path) -> None:
    database = Database(tmp_path / "crucible.db")
    with pytest.raises(sa.exc.IntegrityError):
        add(database, "a", "a")
    assert count(database) == 0


def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr}")
    try:
        database = Database(tmp_path / "crucible.db")
        add(database, "a")
        with pytest.raises(DiskFull, match="the disk is full"):
            add(database, *(f"{number}" * 20 for number in range(10_000)))
        assert count(database) == 1
        database.close()
    finally:
        subprocess.run(["umount", tmp_path], check=True)
