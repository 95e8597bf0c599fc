"""Privacy filters: which releases a dataset's budget admits, and what each costs.

late_reference: adds up small releases, and counts in steps of a reference once a run sets it; the
    default.
reference: counts in steps of a reference mechanism.
addition: adds up ε and δ, in exact decimals.
either: one of two filters, each with half of δ, admits everything.
renyi, renyi_mixture, renyi_sum: add up Rényi divergences at one frozen order, or at several; and
    the δ of releases that have one.
base: what every filter has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger.filters.addition import AddedCharge, AdditionFilter, read_units
from accountant_service.ledger.filters.base import Charge, Json, PrivacyFilter
from accountant_service.ledger.filters.either import EitherCharge, EitherFilter, SideCharge
from accountant_service.ledger.filters.late_reference import LateCharge, LateReferenceFilter
from accountant_service.ledger.filters.reference import ReferenceCharge, ReferenceFilter
from accountant_service.ledger.filters.renyi import DivergenceFilter, RenyiCharge, RenyiFilter
from accountant_service.ledger.filters.renyi_mixture import LateMixtureFilter, RenyiMixtureFilter
from accountant_service.ledger.filters.renyi_sum import RenyiSumCharge, RenyiSumFilter

__all__ = [
    "AdditionFilter",
    "Charge",
    "EitherFilter",
    "LateMixtureFilter",
    "LateReferenceFilter",
    "PrivacyFilter",
    "ReferenceFilter",
    "RenyiFilter",
    "RenyiMixtureFilter",
    "RenyiSumFilter",
    "from_columns",
    "from_json",
    "read_charge",
    "read_charge_columns",
    "read_columns",
]


def read_columns(row: Mapping[Any, Any]) -> PrivacyFilter:
    """Return the privacy filter that a dataset's row stores.

    Raises:
        KeyError, TypeError, ValueError: it stores none.
    """
    return from_columns(row["policy"], row["epsilon"], row["delta"], row["relation"])


@lru_cache(maxsize=1024)  # every grant reads its dataset's policy
def from_columns(stored: str, epsilon: float, delta: float, relation: str) -> PrivacyFilter:
    """Return the privacy filter that four columns store."""
    return from_json(json.loads(stored), epsilon, delta, NeighbouringRelation(relation))


def read_charge_columns(row: Mapping[Any, Any]) -> Charge:
    """Return the cost of a plan that a reservation's row stores."""
    return read_charge(json.loads(row["charge"]), row["steps_reserved"])


def read_charge(stored: Json, steps: int) -> Charge:
    """Return the cost of a plan of `steps` steps, as stored in its reservation's row."""
    if "charged_sides" in stored:
        sides = (_read_side(each, steps) for each in stored["charged_sides"])
        return EitherCharge(steps, tuple(sides))
    part = stored.get("part")
    if "unit_delta" in stored:
        return RenyiSumCharge.from_json(stored, steps)
    if "unit_attonats" in stored:
        return RenyiCharge.from_json(stored, steps)
    charge: AddedCharge | ReferenceCharge
    if "charged_per" in stored:
        charge = AddedCharge.from_json(stored, steps)
    else:
        charge = ReferenceCharge.from_json(stored, steps)
    if part is None:
        return charge
    found = LateCharge(steps, charge)
    if found.to_json()["part"] != part:
        raise ValueError(f"{part!r} is not the part that pays for {stored!r}")
    return found


def _read_side(stored: Json, steps: int) -> SideCharge:
    """Return the cost of a plan of `steps` steps in one side of an either filter."""
    if "missed" in stored:
        return SideCharge(steps, int(stored["missed"]), None)
    own = read_charge(stored, steps)
    return SideCharge(steps, len(own.reserved), own)


def from_json(
    stored: Json, epsilon: float, delta: float, relation: NeighbouringRelation
) -> PrivacyFilter:
    """Return the privacy filter stored in a dataset's row or in its first ledger entry.

    Raises:
        KeyError, TypeError, ValueError: it records none.
    """
    if "summed_delta" in stored:
        own = {name: value for name, value in stored.items() if name != "summed_delta"}
        summed = read_units(stored["summed_delta"])
        rest = from_json(own, epsilon, RenyiSumFilter.rest_of(delta, summed), relation)
        if not isinstance(rest, DivergenceFilter):
            raise ValueError(f"{rest.name!r} adds up no divergences")
        return RenyiSumFilter(epsilon, delta, relation, summed, rest)
    if stored["filter"] == RenyiFilter.name:
        if "order" in stored:
            return RenyiFilter(float(stored["order"]), epsilon, delta, relation)
        orders, weights = (tuple(map(float, stored[name])) for name in ("orders", "weights"))
        if "general_weights" not in stored:
            return RenyiMixtureFilter(orders, weights, epsilon, delta, relation)
        general = tuple(map(float, stored["general_weights"]))
        first = LateMixtureFilter(orders, general, epsilon, delta, relation, general)
        return replace(first, weights=weights)  # the weights of both are checked
    if stored["filter"] == EitherFilter.name:
        part = EitherFilter.half(delta)
        sides = (from_json(each, epsilon, part, relation) for each in stored["sides"])
        return EitherFilter(epsilon, delta, relation, tuple(sides))
    if stored["filter"] == AdditionFilter.name:
        return AdditionFilter(epsilon, delta, relation)
    if stored["filter"] != ReferenceFilter.name:
        raise ValueError(f"unknown filter {stored['filter']!r}")
    kind = LateReferenceFilter if "added_epsilon" in stored else ReferenceFilter
    return kind.from_json(stored, epsilon, delta, relation)
