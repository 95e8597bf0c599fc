"""Privacy filters: which releases a dataset's budget admits, and what each costs.

reference: counts in steps of a reference mechanism; the default.
renyi, renyi_mixture: add up Rényi divergences at one frozen order, or at several.
base: what every filter has.
"""

from __future__ import annotations

import math

from accountant_service import mechanisms
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger.filters.base import Charge, Json, PrivacyFilter
from accountant_service.ledger.filters.reference import ReferenceCharge, ReferenceFilter
from accountant_service.ledger.filters.renyi import RenyiCharge, RenyiFilter
from accountant_service.ledger.filters.renyi_mixture import RenyiMixtureFilter

__all__ = [
    "Charge",
    "PrivacyFilter",
    "ReferenceFilter",
    "RenyiFilter",
    "RenyiMixtureFilter",
    "from_json",
    "read_charge",
]


def read_charge(stored: Json, steps: int) -> Charge:
    """Return the cost of a plan of `steps` steps, as stored in its reservation's row."""
    if "unit_attonats" in stored:
        return RenyiCharge.from_json(stored, steps)
    amounts = [stored[name] for name in ("charged_reference_steps", "slack", "return_slack")]
    if any(type(each) is not int for each in amounts):
        raise TypeError(f"a charge has three whole numbers, not {amounts}")
    reference_steps, slack, return_slack = amounts
    is_reference = bool(stored["is_reference"])
    return ReferenceCharge(steps, reference_steps, slack, return_slack, is_reference)


def from_json(
    stored: Json, epsilon: float, delta: float, relation: NeighbouringRelation
) -> PrivacyFilter:
    """Return the privacy filter stored in a dataset's row or in its first ledger entry.

    Raises:
        KeyError, TypeError, ValueError: it records none.
    """
    if stored["filter"] == RenyiFilter.name:
        if "order" in stored:
            return RenyiFilter(float(stored["order"]), epsilon, delta, relation)
        orders, weights = (tuple(map(float, stored[name])) for name in ("orders", "weights"))
        return RenyiMixtureFilter(orders, weights, epsilon, delta, relation)
    if stored["filter"] != ReferenceFilter.name:
        raise ValueError(f"unknown filter {stored['filter']!r}")
    reference, epsilons = stored["reference"], tuple(stored.get("epsilons", ()))
    if not all(type(each) in (int, float) and math.isfinite(each) for each in epsilons):
        raise TypeError("the table of ε must have finite numbers")
    return ReferenceFilter(
        epsilon,
        delta,
        relation,
        None if reference is None else mechanisms.from_json(reference),
        int(stored["reference_steps"]),
        bool(stored["planned"]),
        float(stored["slack_share"]),
        epsilons,
    )
