"""Claims: which server runs a job, and until when it is believed to."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import BIG_INTEGER, SECONDS, Text

revision, down_revision = "0007", "0006"


def upgrade() -> None:
    op.add_column(
        "jobs", sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("0"))
    )
    op.add_column("jobs", sa.Column("server", Text))
    op.add_column(
        "jobs", sa.Column("fencing_token", BIG_INTEGER, nullable=False, server_default=sa.text("0"))
    )
    op.add_column("jobs", sa.Column("heartbeat_at", SECONDS))
    op.create_index("jobs_by_server", "jobs", ["server"])
    if op.get_bind().dialect.name == "sqlite":  # on PostgreSQL there is no older row
        op.execute(
            "UPDATE jobs SET attempt = json_extract(job, '$.attempt')"
            " WHERE CASE WHEN json_valid(job) THEN json_type(job, '$.attempt') = 'integer' END"
        )
