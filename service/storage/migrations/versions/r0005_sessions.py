"""Sessions of browsers."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import Text

revision, down_revision = "0005", "0004"


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("sha256", Text, primary_key=True),
        sa.Column("key", Text, sa.ForeignKey("keys.prefix"), nullable=False),
        sa.Column("expires", Text, nullable=False),
        sqlite_strict=True,
    )
