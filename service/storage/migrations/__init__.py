"""Migrations of the database by Alembic: one module per revision in `versions`, numbered from 0001.

    upgrade(rows, schema, where)    in the transaction of `rows`: all of it or nothing

Homes that Crucible made before it used Alembic have their number in SQLite's `PRAGMA user_version`.
It is the same as that of the revision, and is still written: so an older Crucible refuses a newer
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from pipeline.errors import StoreError

FOLDER = Path(__file__).parent
HEAD = "0013"


@dataclass(frozen=True, slots=True)
class Schema:
    """The revision to which a database is brought, and the folders of the migrations."""

    revision: str = HEAD
    folders: tuple[Path, ...] = (FOLDER / "versions",)


def revision_of(rows: sa.Connection) -> str | None:
    """Return the database's revision; None for an empty one."""
    if sa.inspect(rows).has_table("alembic_version"):
        revision: str | None = rows.scalar(sa.text("SELECT version_num FROM alembic_version"))
        return revision
    if rows.dialect.name == "sqlite":
        version = rows.exec_driver_sql("PRAGMA user_version").scalar_one()
        return f"{version:04}" if version else None
    return None


def check_revision(revision: str | None, schema: Schema, where: str) -> None:
    """Raise StoreError if a newer Crucible has made this database."""
    if revision is not None and revision > schema.revision:
        raise StoreError(
            f"{where} is of schema version {int(revision)}, this Crucible knows up to"
            f" {int(schema.revision)}",
            "start the newer version of Crucible, or give another home",
        )


def upgrade(rows: sa.Connection, schema: Schema) -> None:
    """Bring the database to a revision, in the transaction of `rows`."""
    from alembic import command  # most starts need no migration
    from alembic.config import Config

    config, folders = Config(), "\n".join(map(str, schema.folders))
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", folders.replace("%", "%%"))
    config.attributes["connection"] = rows
    revision = revision_of(rows)
    if revision is not None and not sa.inspect(rows).has_table("alembic_version"):
        command.stamp(config, revision)
    command.upgrade(config, schema.revision)
    if rows.dialect.name == "sqlite":
        rows.exec_driver_sql(f"PRAGMA user_version = {int(schema.revision)}")
