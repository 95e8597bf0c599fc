"""API keys: made once, shown once, stored as an HMAC only."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from accountant_service.errors import (
    DatabaseReadOnlyError,
    ForbiddenError,
    UnauthenticatedError,
    UnknownSubjectError,
)
from accountant_service.ledger.repository import KeyRecord, Repository, now

_PREFIX: Final = "pa"
_SECRET: Final = "api-keys"
_USED_EVERY: Final = 60_000_000  # microseconds between two notes that a key was used


class Scope(StrEnum):
    """What a key may do; `admin` may do everything, `monitor` only see what is left of budgets.

    A key that is bound to datasets may do it with these; only one that is not may make others.
    """

    COMPUTE = "compute"
    RUN = "run"
    OWNER = "owner"
    MONITOR = "monitor"
    ADMIN = "admin"


class Keys:
    """Makes keys and recognises them."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._secret: bytes | None = None
        self._note_from = 0  # microseconds since 1970

    def create(
        self,
        scopes: Iterable[Scope],
        name: str = "",
        datasets: tuple[str, ...] | None = None,
        expires_at: int | None = None,
    ) -> tuple[str, KeyRecord]:
        """A new key: the token, never to be seen again, and what is kept of it."""
        identifier = secrets.token_hex(8)
        token = f"{_PREFIX}_{identifier}_{secrets.token_urlsafe(32)}"
        record = KeyRecord(
            identifier, name, self._digest(token), frozenset(scope.value for scope in scopes),
            datasets, now(), expires_at, None, None,
        )  # fmt: skip
        with self._repository.transaction() as transaction:
            transaction.add_key(record)
            transaction.audit(identifier, "key-created", identifier)
        return token, record

    def authenticate(self, token: str | None) -> KeyRecord:
        """Whose token this is.

        Raises:
            UnauthenticatedError: nobody's, or it has expired or been revoked.
        """
        if not token:
            raise UnauthenticatedError("send an API key as Authorization: Bearer …")
        parts = token.split("_", 2)
        if len(parts) != 3 or parts[0] != _PREFIX:
            raise UnauthenticatedError(f"what was sent is no API key: one begins with {_PREFIX}_")
        with self._repository.reading() as reading:
            record = reading.key(parts[1])
        expected = record.digest if record is not None else bytes(32)
        genuine = hmac.compare_digest(self._digest(token), expected)
        if record is None or not genuine:
            raise UnauthenticatedError("this API key is not known")
        return self._valid(record)

    def current(self, identifier: str) -> KeyRecord:
        """A key that was authenticated before, as it stands now.

        Raises:
            UnauthenticatedError: it has expired or been revoked since.
        """
        with self._repository.reading() as reading:
            record = reading.key(identifier)
        if record is None:
            raise UnauthenticatedError("this API key is not known")
        return self._valid(record)

    def _valid(self, record: KeyRecord) -> KeyRecord:
        """The key, noted as used, unless it is over."""
        expired = record.expires_at is not None and record.expires_at <= now()
        if record.revoked_at is not None or expired:
            raise UnauthenticatedError("this API key has expired or was revoked")
        self._note_use(record)
        return record

    def _note_use(self, record: KeyRecord) -> None:
        """Note that a key was used, once a minute; where nobody can write, keys still read."""
        at = now()
        if at < max((record.last_used_at or 0) + _USED_EVERY, self._note_from):
            return
        try:
            with self._repository.transaction() as transaction:
                transaction.used(record.identifier)
        except DatabaseReadOnlyError:
            self._note_from = at + _USED_EVERY

    def all(self) -> list[KeyRecord]:
        """Every key, oldest first."""
        with self._repository.reading() as reading:
            return reading.keys()

    def revoke(self, identifier: str, by: str) -> KeyRecord | None:
        """Make a key useless from now on; None if there is none."""
        with self._repository.transaction() as transaction:
            if transaction.key(identifier) is None:
                return None
            transaction.revoke(identifier)
            transaction.audit(by, "key-revoked", identifier)
            return transaction.key(identifier)

    def _digest(self, token: str) -> bytes:
        if self._secret is None:
            self._secret = self._repository.secret(_SECRET)
        return hmac.new(self._secret, token.encode(), hashlib.sha256).digest()


def require(key: KeyRecord, *scopes: Scope) -> None:
    """Raise `ForbiddenError` unless the key has one of the scopes."""
    allowed = {Scope.ADMIN.value, *(scope.value for scope in scopes)}
    if not allowed & key.scopes:
        raise ForbiddenError(f"this needs a key with scope {' or '.join(scopes) or 'admin'}")


def require_unbound(key: KeyRecord, *scopes: Scope) -> None:
    """Raise `ForbiddenError` unless the key has one of the scopes, for all datasets."""
    require(key, *scopes)
    if key.datasets is not None:
        raise ForbiddenError("this needs a key that is not bound to datasets")


def sees(key: KeyRecord, dataset: str) -> bool:
    """Whether a key may know of a dataset at all."""
    return key.datasets is None or dataset in key.datasets


def require_sight(key: KeyRecord, dataset: str, subject: str) -> None:
    """Raise `UnknownSubjectError` if a key may not know of a dataset: as if there were none."""
    if not sees(key, dataset):
        raise UnknownSubjectError(f"there is no {subject}")
