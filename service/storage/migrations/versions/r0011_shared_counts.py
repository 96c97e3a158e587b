"""What servers count together: the uses of shared builds, and failed sign-ins."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import SECONDS, Text

revision, down_revision = "0011", "0010"


def upgrade() -> None:
    op.create_table(
        "builds",
        sa.Column("stage", Text, primary_key=True),
        sa.Column("key", Text, primary_key=True),
        sa.Column("used_at", SECONDS, nullable=False),
    )
    op.create_table(
        "failed_sign_ins",
        sa.Column("network", Text, primary_key=True),
        sa.Column("begin", SECONDS, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
    )
