"""The tables of the database, as the newest migration leaves them.

`service/storage/migrations` creates them; a test compares both. Times are UTC in ISO 8601, so text
sorts by time. All text is compared byte by byte, on both databases.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

METADATA = sa.MetaData()

REPLACED_NUL = "\N{SYMBOL FOR NULL}"
"""PostgreSQL stores no NUL in text. This stands for it."""


class Text(sa.TypeDecorator[str]):
    """Text that sorts by its bytes."""

    impl = sa.Text
    cache_ok = True

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.TEXT(collation="C"))
        return dialect.type_descriptor(sa.Text())

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace("\0", REPLACED_NUL)


BIG_INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
# since 1970, by the database's clock
SECONDS: sa.Double[float] = sa.Double().with_variant(sa.REAL(), "sqlite")


class database_clock_s(FunctionElement[float]):  # noqa: N801 - the name of a function in SQL
    """The time by the database's clock: servers need not agree on theirs."""

    type = sa.Double()
    inherit_cache = True


@compiles(database_clock_s, "postgresql")
def _postgresql_clock(_element: object, _compiler: object, **_: object) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


@compiles(database_clock_s, "sqlite")
def _sqlite_clock(_element: object, _compiler: object, **_: object) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


keys = sa.Table(
    "keys",
    METADATA,
    sa.Column("prefix", Text, primary_key=True),
    sa.Column("sha256", Text, nullable=False),
    sa.Column("name", Text, nullable=False),
    sa.Column("owner", Text, nullable=False),
    sa.Column("scopes", Text, nullable=False),  # separated by spaces
    sa.Column("created", Text, nullable=False),
    sa.Column("revoked", Text),
)

sessions = sa.Table(
    "sessions",
    METADATA,
    sa.Column("sha256", Text, primary_key=True),  # of the token
    sa.Column("key", Text, sa.ForeignKey("keys.prefix"), nullable=False),
    sa.Column("expires", Text, nullable=False),
)

jobs = sa.Table(
    "jobs",
    METADATA,
    sa.Column("id", Text, primary_key=True),
    sa.Column("owner", Text, nullable=False),
    sa.Column("identity", Text, nullable=False),
    sa.Column("state", Text, nullable=False),
    sa.Column("created", Text, nullable=False),
    sa.Column("added_at", SECONDS),
    sa.Column("job", Text, nullable=False),  # JSON of service.jobs.state.Job
    # copies of what `job` holds, for queries
    sa.Column("device", Text, nullable=False, server_default=""),  # what it requires
    sa.Column("started", Text),
    sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("0")),
    # the claim: see service.jobs.claims
    sa.Column("server", Text),
    sa.Column("fencing_token", BIG_INTEGER, nullable=False, server_default=sa.text("0")),
    sa.Column("heartbeat_at", SECONDS),
    sa.Index("jobs_by_server", "server"),
    sa.Index("jobs_by_identity", "owner", "identity"),
    sa.Index("jobs_by_state", "state", "id"),
    sa.Index("jobs_by_device", "device", "owner", "started"),
)

events = sa.Table(
    "events",
    METADATA,
    sa.Column("seq", BIG_INTEGER, sa.Identity(), primary_key=True),
    sa.Column("job_id", Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("at", Text, nullable=False),
    sa.Column("kind", Text, nullable=False),
    sa.Column("data", Text, nullable=False),  # JSON
    # copies of what `data` holds, for queries; NULL where `kind` is not `stage`
    sa.Column("stage", Text),
    sa.Column("subject", Text),
    sa.Index("events_by_job", "job_id", "seq"),
)

running_logs = sa.Table(  # output of jobs that run, for other servers
    "running_logs",
    METADATA,
    sa.Column("job_id", Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    sa.Column("fencing_token", BIG_INTEGER, primary_key=True),  # of the claim under which it ran
    sa.Column("end_bytes", BIG_INTEGER, primary_key=True),  # where this part ends in the log
    sa.Column("text", Text, nullable=False),
)

nodes = sa.Table(
    "nodes",
    METADATA,
    sa.Column("id", Text, primary_key=True),  # that of the claims of its jobs
    sa.Column("name", Text, nullable=False),  # of the host
    sa.Column("kind", Text, nullable=False),  # server or node
    sa.Column("version", Text, nullable=False),
    sa.Column("labels", Text, nullable=False),  # JSON: labels by device
    sa.Column("heartbeat_at", SECONDS, nullable=False),
    # of its HTTP, for a proxy; empty: it has none, or has left
    sa.Column("address", Text, nullable=False, server_default=""),
    # JSON: every `backend precision` that its host runs
    sa.Column("candidates", Text, nullable=False, server_default="[]"),
)

compile_targets = sa.Table(
    "compile_targets",
    METADATA,
    sa.Column("compile", Text, primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("owner", Text, nullable=False),
    sa.Column("title", Text, nullable=False),
    sa.Column("job_id", Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    sa.Index("compile_targets_by_job", "job_id"),
)

requests = sa.Table(
    "requests",
    METADATA,
    sa.Column("owner", Text, primary_key=True),
    sa.Column("idempotency_key", Text, primary_key=True),
    sa.Column("digest", Text, nullable=False),
    sa.Column("job_id", Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("created", Text, nullable=False),
)

models = sa.Table(
    "models",
    METADATA,
    sa.Column("name", Text, primary_key=True),
    sa.Column("owner", Text, nullable=False),
    sa.Column("current", sa.Integer, nullable=False),
    sa.Column("latest", sa.Integer, nullable=False),
    sa.Column("deployed", sa.Integer, nullable=False, server_default=sa.text("0")),  # 0 or 1
    sa.Column("deployment", Text),  # JSON of service.registry.models.DeploymentOptions
    # rises with every change of what servers load
    sa.Column("revision", BIG_INTEGER, nullable=False, server_default=sa.text("0")),
)

model_states = sa.Table(  # how far each server has followed a model
    "model_states",
    METADATA,
    sa.Column("model", Text, sa.ForeignKey("models.name", ondelete="CASCADE"), primary_key=True),
    sa.Column("server", Text, primary_key=True),
    sa.Column("revision", BIG_INTEGER, nullable=False),  # of the model, which it has followed
    sa.Column("state", Text, nullable=False),
    sa.Column("version", sa.Integer),  # the one that answers
    sa.Column("reason", Text, nullable=False),  # why it has not loaded what it should
)

versions = sa.Table(
    "versions",
    METADATA,
    sa.Column("model", Text, sa.ForeignKey("models.name", ondelete="CASCADE"), primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("job_id", Text, nullable=False),
    sa.Column("before", sa.Integer),
    sa.Column("about", Text, nullable=False),  # JSON of service.registry.models.Version
    sa.Column("memory_bytes", BIG_INTEGER),
)

files = sa.Table(  # that `files_url` holds: see service.storage.files
    "files",
    METADATA,
    sa.Column("folder", Text, primary_key=True),  # below the home
    sa.Column("path", Text, primary_key=True),  # below the folder
    sa.Column("object", Text, nullable=False),  # below the URL; folders may share it
    sa.Column("sha256", Text, nullable=False),
    sa.Column("size_bytes", BIG_INTEGER, nullable=False),
)

builds = sa.Table(  # when jobs last used what others have made: see service.jobs.builds
    "builds",
    METADATA,
    sa.Column("stage", Text, primary_key=True),
    sa.Column("key", Text, primary_key=True),
    sa.Column("used_at", SECONDS, nullable=False),
)

key_counts = sa.Table(  # what all servers together have allowed: see service.limits
    "key_counts",
    METADATA,
    sa.Column("key", Text, primary_key=True),  # prefix; empty where no key is required
    sa.Column("requests_until", SECONDS, nullable=False),  # to when the requests count
    sa.Column("hour_begin", SECONDS, nullable=False),  # of the uploads
    sa.Column("uploaded_bytes", BIG_INTEGER, nullable=False),
)

key_streams = sa.Table(  # open streams, by server
    "key_streams",
    METADATA,
    sa.Column("key", Text, primary_key=True),
    sa.Column("server", Text, primary_key=True),
    sa.Column("count", sa.Integer, nullable=False),
)

failed_sign_ins = sa.Table(  # see service.limits.failures
    "failed_sign_ins",
    METADATA,
    sa.Column("network", Text, primary_key=True),
    sa.Column("begin", SECONDS, nullable=False),  # of the time in which they count
    sa.Column("count", sa.Integer, nullable=False),
)

key_tokens = sa.Table(  # of language models, in each window: see service.limits.tokens
    "key_tokens",
    METADATA,
    sa.Column("key", Text, primary_key=True),
    sa.Column("seconds", sa.Integer, primary_key=True),  # of the window
    sa.Column("begin", SECONDS, nullable=False),
    sa.Column("tokens", BIG_INTEGER, nullable=False),
)

audit = sa.Table(
    "audit",
    METADATA,
    sa.Column("seq", BIG_INTEGER, sa.FetchedValue(), primary_key=True),  # without gaps
    sa.Column("at", Text, nullable=False),
    sa.Column("action", Text, nullable=False),
    sa.Column("object", Text, nullable=False),
    sa.Column("key", Text, nullable=False),
    sa.Column("owner", Text, nullable=False),
    sa.Column("address", Text, nullable=False),
    sa.Column("request", Text, nullable=False),
    sa.Column("details", Text, nullable=False),  # JSON
    sa.Index("audit_by_action", "action", "object"),
)
