"""Alembic runs this for each upgrade, on the connection that `upgrade` passes."""

from alembic import context

from service.storage.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
