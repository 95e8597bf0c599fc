"""Runs on several datasets, and what the holder of a cap has taken, kept beside the cap.

Both columns are empty in the rows that exist, and in those that earlier servers write. The first
row that an earlier server would misread lets only servers of this revision write.

Revision ID: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
oldest_writer = "0006"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("reservation", sa.Column("joint", sa.Text, nullable=True))
    op.add_column("cap", sa.Column("taken", sa.Text, nullable=True))


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
