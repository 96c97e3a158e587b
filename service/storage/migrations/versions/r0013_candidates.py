"""Nodes: the candidates that each can run, for the form of a compile."""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import Text

revision, down_revision = "0013", "0012"


def upgrade() -> None:
    op.add_column("nodes", sa.Column("candidates", Text, nullable=False, server_default="[]"))
