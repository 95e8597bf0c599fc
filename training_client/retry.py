"""Delays between attempts at one request: exponential backoff with jitter, and `Retry-After`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_BACKOFF_MIN_SECONDS, _BACKOFF_MAX_SECONDS = 0.2, 10.0
_RANDOM: Final = random.SystemRandom()  # leaves the program's own random state untouched


class RetryTimer:
    """Computes the delay before each retry of one request, and decides when to give up.

    Attributes:
        seconds: time spent on attempts and delays so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._backoff = _BACKOFF_MIN_SECONDS

    def next_delay(self, requested: float, limit: float) -> float | None:
        """Return the delay before the next attempt, or None to give up; count the attempt.

        Jitter keeps clients that failed together from returning together: each waits longer than
        requested, by up to 0.2 s, then up to 0.4 s, and so on up to 10 s.

        Args:
            requested: the service's `Retry-After` in seconds; the delay is at least as long.
            limit: the most seconds to spend on the request.
        """
        left = limit - self.seconds
        if left <= 0 or requested > left:
            return None
        delay = min(requested + self._backoff * _RANDOM.uniform(0.5, 1.0), left)
        self._backoff = min(2 * self._backoff, _BACKOFF_MAX_SECONDS)
        self.seconds += delay
        return delay


def parse_retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a response's `Retry-After` header requests, or 0 without one.

    Args:
        headers: the response's headers. A `Retry-After` date is compared with the response's own
            `Date`, since the clocks of client and service may differ.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    until = _parse_date(text)
    now = _parse_date(headers.get("Date", "")) or datetime.now(UTC)
    return 0.0 if until is None else max((until - now).total_seconds(), 0.0)


def _parse_date(text: str) -> datetime | None:
    """Parse an HTTP date with a time zone; return None if the text is not one."""
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
