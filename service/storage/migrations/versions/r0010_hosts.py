"""Several servers as one: the counts of keys, loaded models, addresses, logs."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import BIG_INTEGER, SECONDS, Text, database_clock_s

revision, down_revision = "0010", "0009"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("added_at", SECONDS))
    jobs = sa.table("jobs", sa.column("added_at"))
    op.execute(sa.update(jobs).values(added_at=database_clock_s()))
    op.add_column("nodes", sa.Column("address", Text, nullable=False, server_default=""))
    op.create_table(
        "running_logs",
        sa.Column("job_id", Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("fencing_token", BIG_INTEGER, primary_key=True),
        sa.Column("end_bytes", BIG_INTEGER, primary_key=True),
        sa.Column("text", Text, nullable=False),
    )
    op.create_table(
        "key_counts",
        sa.Column("key", Text, primary_key=True),
        sa.Column("requests_until", SECONDS, nullable=False),
        sa.Column("hour_begin", SECONDS, nullable=False),
        sa.Column("uploaded_bytes", BIG_INTEGER, nullable=False),
    )
    op.create_table(
        "key_streams",
        sa.Column("key", Text, primary_key=True),
        sa.Column("server", Text, primary_key=True),
        sa.Column("count", sa.Integer, nullable=False),
    )
    op.add_column(
        "models", sa.Column("revision", BIG_INTEGER, nullable=False, server_default=sa.text("0"))
    )
    op.create_table(
        "model_states",
        sa.Column(
            "model", Text, sa.ForeignKey("models.name", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("server", Text, primary_key=True),
        sa.Column("revision", BIG_INTEGER, nullable=False),
        sa.Column("state", Text, nullable=False),
        sa.Column("version", sa.Integer),
        sa.Column("reason", Text, nullable=False),
    )
