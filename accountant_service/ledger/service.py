"""The ledger's calls: certify outside, then one transaction each.

A charge's cost depends on the mechanism alone, so it is computed before the transaction begins; the
transaction compares integers and writes. Every write is remembered under its Idempotency-Key in the
transaction that makes it: a repeat gets the same answer, whatever crashed in between.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy.exc import IntegrityError

from accountant_service import mechanisms
from accountant_service.errors import (
    AccountingError,
    BudgetExhaustedError,
    DatabaseAwayError,
    DatasetSizeError,
    IdempotencyKeyRequiredError,
    IdempotencyKeyReusedError,
    NameTakenError,
    NoFiniteEpsilonError,
    ReservationOpenError,
    TooExpensiveError,
    UnknownSubjectError,
)
from accountant_service.guarantee import Assumption, Guarantee, NeighbouringRelation, Status
from accountant_service.ledger import certificate, chain, model
from accountant_service.ledger import filter as privacy_filter
from accountant_service.ledger.filter import RenyiFilter
from accountant_service.ledger.keys import Scope, require, require_sight, require_unbound, sees
from accountant_service.ledger.model import Balance, Dataset, Kind, Reservation, State
from accountant_service.ledger.repository import (
    PAGE,
    KeyRecord,
    Remembered,
    Repository,
    Transaction,
    now,
)
from accountant_service.mechanisms import (
    CanonicalForm,
    Composed,
    DpSgd,
    Mechanism,
    Repeated,
    canonical_form,
)
from accountant_service.numerics import rounding

_ATTEMPTS: Final = 4
_SIGNING_KEY: Final = "certificates"
_SYSTEM: Final = "system"  # who expires leases
_NOISE_MAX: Final = 1e6
_PLAN_BYTES_MAX: Final = 1 << 17
_OWNERS_MAX: Final = 10_000
_BURN_DOWN: Final = 2_000  # entries that a burn-down goes back
_ONE_PLAN: Final = Assumption(
    "all runs and their steps granted were planned before any result was seen",
    False,
    "decision 0004",
)
View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """A write as it came in.

    Attributes:
        key: whose it is.
        idempotency_key: from the header.
        call: method and path.
        body: as JSON.
    """

    key: KeyRecord
    idempotency_key: str | None
    call: str
    body: Any

    @property
    def fingerprint(self) -> str:
        """The same for the same request."""
        text = json.dumps([self.call, self.body], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Plan:
    """A mechanism as equal steps.

    Attributes:
        mechanism: the whole.
        step: one of its steps, in canonical form.
        steps: how many; one for what is not repeated.
        whole: all of them, in canonical form.
    """

    mechanism: Mechanism
    step: CanonicalForm
    steps: int
    whole: CanonicalForm

    @classmethod
    def of(cls, mechanism: Mechanism) -> Plan:
        """The steps of a mechanism."""
        whole = canonical_form(mechanism)
        match mechanism:
            case DpSgd() if mechanism.sampling != "shuffled" and mechanism.step_count() > 0:
                step: Mechanism = replace(mechanism, steps=1, epochs=None)
                return cls(mechanism, canonical_form(step), mechanism.step_count(), whole)
            case Repeated(count, inner) if count > 0:
                return cls(mechanism, canonical_form(inner), count, whole)
            case _:
                return cls(mechanism, whole, 1, whole)


@dataclass(frozen=True, slots=True)
class Quote:
    """What a plan would take.

    Attributes:
        view: whether it fits, what would, and ε of the filter after it.
        guarantee: of the plan alone; None if it has no finite ε.
        micronats: what the plan costs.
    """

    view: View
    guarantee: Guarantee | None
    micronats: int


def _ignore(_: Kind, __: int) -> None:
    """Tell nobody of a write."""


class Ledger:
    """What can be asked of the ledger, by whoever holds a key.

    Args:
        repository: the database.
        written: told of each write once it is durable: its kind, and the steps of a grant.
    """

    def __init__(
        self, repository: Repository, written: Callable[[Kind, int], None] = _ignore
    ) -> None:
        self._repository, self._written = repository, written
        self._owners: dict[str, str] = {}

    # --- datasets

    def create_dataset(
        self,
        request: Request,
        name: str,
        size: int,
        epsilon: float,
        delta: float,
        relation: NeighbouringRelation,
        privacy_unit: str,
        planned: Mechanism | None,
    ) -> Remembered:
        """A new dataset, its policy frozen."""
        require_unbound(request.key, Scope.OWNER)
        policy = choose_policy(size, epsilon, delta, relation, planned)
        return self.add_dataset(request, name, size, privacy_unit, policy)

    def add_dataset(
        self, request: Request, name: str, size: int, privacy_unit: str, policy: RenyiFilter
    ) -> Remembered:
        """A new dataset with a policy that was chosen for it."""
        require_unbound(request.key, Scope.OWNER)
        dataset = Dataset(
            uuid.uuid4().hex, name, size, privacy_unit, policy, Balance(), 0, chain.GENESIS, now()
        )

        def act(transaction: Transaction) -> tuple[int, View]:
            if transaction.dataset(name) is not None:
                raise NameTakenError(f"there is a dataset {name!r} already; choose another name")
            transaction.audit(request.key.identifier, "dataset-created", name)
            return 201, dataset_view(transaction.add_dataset(dataset, request.key.identifier))

        return self._write(request, Kind.CREATE, act)

    def datasets(self, key: KeyRecord) -> list[View]:
        """Those that the key may see."""
        require(key, Scope.OWNER, Scope.RUN)
        with self._repository.reading() as reading:
            found = reading.datasets()
        return [dataset_view(dataset) for dataset in found if sees(key, dataset.name)]

    def dataset(self, key: KeyRecord, name: str) -> View:
        """One of them, with what is due expired."""
        found, due = self.look(key, name)
        return self.expire(name) if due else found

    def look(self, key: KeyRecord, name: str) -> tuple[View, bool]:
        """One of them as it was last written, and whether a lease of it has ended since."""
        dataset = self.seen(key, name)
        with self._repository.reading() as reading:
            due = reading.due(dataset, now())
        return dataset_view(dataset), bool(due)

    def expire(self, name: str) -> View:
        """Expire the leases of a dataset that have ended."""
        with self._repository.transaction() as transaction:
            return dataset_view(self._current(transaction, name))

    def seen(self, key: KeyRecord, name: str, *scopes: Scope) -> Dataset:
        """A dataset that the key may see, for one of the scopes (owner or run by default)."""
        require(key, *(scopes or (Scope.OWNER, Scope.RUN)))
        require_sight(key, name, f"dataset {name!r}")
        with self._repository.reading() as reading:
            dataset = reading.dataset(name)
        if dataset is None:
            raise UnknownSubjectError(f"there is no dataset {name!r}")
        return dataset

    def _current(self, transaction: Transaction, name: str) -> Dataset:
        """A dataset with its row locked and every ended lease expired."""
        dataset = transaction.dataset(name, lock=True)
        if dataset is None:
            raise UnknownSubjectError(f"there is no dataset {name!r}")
        for reservation in transaction.due(dataset, now()):
            change = model.close(reservation, State.EXPIRED)
            if change is not None:
                dataset = transaction.apply(dataset, change, _SYSTEM)
        return dataset

    # --- plans

    def released(self, key: KeyRecord, name: str) -> tuple[RenyiFilter, list[Reservation]]:
        """The policy of a dataset, and the reservations of which steps were granted."""
        dataset = self.seen(key, name)
        with self._repository.reading() as reading:
            runs = reading.reservations(dataset)
        return dataset.policy, [run for run in runs if run.steps_granted]

    def reserve(
        self, request: Request, name: str, mechanism: Mechanism, lease: float, purpose: str
    ) -> Remembered:
        """Hold the whole plan, or say what would fit."""
        seen = self.seen(request.key, name, Scope.RUN)
        charge = charge_of(seen, mechanism)
        try:
            return self.hold(request, seen, charge, lease, purpose)
        except BudgetExhaustedError as error:
            current = self.seen(request.key, name, Scope.RUN)
            error.affordable = affordable(current, Plan.of(mechanism), charge.unit)
            raise

    def hold(
        self, request: Request, seen: Dataset, charge: Charge, lease: float, purpose: str
    ) -> Remembered:
        """Hold a plan whose charge is known; see `reserve`.

        Raises:
            BudgetExhaustedError: without the noise with which the plan would fit.
        """
        require(request.key, Scope.RUN)
        reservation = Reservation(
            uuid.uuid4().hex,
            seen.identifier,
            State.OPEN,
            charge.mechanism,
            charge.mechanism_hash,
            charge.unit,
            charge.steps,
            0,
            now() + int(1e6 * lease),
            purpose,
            request.key.identifier,
        )

        def act(transaction: Transaction) -> tuple[int, View]:
            dataset = self._current(transaction, seen.name)
            change = model.reserve(dataset, reservation)
            transaction.apply(dataset, change, request.key.identifier)
            return 201, reservation_view(change.reservation, dataset)

        return self._write(request, Kind.RESERVE, act)

    # --- runs

    def reservation(self, key: KeyRecord, identifier: str) -> View:
        """A reservation as it stands."""
        dataset, reservation = self.found(key, identifier)
        if is_due(reservation):
            self.expire(dataset.name)
            dataset, reservation = self.found(key, identifier)
        return reservation_view(reservation, dataset)

    def found(self, key: KeyRecord, identifier: str) -> tuple[Dataset, Reservation]:
        """A reservation as it was last written, and its dataset."""
        require(key, Scope.OWNER, Scope.RUN)
        subject = f"reservation {identifier!r}"
        with self._repository.reading() as reading:
            reservation = reading.reservation(identifier)
            owner = "" if reservation is None else reservation.dataset
            dataset = reading.dataset_by_id(owner)
        if reservation is None or dataset is None:
            raise UnknownSubjectError(f"there is no {subject}")
        require_sight(key, dataset.name, subject)
        return dataset, reservation

    def grant(self, request: Request, identifier: str, steps: int, sequence: int) -> Remembered:
        """Charge the next steps, before their noise is drawn."""
        return self._change(
            request,
            identifier,
            Kind.GRANT,
            lambda reservation: model.grant(reservation, steps, sequence),
            steps,
        )

    def commit(self, request: Request, identifier: str) -> Remembered:
        """The run is done: what was granted is spent."""
        return self._close(request, identifier, Kind.COMMIT, State.COMMITTED)

    def release(self, request: Request, identifier: str) -> Remembered:
        """The run is given up: what was never granted is free again."""
        return self._close(request, identifier, Kind.RELEASE, State.RELEASED)

    def _close(self, request: Request, identifier: str, kind: Kind, state: State) -> Remembered:
        return self._change(
            request, identifier, kind, lambda reservation: model.close(reservation, state)
        )

    def renew(self, request: Request, identifier: str, lease: float) -> Remembered:
        """The lease begins anew."""
        return self._change(
            request,
            identifier,
            Kind.RENEW,
            lambda reservation: model.renew(reservation, now() + int(1e6 * lease)),
        )

    def _change(
        self,
        request: Request,
        identifier: str,
        kind: Kind,
        decide: Callable[[Reservation], model.Change | None],
        steps: int = 0,
    ) -> Remembered:
        require(request.key, Scope.RUN)
        owner, subject = self.owner(identifier), f"reservation {identifier!r}"

        def act(transaction: Transaction) -> tuple[int, View]:
            dataset = transaction.dataset_by_id(owner, lock=True)
            reservation = transaction.reservation(identifier)
            if dataset is None or reservation is None:
                raise UnknownSubjectError(f"there is no {subject}")
            require_sight(request.key, dataset.name, subject)
            if is_due(reservation):
                reservation = replace(reservation, state=State.EXPIRED)
            change = decide(reservation)
            if change is None:
                return 200, reservation_view(reservation, dataset)
            transaction.apply(dataset, change, request.key.identifier)
            return 200, reservation_view(change.reservation, dataset)

        return self._write(request, kind, act, steps)

    def known_owner(self, identifier: str) -> str | None:
        """The dataset of a reservation, if it was looked up before."""
        return self._owners.get(identifier)

    def owner(self, identifier: str) -> str:
        """The dataset of a reservation, which never changes: looked up once."""
        found = self.known_owner(identifier)
        if found is None:
            with self._repository.reading() as reading:
                reservation = reading.reservation(identifier)
            if reservation is None:
                raise UnknownSubjectError(f"there is no reservation {identifier!r}")
            if len(self._owners) >= _OWNERS_MAX:
                self._owners = {}
            found = self._owners[identifier] = reservation.dataset
        return found

    def certificate(self, key: KeyRecord, identifier: str) -> View:
        """What may be published about a run that has ended, signed."""
        self.reservation(key, identifier)  # expires what is due
        return certificate.issue(*self.ended(key, identifier), now())

    def ended(self, key: KeyRecord, identifier: str) -> tuple[Dataset, Reservation, bytes]:
        """A run that has ended, its dataset, and the key that signs certificates."""
        dataset, reservation = self.found(key, identifier)
        if reservation.state is State.OPEN:
            raise ReservationOpenError("commit or release the reservation first")
        with self._repository.transaction() as transaction:
            seed = transaction.secret(_SIGNING_KEY)
        return dataset, reservation, seed

    # --- the record

    def entries(self, key: KeyRecord, name: str, cursor: str) -> View:
        """A page of the append-only record."""
        dataset = self.seen(key, name)
        after = int(cursor) if cursor.isdecimal() and len(cursor) < 19 else 0
        with self._repository.reading() as reading:
            rows = reading.entries(dataset, after, PAGE + 1)
        items = [json.loads(row.body) | {"hash": row.hash} for row in rows[:PAGE]]
        more = len(rows) > PAGE
        return {"items": items, "next_cursor": str(items[-1]["number"]) if more else None}

    def runs(self, key: KeyRecord, name: str, skip: int, limit: int) -> list[View]:
        """A page of a dataset's reservations, open ones first."""
        dataset = self.seen(key, name)
        with self._repository.reading() as reading:
            return [reservation_view(run, dataset) for run in reading.runs(dataset, skip, limit)]

    def burn_down(self, key: KeyRecord, name: str, points: int) -> list[View]:
        """ε spent and taken after so many of the latest entries, oldest first.

        It goes back from the balance as it stands, so a record of any length costs the same.
        """
        dataset = self.seen(key, name)
        balance, after = dataset.balance, []
        for at, change in reversed(self._changes(dataset, max(dataset.version - _BURN_DOWN, 0))):
            after.append((at, balance))
            balance = balance.plus(Balance(-change.spent, -change.held))
        stride = -(-len(after) // points) or 1
        return [_point(dataset, at, balance) for at, balance in after[::stride][::-1]]

    def _changes(self, dataset: Dataset, number: int) -> list[tuple[int, Balance]]:
        """When the entries after a number were made and what they changed, page by page."""
        found: list[tuple[int, Balance]] = []
        with self._repository.reading() as reading:
            while number < dataset.version:
                rows = reading.entries(dataset, number, min(PAGE, dataset.version - number))
                for entry in (json.loads(row.body) for row in rows):
                    change = Balance(entry["spent_micronats"], entry["held_micronats"])
                    found.append((entry["at"], change))
                number += len(rows)
        return found

    def _write(
        self,
        request: Request,
        kind: Kind,
        act: Callable[[Transaction], tuple[int, View]],
        steps: int = 0,
    ) -> Remembered:
        """Do it once, whatever is retried; remember the answer in the same transaction.

        A repeat cannot be written down again, for its key is taken: all of it is rolled back, and
        the first answer is given again. Looking for the key first would cost every write a query.
        """
        value = request.idempotency_key
        if not value:
            raise IdempotencyKeyRequiredError(
                "send an Idempotency-Key header with a new random value for each new request"
            )
        who, fingerprint = request.key.identifier, request.fingerprint
        for _ in range(_ATTEMPTS):
            try:
                with self._repository.transaction() as transaction:
                    status, view = act(transaction)
                    answer = Remembered(fingerprint, status, json.dumps(view))
                    transaction.remember(who, value, answer)
                self._written(kind, steps)
                return answer
            except DatabaseAwayError:
                raise
            except (IntegrityError, AccountingError) as error:
                # a repeat, for which the key is not free or the ledger no longer as it was; or
                # another writer was first; or the ledger says no
                found = self._remembered(who, value, fingerprint)
                if found is not None:
                    return found
                if isinstance(error, AccountingError):
                    raise
        raise DatabaseAwayError("other writers were always first; nothing was charged. Try again")

    def _remembered(self, who: str, value: str, fingerprint: str) -> Remembered | None:
        """The answer of a write that was made before under this key."""
        with self._repository.reading() as reading:
            found = reading.remembered(who, value)
        if found is not None and found.fingerprint != fingerprint:
            raise IdempotencyKeyReusedError(
                "this Idempotency-Key came with another request before; "
                "take a new one for a new request"
            )
        return found


def _require_size(records: int, mechanism: Mechanism, at: str = "/mechanism") -> None:
    """Refuse a mechanism for another number of records: its sample rate would be another."""
    for pointer, size in mechanisms.sizes_other_than(records, mechanism):
        error = DatasetSizeError(
            f"the samples are drawn from {records} records, and dataset_size is {size}: "
            "a rate is a batch size over the number of records there are",
            pointer,
        )
        error.mechanism_at = at
        raise error


def is_due(reservation: Reservation) -> bool:
    """Whether a reservation is open although its lease has ended."""
    return reservation.state is State.OPEN and reservation.expires_at <= now()


# --- the calculations, which need no database: the service makes them in processes of their own


def choose_policy(
    size: int,
    epsilon: float,
    delta: float,
    relation: NeighbouringRelation,
    planned: Mechanism | None,
) -> RenyiFilter:
    """The policy of a dataset of this size with this budget.

    Raises:
        AccountingError: the planned mechanism cannot be charged, or is for another size.
    """
    step = None
    if planned is not None:
        _require_size(size, planned, "/planned_mechanism")
        step = Plan.of(planned).step
    return privacy_filter.choose(epsilon, delta, relation, step)


@dataclass(frozen=True, slots=True)
class Charge:
    """What a plan costs under one policy.

    Attributes:
        mechanism: the plan, as JSON.
        mechanism_hash: its canonical hash.
        unit: atto-nats a step.
        steps: how many.
    """

    mechanism: Any
    mechanism_hash: str
    unit: int
    steps: int


def charge_of(dataset: Dataset, mechanism: Mechanism) -> Charge:
    """The charge of a plan.

    Raises:
        AccountingError: it cannot be charged, is for another number of records, or is too large to
            be kept and answered each time.
    """
    _require_size(dataset.size, mechanism)
    plan = Plan.of(mechanism)
    described = mechanisms.to_json(plan.mechanism)
    size = len(json.dumps(described))
    if size > _PLAN_BYTES_MAX:
        raise TooExpensiveError(
            f"a plan that is reserved may have {_PLAN_BYTES_MAX} bytes as JSON and this one has "
            f"{size}: put equal releases into one `repeated`, or reserve it in parts"
        )
    return Charge(described, plan.whole.hash, dataset.policy.unit_cost(plan.step), plan.steps)


def quote(dataset: Dataset, mechanism: Mechanism) -> Quote:
    """Whether a plan would fit, and what would."""
    _require_size(dataset.size, mechanism)
    plan, policy = Plan.of(mechanism), dataset.policy
    unit = policy.unit_cost(plan.step)
    micronats = privacy_filter.cost(unit, plan.steps)
    view = {
        "fits": model.fits(dataset, unit, plan.steps),
        "affordable": affordable(dataset, plan, unit),
        "epsilon_after": policy.epsilon_of(dataset.balance.taken + micronats),
    }
    try:
        guarantee = certificate.certified(plan.mechanism, policy.relation, policy.delta)
        return Quote(view, guarantee, micronats)
    except NoFiniteEpsilonError:  # it does not fit, and this is no fault of the question
        return Quote(view, None, micronats)


def together(dataset: Dataset, quotes: Sequence[Quote | AccountingError]) -> View:
    """Whether all plans would fit, one after the other."""
    costs = [each.micronats for each in quotes if isinstance(each, Quote)]
    chargeable, total = len(costs) == len(quotes), dataset.balance.taken + sum(costs)
    return {
        "fits": chargeable and total <= dataset.policy.budget,
        "epsilon_after": dataset.policy.epsilon_of(total) if chargeable else None,
    }


def running_total(policy: RenyiFilter, runs: Sequence[Reservation]) -> Guarantee:
    """What has been granted to all runs so far, accounted as if it had been one plan.

    It is an estimate: runs are chosen, and stopped, after results were seen. The budget's claim is
    the proven one.
    """
    released = tuple(
        certificate.with_steps(mechanisms.from_json(run.mechanism), run.steps_granted)
        for run in runs
    )
    found = certificate.certified(Composed(released), policy.relation, policy.delta)
    return replace(
        found,
        status=Status.ESTIMATE,
        assumptions=(*found.assumptions, _ONE_PLAN),
        certified=None,
        certified_reason=f"a hypothesis fails: {_ONE_PLAN.statement}",
    )


def what_fits(dataset: Dataset, mechanism: Mechanism, unit: int) -> View:
    """What of a plan would fit; see `affordable`."""
    return affordable(dataset, Plan.of(mechanism), unit)


def affordable(dataset: Dataset, plan: Plan, unit: int) -> View:
    """The most steps of a plan that fit, and the least noise with which all of them would."""
    micronats = model.room(dataset)
    steps = privacy_filter.affordable_steps(unit, micronats)
    return {"steps": steps, "noise_multiplier": _least_noise(dataset, plan, micronats)}


def _least_noise(dataset: Dataset, plan: Plan, micronats: int) -> float | None:
    """By bisection, rounded up to four digits; only a dp_sgd run has one noise multiplier."""
    run = plan.mechanism
    if not isinstance(run, DpSgd) or run.sampling == "shuffled":
        return None
    one = replace(run, steps=1, epochs=None)

    def fits(noise: float) -> bool:
        step = canonical_form(replace(one, noise_multiplier=noise))
        unit = dataset.policy.unit_cost(step)
        return privacy_filter.cost(unit, plan.steps) <= micronats

    low, high = 0.01, _NOISE_MAX
    if not fits(high):
        return None
    while high > low * (1 + 1e-4):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def dataset_view(dataset: Dataset) -> View:
    """A dataset as it is answered."""
    policy, balance = dataset.policy, dataset.balance
    spent, taken = policy.epsilon_of(balance.spent), policy.epsilon_of(balance.taken)
    return {
        "name": dataset.name,
        "size": dataset.size,
        "privacy_unit": dataset.privacy_unit,
        "neighbouring_relation": policy.relation.value,
        "budget": {"epsilon": policy.epsilon, "delta": policy.delta},
        "spent": {"epsilon": spent, "micronats": balance.spent},
        "held": {"epsilon": max(taken - spent, 0.0), "micronats": balance.held},
        "remaining": {
            "epsilon": max(rounding.difference_down(policy.epsilon, taken), 0.0),
            "micronats": model.room(dataset),
        },
        "accounting": {
            "filter": "renyi",
            "order": policy.order,
            "budget_micronats": policy.budget,
            "scope": "filter_budget",
        },
        "version": dataset.version,
    }


def _point(dataset: Dataset, at: int, balance: Balance) -> View:
    policy = dataset.policy
    return {
        "at": at / 1e6,
        "spent": policy.epsilon_of(balance.spent),
        "taken": policy.epsilon_of(balance.taken),
    }


def reservation_view(reservation: Reservation, dataset: Dataset) -> View:
    """A reservation as it is answered."""
    return {
        "id": reservation.identifier,
        "dataset": dataset.name,
        "state": reservation.state.value,
        "mechanism": reservation.mechanism,
        "mechanism_hash": reservation.mechanism_hash,
        "steps_reserved": reservation.steps_reserved,
        "steps_granted": reservation.steps_granted,
        "expires_at": reservation.expires_at / 1e6,
        "purpose": reservation.purpose,
        "neighbouring_relation": dataset.policy.relation.value,
    }
