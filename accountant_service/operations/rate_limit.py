"""Rates for one API key or address: a burst, then a number of requests per second.

Above its rate a request is refused (`admit`), or waits (`delay`).
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from accountant_service.operations.problem import Problem

_CLIENTS_MAX: Final = 10_000


class RateLimiter:
    """A rate limit per client (leaky bucket), stored as the time when the bucket is empty.

    Args:
        rate: requests per second; 0 for no limit.
        burst: requests that may come at once.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._empty_at: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def admit(self, client: str) -> None:
        """Count a request of a client, or refuse it if the client is above its rate limit.

        Raises:
            Problem: 429, the limit is exceeded; `Retry-After` says when to try again.
        """
        wait = self._seconds_to_wait(client) if self._rate else 0.0
        if wait > 0:
            raise self._refusal(wait)

    def take(self, client: str) -> bool:
        """Count a request of a client and return True, or return False above its rate limit."""
        return not self._rate or self._seconds_to_wait(client) <= 0

    def delay(self, client: str) -> float:
        """Count a request, and return the seconds after which a client's rate allows it."""
        return self._seconds_to_wait(client, counts_above=True) if self._rate else 0.0

    def give_back(self, client: str) -> None:
        """Take back the count of a request that stopped waiting."""
        with self._lock:
            if client in self._empty_at:
                self._empty_at[client] -= 1 / self._rate

    def refusal(self, waiting: int) -> Problem:
        """Return the error for a request when so many others already wait."""
        return self._refusal(waiting / self._rate)

    def _refusal(self, seconds: float) -> Problem:
        return Problem(
            429,
            f"more than {self._rate:g} requests per second from this key or address; slow down",
            {"Retry-After": str(math.ceil(seconds))},
        )

    def _seconds_to_wait(self, client: str, *, counts_above: bool = False) -> float:
        """Count a request and return 0; above the limit, return the seconds to wait."""
        with self._lock:
            now = self._clock()
            empty_at = max(self._empty_at.get(client, now), now) + 1 / self._rate
            wait = empty_at - now - self._burst / self._rate
            if wait > 1e-9 and not counts_above:  # rounding must not refuse the last of a burst
                return wait
            self._empty_at[client] = empty_at
            self._empty_at.move_to_end(client)
            if len(self._empty_at) > _CLIENTS_MAX:
                self._empty_at.popitem(last=False)
        return max(0.0, wait)
