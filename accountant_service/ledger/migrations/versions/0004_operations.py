"""Datasets that are closed for new reservations, quotas of API keys, and webhooks.

Revision ID: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add columns for a dataset's closing time and a key's quota, and tables for webhooks."""
    op.add_column("dataset", sa.Column("closed_at", sa.BigInteger, nullable=True))
    for name in ("requests_per_minute", "quota_empty_at"):
        op.add_column("api_key", sa.Column(name, sa.BigInteger, nullable=True))
    op.create_table(
        "webhook",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("secret", sa.Text, nullable=False),
        sa.Column("dataset", sa.String(200), nullable=True),
        sa.Column("shares", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "webhook_event",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("webhook", sa.String(32), sa.ForeignKey("webhook.id"), nullable=False),
        sa.Column("dataset", sa.String(200), nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("due_at", sa.BigInteger, nullable=False),
        sa.Column("last_error", sa.Text, nullable=False),
    )
    op.create_index("ix_webhook_event_order", "webhook_event", ["webhook", "dataset", "number"])


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
