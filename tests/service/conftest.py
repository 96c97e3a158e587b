"""Fixtures of the service's tests."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from service.storage.database import Database
from tests.pipeline.execution.s3 import S3Server, running_s3, s3_client
from tests.service.builders.postgresql import Server, missing, running_server


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 for all tests. Skipped and counted without the extra."""
    with running_s3() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A client of the server, whose `bucket` is empty."""
    return s3_client(s3_server.url, monkeypatch, tmp_path)


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[Server]:
    """One PostgreSQL for all tests. Skipped and counted where there is none."""
    if reason := missing():
        pytest.skip(f"PostgreSQL test: {reason}")
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def migrated(postgresql_server: Server) -> Iterator[str]:
    """The name of a PostgreSQL database with all tables, to copy."""
    with postgresql_server.database() as url:
        Database(url).close()
        yield make_url(url).database or ""


@pytest.fixture
def postgresql(postgresql_server: Server, migrated: str) -> Iterator[str]:
    """The address of a PostgreSQL database with all tables, and no rows."""
    with postgresql_server.database(migrated) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a new database is: the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        return tmp_path / "crucible.db"
    url: str = request.getfixturevalue("postgresql")
    return url


@pytest.fixture
def open_database(location: Path | str) -> Iterator[Callable[[], Database]]:
    """Opens one database as often as it is called, as several processes do."""
    opened = list[Database]()

    def open_again() -> Database:
        opened.append(Database(location))
        return opened[-1]

    yield open_again
    for database in opened:
        database.close()


@pytest.fixture
def database(open_database: Callable[[], Database]) -> Database:
    """A new database, of each kind."""
    return open_database()
