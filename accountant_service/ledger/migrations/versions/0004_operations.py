"""Datasets that are closed for new reservations, and quotas of API keys.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add when a dataset was closed, and quotas; earlier datasets are open, keys without quota."""
    op.add_column("dataset", sa.Column("closed_at", sa.BigInteger, nullable=True))
    for name in ("requests_per_minute", "quota_empty_at"):
        op.add_column("api_key", sa.Column(name, sa.BigInteger, nullable=True))


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
