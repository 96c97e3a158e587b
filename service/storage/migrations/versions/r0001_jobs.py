"""Keys, jobs with their events, and Idempotency-Keys."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import BIG_INTEGER, Text

revision, down_revision = "0001", None


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("prefix", Text, primary_key=True),
        sa.Column("sha256", Text, nullable=False),
        sa.Column("name", Text, nullable=False),
        sa.Column("owner", Text, nullable=False),
        sa.Column("scopes", Text, nullable=False),
        sa.Column("created", Text, nullable=False),
        sa.Column("revoked", Text),
        sqlite_strict=True,
    )
    op.create_table(
        "jobs",
        sa.Column("id", Text, primary_key=True),
        sa.Column("owner", Text, nullable=False),
        sa.Column("identity", Text, nullable=False),
        sa.Column("state", Text, nullable=False),
        sa.Column("created", Text, nullable=False),
        sa.Column("job", Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("jobs_by_identity", "jobs", ["owner", "identity"])
    op.create_index("jobs_by_state", "jobs", ["state", "id"])
    op.create_table(
        "events",
        sa.Column("seq", BIG_INTEGER, sa.Identity(), primary_key=True),
        sa.Column("job_id", Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("at", Text, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("data", Text, nullable=False),
        sqlite_autoincrement=True,  # a number is never used again
        sqlite_strict=True,
    )
    op.create_index("events_by_job", "events", ["job_id", "seq"])
    op.create_table(
        "requests",
        sa.Column("owner", Text, primary_key=True),
        sa.Column("idempotency_key", Text, primary_key=True),
        sa.Column("digest", Text, nullable=False),
        sa.Column("job_id", Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
        sa.Column("created", Text, nullable=False),
        sqlite_strict=True,
    )
