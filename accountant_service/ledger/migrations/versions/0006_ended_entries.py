"""The number of the entry that ended a reservation, in the reservation's row.

A certificate states when its run ended and what its program declared. Without this number the
entry was searched for in the whole record.

Revision ID: 0006
"""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
_ENTRIES = 1000
_ENDS = ("commit", "release", "expire")


def upgrade() -> None:
    """Add the column, and fill it from the entries."""
    op.add_column("reservation", sa.Column("ended_entry", sa.BigInteger, nullable=True))
    connection = op.get_bind()
    page = sa.text(
        "SELECT dataset, number, body FROM entry WHERE dataset = :dataset AND number > :number "
        f"ORDER BY number LIMIT {_ENTRIES}"
    )
    update = sa.text(
        "UPDATE reservation SET ended_entry = :number WHERE id = :run AND dataset = :dataset"
    )
    for (dataset,) in connection.execute(sa.text("SELECT id FROM dataset")).all():
        number = 0
        while rows := connection.execute(page, {"dataset": dataset, "number": number}).all():
            ends = [end for row in rows if (end := _read_end(row)) is not None]
            if ends:
                connection.execute(update, ends)
            number = rows[-1].number
            if not isinstance(number, int):  # `accountant ledger verify` names it
                break


def _read_end(row: Any) -> dict[str, Any] | None:
    """Return the values of the update for an entry that ends a run; None for any other entry.

    `accountant ledger verify` names an entry that cannot be read.
    """
    try:
        entry = json.loads(row.body)
        run = entry["reservation"] if entry["kind"] in _ENDS else None
    except (KeyError, RecursionError, TypeError, ValueError):
        return None
    if not isinstance(run, str):
        return None
    return {"run": run, "dataset": row.dataset, "number": row.number}


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
