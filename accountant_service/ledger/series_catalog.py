"""The series of a ledger: create them and their datasets, find the last ones, and set their caps.

Every write here may be repeated without an Idempotency-Key: what is there already is returned. A
transaction that locks a series locks datasets only afterwards, by ascending identifiers.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from sqlalchemy.exc import IntegrityError

from accountant_service.ledger import hash_chain
from accountant_service.ledger.api_keys import (
    Scope,
    require_scope,
    require_unbound,
    require_visible,
)
from accountant_service.ledger.caps import record_cap, require_holder, require_share
from accountant_service.ledger.errors import (
    DatabaseAwayError,
    NameTakenError,
    UnknownSubjectError,
    WeakGuaranteeError,
)
from accountant_service.ledger.filters import PrivacyFilter
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.repository import Repository, Transaction, now
from accountant_service.ledger.rules import Balance, Cap, Dataset, HolderKind, NewDataset
from accountant_service.ledger.series import Series, Template

_ATTEMPTS: Final = 4
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SeriesState:
    """A series with its datasets and caps.

    Attributes:
        series: the series.
        names: of its datasets, in their order.
        caps: that each of its datasets has from its creation on.
    """

    series: Series
    names: tuple[str, ...]
    caps: tuple[Cap, ...]


class SeriesCatalog:
    """The series of a ledger."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def create(self, key: KeyRecord, name: str, template: Template) -> tuple[SeriesState, bool]:
        """Create a series; return it, and whether it is new. A repeat changes nothing.

        Raises:
            NameTakenError: there is a dataset of this name, or a series with another template.
        """
        require_unbound(key, Scope.OWNER)

        def write(transaction: Transaction) -> tuple[SeriesState, bool]:
            """Store the series, unless it is there."""
            transaction.lock_new_names()
            found = transaction.find_series(name)
            if found is not None:
                if found.template != template:
                    raise NameTakenError(
                        f"there is a series {name!r} with another template, which never changes; "
                        "choose another name"
                    )
                return _read_state(transaction, found), False
            if transaction.find_dataset(name) is not None:
                raise NameTakenError(f"there is a dataset {name!r}; choose another name")
            at = now()
            for other in transaction.list_keys():
                if name in (other.datasets or ()) and other.is_valid(at):
                    raise NameTakenError(
                        f"key {other.identifier} is bound to the name {name!r}, and would be for "
                        "all datasets of the series: revoke it, or choose another name"
                    )
            created = Series(name, template, now())
            transaction.add_series(created, key.identifier)
            return SeriesState(created, (), ()), True

        return self._write(write)

    def list_series(
        self, key: KeyRecord, after: str = "", limit: int | None = None
    ) -> list[SeriesState]:
        """Return the series that the key may see, sorted by name.

        Args:
            key: the caller's API key.
            after: the last name of the page before.
            limit: at most so many; None for all.
        """
        require_scope(key, Scope.OWNER, Scope.RUN)
        with self._repository.reading() as reading:
            found = reading.list_series(after, limit, key.datasets)
            return [_read_state(reading, each) for each in found]

    def get(self, key: KeyRecord, name: str, *scopes: Scope) -> SeriesState:
        """Return a series; raise an error if the key may not see it or has none of the scopes.

        Args:
            key: the caller's API key.
            name: the series'.
            scopes: the key needs one of them: owner or run unless given.
        """
        require_scope(key, *(scopes or (Scope.OWNER, Scope.RUN)))
        require_visible(key, name, f"series {name!r}")
        with self._repository.reading() as reading:
            return _read_state(reading, _find(reading, name))

    def exists(self, name: str) -> bool:
        """Return whether there is a series of this name."""
        with self._repository.reading() as reading:
            return reading.find_series(name) is not None

    def find_window(self, key: KeyRecord, name: str, count: int) -> list[str]:
        """Return the names of the last datasets of a series, in their order.

        Raises:
            SeriesTooShortError: it has fewer datasets.
        """
        found = self.get(key, name)
        return found.series.take_last(count, found.names)

    def add_dataset(
        self, key: KeyRecord, name: str, label: str, size: int, policy: PrivacyFilter
    ) -> tuple[Dataset, bool]:
        """Create the dataset of a series with a label; return it, and whether it is new.

        It gets the caps of the series. A repeat with the same size changes nothing.

        Args:
            key: with scope owner; it may be bound to the series.
            name: the series'.
            label: the rest of the dataset's name.
            size: the number of records.
            policy: the privacy filter that was chosen for the template.

        Raises:
            NameTakenError: there is a dataset of this name that is another one.
            SeriesLabelError: the label has another length than those before it.
            WeakGuaranteeError: the budget is weak for so few records.
        """
        self.get(key, name, Scope.OWNER)

        def write(transaction: Transaction) -> tuple[Dataset, bool]:
            """Store the dataset with its caps, unless it is there."""
            transaction.lock_new_names()
            series = _find(transaction, name, lock=True)
            new = _describe_dataset(series, label, size)
            found = transaction.find_dataset(new.name)
            if found is not None:
                _require_same(found, series, size)
                return found, False
            series.require_label(label, transaction.list_datasets_of_series([name]))
            if transaction.find_series(new.name) is not None:
                raise NameTakenError(f"there is a series {new.name!r}; choose another label")
            nothing = Balance(policy.nothing, policy.nothing)
            empty = Dataset(
                uuid.uuid4().hex, new.name, size, new.privacy_unit, policy, nothing, 0,
                hash_chain.GENESIS, now(), series=name,
            )  # fmt: skip
            by = key.identifier
            transaction.record_audit_event(by, "dataset-created", new.name, new.accepted_weaknesses)
            transaction.record_audit_event(by, "series-extended", new.name, name)
            dataset = transaction.add_dataset(empty, by)
            for cap in transaction.list_series_caps(series):
                record_cap(transaction, dataset, cap, by)
            return dataset, True

        return self._write(write)

    def set_cap(self, key: KeyRecord, name: str, cap: Cap) -> SeriesState:
        """Set a cap on each dataset of a series, and on those to come; return the series."""
        self.get(key, name, Scope.OWNER)
        require_share(cap)

        def write(transaction: Transaction) -> SeriesState:
            """Store the cap with the series and each of its datasets."""
            series = _find(transaction, name, lock=True)
            require_holder(transaction, cap, name)
            transaction.set_series_cap(series, cap)
            detail = f"{cap.kind} {cap.holder}: {cap.share!r}"
            transaction.record_audit_event(key.identifier, "series-cap-set", name, detail)
            for dataset in _lock_datasets(transaction, name):
                record_cap(transaction, dataset, cap, key.identifier)
            return _read_state(transaction, series)

        return self._write(write)

    def remove_cap(self, key: KeyRecord, name: str, kind: HolderKind, holder: str) -> None:
        """Remove a cap from a series and from all of its datasets.

        Raises:
            UnknownSubjectError: the series has no such cap.
        """
        self.get(key, name, Scope.OWNER)

        def write(transaction: Transaction) -> None:
            """Remove the cap of the series, and those of its datasets that exist."""
            series, detail = _find(transaction, name, lock=True), f"{kind} {holder}"
            if not transaction.remove_series_cap(series, kind, holder):
                raise UnknownSubjectError(f"series {name!r} has no cap of {kind} {holder!r}")
            by = key.identifier
            transaction.record_audit_event(by, "series-cap-removed", name, detail)
            for dataset in _lock_datasets(transaction, name):
                if transaction.remove_cap(dataset, kind, holder):
                    transaction.record_audit_event(by, "cap-removed", dataset.name, detail)

        self._write(write)

    def _write(self, write: Callable[[Transaction], Result]) -> Result:
        """Run a transaction; again if another writer was first."""
        for _ in range(_ATTEMPTS):
            try:
                with self._repository.transaction() as transaction:
                    return write(transaction)
            except IntegrityError:
                continue
        raise DatabaseAwayError("other requests kept changing the series; try again")


def _find(reading: Transaction, name: str, *, lock: bool = False) -> Series:
    """Return a series; raise an error if there is none."""
    found = reading.find_series(name, lock=lock)
    if found is None:
        raise UnknownSubjectError(f"there is no series {name!r}")
    return found


def _read_state(reading: Transaction, series: Series) -> SeriesState:
    """Return a series with the names of its datasets and its caps."""
    names = sorted(reading.list_datasets_of_series([series.name]))
    return SeriesState(series, tuple(names), tuple(reading.list_series_caps(series)))


def _lock_datasets(transaction: Transaction, series: str) -> list[Dataset]:
    """Return the datasets of a locked series, each locked, in the order of all locks."""
    names = transaction.list_datasets_of_series([series])
    found = [transaction.find_dataset(name) for name in names]
    order = sorted(each.identifier for each in found if each is not None)
    locked = [transaction.find_dataset_by_id(each, lock=True) for each in order]
    return [each for each in locked if each is not None]  # one may have been deleted meanwhile


def _describe_dataset(series: Series, label: str, size: int) -> NewDataset:
    """Return the dataset of a series that is to be created.

    Raises:
        WeakGuaranteeError: the budget is weak for so few records.
    """
    try:
        return series.template.new_dataset(series.name_dataset(label), size)
    except WeakGuaranteeError as error:
        error.pointer = "/size"
        raise


def _require_same(found: Dataset, series: Series, size: int) -> None:
    """Raise `NameTakenError` unless a dataset is the one of a series with this size."""
    if found.series != series.name:
        raise NameTakenError(
            f"dataset {found.name!r} exists, and does not belong to series {series.name!r}"
        )
    if found.size != size:
        raise NameTakenError(
            f"dataset {found.name!r} exists with {found.size} records, not {size}: "
            "its size never changes"
        )
