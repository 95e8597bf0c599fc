"""An index on the age of idempotency keys, by which old ones are found.

Revision ID: 0002
"""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the index."""
    op.create_index("ix_idempotency_key_created_at", "idempotency_key", ["created_at"])


def downgrade() -> None:
    """A ledger is never taken back."""
    raise NotImplementedError("a ledger is never taken back: restore a backup instead")
