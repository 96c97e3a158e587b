"""Locks of builds in PostgreSQL, and what a job may give to others."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pipeline.core import Artifact
from pipeline.execution.remote_store import RemoteStore
from pipeline.execution.store import Key, Store
from service.jobs.builds import BuildLocks, Builds
from service.storage.database import Database

KEY = Key("build", 1, ("abc",))
URL = "s3://bucket/files/builds"


class Text(Artifact):
    pass


def make(folder: Path) -> Text:
    (folder / "text").write_text("hello")
    return Text(root=folder, file="text")


def made(home: Path) -> Path:
    """The folder of an artifact in the store of a job."""
    return Store(home).get(KEY, Text, make).value.root


@pytest.fixture
def databases(postgresql: str) -> Iterator[tuple[Database, Database]]:
    with closing(Database(postgresql)) as one, closing(Database(postgresql)) as two:
        yield one, two


def builds_of(home: Path, database: Database) -> Builds:
    return Builds(home, RemoteStore(URL, wait_s=0.5), BuildLocks(database))


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
