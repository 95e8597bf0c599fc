"""Privacy filters of several kinds: a filter, amounts and charges are stored as JSON.

Every dataset keeps the filter that it was created with, and every entry its bytes.

Revision ID: 0003
"""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
_ROWS = 1000


def upgrade() -> None:
    """Replace the columns of one Rényi order by columns that fit every filter."""
    for table, names in (("dataset", ("policy", "spent_amounts", "held_amounts")),
                         ("reservation", ("charge",))):  # fmt: skip
        for name in names:
            op.add_column(table, sa.Column(name, sa.Text, nullable=False, server_default=""))
    _copy(
        "SELECT id, rdp_order, spent, held FROM dataset",
        "UPDATE dataset SET policy = :policy, spent_amounts = :spent, held_amounts = :held "
        "WHERE id = :id",
        lambda row: {
            "id": row.id,
            "policy": json.dumps({"filter": "renyi", "order": row.rdp_order}),
            "spent": json.dumps([row.spent]),
            "held": json.dumps([row.held]),
        },
    )
    _copy(
        "SELECT id, unit FROM reservation",
        "UPDATE reservation SET charge = :charge WHERE id = :id",
        lambda row: {"id": row.id, "charge": json.dumps({"unit_attonats": row.unit})},
    )
    for table, name in (("dataset", "rdp_order"), ("dataset", "spent"), ("dataset", "held"),
                        ("reservation", "unit")):  # fmt: skip
        op.drop_column(table, name)
    for name in ("spent", "held"):
        op.execute(f"ALTER TABLE dataset RENAME COLUMN {name}_amounts TO {name}")


def _copy(query: str, statement: str, values: Callable[[Any], dict[str, Any]]) -> None:
    """Run a statement with the values computed from each row of a query."""
    connection = op.get_bind()
    rows = connection.execute(sa.text(query)).all()
    for first in range(0, len(rows), _ROWS):
        connection.execute(sa.text(statement), [values(row) for row in rows[first : first + _ROWS]])


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
