"""Forgetting idempotency keys whose time is over, beside the server's work."""

from __future__ import annotations

import threading
from typing import Final

from accountant_service.errors import DatabaseAwayError
from accountant_service.ledger.repository import Repository, now

_BATCH: Final = 200  # removed by one transaction: milliseconds
_FIRST_SECONDS: Final = 60.0
_NEXT_SECONDS: Final = 0.2  # while more are over
_REST_SECONDS: Final = 3600.0
_DAY: Final = 86_400_000_000  # microseconds


class Housekeeping:
    """A thread that forgets old idempotency keys, a few at a time.

    Args:
        repository: the ledger's.
        days: for which a key is kept.
    """

    def __init__(self, repository: Repository, days: int) -> None:
        self._repository, self._days = repository, days
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin, in a minute: a server that starts has better to do."""
        self._ended.clear()
        threading.Thread(target=self._work, name="housekeeping", daemon=True).start()

    def forget(self) -> bool:
        """Forget the oldest keys whose time is over; return whether there may be more."""
        with self._repository.transaction() as transaction:
            return transaction.forget(now() - self._days * _DAY, _BATCH) == _BATCH

    def close(self) -> None:
        """End after the transaction that may be under way."""
        self._ended.set()

    def _work(self) -> None:
        pause = _FIRST_SECONDS
        while not self._ended.wait(pause):
            try:
                pause = _NEXT_SECONDS if self.forget() else _REST_SECONDS
            except DatabaseAwayError:
                pause = _REST_SECONDS
