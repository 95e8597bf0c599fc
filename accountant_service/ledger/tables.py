"""The ledger's tables, portable between SQLite and PostgreSQL."""

from __future__ import annotations

from typing import Final

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

METADATA: Final = MetaData()

DATASET: Final = Table(
    "dataset",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("size", BigInteger, nullable=False),
    Column("privacy_unit", Text, nullable=False),
    Column("relation", String(40), nullable=False),
    Column("epsilon", Float(53), nullable=False),
    Column("delta", Float(53), nullable=False),
    Column("policy", Text, nullable=False),  # the privacy filter, as JSON
    Column("spent", Text, nullable=False),  # JSON list of amounts in its units, as is held
    Column("held", Text, nullable=False),
    Column("version", BigInteger, nullable=False),  # the number of the last entry
    Column("head", String(64), nullable=False),  # the hash of the last entry
    Column("created_at", BigInteger, nullable=False),  # microseconds since 1970, like all times
    Column("closed_at", BigInteger, nullable=True),  # null while reservations are accepted
    Column("series", String(200), ForeignKey("series.name"), nullable=True),
    Index("ix_dataset_series", "series"),
)

SERIES: Final = Table(  # of datasets that a template describes
    "series",
    METADATA,
    Column("name", String(200), primary_key=True),
    Column("template", Text, nullable=False),  # as JSON
    Column("created_at", BigInteger, nullable=False),
)

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
    Column("id", String(32), primary_key=True),
    Column("dataset", String(32), ForeignKey("dataset.id"), nullable=False),
    Column("state", String(12), nullable=False),
    Column("mechanism", Text, nullable=False),
    Column("mechanism_hash", String(80), nullable=False),
    Column("charge", Text, nullable=False),  # what the plan takes of the budget, as JSON
    Column("steps_reserved", BigInteger, nullable=False),
    Column("steps_granted", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("key_id", String(32), nullable=False),
    Column("team", String(200), nullable=True),  # of the key, when it reserved
    Column("taken", Text, nullable=False),  # JSON list of amounts, spent or held
    Column("ended_entry", BigInteger, nullable=True),  # the number of the entry that ended it
    Column("joint", Text, nullable=True),  # as JSON; null for a run on one dataset
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
    Column("id", String(32), primary_key=True),
    Column("name", String(200), nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("scopes", Text, nullable=False),
    Column("datasets", Text, nullable=True),  # JSON list of names; null means all datasets
    Column("team", String(200), nullable=True),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=True),
    Column("revoked_at", BigInteger, nullable=True),
    Column("last_used_at", BigInteger, nullable=True),
    Column("requests_per_minute", BigInteger, nullable=True),  # the quota; null means none
    Column("quota_empty_at", BigInteger, nullable=True),  # see `quotas`; null before the first use
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

WEBHOOK: Final = Table(
    "webhook",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("url", Text, nullable=False),
    Column("secret", Text, nullable=False),  # the key of the signatures
    Column("dataset", String(200), nullable=True),  # or a series' name; null: all datasets
    Column("shares", Text, nullable=False),  # JSON list
    Column("created_at", BigInteger, nullable=False),
)

WEBHOOK_EVENT: Final = Table(  # those that are not delivered yet
    "webhook_event",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("webhook", String(32), ForeignKey("webhook.id"), nullable=False),
    Column("dataset", String(200), nullable=False),  # a name; empty for events about keys
    Column("number", BigInteger, nullable=False),  # the order within a dataset
    Column("body", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("due_at", BigInteger, nullable=False),
    Column("last_error", Text, nullable=False),
    Index("ix_webhook_event_order", "webhook", "dataset", "number"),
)

SECRET: Final = Table(
    "secret",
    METADATA,
    Column("name", String(40), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
