"""Language models: the tokens of each key."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import BIG_INTEGER, SECONDS, Text

revision, down_revision = "0012", "0011"


def upgrade() -> None:
    op.create_table(
        "key_tokens",
        sa.Column("key", Text, primary_key=True),
        sa.Column("seconds", sa.Integer, primary_key=True),
        sa.Column("begin", SECONDS, nullable=False),
        sa.Column("tokens", BIG_INTEGER, nullable=False),
    )
