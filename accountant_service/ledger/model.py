"""The ledger's rules, without a database: what may follow what, and what it costs.

Everything here is a pure function from a state and a request to the next state and the entry that
records it. A balance has two numbers, both in micro-nats:

    spent   charged for steps that were granted: never given back;
    held    set aside for steps that were reserved and not granted yet.

spent + held ≤ budget, always. A grant moves its steps' cost from held to spent *before* their noise
is drawn; only what was never granted is ever released.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from accountant_service.errors import (
    BudgetExhaustedError,
    ReservationClosedError,
    StaleSequenceError,
)
from accountant_service.ledger.filter import RenyiFilter, affordable_steps, cost


class RuleError(ValueError):
    """A number that no entry may have; the API's own bounds keep callers from it."""


class State(StrEnum):
    """Where a reservation stands; every state but `open` is final."""

    OPEN = "open"
    COMMITTED = "committed"
    RELEASED = "released"
    EXPIRED = "expired"


class Kind(StrEnum):
    """What an entry records."""

    CREATE = "create"
    RESERVE = "reserve"
    GRANT = "grant"
    COMMIT = "commit"
    RELEASE = "release"
    EXPIRE = "expire"
    RENEW = "renew"


@dataclass(frozen=True, slots=True)
class Balance:
    """Micro-nats spent and held."""

    spent: int = 0
    held: int = 0

    @property
    def taken(self) -> int:
        """What no later reservation may use."""
        return self.spent + self.held

    def plus(self, change: Balance) -> Balance:
        """The balance after a change."""
        return Balance(self.spent + change.spent, self.held + change.held)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset with its frozen policy and its balance.

    Attributes:
        identifier: internal.
        name: unique.
        size: number of records.
        privacy_unit: what one record stands for.
        policy: the filter, fixed at creation.
        balance: in micro-nats.
        version: the number of its last entry.
        head: that entry's hash.
        created_at: microseconds since 1970.
    """

    identifier: str
    name: str
    size: int
    privacy_unit: str
    policy: RenyiFilter
    balance: Balance
    version: int
    head: str
    created_at: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """A plan that a dataset holds budget for.

    Attributes:
        identifier: public.
        dataset: identifier of the dataset.
        state: see `State`.
        mechanism: the whole plan, as JSON.
        mechanism_hash: its canonical hash.
        unit: atto-nats of one step at the dataset's order.
        steps_reserved: steps of the plan.
        steps_granted: of those, granted.
        expires_at: microseconds since 1970, unless renewed.
        purpose: the caller's words.
        key: identifier of the key that reserved.
    """

    identifier: str
    dataset: str
    state: State
    mechanism: dict[str, Any]
    mechanism_hash: str
    unit: int
    steps_reserved: int
    steps_granted: int
    expires_at: int
    purpose: str
    key: str

    @property
    def held(self) -> int:
        """What the steps not granted yet hold."""
        return cost(self.unit, self.steps_reserved) - cost(self.unit, self.steps_granted)


@dataclass(frozen=True, slots=True)
class Change:
    """What a request does: the reservation after it, and what to write down.

    Attributes:
        kind: of the entry.
        reservation: as it is afterwards.
        balance: what is added to the dataset's.
        steps: that the entry is about.
    """

    kind: Kind
    reservation: Reservation
    balance: Balance
    steps: int


def fits(dataset: Dataset, unit: int, steps: int) -> bool:
    """Whether so many more steps may be reserved."""
    return dataset.balance.taken + cost(unit, steps) <= dataset.policy.budget


def room(dataset: Dataset) -> int:
    """Micro-nats that are neither spent nor held."""
    return max(dataset.policy.budget - dataset.balance.taken, 0)


def entry(
    number: int, kind: Kind, at: int, key: str, change: Balance, version: str
) -> dict[str, Any]:
    """Return what every entry says.

    Args:
        number: 1 for the first entry of a dataset.
        kind: of the entry.
        at: microseconds since 1970.
        key: identifier of the key that wrote it.
        change: what it adds to the balance.
        version: of the accountant.

    Raises:
        RuleError: it is from before 1970.
    """
    _require(at >= 0, f"at must be at least 0, not {at}")
    return {
        "number": number,
        "kind": kind.value,
        "at": at,
        "key": key,
        "spent_micronats": change.spent,
        "held_micronats": change.held,
        "accountant_version": version,
    }


def created(dataset: Dataset) -> dict[str, Any]:
    """Return what the first entry says of a dataset: all that never changes.

    Raises:
        RuleError: it has a number that no dataset may have.
    """
    policy = dataset.policy
    _require(dataset.size >= 1, f"size must be at least 1, not {dataset.size}")
    _require(0 < policy.epsilon < math.inf, f"epsilon must be above 0, not {policy.epsilon}")
    _require(0 < policy.delta < 1, f"delta must be between 0 and 1, not {policy.delta}")
    _require(1 < policy.order < math.inf, f"order must be above 1, not {policy.order}")
    _require(dataset.created_at >= 0, f"created_at must be at least 0, not {dataset.created_at}")
    return {
        "name": dataset.name,
        "size": dataset.size,
        "privacy_unit": dataset.privacy_unit,
        "neighbouring_relation": policy.relation.value,
        "epsilon": policy.epsilon,
        "delta": policy.delta,
        "order": policy.order,
        "budget_micronats": policy.budget,
        "created_at": dataset.created_at,
    }


def described(change: Change) -> dict[str, Any]:
    """Return what an entry says of a change, beside what all entries say."""
    after = change.reservation
    about: dict[str, Any] = {"reservation": after.identifier, "steps": change.steps}
    if change.kind is Kind.RESERVE:
        about |= {
            "mechanism": after.mechanism,
            "mechanism_hash": after.mechanism_hash,
            "unit_attonats": str(after.unit),
            "purpose": after.purpose,
        }
    if change.kind in (Kind.RESERVE, Kind.RENEW):
        about["expires_at"] = after.expires_at
    return about


def reserve(dataset: Dataset, plan: Reservation) -> Change:
    """Hold the whole plan.

    Raises:
        BudgetExhaustedError: it does not fit.
        RuleError: it has a number that no reservation may have.
    """
    _require(plan.steps_reserved >= 1, f"steps must be at least 1, not {plan.steps_reserved}")
    _require(plan.unit >= 0, f"a step must cost at least 0, not {plan.unit} atto-nats")
    _require(plan.expires_at >= 0, f"expires_at must be at least 0, not {plan.expires_at}")
    if not fits(dataset, plan.unit, plan.steps_reserved):
        possible = affordable_steps(plan.unit, room(dataset)) or 0
        raise BudgetExhaustedError(
            f"{plan.steps_reserved} steps do not fit in what is left of the budget of "
            f"{dataset.name!r}; {possible} steps of this mechanism would",
            possible,
        )
    return Change(Kind.RESERVE, plan, Balance(held=plan.held), plan.steps_reserved)


def grant(reservation: Reservation, steps: int, sequence: int) -> Change:
    """Charge the next steps, before their noise is drawn.

    Args:
        reservation: open.
        steps: how many, at least 1.
        sequence: the steps granted so far, as the client knows.

    Raises:
        ReservationClosedError: it is not open.
        StaleSequenceError: the client has missed a grant, or asks for one twice.
        RuleError: there are fewer steps than 1.
    """
    _require_open(reservation)
    _require(steps >= 1, f"steps must be at least 1, not {steps}")
    if sequence != reservation.steps_granted:
        raise StaleSequenceError(
            f"{reservation.steps_granted} steps are granted, not {sequence}: "
            "GET the reservation and go on from there",
        )
    if reservation.steps_granted + steps > reservation.steps_reserved:
        left = reservation.steps_reserved - reservation.steps_granted
        raise BudgetExhaustedError(f"{left} steps of this reservation are left", left)
    after = replace(reservation, steps_granted=reservation.steps_granted + steps)
    moved = reservation.held - after.held
    return Change(Kind.GRANT, after, Balance(spent=moved, held=-moved), steps)


def close(reservation: Reservation, state: State) -> Change | None:
    """End a reservation: what was granted stays charged, the rest is no longer held.

    Returns:
        None if it has ended so before.

    Raises:
        ReservationClosedError: it has ended otherwise.
    """
    if reservation.state is state:
        return None
    _require_open(reservation)
    kinds = {
        State.COMMITTED: Kind.COMMIT,
        State.RELEASED: Kind.RELEASE,
        State.EXPIRED: Kind.EXPIRE,
    }
    rest = reservation.steps_reserved - reservation.steps_granted
    after = replace(reservation, state=state)
    return Change(kinds[state], after, Balance(held=-reservation.held), rest)


def renew(reservation: Reservation, expires_at: int) -> Change:
    """Extend the lease; never shorten it.

    Raises:
        ReservationClosedError: it is not open.
    """
    _require_open(reservation)
    after = replace(reservation, expires_at=max(expires_at, reservation.expires_at))
    return Change(Kind.RENEW, after, Balance(), 0)


def _require_open(reservation: Reservation) -> None:
    if reservation.state is not State.OPEN:
        raise ReservationClosedError(
            f"this reservation is {reservation.state}; reserve anew for more steps"
        )


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuleError(otherwise)
