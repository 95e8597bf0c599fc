"""Scopes of API keys and kinds of entries: names that need no other module."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """A permission of an API key; `admin` permits everything, `monitor` only to read budgets.

    `auditor` permits only to export the record.

    A key that is bound to datasets has its permissions for these only. It cannot create datasets
    but those of a series that it is bound to.
    """

    COMPUTE = "compute"
    RUN = "run"
    OWNER = "owner"
    MONITOR = "monitor"
    AUDITOR = "auditor"
    ADMIN = "admin"


class EntryKind(StrEnum):
    """The kind of event that an entry of the hash chain records."""

    CREATE = "create"
    RESERVE = "reserve"
    GRANT = "grant"
    COMMIT = "commit"
    RELEASE = "release"
    EXPIRE = "expire"
    RENEW = "renew"
    CLOSE = "close"  # of the dataset
    REFERENCE = "reference"  # the owner chose it
