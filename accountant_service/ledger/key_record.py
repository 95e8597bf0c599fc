"""API keys as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from accountant_service.ledger.columns import Stored
from accountant_service.ledger.quotas import Quota


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key as it is stored: its HMAC, never the key itself.

    Times are microseconds since 1970.

    Attributes:
        identifier: public.
        name: of its holder.
        digest: the HMAC of its token.
        scopes: what it may do.
        datasets: names of the datasets and series that it is bound to; None for all.
        team: of its holder; None without one.
        created_at: when it was created.
        expires_at: when it ends; None for never.
        revoked_at: when it was revoked; None if it was not.
        last_used_at: when it was last used; None before the first time.
        requests_per_minute: its quota; None without one.
        quota_empty_at: the state of its quota, see `quotas`; None before the first request.
    """

    identifier: Annotated[str, Stored("id", length=32, is_primary=True)]
    name: Annotated[str, Stored(length=200)]
    digest: bytes
    scopes: frozenset[str]
    datasets: tuple[str, ...] | None
    team: Annotated[str | None, Stored(length=200)]
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    last_used_at: int | None = None
    requests_per_minute: int | None = None
    quota_empty_at: int | None = None

    def is_valid(self, at: int) -> bool:
        """Return whether the key has neither expired nor been revoked at a time."""
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > at)

    @property
    def quota(self) -> Quota | None:
        """The key's quota of requests, if it has one."""
        count = self.requests_per_minute
        return None if count is None else Quota(count)
