"""Columns for what queries read out of JSON: PostgreSQL cannot read JSON that has a NUL in it."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import Text

revision, down_revision = "0006", "0005"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("device", Text, nullable=False, server_default=""))
    op.add_column("jobs", sa.Column("started", Text))
    op.create_index("jobs_by_device", "jobs", ["device", "owner", "started"])
    op.add_column("events", sa.Column("stage", Text))
    op.add_column("events", sa.Column("subject", Text))
    if op.get_bind().dialect.name == "sqlite":  # on PostgreSQL there is no older row
        op.execute(
            "UPDATE jobs SET device = coalesce(json_extract(job, '$.device'), ''),"
            " started = json_extract(job, '$.started') WHERE json_valid(job)"
        )
        op.execute(
            "UPDATE events SET stage = json_extract(data, '$.stage'),"
            " subject = json_extract(data, '$.subject') WHERE kind = 'stage' AND json_valid(data)"
        )
