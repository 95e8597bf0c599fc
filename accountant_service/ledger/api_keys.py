"""API keys: shown once when created, stored only as an HMAC."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import sys
from collections.abc import Iterable
from typing import Final, Protocol

from accountant_service.ledger.errors import (
    DatabaseReadOnlyError,
    ForbiddenError,
    QuotaExceededError,
    UnauthenticatedError,
    UnknownSubjectError,
)
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.names import Scope as Scope
from accountant_service.ledger.quotas import Quota
from accountant_service.ledger.repository import Repository, now

COMMAND_LINE: Final = "command-line"  # who acts, in the audit events, if no API key does
_TOKEN_PREFIX: Final = "pa"
_SECRET_NAME: Final = "api-keys"
_REMEMBERED_MAX: Final = 1000  # keys
_USE_RECORD_INTERVAL: Final = 60_000_000  # microseconds between two records of a key's use


class Keys:
    """The API keys of a ledger: create, authenticate, limit, list and revoke them."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._secret: bytes | None = None
        self._next_use_record = 0  # microseconds since 1970
        self._remembered: dict[bytes, tuple[int, KeyRecord]] = {}  # by digest: until when

    def create(
        self,
        scopes: Iterable[Scope],
        name: str = "",
        datasets: tuple[str, ...] | None = None,
        expires_at: int | None = None,
        team: str | None = None,
        *,
        requests_per_minute: int | None = None,
        by: str = COMMAND_LINE,
    ) -> tuple[str, KeyRecord]:
        """Create an API key; return its secret token, which is not stored, and its record.

        Args:
            scopes: the key's permissions.
            name: a label.
            datasets: that the key is bound to; None for all.
            expires_at: microseconds since 1970; None for never.
            team: whose runs and caps the key shares. It never changes.
            requests_per_minute: the key's quota; None for no quota.
            by: who creates the key, for the audit events: the identifier of another key, or the
                command line.
        """
        identifier = secrets.token_hex(8)
        token = f"{_TOKEN_PREFIX}_{identifier}_{secrets.token_urlsafe(32)}"
        record = KeyRecord(
            identifier, name, self._digest(token), frozenset(scope.value for scope in scopes),
            datasets, team, now(), expires_at, requests_per_minute=requests_per_minute,
        )  # fmt: skip
        with self._repository.transaction() as transaction:
            if datasets is not None:  # no series gets one of these names at the same time
                transaction.lock_new_names()
            transaction.add_key(record, by)
            transaction.announce_key("key.created", identifier)
        return token, record

    def warn_of_missing_datasets(self, names: Iterable[str]) -> list[str]:
        """Return a warning for each dataset that a key is bound to and that does not exist yet."""
        with self._repository.reading() as reading:
            missing = [
                name
                for name in names
                if reading.find_dataset(name) is None and reading.find_series(name) is None
            ]
        return [
            f"there is no dataset {name!r}; the key is for it once it is created"
            for name in missing
        ]

    def authenticate(self, token: str | None) -> KeyRecord:
        """Return the valid API key that a token belongs to, and count the request.

        Raises:
            UnauthenticatedError: the token belongs to no key, or to an expired or revoked one.
            QuotaExceededError: the key has used its quota of requests.
        """
        if not token:
            raise UnauthenticatedError("send an API key as Authorization: Bearer …")
        parts = token.split("_", 2)
        if len(parts) != 3 or parts[0] != _TOKEN_PREFIX:
            raise UnauthenticatedError(f"this is not an API key: one begins with {_TOKEN_PREFIX}_")
        with self._repository.reading() as reading:
            record = reading.find_key(parts[1])
        expected = record.digest if record is not None else bytes(32)
        genuine = hmac.compare_digest(self._digest(token), expected)
        if record is None or not genuine:
            raise UnauthenticatedError("this API key is unknown")
        self._remembered.pop(record.digest, None)
        valid = self._require_valid(record)
        if valid.quota is None:
            until = min(now() + _USE_RECORD_INTERVAL, valid.expires_at or sys.maxsize)
            if len(self._remembered) >= _REMEMBERED_MAX:
                self._remembered.clear()
            self._remembered[record.digest] = until, valid
        return valid

    def remembered(self, token: str) -> KeyRecord | None:
        """Return a key that was authenticated within a minute and has no quota, or None.

        It may have been revoked or given a quota since; nothing else of a key changes. The caller
        checks that in its transaction (`WriteRequest.is_authenticated`). No database is asked, so
        the event loop may call this.
        """
        if self._secret is None:  # nothing was authenticated yet
            return None
        until, record = self._remembered.get(self._digest(token), (0, None))
        return record if now() < until else None

    def get_valid(self, identifier: str) -> KeyRecord:
        """Return the current state of a key, if it is still valid, and count the request.

        Raises:
            UnauthenticatedError: the key has expired or been revoked since.
            QuotaExceededError: the key has used its quota of requests.
        """
        with self._repository.reading() as reading:
            record = reading.find_key(identifier)
        if record is None:
            raise UnauthenticatedError("this API key is unknown")
        return self._require_valid(record)

    def _require_valid(self, record: KeyRecord) -> KeyRecord:
        """Return a key and note its use; raise if it is invalid or over its request quota."""
        if not record.is_valid(now()):
            raise UnauthenticatedError("this API key has expired or was revoked")
        if record.quota is not None:
            self._count_request(record, record.quota)
        self._record_use(record)
        if record.datasets is None:
            return record
        with self._repository.reading() as reading:
            return reading.add_series_names(record)

    def _count_request(self, record: KeyRecord, quota: Quota) -> None:
        """Count a request against a key's quota; raise `QuotaExceededError` if none is left.

        While the database takes no writes nothing is counted: reads are answered, writes fail.
        """
        at = now()
        wait = quota.compute_wait(record.quota_empty_at, at)
        if not wait:
            try:
                with self._repository.transaction() as transaction:
                    if transaction.count_request(record.identifier, quota, at):
                        return
            except DatabaseReadOnlyError:
                return
            wait = 1  # another request was counted since the record was read
        raise QuotaExceededError(
            f"this key may send {quota.requests_per_minute} requests a minute; "
            f"try again in {wait} s",
            wait,
        )

    def _record_use(self, record: KeyRecord) -> None:
        """Note a key's use at most once a minute; skip it while the database is read-only."""
        at = now()
        if at < max((record.last_used_at or 0) + _USE_RECORD_INTERVAL, self._next_use_record):
            return
        try:
            with self._repository.transaction() as transaction:
                transaction.record_key_use(record.identifier)
        except DatabaseReadOnlyError:
            self._next_use_record = at + _USE_RECORD_INTERVAL

    def list_keys(
        self, after: tuple[int, str] = (-1, ""), limit: int | None = None
    ) -> list[KeyRecord]:
        """Return the keys, the oldest first.

        Args:
            after: the time of creation and the identifier of the last key of the page before.
            limit: at most so many; None for all.
        """
        with self._repository.reading() as reading:
            return reading.list_keys(after, limit)

    def find_valid(self, identifier: str) -> tuple[KeyRecord, bool] | None:
        """Return a key, and whether no other valid one may create keys; None if it is not valid."""
        with self._repository.reading() as reading:
            found = reading.find_key(identifier)
            if found is None or not found.is_valid(now()):
                return None
            administers = found.datasets is None and Scope.ADMIN.value in found.scopes
            return found, administers and not reading.has_other_administrator(identifier)

    def revoke(self, identifier: str, by: str) -> KeyRecord | None:
        """Revoke a key from now on; return the key, or None if there is no such key."""
        with self._repository.transaction() as transaction:
            if transaction.find_key(identifier) is None:
                return None
            transaction.revoke_key(identifier, by)
            return transaction.find_key(identifier)

    def set_quota(self, identifier: str, requests_per_minute: int | None, by: str) -> KeyRecord:
        """Set or remove the quota of a key; return the key.

        Args:
            identifier: the key's.
            requests_per_minute: from 1 up; None for no quota.
            by: who sets it, for the audit events.

        Raises:
            UnknownSubjectError: there is no such key.
        """
        with self._repository.transaction() as transaction:
            if transaction.find_key(identifier) is None:
                raise UnknownSubjectError(f"there is no key {identifier!r}")
            transaction.set_quota(identifier, requests_per_minute)
            many = requests_per_minute
            detail = "none" if many is None else f"{many} requests a minute"
            transaction.record_audit_event(by, "key-quota-set", identifier, detail)
            found = transaction.find_key(identifier)
        assert found is not None
        return found

    def _digest(self, token: str) -> bytes:
        """Return the HMAC of a token, the only form in which it is stored."""
        if self._secret is None:
            self._secret = self._repository.get_or_create_secret(_SECRET_NAME)
        return hmac.new(self._secret, token.encode(), hashlib.sha256).digest()


def require_scope(key: KeyRecord, *scopes: Scope) -> None:
    """Raise `ForbiddenError` unless the key has one of the scopes."""
    allowed = {Scope.ADMIN.value, *(scope.value for scope in scopes)}
    if not allowed & key.scopes:
        raise ForbiddenError(f"this needs a key with scope {' or '.join(scopes) or 'admin'}")


def require_unbound(key: KeyRecord, *scopes: Scope) -> None:
    """Raise `ForbiddenError` if the key has none of the scopes, or is limited to some datasets."""
    require_scope(key, *scopes)
    if key.datasets is not None:
        raise ForbiddenError("this needs a key that is not bound to datasets")


class Owned(Protocol):
    """A run, as far as it decides who may change it."""

    @property
    def key(self) -> str:
        """The identifier of the key that reserved it."""

    @property
    def team(self) -> str | None:
        """The team of that key."""


def require_control(key: KeyRecord, run: Owned) -> None:
    """Raise `ForbiddenError` unless the API key may change this run.

    A run belongs to the key that reserved it and to that key's team. Owners and admins may change
    every run that they see.
    """
    if not may_control(key, run):
        raise ForbiddenError(
            "this run belongs to another key: use the key that reserved it, a key of the same "
            "team, or a key with scope owner"
        )


def may_control(key: KeyRecord, run: Owned) -> bool:
    """Return whether the API key may change this run."""
    if {Scope.OWNER.value, Scope.ADMIN.value} & key.scopes or key.identifier == run.key:
        return True
    return key.team is not None and key.team == run.team


def is_visible(key: KeyRecord, dataset: str) -> bool:
    """Return whether an API key may learn that a dataset exists."""
    return key.datasets is None or dataset in key.datasets


def require_visible(key: KeyRecord, dataset: str, subject: str) -> None:
    """Raise `UnknownSubjectError` if the key may not see the dataset, as if it did not exist."""
    if not is_visible(key, dataset):
        raise UnknownSubjectError(f"there is no {subject}")
