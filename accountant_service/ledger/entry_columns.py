"""Derivation of the columns that servers of an earlier revision leave empty, in the background."""

from __future__ import annotations

from typing import Final

from accountant_service.ledger.background_work import BackgroundWork
from accountant_service.ledger.repository import Repository

_START: Final = ("", -(1 << 62))
_ENTRIES_PER_TRANSACTION: Final = 200  # so that a transaction takes milliseconds
_START_DELAY_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.05  # while more entries lack their columns
_IDLE_SECONDS: Final = 300.0


class EntryColumns:
    """A thread that derives the kind and time of entries that have none, in small batches.

    Until that is done exports read such entries, and leave out those that nobody asked for.

    Args:
        repository: the ledger's.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository, self._after = repository, _START
        self._work = BackgroundWork(
            "entry columns",
            self._derive,
            delay=_START_DELAY_SECONDS,
            pause_after_failure=_IDLE_SECONDS,
        )

    def start(self) -> None:
        """Start the thread."""
        self._work.start()

    def close(self) -> None:
        """Stop the thread after its current transaction, if any."""
        self._work.close()

    def _derive(self) -> float:
        """Derive the columns of a batch of entries; return the seconds until the next batch."""
        with self._repository.transaction() as transaction:
            after = transaction.derive_entry_columns(self._after, _ENTRIES_PER_TRANSACTION)
        self._after = after or _START
        return _IDLE_SECONDS if after is None else _PAUSE_SECONDS


def derive_all(repository: Repository) -> None:
    """Derive the columns of all entries that have none."""
    after: tuple[str, int] | None = _START
    while after is not None:
        with repository.transaction() as transaction:
            after = transaction.derive_entry_columns(after, _ENTRIES_PER_TRANSACTION)
