"""References that the owner of a dataset chose: entries of a kind that earlier servers cannot read.

The tables stay as they are, and earlier servers go on writing until the first such entry, which
lets only servers of this revision write.

Revision ID: 0011
"""

revision = "0011"
down_revision = "0010"
oldest_writer = "0006"


def upgrade() -> None:
    """Change nothing."""


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
