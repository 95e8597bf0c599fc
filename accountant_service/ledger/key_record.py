"""API keys as they are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from accountant_service.ledger.columns import Stored
from accountant_service.ledger.quotas import Quota


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key as it is stored: its HMAC, never the key itself."""

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

    @property
    def quota(self) -> Quota | None:
        """The key's quota of requests, if it has one."""
        count = self.requests_per_minute
        return None if count is None else Quota(count)
