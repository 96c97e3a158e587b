"""Models and their versions."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import Text

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    op.create_table(
        "models",
        sa.Column("name", Text, primary_key=True),
        sa.Column("owner", Text, nullable=False),
        sa.Column("current", sa.Integer, nullable=False),
        sa.Column("latest", sa.Integer, nullable=False),
        sa.Column("deployed", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("deployment", Text),
        sqlite_strict=True,
    )
    op.create_table(
        "versions",
        sa.Column(
            "model", Text, sa.ForeignKey("models.name", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("job_id", Text, nullable=False),
        sa.Column("before", sa.Integer),
        sa.Column("about", Text, nullable=False),
        sqlite_strict=True,
    )
