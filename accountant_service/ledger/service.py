"""The ledger's operations: calculate first, then write in one transaction.

A charge's cost depends on the mechanism alone, so it is computed before the transaction begins; the
transaction compares integers and writes. Every write stores its answer under the Idempotency-Key in
the transaction that makes it: a retry gets the same answer, whatever crashed in between.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Protocol

from sqlalchemy.exc import IntegrityError

from accountant_service.errors import CodedError
from accountant_service.ledger import certificate, hash_chain, plans, rules, signing
from accountant_service.ledger.api_keys import (
    Scope,
    require_control,
    require_scope,
    require_unbound,
    require_visible,
)
from accountant_service.ledger.certificate import RunEnd
from accountant_service.ledger.errors import (
    BudgetExhaustedError,
    ChargeOutdatedError,
    DatabaseAwayError,
    IdempotencyKeyRequiredError,
    IdempotencyKeyReusedError,
    NameTakenError,
    ReservationOpenError,
    StoredRowError,
    UnauthenticatedError,
    UnknownSubjectError,
)
from accountant_service.ledger.filters import PrivacyFilter
from accountant_service.ledger.filters.base import Amounts
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.plans import BudgetPreview, PlannedCharge, ReferenceChoice
from accountant_service.ledger.quotas import RunQuota
from accountant_service.ledger.reading_rows import UNREADABLE, read_entry
from accountant_service.ledger.repository import (
    PAGE_SIZE,
    SYSTEM,
    Repository,
    RunPlace,
    StoredAnswer,
    Transaction,
    now,
)
from accountant_service.ledger.rules import (
    NOTHING_DECLARED,
    Balance,
    CapUse,
    Dataset,
    Declaration,
    EntryKind,
    JointRun,
    NewDataset,
    Reservation,
    State,
)
from accountant_service.mechanisms import Mechanism
from accountant_service.writing.canonical_json import canonical_json

ATTEMPTS: Final = 4
_CACHED_SUBJECTS_MAX: Final = 10_000
_BURN_DOWN_ENTRIES_MAX: Final = 2_000
_OTHERS_FIRST: Final = "other requests kept changing the dataset; nothing was charged. Try again"
_FINAL_STATES: Final = {EntryKind.COMMIT: State.COMMITTED, EntryKind.RELEASE: State.RELEASED}
_CREATING: Final = (EntryKind.CREATE, EntryKind.RESERVE)


class Deletion:
    """Stands for the deletion of a dataset in the outcome of a write."""


RunParts = tuple[tuple[Dataset, Reservation], ...]  # a run's reservations, one of each dataset
# of a write: the dataset, and a run's reservations or, if the dataset is new, what its budget
# admits; None if the write is about the dataset alone
Subject = RunParts | BudgetPreview | Deletion | None
Outcome = tuple[Dataset, Subject]
Refunds = dict[str, tuple[int, Amounts]]  # by reservation: steps granted, and amounts returned


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """A write request: the API key, the Idempotency-Key and the body.

    Attributes:
        key: the API key that sent it.
        idempotency_key: from the header.
        call: method and path.
        body: as JSON.
        is_authenticated: whether the key was read for this request. A write of a remembered key is
            refused unless the key is as it was, and repeats nothing that was answered before.
    """

    key: KeyRecord
    idempotency_key: str | None
    call: str
    body: Any
    is_authenticated: bool = True

    @property
    def fingerprint(self) -> str:
        """A hash of the request, by which a retry is recognised."""
        text = canonical_json([self.call, self.body], compact=False, ascii_only=True)
        return hashlib.sha256(text.encode()).hexdigest()


class AnswerFormat(Protocol):
    """The format of answers to writes: as they are sent, and as they are stored for retries.

    What never changes is in the row of the run or the dataset. A stored answer does not repeat it,
    because a plan may be large and every renewal stores an answer.
    """

    def encode(self, dataset: Dataset, result: Subject) -> tuple[str, str]:
        """Return the answer about a reservation or dataset as text: as sent, and as stored."""

    def restore(self, stored: str, reading: Transaction) -> str:
        """Return a stored answer as it was sent."""


@dataclass(frozen=True, slots=True)
class RunSubject:
    """The facts of a run that never change and decide who may change it.

    Attributes:
        reservations: the identifiers of its reservations, one for each of its datasets.
        datasets: the identifiers of these datasets, in the order in which they are locked.
        dataset_names: their names.
        key: identifier of the key that reserved it.
        team: the team of that key.
    """

    reservations: tuple[str, ...]
    datasets: tuple[str, ...]
    dataset_names: tuple[str, ...]
    key: str
    team: str | None

    @property
    def dataset(self) -> str:
        """The dataset at which writers of this run wait for their turn: the first that is locked.

        To wait at several would let two runs wait for each other.
        """
        return self.datasets[0]


@dataclass(frozen=True, slots=True)
class EntriesPage:
    """A page of the entries in a dataset's hash chain.

    Attributes:
        entries: as they are stored, each with its hash.
        has_more: True if later entries exist.
    """

    entries: list[dict[str, Any]]
    has_more: bool


@dataclass(frozen=True, slots=True)
class BurnDownPoint:
    """A point of a budget's history: ε spent, and ε spent or held, after one entry.

    Attributes:
        at: microseconds since 1970.
        spent: ε of the steps granted.
        taken: ε of the steps granted or held.
    """

    at: int
    spent: float
    taken: float


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """A run's origin: the key that reserved it, and its times; None where it is not known.

    Attributes:
        holder: the key that reserved.
        reserved_at: microseconds since 1970.
        ended_at: microseconds since 1970; None also while the run is open.
    """

    holder: KeyRecord | None
    reserved_at: int | None
    ended_at: int | None


def _ignore_write(_: EntryKind, __: int) -> None:
    """Do nothing with a write: the default callback."""


class Ledger:
    """The ledger's operations, each checked against the caller's API key.

    Args:
        repository: the database.
        answers: the format of answers to writes. They are stored in the transaction of the write,
            so they are made here and not when they are sent.
        on_write: called with the kind of each durable write, and with the steps of a grant.
        run_quota: how many runs a key may have.
    """

    def __init__(
        self,
        repository: Repository,
        answers: AnswerFormat,
        on_write: Callable[[EntryKind, int], None] = _ignore_write,
        run_quota: RunQuota = RunQuota(),  # noqa: B008 - it is frozen
    ) -> None:
        self._repository, self._answers = repository, answers
        self._on_write, self._run_quota = on_write, run_quota
        self._run_subjects: dict[str, RunSubject] = {}  # by reservation

    # --- datasets

    def create_dataset(self, request: WriteRequest, new: NewDataset) -> StoredAnswer:
        """Create a dataset with a budget, and choose the privacy filter, which never changes."""
        require_unbound(request.key, Scope.OWNER)
        policy = plans.choose_policy(new)
        preview = plans.preview_budget(policy, new.planned_mechanism)
        return self.add_dataset(request, new, policy, preview)

    def add_dataset(
        self,
        request: WriteRequest,
        new: NewDataset,
        policy: PrivacyFilter,
        preview: BudgetPreview,
    ) -> StoredAnswer:
        """Store a new dataset with the privacy filter that was chosen for it.

        Args:
            request: the write.
            new: the dataset.
            policy: its privacy filter.
            preview: what the budget admits; part of the answer.
        """
        require_unbound(request.key, Scope.OWNER)
        preview = plans.warn_of_size(preview, new.size, new.delta)
        dataset = Dataset(
            uuid.uuid4().hex,
            new.name,
            new.size,
            new.privacy_unit,
            policy,
            Balance(policy.nothing, policy.nothing),
            0,
            hash_chain.GENESIS,
            now(),
        )

        def insert(transaction: Transaction) -> Outcome:
            """Store the dataset in a transaction, and return the answer."""
            transaction.lock_new_names()
            if transaction.find_dataset(new.name) is not None:
                raise NameTakenError(
                    f"there is a dataset {new.name!r} already; choose another name"
                )
            if transaction.find_series(new.name) is not None:
                raise NameTakenError(f"there is a series {new.name!r}; choose another name")
            transaction.record_audit_event(
                request.key.identifier, "dataset-created", new.name, new.accepted_weaknesses
            )
            return transaction.add_dataset(dataset, request.key.identifier), preview

        return self._write_once(request, EntryKind.CREATE, insert)

    def close_dataset(self, request: WriteRequest, name: str) -> StoredAnswer:
        """Close a dataset for good: it takes no further reservation. A repeat changes nothing.

        Anyone who may create a budget may close it. Open runs keep what they hold.
        """
        require_unbound(request.key, Scope.OWNER)

        def close(transaction: Transaction) -> Outcome:
            """Record that the locked dataset is closed, and return the answer."""
            dataset = self._lock_dataset(transaction, name)
            at = now()
            if rules.close_dataset(dataset, at) is None:
                return dataset, None
            transaction.record_audit_event(request.key.identifier, "dataset-closed", name)
            return transaction.close_dataset(dataset, at, request.key.identifier), None

        return self._write_once(request, EntryKind.CLOSE, close)

    def set_reference(self, request: WriteRequest, name: str, mechanism: Mechanism) -> StoredAnswer:
        """Set or confirm the reference in whose steps a dataset's budget is counted, for its owner.

        No reservation replaces it. A repeat changes nothing.

        Raises:
            ReferenceFixedError: the dataset has none that its owner may choose.
            UnsuitableReferenceError: the mechanism cannot be the reference.
        """
        for attempt in range(ATTEMPTS):
            dataset = self.find_dataset(request.key, name, Scope.OWNER)
            try:
                return self.store_reference(
                    request, dataset, plans.choose_reference(dataset, mechanism)
                )
            except CodedError as error:
                known = self.find_stored_answer(request)
                if known is not None:
                    return known
                if attempt == ATTEMPTS - 1 or not isinstance(error, ChargeOutdatedError):
                    raise
        raise AssertionError  # the last attempt returns or raises

    def quote_reference(self, key: KeyRecord, name: str, mechanism: Mechanism) -> ReferenceChoice:
        """Return what would still fit with another reference, and what fits now; set nothing."""
        return plans.choose_reference(self.find_dataset(key, name, Scope.OWNER), mechanism)

    def store_reference(
        self, request: WriteRequest, before: Dataset, choice: ReferenceChoice
    ) -> StoredAnswer:
        """Store the owner's choice of a reference, which was computed for a dataset as it was.

        Raises:
            ChargeOutdatedError: the dataset has another reference or balance now.
        """
        require_scope(request.key, Scope.OWNER)

        def store(transaction: Transaction) -> Outcome:
            """Record the choice for the locked dataset, and return the answer."""
            dataset = self._lock_again(transaction, before)
            changed = rules.set_reference(dataset, choice.policy)
            if changed is None:
                return dataset, choice.after
            transaction.record_audit_event(request.key.identifier, "reference-set", before.name)
            return transaction.set_reference(changed, request.key.identifier), choice.after

        return self._write_once(request, EntryKind.REFERENCE, store)

    def delete_dataset(self, request: WriteRequest, name: str) -> StoredAnswer:
        """Delete a dataset that was never used; its name may be given to another one.

        Anyone who may create a budget may delete it.

        Raises:
            DatasetUsedError: it has entries besides its creation.
        """
        require_unbound(request.key, Scope.OWNER)

        def delete(transaction: Transaction) -> Outcome:
            """Delete the locked dataset, and return the answer."""
            dataset = self._lock_dataset(transaction, name)
            rules.require_unused(dataset)
            transaction.delete_dataset(dataset, request.key.identifier)
            return dataset, Deletion()

        return self._write_once(request, None, delete)

    def list_datasets(
        self, key: KeyRecord, after: str = "", limit: int | None = None
    ) -> list[Dataset]:
        """Return the datasets that the key may see, sorted by name.

        Args:
            key: the caller's API key.
            after: the last name of the page before.
            limit: at most so many; None for all.
        """
        require_scope(key, Scope.OWNER, Scope.RUN)
        with self._repository.reading() as reading:
            return reading.list_datasets(after, limit, key.datasets)

    def get_dataset(self, key: KeyRecord, name: str) -> Dataset:
        """Return a dataset after expiring its ended leases."""
        dataset, overdue = self.read_dataset(key, name)
        return self.expire_leases(name, self._compute_refunds(dataset, overdue)) or dataset

    def read_dataset(self, key: KeyRecord, name: str) -> tuple[Dataset, list[Reservation]]:
        """Return a dataset and its reservations with an ended lease, without changing them."""
        dataset = self.find_dataset(key, name)
        with self._repository.reading() as reading:
            return dataset, reading.list_overdue_reservations(dataset, now())

    def _compute_refunds(self, dataset: Dataset, runs: Sequence[Reservation]) -> Refunds:
        """Compute the budget that each reservation frees if it ends now."""
        return {
            run.identifier: (run.steps_granted, plans.compute_refund(dataset.policy, run))
            for run in runs
        }

    def expire_leases(self, name: str, refunds: Refunds) -> Dataset | None:
        """End a dataset's reservations whose lease has ended, given the budget that each frees.

        Returns:
            The dataset, or None if there is no lease to expire.
        """
        if not refunds:
            return None
        with self._repository.transaction() as transaction:
            return self._lock_dataset(transaction, name, refunds)

    def find_dataset(self, key: KeyRecord, name: str, *scopes: Scope) -> Dataset:
        """Return a dataset; raise an error if the key may not see it or has none of the scopes.

        Args:
            key: the caller's API key.
            name: the dataset's.
            scopes: the key needs one of them: owner or run unless given.
        """
        require_scope(key, *(scopes or (Scope.OWNER, Scope.RUN)))
        require_visible(key, name, f"dataset {name!r}")
        with self._repository.reading() as reading:
            dataset = reading.find_dataset(name)
        if dataset is None:
            raise UnknownSubjectError(f"there is no dataset {name!r}")
        return dataset

    def _lock_dataset(
        self, transaction: Transaction, name: str, refunds: Refunds | None = None
    ) -> Dataset:
        """Lock a dataset's row, expire its ended leases and return the dataset.

        A lease whose return takes a computation, and is not in `refunds`, is left for later.
        """
        dataset = transaction.find_dataset(name, lock=True)
        if dataset is None:
            raise UnknownSubjectError(f"there is no dataset {name!r}")
        return self._end_overdue(transaction, dataset, refunds or {})

    def _end_overdue(self, transaction: Transaction, dataset: Dataset, refunds: Refunds) -> Dataset:
        """Expire the ended leases of a locked dataset; return the dataset.

        Of a run on several datasets only this one's reservation ends: no grant or renewal is
        possible on the others either, and they end when somebody looks at them.
        """
        for run in transaction.list_overdue_reservations(dataset, now()):
            granted, amounts = refunds.get(run.identifier, (-1, ()))
            refund = amounts if granted == run.steps_granted else run.refund_if_ended
            change = None if refund is None else rules.close(run, State.EXPIRED, refund)
            if change is not None:
                dataset = transaction.apply_change(dataset, change, SYSTEM)
        return dataset

    # --- reservations

    def reserve(
        self, request: WriteRequest, name: str, mechanism: Mechanism, lease: float, purpose: str
    ) -> StoredAnswer:
        """Reserve budget for a whole plan; if it does not fit, the error says what would."""
        return self._reserve(request, [name], mechanism, lease, purpose, is_joint=False)

    def reserve_jointly(
        self,
        request: WriteRequest,
        names: Sequence[str],
        mechanism: Mechanism,
        lease: float,
        purpose: str,
    ) -> StoredAnswer:
        """Reserve budget of each of several datasets for one plan on all of their records.

        Nothing is held of any dataset unless the plan fits all of them.

        Raises:
            DatasetsDifferError: they have not one neighbouring relation and one privacy unit.
        """
        return self._reserve(request, names, mechanism, lease, purpose, is_joint=True)

    def _reserve(
        self,
        request: WriteRequest,
        names: Sequence[str],
        mechanism: Mechanism,
        lease: float,
        purpose: str,
        *,
        is_joint: bool,
    ) -> StoredAnswer:
        """Reserve budget for a plan on one dataset, or jointly on several."""
        for attempt in range(ATTEMPTS):
            datasets = self.find_datasets(request.key, names, Scope.RUN, is_joint=is_joint)
            records = sum(dataset.size for dataset in datasets)
            try:
                charges: dict[Hashable, PlannedCharge] = {}
                planned = []
                for at, dataset in enumerate(datasets):
                    caps = self.find_cap_uses(request.key, dataset)
                    state = plans.state_of(dataset, caps)
                    if state not in charges:
                        with naming_dataset(at, is_joint=is_joint):
                            charges[state] = plans.compute_charge(dataset, mechanism, caps, records)
                    planned.append(charges[state])
                return self.hold_budget(
                    request, list(zip(datasets, planned, strict=True)), lease, purpose,
                    is_joint=is_joint,
                )  # fmt: skip
            except CodedError as error:
                known = self.find_stored_answer(request)
                if known is not None:
                    return known
                again = [self._prepare_retry(error, request.key, each) for each in datasets]
                if attempt == ATTEMPTS - 1 or not any(again):
                    self._explain_refusal(error, request.key, datasets, mechanism)
                    raise
        raise AssertionError  # the last attempt returns or raises

    def find_datasets(
        self, key: KeyRecord, names: Sequence[str], *scopes: Scope, is_joint: bool
    ) -> list[Dataset]:
        """Return the datasets of one run, by their names.

        Args:
            key: the caller's API key.
            names: of the datasets.
            scopes: the key needs one of them: owner or run unless given.
            is_joint: whether the request names several.

        Raises:
            DatasetsDifferError: they have not one neighbouring relation and one privacy unit.
        """
        found: list[Dataset] = []
        for at, name in enumerate(names):
            with naming_dataset(at, is_joint=is_joint):
                found.append(self.find_dataset(key, name, *scopes))
                rules.require_alike(found[0], found[-1])
        return found

    def _prepare_retry(self, error: CodedError, key: KeyRecord, before: Dataset) -> bool:
        """Expire ended leases; return whether a refused reservation is then worth retrying."""
        current, overdue = self.read_dataset(key, before.name)
        self.expire_leases(before.name, self._compute_refunds(current, overdue))
        return is_worth_retrying(error, before, current, overdue)

    def _explain_refusal(
        self, error: CodedError, key: KeyRecord, datasets: Sequence[Dataset], mechanism: Mechanism
    ) -> None:
        """Add to the error how many steps, or how much noise, would fit every budget."""
        if isinstance(error, BudgetExhaustedError):
            found = []
            for dataset in datasets:
                current = self.find_dataset(key, dataset.name)
                caps = self.find_cap_uses(key, current)
                found.append(plans.find_affordable(current, mechanism, caps))
            error.explain(*plans.fit_all(found))

    def find_cap_uses(self, key: KeyRecord, dataset: Dataset) -> list[CapUse]:
        """Return a dataset's caps for a key and its team, each with the budget used so far."""
        with self._repository.reading() as reading:
            return reading.find_cap_uses(dataset, key.identifier, key.team)

    def hold_budget(
        self,
        request: WriteRequest,
        planned: Sequence[tuple[Dataset, PlannedCharge]],
        lease: float,
        purpose: str,
        *,
        is_joint: bool = False,
    ) -> StoredAnswer:
        """Reserve budget for a plan whose cost is already computed, on all datasets or none.

        Args:
            request: the write.
            planned: each dataset, as read before the charge was computed, with the plan and its
                charge.
            lease: seconds until the reservation expires.
            purpose: the caller's words.
            is_joint: whether the run is one on several datasets, even if only one is named.

        Raises:
            BudgetExhaustedError: the plan does not fit in the budget or, as a CapExhaustedError,
                under a cap; what would fit is not computed.
            ChargeOutdatedError: a dataset's filter changed since the charge was computed.
        """
        require_scope(request.key, Scope.RUN)
        # every transaction locks datasets in this order, so none waits for one that waits for it
        order = sorted(range(len(planned)), key=lambda at: planned[at][0].identifier)
        names = tuple(uuid.uuid4().hex for _ in planned)
        records = sum(dataset.size for dataset, _ in planned)
        joint = JointRun(names, records) if is_joint else None
        expires_at = now() + int(1e6 * lease)

        def insert(transaction: Transaction) -> Outcome:
            """Store the reservations in a transaction, and return the answer."""
            locked = [self._lock_again(transaction, planned[at][0]) for at in order]
            if joint is not None:
                transaction.allow_joint_runs()
            parts = []
            for at, current, name in zip(order, locked, names, strict=True):
                run = _build_reservation(
                    request.key, name, current, planned[at][1], expires_at, purpose, joint
                )
                with naming_dataset(at, is_joint=is_joint):
                    parts.append(self._hold(transaction, current, run, planned[at][1].policy))
            return parts[0][0], tuple(parts)

        return self._write_once(request, EntryKind.RESERVE, insert)

    def _lock_again(self, transaction: Transaction, before: Dataset) -> Dataset:
        """Lock a dataset that was read before, expire its ended leases and return it."""
        current = transaction.find_dataset_by_id(before.identifier, lock=True)
        if current is None:
            raise ChargeOutdatedError(f"dataset {before.name!r} was deleted meanwhile")
        return self._end_overdue(transaction, current, {})

    def _hold(
        self, transaction: Transaction, current: Dataset, run: Reservation, policy: PrivacyFilter
    ) -> tuple[Dataset, Reservation]:
        """Store a reservation of a locked dataset; return both as they are then."""
        counts = transaction.count_runs_of_key(current, run.key, now())
        self._run_quota.require_room(*counts)
        caps = transaction.find_cap_uses(current, run.key, run.team)
        change = rules.reserve(current, run, policy, caps)
        return transaction.apply_change(current, change, run.key), change.reservation

    def get_reservation(self, key: KeyRecord, identifier: str) -> tuple[Dataset, Reservation]:
        """Return a reservation and its dataset, after expiring a lease that has ended."""
        return self.get_run(key, identifier)[0]

    def get_run(self, key: KeyRecord, identifier: str) -> RunParts:
        """Return a run's reservations and their datasets, after expiring ended leases."""
        parts = self.find_run(key, identifier)
        if not any(is_overdue(run) for _, run in parts):
            return parts
        for dataset, run in parts:
            if is_overdue(run):
                self.expire_leases(dataset.name, self._compute_refunds(dataset, [run]))
        return self.find_run(key, identifier)

    def find_run(self, key: KeyRecord, identifier: str) -> RunParts:
        """Return a run's reservations with their datasets, without changing them.

        A key that may not see one of the datasets does not see the run.
        """
        require_scope(key, Scope.OWNER, Scope.RUN)
        with self._repository.reading() as reading:
            parts = reading.find_run(identifier)
        if not parts:
            raise UnknownSubjectError(_no_reservation(identifier))
        for dataset, _ in parts:
            require_visible(key, dataset.name, f"reservation {identifier!r}")
        return parts

    def list_reservations(
        self, key: KeyRecord, name: str, after: RunPlace | None, limit: int
    ) -> tuple[Dataset, list[Reservation], RunPlace | None]:
        """Return a dataset, a page of its reservations, and where the next page begins after.

        See `Transaction.list_reservations_page`.
        """
        dataset = self.find_dataset(key, name)
        with self._repository.reading() as reading:
            return dataset, *reading.list_reservations_page(dataset, after, limit)

    def read_run_origins(
        self, dataset: Dataset, runs: Sequence[Reservation]
    ) -> dict[str, RunOrigin]:
        """Return who reserved runs of a dataset, when, and when they ended; by identifier."""
        with self._repository.reading() as reading:
            times = reading.find_run_times(dataset, runs)
            holders = {run.key: reading.find_key(run.key) for run in runs}
        return {run.identifier: RunOrigin(holders[run.key], *times[run.identifier]) for run in runs}

    def read_runs(
        self, key: KeyRecord, name: str, limit: int | None = None
    ) -> tuple[Dataset, list[Reservation], int]:
        """Return a dataset, at most `limit` of its reservations, and the number of all."""
        dataset = self.find_dataset(key, name)
        with self._repository.reading() as reading:
            runs = list(islice(_iterate_runs(reading, dataset), limit))
            return dataset, runs, reading.count_reservations(dataset)

    def find_last_run(self, key: KeyRecord, name: str) -> tuple[Dataset, Reservation | None]:
        """Return a dataset, and its last changed run, if there is one."""
        dataset = self.find_dataset(key, name)
        with self._repository.reading() as reading:
            return dataset, reading.find_last_run(dataset)

    def list_granted_reservations(
        self, key: KeyRecord, name: str
    ) -> tuple[PrivacyFilter, list[Reservation]]:
        """Return a dataset's privacy filter, and its reservations with granted steps."""
        dataset = self.find_dataset(key, name)
        with self._repository.reading() as reading:
            reservations = reading.list_reservations(dataset)
        return dataset.policy, [each for each in reservations if each.steps_granted]

    def grant(
        self, request: WriteRequest, identifier: str, steps: int, sequence: int
    ) -> StoredAnswer:
        """Grant a run's next steps before their noise is drawn: spend their part of the budget."""
        return self._change(
            request,
            identifier,
            EntryKind.GRANT,
            lambda reservation: rules.grant(reservation, steps, sequence),
            steps,
        )

    def commit(
        self,
        request: WriteRequest,
        identifier: str,
        declared: Declaration = NOTHING_DECLARED,
    ) -> StoredAnswer:
        """End a finished run; free the budget of steps that were not granted.

        Args:
            request: the write.
            identifier: the reservation's.
            declared: what the training program states about the run.
        """
        return self._end_run(request, identifier, EntryKind.COMMIT, declared)

    def release(self, request: WriteRequest, identifier: str) -> StoredAnswer:
        """End an abandoned run; free the budget of steps that were not granted."""
        return self._end_run(request, identifier, EntryKind.RELEASE)

    def _end_run(
        self,
        request: WriteRequest,
        identifier: str,
        kind: EntryKind,
        declared: Declaration = NOTHING_DECLARED,
    ) -> StoredAnswer:
        """Commit or release a run; if its refund is slow to compute, compute it and try again."""
        refunds: Refunds = {}
        for _ in range(ATTEMPTS):
            try:
                return self.close_run(request, identifier, kind, refunds, declared)
            except ChargeOutdatedError:
                for dataset, run in self.find_run(request.key, identifier):
                    refunds |= self._compute_refunds(dataset, [run])
        raise DatabaseAwayError(_OTHERS_FIRST)

    def close_run(
        self,
        request: WriteRequest,
        identifier: str,
        kind: EntryKind,
        refunds: Refunds,
        declared: Declaration = NOTHING_DECLARED,
    ) -> StoredAnswer:
        """End a reservation; free the budget of steps that were not granted.

        Args:
            request: the write.
            identifier: the reservation's.
            kind: COMMIT or RELEASE.
            refunds: what each of the run's reservations returns to its budget, if known.
            declared: what the training program states about a run that it commits.

        Raises:
            ChargeOutdatedError: what is returned takes a computation: pass `refunds`.
        """

        def decide(run: Reservation) -> rules.Change | None:
            """Return the change that ends the run; None if it already ended in the same way."""
            granted, amounts = refunds.get(run.identifier, (-1, None))
            known = amounts if granted == run.steps_granted else None
            return rules.close(run, _FINAL_STATES[kind], known, declared)

        return self._change(request, identifier, kind, decide)

    def renew(self, request: WriteRequest, identifier: str, lease: float) -> StoredAnswer:
        """Extend a reservation's lease to `lease` seconds from now."""
        expires_at = now() + int(1e6 * lease)
        return self._change(
            request,
            identifier,
            EntryKind.RENEW,
            lambda reservation: rules.renew(reservation, expires_at),
        )

    def _change(
        self,
        request: WriteRequest,
        identifier: str,
        kind: EntryKind,
        decide: Callable[[Reservation], rules.Change | None],
        steps: int = 0,
    ) -> StoredAnswer:
        """Lock the datasets of a run, and apply the changes that `decide` returns, if any."""
        require_scope_of_runs(request.key)
        subject = self.find_run_subject(identifier)
        require_access(request.key, subject, identifier)

        def update(transaction: Transaction) -> Outcome:
            """Apply the change to every locked dataset, and return the answer."""
            places = zip(subject.datasets, subject.reservations, strict=True)
            locked = [_lock_run(transaction, *place) for place in places]
            parts = []
            for dataset, reservation in locked:
                change = decide(reservation)
                if change is not None:
                    transaction.apply_change(dataset, change, request.key.identifier)
                parts.append((dataset, reservation if change is None else change.reservation))
            return parts[0][0], tuple(parts)

        return self._write_once(request, kind, update, steps)

    def cached_run_subject(self, reservation_id: str) -> RunSubject | None:
        """Return the cached facts of a run, or None."""
        return self._run_subjects.get(reservation_id)

    def find_run_subject(self, reservation_id: str) -> RunSubject:
        """Return what decides who may change a run; it never changes, so it is cached.

        Raises:
            UnknownSubjectError: there is no such reservation.
        """
        found = self.cached_run_subject(reservation_id)
        if found is not None:
            return found
        with self._repository.reading() as reading:
            parts = reading.find_run(reservation_id)
        if not parts:
            raise UnknownSubjectError(_no_reservation(reservation_id))
        if len(self._run_subjects) >= _CACHED_SUBJECTS_MAX:
            self._run_subjects = {}
        run = parts[0][1]
        found = RunSubject(
            tuple(each.identifier for _, each in parts),
            tuple(dataset.identifier for dataset, _ in parts),
            tuple(dataset.name for dataset, _ in parts),
            run.key,
            run.team,
        )
        self._run_subjects[reservation_id] = found
        return found

    def issue_certificate(self, key: KeyRecord, identifier: str) -> certificate.Document:
        """Return the signed certificate of a run that has ended."""
        self.get_run(key, identifier)  # expires an ended lease
        return certificate.issue(*self.read_ended_run(key, identifier), now())

    def read_ended_run(
        self, key: KeyRecord, identifier: str
    ) -> tuple[list[tuple[Dataset, Reservation, RunEnd]], bytes]:
        """Return an ended run: its datasets, reservations and ends; and the signing key's seed."""
        parts = self.find_run(key, identifier)
        if any(run.state is State.OPEN for _, run in parts):
            raise ReservationOpenError("commit or release the reservation first")
        seed = self._repository.get_or_create_secret(signing.SIGNING_KEY)
        with self._repository.reading() as reading:
            ended = [
                (dataset, run, _read_run_end(reading.find_last_entry(dataset, run), run))
                for dataset, run in parts
            ]
        return ended, seed

    # --- the record

    def list_entries(self, key: KeyRecord, name: str, after: int) -> EntriesPage:
        """Return the page of a dataset's entries that follow the entry number `after`."""
        dataset = self.find_dataset(key, name)
        with self._repository.reading() as reading:
            rows, has_more = reading.list_entries_page(dataset, after)
        entries = [read_entry(name, row.number, row.body) | {"hash": row.hash} for row in rows]
        return EntriesPage(entries, has_more)

    def compute_burn_down(self, key: KeyRecord, name: str, points_max: int) -> list[BurnDownPoint]:
        """Return a budget's history: ε spent, and spent or held, at up to `points_max` entries.

        The oldest comes first. The balances are computed backwards from the current one, so the
        cost does not grow with the length of the record.
        """
        dataset = self.find_dataset(key, name)
        balance, history = dataset.balance, []
        first = max(dataset.version - _BURN_DOWN_ENTRIES_MAX, 0)
        for at, change in reversed(self._read_balance_changes(dataset, first)):
            history.append((at, balance))
            balance = balance.minus(change)
        stride = -(-len(history) // points_max) or 1
        policy = dataset.policy

        def epsilon_of(amounts: Amounts) -> float:
            """Return the ε that the dataset's filter proves for these amounts."""
            # an earlier reference, of which nothing was released, may have had more steps
            return min(policy.epsilon_of(amounts), policy.epsilon)

        return [
            BurnDownPoint(at, epsilon_of(balance.spent), epsilon_of(balance.taken))
            for at, balance in history[::stride][::-1]
        ]

    def _read_balance_changes(self, dataset: Dataset, number: int) -> list[tuple[int, Balance]]:
        """Return the time and the balance change of each entry after a given number."""
        changes: list[tuple[int, Balance]] = []
        with self._repository.reading() as reading:
            while number < dataset.version:
                limit = min(PAGE_SIZE, dataset.version - number)
                rows = reading.list_entries(dataset, number, limit)
                for row in rows:
                    entry = read_entry(dataset.name, row.number, row.body)
                    try:
                        change = Balance(*dataset.policy.read_balance(entry))
                    except UNREADABLE as error:
                        where = f"entry {row.number} of dataset {dataset.name!r}"
                        raise StoredRowError(f"{where} cannot be read: {error}") from None
                    changes.append((entry["at"], change))
                number += len(rows)
        return changes

    # --- idempotency

    def _write_once(
        self,
        request: WriteRequest,
        kind: EntryKind | None,
        write: Callable[[Transaction], Outcome],
        steps: int = 0,
    ) -> StoredAnswer:
        """Make a write and store its answer in one transaction; a retry gets the same answer.

        `kind` is that of the entry that the write appends, if it appends one.

        A retry cannot store its answer, because its Idempotency-Key is taken: the transaction is
        rolled back, and the first answer is returned. To look for the key first would cost every
        write one more query.
        """
        value = request.idempotency_key
        if not value:
            raise IdempotencyKeyRequiredError(
                "send an Idempotency-Key header with a new random value for each new request"
            )
        key_id, fingerprint = request.key.identifier, request.fingerprint
        status = 201 if kind in _CREATING else 200
        for _ in range(ATTEMPTS):
            try:
                with self._repository.transaction() as transaction:
                    text, stored = self._answers.encode(*write(transaction))
                    answer = StoredAnswer(fingerprint, status, text)
                    transaction.store_answer(
                        key_id,
                        value,
                        replace(answer, text=stored),
                        is_authenticated=request.is_authenticated,
                    )
                if kind is not None:
                    self._on_write(kind, steps)
                return answer
            except DatabaseAwayError:
                raise
            except (IntegrityError, CodedError) as error:
                # a retry: its Idempotency-Key is taken, or the ledger has changed since; or another
                # writer was first; or the ledger refuses the request
                if not request.is_authenticated:
                    raise UnauthenticatedError("this API key was not read") from error
                found = self._find_answer(key_id, value, fingerprint)
                if found is not None:
                    return found
                if isinstance(error, CodedError):
                    raise
        raise DatabaseAwayError(_OTHERS_FIRST)

    def find_stored_answer(self, request: WriteRequest) -> StoredAnswer | None:
        """Return the stored answer if this request was already carried out, else None."""
        value = request.idempotency_key
        if not value:
            return None
        return self._find_answer(request.key.identifier, value, request.fingerprint)

    def _find_answer(self, key_id: str, value: str, fingerprint: str) -> StoredAnswer | None:
        """Return the stored answer of an earlier write with this Idempotency-Key, or None."""
        with self._repository.reading() as reading:
            found = reading.find_answer(key_id, value)
            if found is None:
                return None
            if found.fingerprint != fingerprint:
                raise IdempotencyKeyReusedError(
                    "this Idempotency-Key was used for another request; "
                    "send a new one with each new request"
                )
            return replace(found, text=self._answers.restore(found.text, reading))


def _iterate_runs(reading: Transaction, dataset: Dataset) -> Iterator[Reservation]:
    """Yield all reservations of a dataset, page by page."""
    found, after = reading.list_reservations_page(dataset, None, PAGE_SIZE)
    yield from found
    while after is not None:
        found, after = reading.list_reservations_page(dataset, after, PAGE_SIZE)
        yield from found


def _read_run_end(entry: dict[str, Any] | None, run: Reservation) -> RunEnd:
    """Return a run's end and its program's declared facts, from the entry that ended it.

    Raises:
        StoredRowError: there is no such entry, or it cannot be read.
    """
    try:
        if entry is None or entry.get("reservation") != run.identifier:
            raise ValueError(f"entry {run.ended_entry} is not about it")
        declared = Declaration(**entry.get("declared", {}))
        declared.entry_fields()  # checks them
    except UNREADABLE as error:
        raise StoredRowError(
            f"the end of run {run.identifier} cannot be read: {error}; "
            "`accountant ledger verify` lists all faults"
        ) from None
    return RunEnd(entry["at"], declared)


def require_scope_of_runs(key: KeyRecord) -> None:
    """Raise an error unless a key may change runs; whether a run exists is not told to others."""
    require_scope(key, Scope.RUN, Scope.OWNER)


def require_access(key: KeyRecord, run: RunSubject, identifier: str) -> None:
    """Raise an error unless a key that may change runs may change this one.

    This is decided before the run's dataset is locked, so that nobody else waits for a stranger.
    """
    for name in run.dataset_names:
        require_visible(key, name, f"reservation {identifier!r}")
    require_control(key, run)


@contextmanager
def naming_dataset(at: int, *, is_joint: bool) -> Iterator[None]:
    """Context manager that lets a refusal point to a dataset of a run on several.

    Args:
        at: the place of the dataset in the request.
        is_joint: whether the request names several.
    """
    try:
        yield
    except CodedError as error:
        if is_joint and error.pointer is None:
            error.mechanism_at, error.pointer = "", f"/datasets/{at}"
        raise


def _build_reservation(
    key: KeyRecord,
    identifier: str,
    dataset: Dataset,
    planned: PlannedCharge,
    expires_at: int,
    purpose: str,
    joint: JointRun | None,
) -> Reservation:
    """Return the new reservation of a plan."""
    return Reservation(
        identifier,
        dataset.identifier,
        State.OPEN,
        planned.mechanism,
        planned.mechanism_hash,
        planned.charge,
        planned.charge.steps,
        0,
        expires_at,
        purpose,
        key.identifier,
        key.team,
        planned.charge.reserved,
        joint=joint,
    )


def _lock_run(
    transaction: Transaction, dataset_id: str, identifier: str
) -> tuple[Dataset, Reservation]:
    """Lock a reservation's dataset; return both, the reservation as expired if its lease ended."""
    dataset = transaction.find_dataset_by_id(dataset_id, lock=True)
    reservation = transaction.find_reservation(identifier)
    if dataset is None or reservation is None:
        raise UnknownSubjectError(_no_reservation(identifier))
    if is_overdue(reservation):
        reservation = replace(reservation, state=State.EXPIRED)
    return dataset, reservation


def _no_reservation(identifier: str) -> str:
    """Return the sentence that there is no such reservation."""
    return f"there is no reservation {identifier!r}"


def is_overdue(reservation: Reservation) -> bool:
    """Return whether a reservation is open although its lease has ended."""
    return reservation.state is State.OPEN and reservation.expires_at <= now()


def is_worth_retrying(
    error: CodedError, before: Dataset, current: Dataset, overdue: Sequence[Reservation]
) -> bool:
    """Return whether a refused reservation may succeed if its cost is computed again.

    It may if the dataset changed since it was read as `before`, or if leases have ended.
    """
    if isinstance(error, ChargeOutdatedError):
        return True
    changed = (before.balance.taken, before.policy) != (current.balance.taken, current.policy)
    return isinstance(error, BudgetExhaustedError) and (changed or bool(overdue))
