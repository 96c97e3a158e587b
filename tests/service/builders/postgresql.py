"""A private PostgreSQL: its data is in a temporary folder, and it listens on a socket there."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import sqlalchemy as sa

BINARIES = Path("/usr/lib/postgresql/15/bin")  # of Debian's package postgresql
USER = "postgres"  # initdb refuses root
START_S = 60.0
# A test needs no durability. One transaction holds few locks, but many databases are created.
OPTIONS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=200")


def missing() -> str:
    """Why this host has no PostgreSQL for tests; empty if it has."""
    if not (BINARIES / "postgres").is_file():
        return f"no PostgreSQL 15 in {BINARIES}"
    if find_spec("psycopg") is None:
        return "no psycopg: install the extra `postgres`"
    if os.getuid() == 0 and USER not in {user.pw_name for user in pwd.getpwall()}:
        return f"no user {USER} to run PostgreSQL as"
    return ""


class Server:
    """A running server. Each test has databases of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._user = USER if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
        self._admin = sa.create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")

    def url(self, database: str) -> str:
        """The address of a database, as the setting `database_url` has it."""
        return f"postgresql+psycopg://{self._user}@/{database}?host={self._folder}"

    @contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """The address of a new database, which is dropped at the end."""
        name = f"test_{next(self._numbers)}"
        with self._admin.connect() as rows:
            rows.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield self.url(name)
        finally:
            with self._admin.connect() as rows:
                rows.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")

    def close(self) -> None:
        self._admin.dispose()


@contextmanager
def running_server() -> Iterator[Server]:
    """Start a server, and stop it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="crucible-postgresql-"))
    user = USER if os.getuid() == 0 else None
    groups: list[str] | None = [] if user else None
    try:
        if user:
            shutil.chown(folder, USER, USER)
        initialize = (BINARIES / "initdb", "--auth=trust", "--no-sync", "-E", "UTF8", "-D")
        subprocess.run(
            (*initialize, folder / "data"),
            check=True,
            capture_output=True,
            cwd=folder,
            user=user,
            group=user,
            extra_groups=groups,
        )
        options = (f"unix_socket_directories={folder}", "listen_addresses=", *OPTIONS)
        command: list[str | Path] = [BINARIES / "postgres", "-D", folder / "data"]
        for option in options:
            command += ["-c", option]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                user=user,
                group=user,
                extra_groups=groups,
            )
        server = Server(folder)
        try:
            _wait_for(process, folder)
            yield server
        finally:
            server.close()
            process.send_signal(signal.SIGQUIT)  # at once: nothing of it is kept
            process.wait()
    finally:
        shutil.rmtree(folder)


def _wait_for(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    end = time.monotonic() + START_S
    while subprocess.run([BINARIES / "pg_isready", "-q", "-h", folder], check=False).returncode:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"PostgreSQL does not start:\n{(folder / 'log').read_text()}")
        time.sleep(0.05)
