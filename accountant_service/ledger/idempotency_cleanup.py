"""Deletion of expired idempotency keys, in a background thread."""

from __future__ import annotations

from typing import Final

from accountant_service.ledger.background_work import BackgroundWork
from accountant_service.ledger.repository import Repository, now

_KEYS_PER_TRANSACTION: Final = 200  # so that a transaction takes milliseconds
_START_DELAY_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.2  # while more keys are expired
_IDLE_SECONDS: Final = 3600.0
_DAY_MICROSECONDS: Final = 86_400_000_000


class IdempotencyCleanup:
    """A thread that deletes expired idempotency keys in small batches.

    Args:
        repository: the ledger's.
        days: the number of days that a key is kept.
    """

    def __init__(self, repository: Repository, days: int) -> None:
        self._repository, self._days = repository, days
        self._work = BackgroundWork(
            "housekeeping",
            self._clean,
            delay=_START_DELAY_SECONDS,
            pause_after_failure=_IDLE_SECONDS,
        )

    def start(self) -> None:
        """Start the thread, which begins to work a minute later."""
        self._work.start()

    def delete_expired(self) -> bool:
        """Delete a batch of the oldest expired keys; return whether more may be left."""
        with self._repository.transaction() as transaction:
            return (
                transaction.delete_answers(
                    now() - self._days * _DAY_MICROSECONDS, _KEYS_PER_TRANSACTION
                )
                == _KEYS_PER_TRANSACTION
            )

    def close(self) -> None:
        """Stop the thread after its current transaction, if any."""
        self._work.close()

    def _clean(self) -> float:
        """Delete a batch of expired keys; return the seconds until the next batch."""
        return _PAUSE_SECONDS if self.delete_expired() else _IDLE_SECONDS
