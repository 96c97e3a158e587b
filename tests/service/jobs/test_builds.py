"""Locks of builds in PostgreSQL, and what a job may give to others."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline.core.artifacts import Artifact
from pipeline.errors import StoreError
from pipeline.execution.remote_store import RemoteStore
from pipeline.execution.store import Key, Store
from service.jobs.builds import BuildLocks, Builds
from service.storage.database import Database
from service.storage.tables import builds as table
from tests.pipeline.execution.s3 import object_names

KEY = Key("build", 1, ("abc",))
URL = "s3://bucket/files/builds"
HOUR_S = 3600.0


class Text(Artifact):
    pass


def make(folder: Path) -> Text:
    (folder / "text").write_text("hello")
    return Text(root=folder, file="text")


def made(home: Path, key: Key = KEY) -> Path:
    """The folder of an artifact in the store of a job."""
    return Store(home).get(key, Text, make).value.root


def share(builds: Builds, work: Path, key: Key) -> None:
    """Make an artifact in a job of this server, and let it be shared."""
    made(work, key)
    builds.made("first", work, "build", key.digest)


@pytest.fixture
def databases(postgresql: str) -> Iterator[tuple[Database, Database]]:
    with closing(Database(postgresql)) as one, closing(Database(postgresql)) as two:
        yield one, two


def builds_of(home: Path, database: Database) -> Builds:
    return Builds(home, RemoteStore(URL, wait_s=0.5), database)


def test_one_job_has_the_lock_of_an_artifact_until_it_gives_it_back_or_its_server_ends(
    databases: tuple[Database, Database],
) -> None:
    one, two = map(BuildLocks, databases)
    assert one.take("x", "first")
    assert one.take("x", "first"), "it may ask again"
    assert not one.take("x", "other"), "of the same server"
    assert not two.take("x", "second")
    assert two.take("y", "second")
    one.give_back("x", "other")
    assert not two.take("x", "second"), "it was not the other's"
    one.release("first")
    assert two.take("x", "second")
    two.close()
    assert one.take("x", "first")
    assert one.take("y", "first")
    one.close()


def test_a_lost_connection_gives_the_locks_to_others_and_the_next_call_works(
    databases: tuple[Database, Database], tmp_path: Path, s3: Any
) -> None:
    one, two = databases
    mine, others = BuildLocks(one), BuildLocks(two)
    assert mine.take("x", "first")
    with two.write() as rows:
        rows.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    end_s = time.monotonic() + 60
    while not others.take("x", "second"):  # the connection ends a moment later
        assert time.monotonic() < end_s
        time.sleep(0.05)
    mine.give_back("x", "first")
    assert not mine.take("x", "first")
    others.close()
    mine.close()


def test_what_a_job_has_made_is_there_for_the_job_of_another_server(
    databases: tuple[Database, Database], tmp_path: Path, s3: Any
) -> None:
    one, two = (
        builds_of(tmp_path / name, each) for name, each in zip("ab", databases, strict=True)
    )
    assert one.seek("first", "build", KEY.digest, is_exclusive=True) == "make"
    assert two.seek("second", "build", KEY.digest, is_exclusive=True) == "wait"
    made(tmp_path / "work")
    one.made("first", tmp_path / "work", "build", KEY.digest)
    assert two.seek("second", "build", KEY.digest, is_exclusive=True) == "there"
    assert Store(tmp_path / "b").find(KEY, Text) is not None
    one.close()
    two.close()


@pytest.mark.parametrize("damage", ["changed", "link", "pipe", "added"])
def test_what_is_not_intact_is_refused_and_the_next_job_makes_it(
    databases: tuple[Database, Database], tmp_path: Path, s3: Any, damage: str
) -> None:
    builds = builds_of(tmp_path / "a", databases[0])
    assert builds.seek("first", "build", KEY.digest, is_exclusive=True) == "make"
    folder = made(tmp_path / "work")
    if damage == "changed":
        (folder / "text").write_text("hellO")
    elif damage == "link":
        (folder / "text").rename(tmp_path / "elsewhere")
        (folder / "text").symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        (folder / "text").unlink()
        os.mkfifo(folder / "text")
    else:
        (folder / "more").touch()
    builds.made("first", tmp_path / "work", "build", KEY.digest)
    assert not (tmp_path / "a" / "artifacts" / "build").exists()
    assert builds.seek("second", "build", KEY.digest, is_exclusive=True) == "make"
    builds.close()


def test_without_s3_a_job_makes_it_and_it_is_uploaded_later(
    databases: tuple[Database, Database], tmp_path: Path, s3: Any, s3_server: Any
) -> None:
    builds = builds_of(tmp_path / "a", databases[0])
    s3_server.stop()
    try:
        assert builds.seek("first", "build", KEY.digest, is_exclusive=True) == "make"
        made(tmp_path / "work")
        builds.made("first", tmp_path / "work", "build", KEY.digest)
    finally:
        s3_server.start()
    assert not RemoteStore(URL).fetch("build", KEY.digest, tmp_path / "none")
    builds.push()
    (tmp_path / "copy").mkdir()
    assert RemoteStore(URL).fetch("build", KEY.digest, tmp_path / "copy")
    builds.close()


def test_what_no_job_uses_is_removed_and_nothing_of_what_remains(
    databases: tuple[Database, Database], tmp_path: Path, s3: Any
) -> None:
    one, two = (
        builds_of(tmp_path / name, each) for name, each in zip("ab", databases, strict=True)
    )
    other = Key("build", 1, ("other",))  # of the same content: its file is one object
    for key in (KEY, other):
        share(one, tmp_path / "work", key)
    assert one.collect(HOUR_S) == (0, 0), "both are new"
    assert two.seek("second", "build", KEY.digest, is_exclusive=True) == "there"
    move_uses(databases[0], 2 * HOUR_S)
    dry = two.collect(-HOUR_S, dry_run=True)
    assert two.collect(-HOUR_S) == dry
    assert dry[0] == 1
    assert (
        builds_of(tmp_path / "c", databases[1]).seek(
            "third", "build", KEY.digest, is_exclusive=False
        )
        == "there"
    )
    assert two.seek("third", "build", other.digest, is_exclusive=False) == "make"
    move_uses(databases[0], -2 * HOUR_S)
    assert one.collect(-HOUR_S)[0] == 1
    assert object_names(s3) == []
    with databases[0].read() as rows:
        assert rows.execute(sa.select(table)).all() == []
    one.close()
    two.close()


def move_uses(database: Database, by_s: float) -> None:
    with database.write() as rows:
        rows.execute(sa.update(table).values(used_at=table.c.used_at + by_s))


def test_nothing_is_removed_during_an_upload_nor_uploaded_during_a_removal(
    databases: tuple[Database, Database],
    tmp_path: Path,
    s3: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.jobs.builds.PATIENCE_S", 0.3)
    one, two = (
        builds_of(tmp_path / name, each) for name, each in zip("ab", databases, strict=True)
    )
    locks = BuildLocks(databases[0])
    with locks.shared_with_uploads():
        with pytest.raises(StoreError, match="another server uploads or removes"):
            two.collect(0)
        with pytest.raises(StoreError, match="another server uploads or removes"):
            one.collect(0)
        share(two, tmp_path / "work", KEY)
    assert len(object_names(s3)) == 2
    other = Key("build", 1, ("other",))
    with locks.without_uploads():
        share(one, tmp_path / "work", other)
        assert len(object_names(s3)) == 2
    share(one, tmp_path / "work", other)
    assert len(object_names(s3)) == 3
    one.close()
    two.close()
