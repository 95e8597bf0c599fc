"""How long to wait before a call is repeated, and when to give up."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_PAUSE_MIN, _PAUSE_MAX = 0.2, 10.0
_CHANCE: Final = random.SystemRandom()  # leaves a program's own random numbers as they were


class Waiting:
    """The time that one call has taken so far, and its pauses.

    Attributes:
        seconds: that its attempts and pauses took.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._pause = _PAUSE_MIN

    def pause(self, asked: float, limit: float) -> float | None:
        """Return how long to wait before the next attempt, and count it; None to give up.

        Clients that failed together must not come back together, so each waits a while longer than
        it was asked to: up to 0.2 s, then 0.4 s and so on, up to 10 s.

        Args:
            asked: seconds that the service asked for; it is not asked again before.
            limit: seconds that the call may take.
        """
        left = limit - self.seconds
        if left <= 0 or asked > left:
            return None
        pause = min(asked + self._pause * _CHANCE.uniform(0.5, 1.0), left)
        self._pause = min(2 * self._pause, _PAUSE_MAX)
        self.seconds += pause
        return pause


def retry_after(headers: Mapping[str, str]) -> float:
    """Return how many seconds an answer asks to wait; 0 if it does not say.

    Args:
        headers: of the answer. `Retry-After` has seconds, or a date, which is compared with the
            answer's own `Date`, as the clocks of client and service may differ.
    """
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    until = _moment(text)
    now = _moment(headers.get("Date", "")) or datetime.now(UTC)
    return 0.0 if until is None else max((until - now).total_seconds(), 0.0)


def _moment(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
