"""How often one key or address may ask: a burst, then so many requests a second."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from accountant_service.api.problems import Problem

_KNOWN_MAX: Final = 10_000


class Limiter:
    """A leaky bucket for each asker, kept as the one time at which it will be empty.

    Args:
        rate: requests a second; 0 for no limit.
        burst: how many may come at once.
        clock: seconds, never going back.
    """

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._empty_at: OrderedDict[str, float] = OrderedDict()
        self._turn = threading.Lock()

    def admit(self, who: str) -> None:
        """Count one request.

        Raises:
            Problem: 429, it is one too many; `Retry-After` says when it would not be.
        """
        wait = self._wait(who) if self._rate else 0.0
        if wait > 0:
            raise Problem(
                429,
                f"more than {self._rate:g} requests a second came from here; slow down",
                {"Retry-After": str(math.ceil(wait))},
            )

    def _wait(self, who: str) -> float:
        with self._turn:
            now = self._clock()
            empty_at = max(self._empty_at.get(who, now), now) + 1 / self._rate
            wait = empty_at - now - self._burst / self._rate
            if wait > 1e-9:  # the last of a burst must not fail by a rounding
                return wait
            self._empty_at[who] = empty_at
            self._empty_at.move_to_end(who)
            if len(self._empty_at) > _KNOWN_MAX:
                self._empty_at.popitem(last=False)
        return 0.0
