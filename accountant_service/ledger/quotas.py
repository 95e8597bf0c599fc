"""Quotas: how many requests an API key may send in a minute.

A key's requests fill a bucket that empties at an even rate. The bucket is stored as the time at
which it will be empty, in the key's row, so that all servers of one database count together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

REQUESTS_PER_MINUTE_MAX: Final = 1_000_000
_MINUTE_MICROSECONDS: Final = 60_000_000


@dataclass(frozen=True, slots=True)
class Quota:
    """A request quota per minute (leaky bucket): a burst may come at once, then an even rate.

    Attributes:
        requests_per_minute: at least 1.
    """

    requests_per_minute: int

    @property
    def interval(self) -> int:
        """The microseconds after which one more request is admitted, rounded up."""
        return -(-_MINUTE_MICROSECONDS // self.requests_per_minute)

    def latest_empty_at(self, at: int) -> int:
        """Return the latest time when the bucket may run empty, if a request is to be admitted.

        Args:
            at: the time of the request, in microseconds since 1970, as all times here.
        """
        return at + (self.requests_per_minute - 1) * self.interval

    def compute_wait(self, empty_at: int | None, at: int) -> int:
        """Return the seconds until a request is admitted, rounded up; 0 if it is admitted now.

        Args:
            empty_at: when the bucket will be empty; None before the first request.
            at: the time of the request.
        """
        excess = (empty_at or 0) - self.latest_empty_at(at)
        return max(0, math.ceil(excess / 1e6))

    def used_share(self, empty_at: int | None, at: int) -> float:
        """Return the fraction of the quota that is used up at time `at`, from 0 to 1."""
        full = self.requests_per_minute * self.interval
        return min(1.0, max(0, (empty_at or 0) - at) / full)
