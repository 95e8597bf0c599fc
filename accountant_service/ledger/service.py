"""The ledger's operations: calculate first, then write in one transaction.

A charge's cost depends on the mechanism alone, so it is computed before the transaction begins; the
transaction compares integers and writes. Every write stores its answer under the Idempotency-Key in
the transaction that makes it: a retry gets the same answer, whatever crashed in between.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, Protocol

from sqlalchemy.exc import IntegrityError

from accountant_service.canonical_json import canonical_json
from accountant_service.errors import CodedError
from accountant_service.guarantee import warn_about_delta
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
from accountant_service.ledger.plans import BudgetPreview, PlannedCharge
from accountant_service.ledger.quotas import RunQuota
from accountant_service.ledger.reading_rows import UNREADABLE, read_entry
from accountant_service.ledger.repository import (
    PAGE_SIZE,
    SYSTEM,
    KeyRecord,
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
    NewDataset,
    Reservation,
    State,
)
from accountant_service.mechanisms import Mechanism

ATTEMPTS: Final = 4
_CACHED_SUBJECTS_MAX: Final = 10_000
_BURN_DOWN_ENTRIES_MAX: Final = 2_000
_OTHERS_FIRST: Final = "other requests kept changing the dataset; nothing was charged. Try again"
_FINAL_STATES: Final = {EntryKind.COMMIT: State.COMMITTED, EntryKind.RELEASE: State.RELEASED}
_CREATING: Final = (EntryKind.CREATE, EntryKind.RESERVE)


class Deletion:
    """Stands for the deletion of a dataset in the outcome of a write."""


# of a write: the dataset, and its reservation or, if the dataset is new, what its budget admits;
# None if the write is about the dataset alone
Subject = Reservation | BudgetPreview | Deletion | None
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
        dataset: the identifier of its dataset.
        dataset_name: the name of its dataset.
        key: identifier of the key that reserved it.
        team: the team of that key.
    """

    dataset: str
    dataset_name: str
    key: str
    team: str | None


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
        warning = warn_about_delta(new.size, new.delta)
        if warning is not None:
            preview = replace(preview, warnings=(*preview.warnings, warning))
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
            if transaction.find_dataset(new.name) is not None:
                raise NameTakenError(
                    f"there is a dataset {new.name!r} already; choose another name"
                )
            transaction.record_audit_event(request.key.identifier, "dataset-created", new.name)
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
        for run in transaction.list_overdue_reservations(dataset, now()):
            granted, amounts = (refunds or {}).get(run.identifier, (-1, ()))
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
        for attempt in range(ATTEMPTS):
            dataset = self.find_dataset(request.key, name, Scope.RUN)
            try:
                caps = self.find_cap_uses(request.key, dataset)
                planned = plans.compute_charge(dataset, mechanism, caps)
                return self.hold_budget(request, dataset, planned, lease, purpose)
            except CodedError as error:
                known = self.find_stored_answer(request)
                if known is not None:
                    return known
                current, overdue = self.read_dataset(request.key, name)
                self.expire_leases(name, self._compute_refunds(current, overdue))
                last = attempt == ATTEMPTS - 1
                if last or not is_worth_retrying(error, dataset, current, overdue):
                    self._explain_refusal(error, request.key, current, mechanism)
                    raise
        raise AssertionError  # the last attempt returns or raises

    def _explain_refusal(
        self, error: CodedError, key: KeyRecord, dataset: Dataset, mechanism: Mechanism
    ) -> None:
        """Add to the error how many steps, or how much noise, would fit the budget."""
        if isinstance(error, BudgetExhaustedError):
            caps = self.find_cap_uses(key, dataset)
            error.explain(*plans.find_affordable(dataset, mechanism, caps))

    def find_cap_uses(self, key: KeyRecord, dataset: Dataset) -> list[CapUse]:
        """Return a dataset's caps for a key and its team, each with the budget used so far."""
        with self._repository.reading() as reading:
            return reading.find_cap_uses(dataset, key.identifier, key.team)

    def hold_budget(
        self,
        request: WriteRequest,
        dataset: Dataset,
        planned: PlannedCharge,
        lease: float,
        purpose: str,
    ) -> StoredAnswer:
        """Reserve budget for a plan whose cost is already computed.

        Args:
            request: the write.
            dataset: as read before the charge was computed.
            planned: the plan and its charge.
            lease: seconds until the reservation expires.
            purpose: the caller's words.

        Raises:
            BudgetExhaustedError: the plan does not fit in the budget or, as a CapExhaustedError,
                under a cap; what would fit is not computed.
            ChargeOutdatedError: the dataset's filter changed since the charge was computed.
        """
        require_scope(request.key, Scope.RUN)
        reservation = Reservation(
            uuid.uuid4().hex,
            dataset.identifier,
            State.OPEN,
            planned.mechanism,
            planned.mechanism_hash,
            planned.charge,
            planned.charge.steps,
            0,
            now() + int(1e6 * lease),
            purpose,
            request.key.identifier,
            planned.charge.reserved,
            request.key.team,
        )

        def insert(transaction: Transaction) -> Outcome:
            """Store the reservation in a transaction, and return the answer."""
            current = self._lock_dataset(transaction, dataset.name)
            if current.identifier != dataset.identifier:
                raise ChargeOutdatedError(f"another dataset is {dataset.name!r} now")
            self._run_quota.require_room(
                *transaction.count_runs_of_key(current, reservation.key, now())
            )
            caps = transaction.find_cap_uses(current, reservation.key, reservation.team)
            change = rules.reserve(current, reservation, planned.policy, caps)
            current = transaction.apply_change(current, change, request.key.identifier)
            return current, change.reservation

        return self._write_once(request, EntryKind.RESERVE, insert)

    def get_reservation(self, key: KeyRecord, identifier: str) -> tuple[Dataset, Reservation]:
        """Return a reservation and its dataset, after expiring a lease that has ended."""
        dataset, reservation = self.find_reservation(key, identifier)
        if is_overdue(reservation):
            self.expire_leases(dataset.name, self._compute_refunds(dataset, [reservation]))
            dataset, reservation = self.find_reservation(key, identifier)
        return dataset, reservation

    def find_reservation(self, key: KeyRecord, identifier: str) -> tuple[Dataset, Reservation]:
        """Return a reservation without changing it, and its dataset."""
        require_scope(key, Scope.OWNER, Scope.RUN)
        subject = f"reservation {identifier!r}"
        with self._repository.reading() as reading:
            reservation = reading.find_reservation(identifier)
            dataset_id = "" if reservation is None else reservation.dataset
            dataset = reading.find_dataset_by_id(dataset_id)
        if reservation is None or dataset is None:
            raise UnknownSubjectError(f"there is no {subject}")
        require_visible(key, dataset.name, subject)
        return dataset, reservation

    def list_reservations(
        self, key: KeyRecord, name: str, after: RunPlace | None, limit: int
    ) -> tuple[Dataset, list[Reservation], RunPlace | None]:
        """Return a dataset, a page of its reservations, and where the next page begins after.

        See `Transaction.list_reservations_page`.
        """
        dataset = self.find_dataset(key, name)
        with self._repository.reading() as reading:
            return dataset, *reading.list_reservations_page(dataset, after, limit)

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
        refund: tuple[int, Amounts] | None = None
        for _ in range(ATTEMPTS):
            try:
                return self.close_run(request, identifier, kind, refund, declared)
            except ChargeOutdatedError:
                dataset, run = self.find_reservation(request.key, identifier)
                refund = run.steps_granted, plans.compute_refund(dataset.policy, run)
        raise DatabaseAwayError(_OTHERS_FIRST)

    def close_run(
        self,
        request: WriteRequest,
        identifier: str,
        kind: EntryKind,
        refund: tuple[int, Amounts] | None = None,
        declared: Declaration = NOTHING_DECLARED,
    ) -> StoredAnswer:
        """End a reservation; free the budget of steps that were not granted.

        Args:
            request: the write.
            identifier: the reservation's.
            kind: COMMIT or RELEASE.
            refund: a number of granted steps, and what it returns to the budget after these.
            declared: what the training program states about a run that it commits.

        Raises:
            ChargeOutdatedError: what is returned takes a computation: pass `refund`.
        """

        def decide(run: Reservation) -> rules.Change | None:
            """Return the change that ends the run; None if it already ended in the same way."""
            granted, amounts = refund or (-1, None)
            known = amounts if granted == run.steps_granted else None
            return rules.close(run, _FINAL_STATES[kind], known, declared)

        return self._change(request, identifier, kind, decide)

    def renew(self, request: WriteRequest, identifier: str, lease: float) -> StoredAnswer:
        """Extend a reservation's lease to `lease` seconds from now."""
        return self._change(
            request,
            identifier,
            EntryKind.RENEW,
            lambda reservation: rules.renew(reservation, now() + int(1e6 * lease)),
        )

    def _change(
        self,
        request: WriteRequest,
        identifier: str,
        kind: EntryKind,
        decide: Callable[[Reservation], rules.Change | None],
        steps: int = 0,
    ) -> StoredAnswer:
        """Lock a reservation's dataset, and apply the change that `decide` returns, if any."""
        require_scope_of_runs(request.key)
        subject = self.find_run_subject(identifier)
        require_access(request.key, subject, identifier)

        def update(transaction: Transaction) -> Outcome:
            """Apply the change to the locked dataset, and return the answer."""
            dataset = transaction.find_dataset_by_id(subject.dataset, lock=True)
            reservation = transaction.find_reservation(identifier)
            if dataset is None or reservation is None:
                raise UnknownSubjectError(_no_reservation(identifier))
            if is_overdue(reservation):
                reservation = replace(reservation, state=State.EXPIRED)
            change = decide(reservation)
            if change is None:
                return dataset, reservation
            transaction.apply_change(dataset, change, request.key.identifier)
            return dataset, change.reservation

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
            run = reading.find_reservation(reservation_id)
            dataset = None if run is None else reading.find_dataset_by_id(run.dataset)
        if run is None or dataset is None:
            raise UnknownSubjectError(_no_reservation(reservation_id))
        if len(self._run_subjects) >= _CACHED_SUBJECTS_MAX:
            self._run_subjects = {}
        found = RunSubject(dataset.identifier, dataset.name, run.key, run.team)
        self._run_subjects[reservation_id] = found
        return found

    def issue_certificate(self, key: KeyRecord, identifier: str) -> certificate.Document:
        """Return the signed certificate of a run that has ended."""
        self.get_reservation(key, identifier)  # expires an ended lease
        return certificate.issue(*self.read_ended_run(key, identifier), now())

    def read_ended_run(
        self, key: KeyRecord, identifier: str
    ) -> tuple[Dataset, Reservation, bytes, RunEnd]:
        """Return an ended run with its dataset and end, and the seed of the signing key."""
        dataset, reservation = self.find_reservation(key, identifier)
        if reservation.state is State.OPEN:
            raise ReservationOpenError("commit or release the reservation first")
        seed = self._repository.get_or_create_secret(signing.SIGNING_KEY)
        with self._repository.reading() as reading:
            entry = reading.find_last_entry(dataset, reservation)
        return dataset, reservation, seed, _read_run_end(entry, reservation)

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
    require_visible(key, run.dataset_name, f"reservation {identifier!r}")
    require_control(key, run)


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
