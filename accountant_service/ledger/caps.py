"""Caps: set, list and remove limits on what one key or one team may take of a dataset's budget.

A cap divides a budget among people. It is bookkeeping: that everything released is (ε, δ)-DP
follows from the dataset's one privacy filter, with or without caps. Decision 0014 has the reasons.
"""

from __future__ import annotations

from accountant_service.ledger.api_keys import is_visible
from accountant_service.ledger.errors import LedgerError, UnknownSubjectError
from accountant_service.ledger.repository import Repository, Transaction
from accountant_service.ledger.rules import Cap, CapUse, Dataset, HolderKind


class Caps:
    """The caps: limits on the share of a dataset's budget that one key or team may use."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def set(self, dataset: str, cap: Cap, by: str) -> tuple[Dataset, CapUse]:
        """Set the cap of a key or team; return the dataset, and the cap with the budget used.

        A cap below what the holder has taken revokes nothing: the holder can reserve nothing more.

        Args:
            dataset: the dataset's name.
            cap: replaces an earlier cap of the same holder.
            by: the identifier of the key that sets it, for the audit events.

        Raises:
            UnknownSubjectError: there is no such dataset, or no such key for this dataset.
            LedgerError: the share is not from 0 to 1.
        """
        require_share(cap)
        with self._repository.transaction() as transaction:
            found = _lock_dataset(transaction, dataset)
            require_holder(transaction, cap, dataset)
            return found, record_cap(transaction, found, cap, by)

    def remove(self, dataset: str, kind: HolderKind, holder: str, by: str) -> None:
        """Remove the cap of a key or team.

        Raises:
            UnknownSubjectError: there is no such dataset, or it has no such cap.
        """
        with self._repository.transaction() as transaction:
            found = _lock_dataset(transaction, dataset)
            if not transaction.remove_cap(found, kind, holder):
                raise UnknownSubjectError(f"dataset {dataset!r} has no cap of {kind} {holder!r}")
            transaction.record_audit_event(by, "cap-removed", dataset, f"{kind} {holder}")

    def list_uses(
        self, dataset: str, after: tuple[str, str] = ("", ""), limit: int | None = None
    ) -> tuple[Dataset, list[CapUse]]:
        """Return a dataset and its caps, each with the budget that its holder has spent or held.

        Args:
            dataset: the dataset's name.
            after: the kind and the holder of the last cap of the page before.
            limit: at most so many; None for all.

        Raises:
            UnknownSubjectError: there is no such dataset.
        """
        with self._repository.reading() as reading:
            found = reading.find_dataset(dataset)
            if found is None:
                raise UnknownSubjectError(f"there is no dataset {dataset!r}")
            return found, reading.list_cap_uses(found, after, limit)

    def list_by_holder(self) -> dict[tuple[HolderKind, str], list[tuple[str, float]]]:
        """Return each key's and team's caps, as pairs (dataset name, share of its budget)."""
        with self._repository.reading() as reading:
            return reading.list_caps_by_holder()


def _lock_dataset(transaction: Transaction, name: str) -> Dataset:
    """Return a dataset, locked against reservations while a cap changes."""
    found = transaction.find_dataset(name, lock=True)
    if found is None:
        raise UnknownSubjectError(f"there is no dataset {name!r}")
    return found


def record_cap(transaction: Transaction, dataset: Dataset, cap: Cap, by: str) -> CapUse:
    """Set a cap of a locked dataset, and record who did; return it with the budget used.

    Args:
        transaction: that has locked the dataset, or creates it.
        dataset: the dataset.
        cap: replaces an earlier cap of the same holder.
        by: the identifier of the key that sets it, for the audit events.
    """
    use = transaction.set_cap(dataset, cap)
    detail = f"{cap.kind} {cap.holder}: {cap.share!r}"
    transaction.record_audit_event(by, "cap-set", dataset.name, detail)
    return use


def require_share(cap: Cap) -> None:
    """Raise `LedgerError` unless the share of a cap is from 0 to 1."""
    if not 0 <= cap.share <= 1:
        raise LedgerError(f"the share of a cap must be from 0 to 1, not {cap.share!r}")


def require_holder(transaction: Transaction, cap: Cap, name: str) -> None:
    """Raise `UnknownSubjectError` if a cap is of a key that may not see a dataset or series."""
    if cap.kind is not HolderKind.KEY:
        return
    key = transaction.find_key(cap.holder)
    if key is None or not is_visible(transaction.add_series_names(key), name):
        raise UnknownSubjectError(f"there is no key {cap.holder!r} for {name!r}")
