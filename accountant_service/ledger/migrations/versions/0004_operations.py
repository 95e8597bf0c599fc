"""Datasets that are closed for new reservations.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add when a dataset was closed; earlier ones are all open."""
    op.add_column("dataset", sa.Column("closed_at", sa.BigInteger, nullable=True))


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
