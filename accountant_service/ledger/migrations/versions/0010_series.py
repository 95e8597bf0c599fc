"""Series of datasets, and the caps that their datasets are created with.

Earlier servers go on writing: they neither read nor write the tables, and leave the column empty.

Revision ID: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
oldest_writer = "0006"


def upgrade() -> None:
    """Add the tables and the column."""
    op.create_table(
        "series",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("template", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "series_cap",
        sa.Column("series", sa.String(200), sa.ForeignKey("series.name"), primary_key=True),
        sa.Column("kind", sa.String(4), primary_key=True),
        sa.Column("holder", sa.String(200), primary_key=True),
        sa.Column("share", sa.Float(53), nullable=False),
    )
    # SQL, because Alembic adds no column with a foreign key to a table of SQLite
    op.execute("ALTER TABLE dataset ADD COLUMN series VARCHAR(200) REFERENCES series (name)")
    op.create_index("ix_dataset_series", "dataset", ["series"])


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
