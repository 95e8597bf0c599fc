"""An index by which a page of API keys is found, however many there are.

Revision ID: 0008
"""

from alembic import op

revision = "0008"
down_revision = "0007"
oldest_writer = "0006"


def upgrade() -> None:
    """Create the index."""
    op.create_index("ix_api_key_order", "api_key", ["created_at", "id"])


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
