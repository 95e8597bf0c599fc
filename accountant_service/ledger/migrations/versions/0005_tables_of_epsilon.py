"""Empty the tables of ε that may belong to an earlier reference of their dataset.

Up to this revision a reservation that replaced the reference kept the table of the first one. Only
an unplanned reference can be replaced. Without a table ε is computed when it is shown.

Revision ID: 0005
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Empty the table of ε in every dataset whose reference was not planned."""
    connection = op.get_bind()
    rows = connection.execute(sa.text("SELECT id, policy FROM dataset")).all()
    for row in rows:
        emptied = _empty_table(row.policy)
        if emptied is not None:
            connection.execute(
                sa.text("UPDATE dataset SET policy = :policy WHERE id = :id"),
                {"id": row.id, "policy": emptied},
            )


def _empty_table(stored: str) -> str | None:
    """Return a filter without its table of ε; None if it stays as it is, or cannot be read.

    `accountant ledger verify` names a row that cannot be read.
    """
    try:
        policy = json.loads(stored)
        if policy["filter"] != "reference" or policy["planned"]:
            return None
        return json.dumps(policy | {"epsilons": []})
    except (KeyError, RecursionError, TypeError, ValueError):
        return None


def downgrade() -> None:
    """Refuse: a ledger cannot be downgraded."""
    raise NotImplementedError("a ledger cannot be downgraded; restore a backup instead")
