"""PostgreSQL: one database for several servers. Needs the extra `postgres`."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import sqlalchemy as sa

from pipeline.errors import DiskFull, PlanError, StoreError, UserError

DRIVER = "postgresql+psycopg"
CONNECT_S = 10
# A connection whose server no longer answers fails after about 10 s: the default is minutes.
KEEPALIVE = {
    "keepalives_idle": 4,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # ms
}
# A server that lost its network must not hold locks, or wait for them, without end.
OPTIONS = "-c lock_timeout=10s -c idle_in_transaction_session_timeout=60s"
POOL_SIZE, MAX_OVERFLOW, POOL_TIMEOUT_S = 5, 10, 30.0  # connections of one server
# SQLSTATE
DISK_FULL = "53100"
# What the operator mends, although the driver calls it an error of the program: a bad option of the
# address (the driver finds it, without a code), a missing right, no schema to create tables in.
OF_OPERATOR = (None, "42501", "3F000")
SHOWN = ("host", "port")  # parameters of an address that may be in a message


@dataclass(frozen=True, slots=True)
class PostgreSQL:
    """A database on a server."""

    url: sa.URL

    @property
    def name(self) -> str:
        """The address without its password, which a parameter may hold, too."""
        shown = {name: value for name, value in self.url.query.items() if name in SHOWN}
        return f"'{self.url.set(query=shown).render_as_string(hide_password=True)}'"

    def open(self) -> sa.Engine:
        """Return the engine. It connects at the first use. UserError without the extra."""
        defaults = {"connect_timeout": CONNECT_S, "options": OPTIONS, **KEEPALIVE}
        unset = {name: value for name, value in defaults.items() if name not in self.url.query}
        try:
            return sa.create_engine(
                self.url,
                connect_args=unset,
                pool_pre_ping=True,  # the server may have been restarted
                pool_size=POOL_SIZE,
                max_overflow=MAX_OVERFLOW,
                pool_timeout=POOL_TIMEOUT_S,
            )
        except ModuleNotFoundError as error:
            raise UserError(
                "PostgreSQL needs the package psycopg",
                "install Crucible with the extra `postgres`",
            ) from error

    def reading(self, engine: sa.Engine) -> sa.Engine:
        """Return the engine for queries: each block of them sees the database at one moment."""
        return engine.execution_options(isolation_level="REPEATABLE READ")

    def writing(self, engine: sa.Engine) -> sa.Engine:
        """Return the engine for changes: after each lock, a query sees what was committed."""
        return engine.execution_options(isolation_level="READ COMMITTED")

    def turn(self) -> contextlib.AbstractContextManager[object]:
        """Nothing to wait for: the database lets several write at once."""
        return contextlib.nullcontext()

    def lock(self, rows: sa.Connection, subject: str) -> None:
        """Hold back other transactions that lock the same subject, to the end of this one."""
        number = sa.func.hashtextextended(f"crucible {subject}", 0)
        rows.execute(sa.select(sa.func.pg_advisory_xact_lock(number)))

    def check(self, rows: sa.Connection) -> None:
        """Nothing to check: the server does."""

    def is_of_operator(self, error: BaseException | None) -> bool:
        """Return whether the operator can mend what the driver calls an error of the program."""
        return getattr(error, "sqlstate", "") in OF_OPERATOR

    def crucible_error(self, error: BaseException) -> DiskFull | StoreError:
        """Translate an error of the driver."""
        if getattr(error, "sqlstate", None) == DISK_FULL:
            return DiskFull(
                f"the disk of the database is full: {self.name}", "free some space on its server"
            )
        return StoreError(
            f"cannot use the database {self.name}: {error}",
            "check that it runs, that this host reaches it, and the address in `database_url`",
        )


def url_from(text: str) -> sa.URL:
    """Parse the address of a database. PlanError if it is not one of PostgreSQL."""
    expected = f"expected {DRIVER}://USER@HOST/NAME"
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):  # whose text may hold the password
        raise PlanError("database_url is not the address of a database", expected) from None
    if url.drivername != DRIVER:
        raise PlanError(f"no database '{url.drivername}' for database_url", expected)
    if "@" in (url.host or ""):  # of a password, whose end would be taken for the host
        raise PlanError("database_url has more than one '@'", "write %40 for '@' in the password")
    return url
