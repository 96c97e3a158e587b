"""Nodes: who can run jobs, on which devices; and the jobs of a compile for several targets."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import SECONDS, Text

revision, down_revision = "0009", "0008"


def upgrade() -> None:
    op.create_table(
        "nodes",
        sa.Column("id", Text, primary_key=True),
        sa.Column("name", Text, nullable=False),
        sa.Column("kind", Text, nullable=False),
        sa.Column("version", Text, nullable=False),
        sa.Column("labels", Text, nullable=False),
        sa.Column("heartbeat_at", SECONDS, nullable=False),
    )
    op.create_table(
        "compile_targets",
        sa.Column("compile", Text, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("owner", Text, nullable=False),
        sa.Column("title", Text, nullable=False),
        sa.Column("job_id", Text, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
        sa.Index("compile_targets_by_job", "job_id"),
    )
