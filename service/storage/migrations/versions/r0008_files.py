"""Files that servers share: which object holds each, and its digest."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import BIG_INTEGER, Text

revision, down_revision = "0008", "0007"


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("folder", Text, primary_key=True),
        sa.Column("path", Text, primary_key=True),
        sa.Column("object", Text, nullable=False),
        sa.Column("sha256", Text, nullable=False),
        sa.Column("size_bytes", BIG_INTEGER, nullable=False),
        sqlite_strict=True,
    )
