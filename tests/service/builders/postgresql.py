"""A private PostgreSQL: its data is in a temporary folder, and it listens on a socket there."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
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
# Committed transactions outlast a crash of the server, though not one of the host.
DURABLE = (*OPTIONS, "synchronous_commit=on")


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
    """A server. Each test has databases of its own."""

    def __init__(self, folder: Path, options: Sequence[str] = OPTIONS) -> None:
        self._folder, self._options = folder, options
        self._numbers = count()
        self._owner = USER if os.getuid() == 0 else None  # None: this process's user
        self._user = self._owner or pwd.getpwuid(os.getuid()).pw_name
        self._admin = sa.create_engine(
            self.url("postgres"), isolation_level="AUTOCOMMIT", pool_pre_ping=True
        )
        self._process: subprocess.Popen[bytes] | None = None

    def initialize(self) -> None:
        """Create its data."""
        if self._owner:
            shutil.chown(self._folder, self._owner, self._owner)
        command = (BINARIES / "initdb", "--auth=trust", "--no-sync", "-E", "UTF8", "-D")
        self._run((*command, self._folder / "data")).wait()

    def start(self) -> None:
        """Start, and return when it answers."""
        options = (f"unix_socket_directories={self._folder}", "listen_addresses=", *self._options)
        command: list[str | Path] = [BINARIES / "postgres", "-D", self._folder / "data"]
        for option in options:
            command += ["-c", option]
        self._process = self._run(command)
        end = time.monotonic() + START_S
        ready = (BINARIES / "pg_isready", "-q", "-h", self._folder)
        while subprocess.run(ready, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > end:
                log = (self._folder / "log").read_text()
                raise RuntimeError(f"PostgreSQL does not start:\n{log}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it at once, as a crash does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
            self._process = None

    def _run(self, command: Sequence[str | Path]) -> "subprocess.Popen[bytes]":
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                user=self._owner,
                group=self._owner,
                extra_groups=[] if self._owner else None,
            )

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self._folder / ".s.PGSQL.5432"

    @property
    def process_id(self) -> int:
        """That of the running server."""
        assert self._process is not None
        return self._process.pid

    def url(self, database: str) -> str:
        """The address of a database, as the setting `database_url` has it."""
        return f"postgresql+psycopg://{self._user}@/{database}?host={self._folder}"

    def url_at(self, port: int, database: str) -> str:
        """The address of a database behind a TCP port that leads to the socket."""
        return f"postgresql+psycopg://{self._user}@127.0.0.1:{port}/{database}"

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
def running_server(options: Sequence[str] = OPTIONS) -> Iterator[Server]:
    """Start a server, and stop it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="crucible-postgresql-"))
    server = Server(folder, options)
    try:
        server.initialize()
        server.start()
        yield server
    finally:
        server.close()
        server.stop()
        shutil.rmtree(folder)


@contextmanager
def refusing_connections(url: str) -> Iterator[None]:
    """End all connections to a database, and allow no new ones meanwhile."""
    address = sa.make_url(url)
    admin = sa.create_engine(address.set(database="postgres"), isolation_level="AUTOCOMMIT")
    allow = f"ALTER DATABASE {address.database} WITH ALLOW_CONNECTIONS"
    end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'"
    try:
        with admin.connect() as rows:
            rows.exec_driver_sql(f"{allow} false")
            rows.exec_driver_sql(end.format(address.database))
            try:
                yield
            finally:
                rows.exec_driver_sql(f"{allow} true")
    finally:
        admin.dispose()
