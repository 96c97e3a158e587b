"""The memory of one instance of a version."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import BIG_INTEGER

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    op.add_column("versions", sa.Column("memory_bytes", BIG_INTEGER))
