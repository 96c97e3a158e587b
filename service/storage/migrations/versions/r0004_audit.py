"""The audit.

An entry is never changed. It is deleted only after an entry `audit.expired` has announced, as its
object, the time before which entries are deleted. So every deletion leaves an entry. On PostgreSQL
a trigger numbers the entries, because a sequence leaves gaps where a transaction is rolled back.
"""

import sqlalchemy as sa
from alembic import op

from service.storage.tables import BIG_INTEGER, Text

revision, down_revision = "0004", "0003"

CHANGED, NOT_EXPIRED = "an audit entry cannot be changed", "an audit entry has not expired"
EXPIRED = "coalesce((SELECT max(object) FROM audit WHERE action = 'audit.expired'), '')"

SQLITE = (
    f"""
    CREATE TRIGGER audit_replace BEFORE INSERT ON audit
        WHEN EXISTS (SELECT 1 FROM audit WHERE seq = NEW.seq)
        BEGIN SELECT RAISE(ABORT, '{CHANGED}'); END
    """,
    f"""
    CREATE TRIGGER audit_update BEFORE UPDATE ON audit
        BEGIN SELECT RAISE(ABORT, '{CHANGED}'); END
    """,
    f"""
    CREATE TRIGGER audit_delete BEFORE DELETE ON audit WHEN OLD.at >= {EXPIRED}
        BEGIN SELECT RAISE(ABORT, '{NOT_EXPIRED}'); END
    """,
)
POSTGRESQL = (
    f"""
    CREATE FUNCTION audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION '{CHANGED}' USING ERRCODE = 'integrity_constraint_violation';
    END $$
    """,
    # The lock is held to the end of the transaction: the next entry sees this one, or its absence.
    """
    CREATE FUNCTION audit_number() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock(hashtextextended('crucible audit', 0));
        NEW.seq := coalesce((SELECT max(seq) FROM audit), 0) + 1;
        RETURN NEW;
    END $$
    """,
    f"""
    CREATE FUNCTION audit_keep() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF OLD.at >= {EXPIRED} THEN
            RAISE EXCEPTION '{NOT_EXPIRED}' USING ERRCODE = 'integrity_constraint_violation';
        END IF;
        RETURN OLD;
    END $$
    """,
    "CREATE TRIGGER audit_number BEFORE INSERT ON audit"
    " FOR EACH ROW EXECUTE FUNCTION audit_number()",
    "CREATE TRIGGER audit_update BEFORE UPDATE ON audit"
    " FOR EACH ROW EXECUTE FUNCTION audit_refuse()",
    "CREATE TRIGGER audit_delete BEFORE DELETE ON audit FOR EACH ROW EXECUTE FUNCTION audit_keep()",
    "CREATE TRIGGER audit_truncate BEFORE TRUNCATE ON audit EXECUTE FUNCTION audit_refuse()",
)


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("seq", BIG_INTEGER, sa.FetchedValue(), primary_key=True),
        sa.Column("at", Text, nullable=False),
        sa.Column("action", Text, nullable=False),
        sa.Column("object", Text, nullable=False),
        sa.Column("key", Text, nullable=False),
        sa.Column("owner", Text, nullable=False),
        sa.Column("address", Text, nullable=False),
        sa.Column("request", Text, nullable=False),
        sa.Column("details", Text, nullable=False),
        sa.CheckConstraint("action != 'audit.expired' OR object < at"),
        sqlite_autoincrement=True,  # a number is never used again
        sqlite_strict=True,
    )
    op.create_index("audit_by_action", "audit", ["action", "object"])
    statements = SQLITE if op.get_bind().dialect.name == "sqlite" else POSTGRESQL
    for statement in statements:
        op.get_bind().exec_driver_sql(statement)
