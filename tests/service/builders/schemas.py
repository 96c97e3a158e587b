"""Schemas of Crucibles that do not exist."""

from pathlib import Path

from service.storage.database import CURRENT
from service.storage.migrations import HEAD, Schema

REVISION = """
from alembic import op

revision, down_revision = "{revision}", "{head}"


def upgrade() -> None:
    {statements}
"""


def newer_schema(folder: Path, *statements: str) -> Schema:
    """The schema of a newer Crucible, which has one more revision of these statements."""
    revision = f"{int(HEAD) + 1:04}"
    versions = folder / "newer"
    versions.mkdir(exist_ok=True)
    text = REVISION.format(revision=revision, head=HEAD, statements="\n    ".join(statements))
    (versions / f"r{revision}_newer.py").write_text(text)
    return Schema(revision, (*CURRENT.folders, versions))
