"""The ledger's tables, portable between SQLite and PostgreSQL.

Those of datasets, reservations, series, keys and webhooks follow from the models that they store.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.types import TypeEngine

from accountant_service.ledger.columns import list_columns
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.rules import Dataset, Reservation
from accountant_service.ledger.series import Series
from accountant_service.ledger.webhooks import Event, Webhook

METADATA: Final = MetaData()

_TYPES: Final[dict[type, TypeEngine[Any]]] = {
    int: BigInteger(), float: Float(53), str: Text(), bytes: LargeBinary(),
}  # fmt: skip


def _build_columns(model: type) -> Iterator[Column[Any]]:
    """Yield the columns of a model's table."""
    for name, codec, is_nullable, _, details in list_columns(model):
        kind: TypeEngine[Any] = _TYPES[codec.stored]
        if details.length is not None:
            kind = Integer() if codec.stored is int else String(details.length)
        keys = [] if details.refers_to is None else [ForeignKey(details.refers_to)]
        yield Column(
            name, kind, *keys, primary_key=details.is_primary, unique=details.is_unique or None,
            nullable=is_nullable,
        )  # fmt: skip


DATASET: Final = Table(
    "dataset", METADATA, *_build_columns(Dataset), Index("ix_dataset_series", "series")
)

SERIES: Final = Table("series", METADATA, *_build_columns(Series))

SERIES_CAP: Final = Table(  # caps that every dataset of a series has from its creation on
    "series_cap",
    METADATA,
    Column("series", String(200), ForeignKey("series.name"), primary_key=True),
    Column("kind", String(4), primary_key=True),  # of the holder: key or team
    Column("holder", String(200), primary_key=True),
    Column("share", Float(53), nullable=False),  # of each dataset's budget
)

RESERVATION: Final = Table(
    "reservation",
    METADATA,
    *_build_columns(Reservation),
    Index("ix_reservation_due", "dataset", "state", "expires_at"),
    Index("ix_reservation_key", "dataset", "key_id"),
    Index("ix_reservation_team", "dataset", "team"),
)

CAP: Final = Table(
    "cap",
    METADATA,
    Column("dataset", String(32), ForeignKey("dataset.id"), primary_key=True),
    Column("kind", String(4), primary_key=True),  # of the holder: key or team
    Column("holder", String(200), primary_key=True),
    Column("share", Float(53), nullable=False),  # of the budget
    # JSON list of amounts that the holder has spent or held; null if an earlier server set the cap
    Column("taken", Text, nullable=True),
)

ENTRY: Final = Table(
    "entry",
    METADATA,
    Column("dataset", String(32), ForeignKey("dataset.id"), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("body", Text, nullable=False),  # canonical JSON, which is hashed
    Column("hash", String(64), nullable=False),
    # of the body; null until they are derived from it, if a server of revision 0006 wrote the entry
    Column("kind", String(12), nullable=True),
    Column("at", BigInteger, nullable=True),
    Index("ix_entry_kind", "dataset", "kind", "number"),
    Index("ix_entry_at", "dataset", "at", "number"),
)
Index(
    "ix_entry_underived",
    ENTRY.c.dataset,
    ENTRY.c.number,
    sqlite_where=ENTRY.c.at.is_(None),
    postgresql_where=ENTRY.c.at.is_(None),
)

API_KEY: Final = Table(
    "api_key",
    METADATA,
    *_build_columns(KeyRecord),
    Index("ix_api_key_order", "created_at", "id"),
)

IDEMPOTENCY: Final = Table(
    "idempotency_key",
    METADATA,
    Column("key_id", String(32), primary_key=True),
    Column("value", String(200), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("status", Integer, nullable=False),
    Column("answer", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Index("ix_idempotency_key_created_at", "created_at"),
)

AUDIT_EVENT: Final = Table(
    "audit_event",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("at", BigInteger, nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("action", String(40), nullable=False),
    Column("subject", String(200), nullable=False),
    Column("detail", Text, nullable=False),
    Index("ix_audit_event_order", "at", "id"),
)

WEBHOOK: Final = Table("webhook", METADATA, *_build_columns(Webhook))

WEBHOOK_EVENT: Final = Table(  # those that are not delivered yet
    "webhook_event",
    METADATA,
    *_build_columns(Event),
    Index("ix_webhook_event_order", "webhook", "dataset", "number"),
)

SECRET: Final = Table(
    "secret",
    METADATA,
    Column("name", String(40), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
