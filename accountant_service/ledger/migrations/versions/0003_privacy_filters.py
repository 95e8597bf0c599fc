"""Privacy filters of several kinds, teams and caps.

Filters, amounts and charges are stored as JSON. Every dataset keeps the filter that it was created
with, and every entry its bytes. A reservation's row says what it takes of the budget.

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
_ATTO_PER_MICRO = 10**12


def upgrade() -> None:
    """Replace the columns for one Rényi order by columns for any filter; add teams and caps."""
    for table, names in (("dataset", ("policy", "spent_amounts", "held_amounts")),
                         ("reservation", ("charge", "taken")),
                         ("audit_event", ("detail",))):  # fmt: skip
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
        "SELECT id, unit, state, steps_reserved, steps_granted FROM reservation",
        "UPDATE reservation SET charge = :charge, taken = :taken WHERE id = :id",
        lambda row: {
            "id": row.id,
            "charge": json.dumps({"unit_attonats": row.unit}),
            "taken": json.dumps([_compute_spent_or_held(row)]),
        },
    )
    _add_teams_and_caps()
    for table, name in (("dataset", "rdp_order"), ("dataset", "spent"), ("dataset", "held"),
                        ("reservation", "unit")):  # fmt: skip
        op.drop_column(table, name)
    for name in ("spent", "held"):
        op.execute(f"ALTER TABLE dataset RENAME COLUMN {name}_amounts TO {name}")


def _compute_spent_or_held(row: Any) -> int:
    """Return the micro-nats that a reservation has spent or holds, rounded up.

    While it is open these are the cost of all its steps, then of the granted steps.

    Each state of a Rényi charge is rounded up once.
    """
    steps = row.steps_reserved if row.state == "open" else row.steps_granted
    return -(-int(row.unit) * int(steps) // _ATTO_PER_MICRO)


def _add_teams_and_caps() -> None:
    """Add a team column to API keys and reservations, and create the table of caps."""
    for table in ("api_key", "reservation"):
        op.add_column(table, sa.Column("team", sa.String(200), nullable=True))
    op.create_index("ix_reservation_key", "reservation", ["dataset", "key_id"])
    op.create_index("ix_reservation_team", "reservation", ["dataset", "team"])
    op.create_table(
        "cap",
        sa.Column("dataset", sa.String(32), sa.ForeignKey("dataset.id"), primary_key=True),
        sa.Column("kind", sa.String(4), primary_key=True),
        sa.Column("holder", sa.String(200), primary_key=True),
        sa.Column("share", sa.Float(53), nullable=False),
    )


def _copy(query: str, statement: str, values: Callable[[Any], dict[str, Any]]) -> None:
    """Run a statement for each row of a query, with values computed from that row."""
    connection = op.get_bind()
    rows = connection.execute(sa.text(query)).all()
    for first in range(0, len(rows), _ROWS):
        connection.execute(sa.text(statement), [values(row) for row in rows[first : first + _ROWS]])


def downgrade() -> None:
    """Raise NotImplementedError: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
