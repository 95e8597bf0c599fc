"""Quotas: how many requests an API key may send in a minute, and how many runs it may have.

A key's requests fill a bucket that empties at an even rate. The bucket is stored as the time at
which it will be empty, in the key's row, so that all servers of one database count together. A time
that no correct clock can have written is ignored: else a clock that was once far ahead would block
the key until then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from accountant_service.ledger.errors import TooManyRunsError

REQUESTS_PER_MINUTE_MAX: Final = 1_000_000
OPEN_RUNS_MAX: Final = 1000
UNSPENT_RUNS_MAX: Final = 1000
_MINUTE_MICROSECONDS: Final = 60_000_000
_CLOCKS_DIFFER_MAX: Final = _MINUTE_MICROSECONDS  # between the servers of one database


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

    def latest_plausible(self, at: int) -> int:
        """Return the latest time when a full bucket can run empty, if clocks are nearly right.

        Args:
            at: the time now.
        """
        return at + self.requests_per_minute * self.interval + _CLOCKS_DIFFER_MAX

    def compute_wait(self, empty_at: int | None, at: int) -> int:
        """Return the seconds until a request is admitted, rounded up; 0 if it is admitted now.

        Args:
            empty_at: when the bucket will be empty; None before the first request.
            at: the time of the request.
        """
        excess = self._plausible(empty_at, at) - self.latest_empty_at(at)
        return max(0, math.ceil(excess / 1e6))

    def used_share(self, empty_at: int | None, at: int) -> float:
        """Return the fraction of the quota that is used up at time `at`, from 0 to 1."""
        full = self.requests_per_minute * self.interval
        return min(1.0, max(0, self._plausible(empty_at, at) - at) / full)

    def _plausible(self, empty_at: int | None, at: int) -> int:
        """Return when the bucket will be empty, or 0 if that is not known or cannot be true."""
        return empty_at if empty_at is not None and empty_at <= self.latest_plausible(at) else 0


@dataclass(frozen=True, slots=True)
class RunQuota:
    """A limit on the runs that one API key may have of one dataset, beside the budget.

    Plans without releases, and runs that are released unused, cost no budget. Without a limit they
    could fill the database.

    Attributes:
        open_max: open runs.
        unspent_max: runs that spend and hold nothing, whose lease ended in the last day or later.
    """

    open_max: int = OPEN_RUNS_MAX
    unspent_max: int = UNSPENT_RUNS_MAX

    def require_room(self, open_runs: int, unspent_runs: int) -> None:
        """Raise `TooManyRunsError` if a key that has so many runs may not reserve another."""
        if open_runs >= self.open_max:
            raise TooManyRunsError(
                f"this key has {open_runs} open runs of the dataset, and may have {self.open_max}: "
                "commit or release some"
            )
        if unspent_runs >= self.unspent_max:
            raise TooManyRunsError(
                f"this key has reserved {unspent_runs} runs of the dataset that spent nothing, and "
                f"may have {self.unspent_max} with a lease that ended within a day or is still to "
                "end: use runs that are reserved, or wait"
            )
