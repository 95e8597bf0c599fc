"""The oldest revision whose servers may write, and the kind and time of an entry as columns.

The columns stay empty in the entries that exist, and in those that servers of revision 0006 write
meanwhile: they are derived from the entries later. So the migration of a long record takes no
longer than the building of its indexes.

Revision ID: 0007
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
oldest_writer = "0006"


def upgrade() -> None:
    """Create the table, and add the columns and the indexes for exports."""
    schema = op.create_table(
        "ledger_schema", sa.Column("oldest_writer", sa.String(32), primary_key=True)
    )
    op.execute(schema.insert().values(oldest_writer=oldest_writer))
    op.add_column("entry", sa.Column("kind", sa.String(12), nullable=True))
    op.add_column("entry", sa.Column("at", sa.BigInteger, nullable=True))
    op.create_index("ix_entry_kind", "entry", ["dataset", "kind", "number"])
    op.create_index("ix_entry_at", "entry", ["dataset", "at", "number"])
    op.create_index("ix_audit_event_order", "audit_event", ["at", "id"])
    empty = sa.text("at IS NULL")
    op.create_index(
        "ix_entry_underived", "entry", ["dataset", "number"], sqlite_where=empty,
        postgresql_where=empty,
    )  # fmt: skip


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
