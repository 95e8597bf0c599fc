"""diffprivlib: a `BudgetAccountant` with its spends, as its `repr` or as JSON.

diffprivlib 0.6.6, `accountant.py`: each query spends (ε, δ), and `total` adds them up: ε by the
least of the sum and two composition theorems, δ as 1 − (1 − slack)·Π(1 − δᵢ).
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Final

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.importing.document import Part
from accountant_service.importing.findings import Finding
from accountant_service.importing.imported import Claim, Facts, Imported, Node
from accountant_service.importing.keys import CLASS, Fields, acts, checked, harmless, join
from accountant_service.importing.runs import EPSILON_MAX
from accountant_service.numerics.floats import rounding

_SPENDS_MAX: Final = 5000
CONSTRUCTORS: Final = {"BudgetAccountant": ("epsilon", "delta", "slack", "spent_budget")}
KEYS: Final = join(
    *CLASS,
    acts("spent_budget", "the list of (ε, δ) that queries spent"),
    acts("slack", "δ of the composition theorem, 0 by default: for the total that is claimed"),
    checked("epsilon", "the ceiling: the total must not be above it"),
    acts("delta", "the ceiling, which the total must not be above; below 1 also δ of the answer"),
    acts("neighbouring_relation neighboring_relation", "which datasets are neighbours"),
    harmless("name title description comment notes source date", "what the document is about"),
)


def detect(fields: Fields) -> bool:
    """Return whether a document is a `BudgetAccountant`."""
    return fields.class_name in CONSTRUCTORS or fields.has("spent_budget")


def read(fields: Fields, facts: Facts) -> Imported:
    """Import a `BudgetAccountant`: the composition of what was spent, and its total as a claim."""
    given = fields.field("spent_budget")
    spends = [_read_spend(part) for part in given.items()]
    if not 1 <= len(spends) <= _SPENDS_MAX:
        raise given.fault(f"must have 1 to {_SPENDS_MAX} spends")
    ceiling, slack = fields.find("delta"), fields.find("slack")
    most = 1.0 if ceiling is None else ceiling.number(0.0, 1.0)
    apart = 0.0 if slack is None else slack.number(0.0, most)
    epsilon, delta = _total(spends, apart)
    _require_within(fields.find("epsilon"), epsilon)
    _require_within(ceiling, delta)
    parts, first = [], {spend: i for i, spend in reversed(list(enumerate(spends)))}
    for (spent, failing), count in Counter(spends).items():
        where = f"{given.pointer}/{first[spent, failing]}"
        release = Node("approximate_dp", where, {"epsilon": spent, "delta": failing})
        again = {"count": count, "mechanism": release}
        parts.append(release if count == 1 else Node("repeated", where, again))
    return Imported(
        "a diffprivlib BudgetAccountant",
        Node("composed", given.pointer, {"mechanisms": parts}),
        facts.relation or NeighbouringRelation.ADD_OR_REMOVE_ONE,
        delta=most if 0 < most < 1 else delta,
        claims=(Claim(epsilon, delta or None, given.pointer),) if epsilon > 0 else (),
        findings=() if facts.relation else (_RELATION_NOT_STATED,),
    )


_RELATION_NOT_STATED: Final = Finding(
    "relation-not-stated",
    "",
    "the accountant does not say which datasets are neighbours; each query does",
    "the computed cost is for the neighbours of all queries, whatever name they have here",
)


def _read_spend(part: Part) -> tuple[float, float]:
    """Return the ε and δ of one spend."""
    values = part.items()
    if len(values) != 2:
        raise part.fault("must be (ε, δ)")
    return values[0].number(0.0, EPSILON_MAX), values[1].number(0.0, 1.0)


def _total(spends: list[tuple[float, float]], slack: float) -> tuple[float, float]:
    """Return ε and δ as `BudgetAccountant.total` does (Kairouz et al. 2017, Theorem 3.5).

    The sum of ε is that of the decimals: a rounding error of it must not refute it.
    """
    total = rounding.fraction_up(
        sum((rounding.as_written(epsilon) for epsilon, _ in spends), Fraction())
    )
    apart = [slack, *(delta for _, delta in spends)]
    delta = 1.0 if 1 in apart else 0.0 - math.expm1(math.fsum(math.log1p(-each) for each in apart))
    if slack == 0:
        return total, delta
    mean = math.fsum(epsilon * math.tanh(epsilon / 2) for epsilon, _ in spends)
    squares = math.fsum(epsilon**2 for epsilon, _ in spends)
    logs = math.log(1 / slack), math.log(math.e + math.sqrt(squares) / slack)
    return min(total, *(mean + math.sqrt(2 * squares * each) for each in logs)), delta


def _require_within(ceiling: Part | None, total: float) -> None:
    """Raise DocumentError if more is spent than the accountant allows, beyond rounding."""
    if ceiling is not None and total > ceiling.number(0.0, math.inf) * (1 + 1e-9):
        raise ceiling.fault(f"is below the total of the spends, {total:.6g}: correct one of them")
