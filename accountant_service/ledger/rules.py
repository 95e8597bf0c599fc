"""The ledger's rules, without a database: which change may follow which, and what it costs.

Every rule is a pure function from a state and a request to the next state and the entry that
records it. A balance has two amounts, in the units of the dataset's privacy filter:

    spent   charged for granted steps: never given back;
    held    reserved for steps that are not granted yet.

The filter admits spent + held, always. A grant moves its steps' cost from held to spent *before*
their noise is drawn; only budget that was never granted is ever released.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Annotated, Any, Final

from accountant_service.accounting.guarantee import NeighbouringRelation, list_weaknesses
from accountant_service.ledger import filters
from accountant_service.ledger.columns import Spread, Stored, read_integers, state_in_entry
from accountant_service.ledger.errors import (
    BudgetExhaustedError,
    CapExhaustedError,
    ChargeOutdatedError,
    DatasetClosedError,
    DatasetsDifferError,
    DatasetUsedError,
    ReservationClosedError,
    StaleSequenceError,
    WeakGuaranteeError,
)
from accountant_service.ledger.filter_names import DEFAULT_FILTER
from accountant_service.ledger.filters.base import (
    Amounts,
    Charge,
    PrivacyFilter,
    add,
    negate,
    subtract,
)
from accountant_service.ledger.names import EntryKind as EntryKind
from accountant_service.mechanisms import Mechanism

SHA256_PATTERN: Final = "[0-9a-f]{64}"


class RuleError(ValueError):
    """An entry breaks the ledger's rules: a number out of range, or a wrong order of entries."""


class State(StrEnum):
    """A reservation's state; every state but `open` is final."""

    OPEN = "open"
    COMMITTED = "committed"
    RELEASED = "released"
    EXPIRED = "expired"


class HolderKind(StrEnum):
    """The holder that a cap limits: one API key, or all keys of one team."""

    KEY = "key"
    TEAM = "team"


@dataclass(frozen=True, slots=True)
class Cap:
    """A limit on the part of a dataset's budget that one key or one team may spend or hold.

    Attributes:
        kind: whether the holder is a key or a team.
        holder: the key's identifier, or the team's name.
        share: of the budget, from 0 to 1.
        limits_slack: whether the share is also one of the slack. Caps of earlier versions, as
            the entries of their reservations record them, limited the steps alone.
    """

    kind: HolderKind
    holder: str
    share: float
    limits_slack: bool = True

    def entry_fields(self, charge: Charge) -> dict[str, Any]:
        """Return the fields that state the cap in the entry of a reservation with a charge."""
        fields: dict[str, Any] = {self.kind.value: self.holder, "share": self.share}
        return fields | {"slack": True} if self.limits_slack and charge.needs_slack else fields


@dataclass(frozen=True, slots=True)
class CapUse:
    """A cap, and the budget that its holder's reservations have spent or held so far."""

    cap: Cap
    taken: Amounts


@dataclass(frozen=True, slots=True)
class Balance:
    """The amounts of a budget that are spent and held, or changes of both, in a filter's units."""

    spent: Amounts
    held: Amounts

    @property
    def taken(self) -> Amounts:
        """The amounts spent or held, which no later reservation may use."""
        return add(self.spent, self.held)

    def plus(self, other: Balance) -> Balance:
        """Return the sum of this balance and another one, such as a change."""
        return Balance(add(self.spent, other.spent), add(self.held, other.held))

    def minus(self, other: Balance) -> Balance:
        """Return this balance minus another one, such as a change to undo."""
        return Balance(subtract(self.spent, other.spent), subtract(self.held, other.held))


@dataclass(frozen=True, slots=True)
class NewDataset:
    """A dataset to create, with its privacy budget.

    Attributes:
        name: unique.
        size: the number of records.
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
        privacy_unit: what one record stands for.
        planned_mechanism: the mechanism that the policy is chosen for, if there is one.
        filter: the name of the privacy filter.
        accept_weak: whether a budget that protects hardly anyone is wanted.

    Raises:
        WeakGuaranteeError: the budget protects hardly anyone, and that was not accepted.
    """

    name: str
    size: int
    epsilon: float
    delta: float
    relation: NeighbouringRelation
    privacy_unit: str
    planned_mechanism: Mechanism | None = None
    filter: str = DEFAULT_FILTER
    accept_weak: bool = False

    def __post_init__(self) -> None:
        """Refuse a weak budget that was not accepted."""
        if self._weaknesses and not self.accept_weak:
            raise WeakGuaranteeError(
                f"{'. '.join(self._weaknesses.values())}. If you want this all the same, set "
                "accept_weak",
                f"/budget/{next(iter(self._weaknesses))}",
            )

    @property
    def accepted_weaknesses(self) -> str:
        """The accepted weaknesses, for the audit event; empty if the budget is not weak."""
        weak = self._weaknesses.values()
        return f"weak budget accepted: {'. '.join(weak)}" if weak else ""

    @property
    def _weaknesses(self) -> dict[str, str]:
        return list_weaknesses(self.size, self.epsilon, self.delta)


_POLICY_COLUMNS: Final = Spread(
    filters.read_columns,
    {
        "relation": (Annotated[NeighbouringRelation, Stored(length=40)], attrgetter("relation")),
        "epsilon": (float, attrgetter("epsilon")),
        "delta": (float, attrgetter("delta")),
        "policy": (Annotated[PrivacyFilter, Stored(changes=True)], lambda policy: policy),
    },
)
_BALANCE_COLUMNS: Final = Spread(
    lambda row: Balance(read_integers(row["spent"]), read_integers(row["held"])),
    {
        name: (Annotated[Amounts, Stored(changes=True)], attrgetter(name))
        for name in ("spent", "held")
    },
)
_CHARGE_COLUMN: Final = Spread(
    filters.read_charge_columns, {"charge": (Charge, lambda charge: charge)}
)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset: its size, its privacy filter, and the budget spent and held.

    Attributes:
        identifier: internal.
        name: unique.
        size: the number of records.
        privacy_unit: what one record stands for.
        policy: the privacy filter. It never changes once something is spent or held.
        balance: in the policy's units.
        version: the number of the last entry.
        head: the hash of the last entry.
        created_at: microseconds since 1970.
        closed_at: when it was closed; None while it takes reservations. It is never opened again.
        series: the name of the series that it was created in; None for a dataset on its own.
    """

    identifier: Annotated[str, Stored("id", length=32, is_primary=True)]
    name: Annotated[str, Stored(length=200, is_unique=True, in_entry=True)]
    size: Annotated[int, Stored(in_entry=True)]
    privacy_unit: Annotated[str, Stored(in_entry=True)]
    policy: Annotated[PrivacyFilter, _POLICY_COLUMNS]
    balance: Annotated[Balance, _BALANCE_COLUMNS]
    version: Annotated[int, Stored(changes=True)]
    head: Annotated[str, Stored(length=64, changes=True)]
    created_at: Annotated[int, Stored(in_entry=True)]
    closed_at: Annotated[int | None, Stored(changes=True)] = None
    series: Annotated[str | None, Stored(length=200, refers_to="series.name")] = None


@dataclass(frozen=True, slots=True)
class JointRun:
    """A run on several datasets: a reservation of each, which change together.

    Attributes:
        reservations: their identifiers, in the order in which the datasets are locked.
        records: the number of records of all these datasets.

    Raises:
        RuleError: a reservation is named twice, or there is none.
    """

    reservations: tuple[str, ...]
    records: int

    def __post_init__(self) -> None:
        """Refuse a run without reservations, or with one twice."""
        names = self.reservations
        _require(0 < len(names) == len(set(names)), f"a joint run must not have {names}")

    @property
    def identifier(self) -> str:
        """The run's public identifier: that of its first reservation."""
        return self.reservations[0]

    def to_json(self) -> dict[str, Any]:
        """Return the run as an entry and a row state it."""
        return {"reservations": list(self.reservations), "records": self.records}

    @classmethod
    def from_json(cls, fields: Any) -> JointRun:
        """Return the run that an entry or a row states.

        Raises:
            KeyError, TypeError, RuleError: it states none.
        """
        names, records = fields["reservations"], fields["records"]
        if type(names) is not list or any(type(each) is not str for each in names):
            raise TypeError(f"reservations must be a list of texts, not {names!r}")
        if type(records) is not int:
            raise TypeError(f"records must be a whole number, not {records!r}")
        return cls(tuple(names), records)


@dataclass(frozen=True, slots=True)
class Reservation:
    """A run's plan, its state, and the budget that the dataset holds for it.

    Attributes:
        identifier: public.
        dataset: the dataset's identifier.
        state: open, or how it ended.
        mechanism: the whole plan, as JSON.
        mechanism_hash: its canonical hash.
        charge: what the plan takes of the budget.
        steps_reserved: the number of steps of the plan.
        steps_granted: the number of steps granted so far.
        expires_at: the end of the lease, in microseconds since 1970.
        purpose: the caller's words.
        key: identifier of the key that reserved.
        team: the team of the key that reserved, if it has one.
        taken: the amounts that it takes of the budget, granted or held: the whole charge while it
            is open, and what was not given back after that.
        ended_entry: the number of the ledger entry that ended it; None while it is open.
        joint: the run on several datasets of which it is a part; None for a run on one.
    """

    identifier: Annotated[str, Stored("id", length=32, is_primary=True)]
    dataset: Annotated[str, Stored(length=32, refers_to="dataset.id")]
    state: Annotated[State, Stored(length=12, changes=True)]
    mechanism: Annotated[dict[str, Any], Stored(in_entry=True)]
    mechanism_hash: Annotated[str, Stored(length=80, in_entry=True)]
    charge: Annotated[Charge, _CHARGE_COLUMN]
    steps_reserved: int
    steps_granted: Annotated[int, Stored(changes=True)]
    expires_at: Annotated[int, Stored(in_entry=True, changes=True)]
    purpose: Annotated[str, Stored(in_entry=True)]
    key: Annotated[str, Stored("key_id", length=32)]
    team: Annotated[str | None, Stored(length=200, in_entry=True)]
    taken: Annotated[Amounts, Stored(changes=True)]
    ended_entry: Annotated[int | None, Stored(changes=True)] = None
    joint: Annotated[JointRun | None, Stored(in_entry=True)] = None

    @property
    def held(self) -> Amounts:
        """The amounts held for steps not granted yet."""
        return self.charge.held(self.steps_granted)

    @property
    def refund_if_ended(self) -> Amounts | None:
        """The budget freed if the reservation ended now; None if the filter must compute it."""
        return self.charge.refund(self.steps_granted)


@dataclass(frozen=True, slots=True)
class Declaration:
    """Facts that a training program states at the end of its run, unchecked by the ledger.

    Attributes:
        clip_norm: C, the bound on what one record contributes to a step.
        model_sha256: the hash of the trained model's file, in lower-case hexadecimal.
    """

    clip_norm: float | None = None
    model_sha256: str | None = None

    def entry_fields(self) -> dict[str, Any]:
        """Return the facts that are stated, as the entry and the certificate record them.

        Raises:
            RuleError: a fact is out of range.
        """
        norm, digest = self.clip_norm, self.model_sha256
        if norm is not None:
            is_norm = type(norm) is float and 0 < norm < math.inf
            _require(is_norm, f"clip_norm must be above 0 and finite, not {norm!r}")
        if digest is not None:
            is_hash = type(digest) is str and re.fullmatch(SHA256_PATTERN, digest) is not None
            _require(is_hash, f"model_sha256 must be 64 lower-case hexadecimal digits: {digest!r}")
        stated = {"clip_norm": norm, "model_sha256": digest}
        return {name: value for name, value in stated.items() if value is not None}


NOTHING_DECLARED: Final = Declaration()


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of one request: the changed reservation, and the change of the balance.

    Attributes:
        kind: of the entry that records it.
        reservation: as it is afterwards.
        balance: added to the dataset's.
        steps: the number of steps that the entry names.
        policy: the dataset's filter afterwards, if the change replaces it.
        caps: those that the reservation was held to.
        declared: what the training program stated about the run.
    """

    kind: EntryKind
    reservation: Reservation
    balance: Balance
    steps: int
    policy: PrivacyFilter | None = None
    caps: tuple[Cap, ...] = ()
    declared: Declaration = NOTHING_DECLARED


def fits_budget(dataset: Dataset, charge: Charge) -> bool:
    """Return whether a plan's cost fits the remaining budget."""
    return dataset.policy.admits(add(dataset.balance.taken, charge.reserved))


def fits_cap(policy: PrivacyFilter, use: CapUse, reserved: Amounts) -> bool:
    """Return whether reserving these amounts stays under a cap; zero amounts always do."""
    if use.cap.limits_slack:
        return policy.fits_share(use.taken, reserved, use.cap.share)
    return not any(reserved) or policy.share_of(add(use.taken, reserved)) <= use.cap.share


def describe_entry(
    number: int, kind: EntryKind, at: int, key: str, change: dict[str, Any], version: str
) -> dict[str, Any]:
    """Return the fields that all ledger entries have.

    Args:
        number: 1 for the first entry of a dataset.
        kind: of the entry.
        at: microseconds since 1970.
        key: identifier of the key that wrote it.
        change: added to the balance, as the dataset's filter describes it.
        version: of the accountant.

    Raises:
        RuleError: the time is before 1970.
    """
    _require(at >= 0, f"at must be at least 0, not {at}")
    return {
        "number": number,
        "kind": kind.value,
        "at": at,
        "key": key,
        "accountant_version": version,
    } | change


def describe_dataset(dataset: Dataset) -> dict[str, Any]:
    """Return the first entry's fields about a dataset: everything that never changes.

    Raises:
        RuleError: the dataset has a number that the rules forbid.
    """
    policy = dataset.policy
    _require(dataset.size >= 1, f"size must be at least 1, not {dataset.size}")
    _require(0 < policy.epsilon < math.inf, f"epsilon must be above 0, not {policy.epsilon}")
    _require(0 <= policy.delta < 1, f"delta must be at least 0 and below 1, not {policy.delta}")
    _require(dataset.created_at >= 0, f"created_at must be at least 0, not {dataset.created_at}")
    return (
        state_in_entry(dataset)
        | {
            "neighbouring_relation": policy.relation.value,
            "epsilon": policy.epsilon,
            "delta": policy.delta,
        }
        | _describe_filter(policy)
    )


def _describe_filter(policy: PrivacyFilter) -> dict[str, Any]:
    """Return the ledger-entry fields of a filter; raise RuleError if a parameter is invalid."""
    try:
        return policy.entry_fields()
    except ValueError as error:
        raise RuleError(str(error)) from error


def describe_change(change: Change) -> dict[str, Any]:
    """Return the entry fields that state a change of a reservation."""
    after = change.reservation
    fields: dict[str, Any] = {"reservation": after.identifier, "steps": change.steps}
    if change.kind is EntryKind.RESERVE:
        fields |= state_in_entry(after) | after.charge.entry_fields()
        if change.caps:
            fields["caps"] = [cap.entry_fields(after.charge) for cap in change.caps]
        if change.policy is not None:
            fields["filter"] = change.policy.entry_fields()
    if change.kind is EntryKind.RENEW:
        fields["expires_at"] = after.expires_at
    if declared := change.declared.entry_fields():
        fields["declared"] = declared
    return fields


def reserve(
    dataset: Dataset,
    reservation: Reservation,
    policy: PrivacyFilter,
    caps: Sequence[CapUse] = (),
) -> Change:
    """Return the change that holds budget for a whole plan; raise if the plan does not fit.

    Args:
        dataset: as it is now.
        reservation: new, with the plan's charge.
        policy: the filter under which the charge was computed.
        caps: of the reservation's key and team, with what these have taken so far.

    Raises:
        DatasetClosedError: the dataset is closed.
        BudgetExhaustedError: the plan does not fit in the remaining budget.
        CapExhaustedError: the plan does not fit under a cap.
        ChargeOutdatedError: the dataset has another filter now, or less slack.
        RuleError: the reservation has a number that the rules forbid.
    """
    require_dataset_open(dataset)
    steps = reservation.steps_reserved
    _require(steps >= 1, f"steps must be at least 1, not {steps}")
    charge = reservation.charge
    parts = (*charge.reserved, *charge.spent(charge.steps), *charge.held(charge.steps))
    _require(min(parts) >= 0, f"a plan must cost at least 0, not {charge.entry_fields()}")
    joint = reservation.joint
    if joint is not None:
        is_part = reservation.identifier in joint.reservations
        _require(is_part, f"{reservation.identifier} is no part of {joint}")
    expires_at = reservation.expires_at
    _require(expires_at >= 0, f"expires_at must be at least 0, not {expires_at}")
    replaced = None if policy == dataset.policy else policy
    if replaced is not None:
        taken = dataset.balance.taken
        if not (dataset.policy.may_become(policy, taken) and policy.admits(taken)):
            raise ChargeOutdatedError(
                f"another reservation has set the reference of {dataset.name!r} meanwhile"
            )
        dataset = replace(dataset, policy=policy)
    if not fits_budget(dataset, charge):
        raise BudgetExhaustedError(
            f"{steps} steps do not fit in the remaining budget of {dataset.name!r}", None
        )
    for use in caps:
        _require_cap(dataset, reservation, use)
    held = Balance(policy.nothing, reservation.held)
    applied = tuple(use.cap for use in caps)
    return Change(EntryKind.RESERVE, reservation, held, steps, replaced, applied)


def _require_cap(dataset: Dataset, reservation: Reservation, use: CapUse) -> None:
    """Raise CapExhaustedError if a reservation does not fit under a cap."""
    cap = use.cap
    holder = reservation.key if cap.kind is HolderKind.KEY else reservation.team
    _require(cap.holder == holder, f"a cap of {cap.kind} {cap.holder!r} does not limit {holder!r}")
    if not fits_cap(dataset.policy, use, reservation.charge.reserved):
        raise CapExhaustedError(
            f"{reservation.steps_reserved} steps do not fit under a cap: {cap.kind} "
            f"{cap.holder!r} may take a share of {cap.share:g} of the budget of {dataset.name!r}, "
            f"and has taken {dataset.policy.largest_share_of(use.taken):.4g}",
            None,
        )


def require_dataset_open(dataset: Dataset) -> None:
    """Raise DatasetClosedError unless the dataset takes reservations."""
    if dataset.closed_at is not None:
        raise DatasetClosedError(
            f"dataset {dataset.name!r} was closed and takes no further reservation; "
            "runs that were reserved before may go on to their end"
        )


def require_alike(first: Dataset, other: Dataset) -> None:
    """Raise `DatasetsDifferError` unless one run may be on both datasets.

    A record's neighbour, and what a record stands for, must be the same in both.
    """
    for name, one, two in (
        ("neighbouring relation", first.policy.relation.value, other.policy.relation.value),
        ("privacy unit", first.privacy_unit, other.privacy_unit),
    ):
        if one != two:
            raise DatasetsDifferError(
                f"dataset {other.name!r} has the {name} {two!r}, and {first.name!r} has {one!r}: "
                "one run needs the same of all its datasets"
            )


def close_dataset(dataset: Dataset, at: int) -> Dataset | None:
    """Return the dataset closed for new reservations, or None if it is closed already.

    Nothing else changes: open reservations keep what they hold, and may use it.

    Args:
        dataset: as it is now.
        at: the time, in microseconds since 1970.
    """
    return None if dataset.closed_at is not None else replace(dataset, closed_at=at)


def set_reference(dataset: Dataset, policy: PrivacyFilter) -> Dataset | None:
    """Return the dataset with the reference that its owner chose; None if it has that already.

    Args:
        dataset: as it is now.
        policy: the filter with the reference, computed from an earlier state of the dataset.

    Raises:
        DatasetClosedError: the dataset is closed.
        ChargeOutdatedError: releases were added, or steps of a reference taken, since then.
    """
    require_dataset_open(dataset)
    if policy == dataset.policy:
        return None
    taken = dataset.balance.taken
    if not (dataset.policy.allows_owner_replacement(policy, taken) and policy.admits(taken)):
        raise ChargeOutdatedError(
            f"budget of {dataset.name!r} was taken meanwhile: choose the reference again"
        )
    return replace(dataset, policy=policy)


def describe_reference(policy: PrivacyFilter) -> dict[str, Any]:
    """Return the entry fields that state the filter with the reference that the owner chose."""
    return {"filter": _describe_filter(policy)}


def require_unused(dataset: Dataset) -> None:
    """Raise `DatasetUsedError` unless the only entry of a dataset is the one that created it."""
    if dataset.version > 1:
        raise DatasetUsedError(
            f"dataset {dataset.name!r} has {dataset.version} entries, and only one whose single "
            "entry is its creation can be deleted: close it instead"
        )


def grant(reservation: Reservation, steps: int, sequence: int) -> Change:
    """Return the change that spends budget for a run's next steps, before noise is drawn.

    Args:
        reservation: open.
        steps: the number of steps to grant, at least 1.
        sequence: the number of steps granted so far, as the client knows it.

    Raises:
        ReservationClosedError: the reservation is not open.
        StaleSequenceError: the client missed a grant, or requests the same grant twice; or it was
            granted steps that this ledger does not know, because a backup was restored.
        BudgetExhaustedError: the reservation has fewer steps left.
        RuleError: the number of steps is below 1.
    """
    _require_open(reservation)
    _require(steps >= 1, f"steps must be at least 1, not {steps}")
    if sequence > reservation.steps_granted:
        raise StaleSequenceError(
            f"only {reservation.steps_granted} steps of reservation {reservation.identifier} are "
            f"granted, not {sequence}: is this ledger an older copy, restored from a backup? The "
            "missing steps must be entered before the run goes on; see docs/how-to/backup.md"
        )
    if sequence < reservation.steps_granted:
        raise StaleSequenceError(
            f"{reservation.steps_granted} steps are granted, not {sequence}: "
            "GET the reservation and continue from its steps_granted",
        )
    if reservation.steps_granted + steps > reservation.steps_reserved:
        left = reservation.steps_reserved - reservation.steps_granted
        raise BudgetExhaustedError(
            f"this reservation has {left} steps left, and {steps} were requested", left
        )
    after = replace(reservation, steps_granted=reservation.steps_granted + steps)
    moved = subtract(reservation.held, after.held)
    return Change(EntryKind.GRANT, after, Balance(spent=moved, held=negate(moved)), steps)


def close(
    reservation: Reservation,
    state: State,
    refund: Amounts | None = None,
    declared: Declaration = NOTHING_DECLARED,
) -> Change | None:
    """Return the change that ends a reservation: granted steps stay spent, the rest is freed.

    Args:
        reservation: open, or ended with the same state.
        state: final.
        refund: the amounts to return, if the charge does not say: at most those held. The rest
            of what is held is spent.
        declared: what the training program states about a run that it commits.

    Returns:
        None if the reservation has this state already.

    Raises:
        ReservationClosedError: the reservation has ended with another state.
        ChargeOutdatedError: the returned amounts take a computation, and were not passed.
        RuleError: more would be returned than is held, or something declared is out of range or
            about a run that is not committed.
    """
    if reservation.state is state:
        return None
    _require_open(reservation)
    known = reservation.refund_if_ended
    free = refund if known is None else known
    if free is None:
        raise ChargeOutdatedError(
            "steps were granted meanwhile: compute the returned amounts again"
        )
    held = reservation.held
    kept = subtract(held, free)
    _require(min(free) >= 0 and min(kept) >= 0, f"at most {held} can be returned, not {free}")
    kinds = {
        State.COMMITTED: EntryKind.COMMIT,
        State.RELEASED: EntryKind.RELEASE,
        State.EXPIRED: EntryKind.EXPIRE,
    }
    rest = reservation.steps_reserved - reservation.steps_granted
    taken = subtract(reservation.charge.reserved, free)
    after = replace(reservation, state=state, taken=taken)
    stated = declared.entry_fields()
    _require(not stated or state is State.COMMITTED, "only a committed run has declared facts")
    return Change(kinds[state], after, Balance(kept, negate(held)), rest, declared=declared)


def number_end(change: Change, number: int) -> Change:
    """Return a change with the number of its entry in the reservation, if it ends that.

    Args:
        change: of a reservation.
        number: of the entry that records the change.
    """
    if change.reservation.state is State.OPEN:
        return change
    return replace(change, reservation=replace(change.reservation, ended_entry=number))


def renew(reservation: Reservation, expires_at: int) -> Change:
    """Return the change that extends a reservation's lease; a lease is never shortened.

    Raises:
        ReservationClosedError: the reservation is not open.
    """
    _require_open(reservation)
    after = replace(reservation, expires_at=max(expires_at, reservation.expires_at))
    unchanged = subtract(reservation.held, reservation.held)
    return Change(EntryKind.RENEW, after, Balance(unchanged, unchanged), 0)


# what is one for all reservations of a run on several datasets
_TOGETHER: Final = (
    "mechanism_hash", "steps_reserved", "steps_granted", "expires_at", "purpose", "key", "team",
)  # fmt: skip


def find_joint_faults(joint: JointRun, parts: Mapping[str, Reservation]) -> Iterator[str]:
    """Yield the faults of a run on several datasets whose reservations did not change together.

    A lease may have ended on one dataset first: each dataset's are ended when somebody looks at it.

    Args:
        joint: the run, as each of these reservations states it.
        parts: its reservations that are known, by the names of their datasets.
    """
    runs = list(parts.values())
    for name in _TOGETHER:
        values = {getattr(run, name) for run in runs}
        if len(values) > 1:
            yield f"run {joint.identifier} has one {name} for {len(runs)} datasets, not {values}"
    states = {run.state for run in runs}
    if len(states) > 1 and not states <= {State.OPEN, State.EXPIRED}:
        yield f"run {joint.identifier} has ended on some datasets only: {sorted(states)}"


def _require_open(reservation: Reservation) -> None:
    """Raise ReservationClosedError unless the reservation is open."""
    if reservation.state is not State.OPEN:
        raise ReservationClosedError(
            f"this reservation is {reservation.state}; make a new one for more steps"
        )


def _require(condition: bool, message: str) -> None:
    """Raise RuleError with this message unless a condition holds."""
    if not condition:
        raise RuleError(message)
