"""The addition filter: every release takes its own ε and δ, in the decimals that people write.

A history of releases, each (εᵢ, δᵢ)-DP whatever was seen before, is (ε, δ)-DP if Σεᵢ ≤ ε and
Σδᵢ ≤ δ held before each of them (Rogers, Roth, Ullman & Vadhan 2016, arXiv 1605.08294, section 3;
for runs that overlap in time: Haney et al. 2023, arXiv 2309.05901v2). Sums are exact: amounts are
whole multiples of a unit that divides 10⁻⁴⁰ and its parts up to the fortieth, such as a third. Any
other number is charged up, to a decimal of 17 digits.

A release whose loss is known exactly, such as Laplace noise or a given (ε, δ), is charged step by
step. Any other run is charged as a whole, at one δᵢ that is chosen from the budget and the plan
alone; its first grant spends all of it.
"""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Final

from accountant_service.accounting import release_laws
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.accounting.methods.base import TOLERANCE
from accountant_service.errors import CodedError, NoFiniteEpsilonError
from accountant_service.ledger.errors import ChargeUndecidedError
from accountant_service.ledger.filters.base import Amounts, Charge, Json, PrivacyFilter, add
from accountant_service.ledger.filters.proofs import limit_seconds, require_proof
from accountant_service.ledger.filters.reference import ReferenceFilter
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import CanonicalForm
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.numerics.floats import rounding

_DIGITS: Final = 40
_TEXT_MAX: Final = 400  # characters of an amount
_AMOUNT: Final = r"-?\d+(\.\d+|/\d+)?"  # an exponent could make a number of any length
UNITS: Final = 10**_DIGITS * math.lcm(*range(1, 41))  # of an ε or a δ of 1
# the parts of the budget's δ at which a run as a whole may be charged
_DELTA_SHARES: Final = (1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.5)
_COUNTED_SHARE: Final = 0.1  # the one at which the steps that fit are counted
# ε is scarcer: a tenth of δ changes what a budget admits less than a hundredth of ε does
_DELTA_WEIGHT: Final = 0.1
_VERIFIED_TOLERANCES: Final = (TOLERANCE, 1e-6, 1e-9)
_ROUNDING: Final = Fraction(1, 10**9)  # of floating point on another machine, relative
_SMALL: Final = 0.00999  # of ε and of δ: a hundredth, also after rounding
_HUNDREDTH: Final = Fraction(1, 100)


@dataclass(frozen=True, slots=True)
class AddedCharge(Charge):
    """A plan's cost by addition.

    Attributes:
        steps: the number of steps of the plan.
        epsilon: units of ε, of one step or of the whole run.
        delta: units of δ, of one step or of the whole run.
        is_whole: whether the run is charged as a whole.
    """

    epsilon: int
    delta: int
    is_whole: bool = False

    @property
    def reserved(self) -> Amounts:
        """The units of ε and of δ held before the first grant."""
        return self.spent(self.steps)

    def spent(self, granted: int) -> Amounts:
        """Return the units of ε and of δ spent after `granted` steps."""
        times = min(granted, 1) if self.is_whole else granted
        return self.epsilon * times, self.delta * times

    def refund(self, granted: int) -> Amounts:
        """Return the units of ε and of δ of what was not granted."""
        return self.held(granted)

    def entry_fields(self) -> Json:
        """Return the cost as ledger-entry fields: decimals, of a step or of the run."""
        return {
            "charged_epsilon": write_units(self.epsilon),
            "charged_delta": write_units(self.delta),
            "charged_per": "run" if self.is_whole else "step",
        }

    @classmethod
    def from_json(cls, fields: Json, steps: int) -> AddedCharge:
        """Return the cost of a plan of `steps` steps, read from a ledger entry's fields."""
        per = fields["charged_per"]
        if per not in ("step", "run"):
            raise ValueError(f"charged_per must be 'step' or 'run', not {per!r}")
        epsilon, delta = (read_units(fields[name]) for name in ("charged_epsilon", "charged_delta"))
        return cls(steps, epsilon, delta, per == "run")


@dataclass(frozen=True, slots=True)
class AdditionFilter(PrivacyFilter):
    """A filter that adds up the ε and the δ of releases.

    Attributes:
        epsilon: ε of the budget.
        delta: δ of the budget; it may be 0.
        relation: when two datasets are neighbours.
    """

    name: ClassVar[str] = "addition"
    oldest_reader: ClassVar[str] = "0008"
    epsilon: float
    delta: float
    relation: NeighbouringRelation

    @property
    def nothing(self) -> Amounts:
        """The amounts spent without releases: no ε and no δ."""
        return 0, 0

    @property
    def description(self) -> str:
        """A sentence that describes the filter."""
        return "addition: every release takes its own ε and δ of the budget, in exact decimals"

    @property
    def whole(self) -> Amounts:
        """The budget in units of ε and of δ, rounded down."""
        return units_down(self.epsilon), units_down(self.delta)

    def admits(self, taken: Amounts) -> bool:
        """Return whether the ε and the δ taken are each at most the budget's."""
        return all(part <= whole for part, whole in zip(taken, self.whole, strict=True))

    def share_of(self, taken: Amounts) -> float:
        """Return the larger of the shares of ε and of δ that are taken."""
        return max(map(_share, taken, self.whole))

    def fits_share(self, taken: Amounts, reserved: Amounts, share: float) -> bool:
        """Return whether a holder may reserve further ε and δ within a share of each."""
        limits = (share_down(share, whole) for whole in self.whole)
        return all(
            not more or part + more <= limit
            for part, more, limit in zip(taken, reserved, limits, strict=True)
        )

    def apply_cap(self, taken: Amounts, share: float, holder_taken: Amounts) -> Amounts:
        """Return the ε and the δ taken, raised until no more remains than the cap allows."""
        return tuple(
            max(part, whole - max(share_down(share, whole) - own, 0))
            for part, whole, own in zip(taken, self.whole, holder_taken, strict=True)
        )

    def epsilon_of(self, taken: Amounts) -> float:
        """Return the ε taken, rounded up."""
        return epsilon_up(taken[0])

    def after_reserving(self, plan: StepPlan, taken: Amounts) -> AdditionFilter:
        """Return this filter unchanged."""
        return self

    def compute_charge(self, plan: StepPlan, taken: Amounts) -> AddedCharge:
        """Return a plan's own ε and δ.

        Raises:
            CodedError: no finite ε is proved, or it takes too long to compute.
        """
        return compute_added_charge(plan, self.epsilon, self.delta, self.relation)

    def compute_refund(self, plan: StepPlan, charge: Charge, granted: int) -> Amounts:
        """Return the ε and the δ of what was not granted."""
        return charge.held(granted)

    def count_affordable_steps(self, plan: StepPlan, taken: Amounts) -> int | None:
        """Return how many steps of a plan fit by addition; None if they cost nothing."""
        if not plan.step.atom_counts:
            return None
        charge = self.compute_charge(plan, taken)
        if not any(charge.reserved):
            return None
        left = [max(whole - part, 0) for whole, part in zip(self.whole, taken, strict=True)]
        if not charge.is_whole:
            each = zip(left, (charge.epsilon, charge.delta), strict=True)
            return min(min(part // cost for part, cost in each if cost), COUNT_MAX)
        parts = [rounding.fraction_down(Fraction(each, UNITS)) for each in left]
        epsilon, delta = parts[0], min(parts[1], _COUNTED_SHARE * self.delta)
        if epsilon <= 0 or delta <= 0:
            return 0
        whole = ReferenceFilter(epsilon, delta, self.relation, slack_share=0.0)
        return whole.count_reference_steps(plan.step)

    def is_small(self, plan: StepPlan) -> bool:
        """Return whether a plan takes at most a hundredth of ε and of δ."""
        try:
            simple = simple_amounts(plan.step, self.relation)
            if simple is None and not _is_small_run(
                plan.canonical, self.epsilon, self.delta, self.relation
            ):
                return False
            reserved = self.compute_charge(plan, self.nothing).reserved
        except CodedError:
            return False
        return all(
            part <= _HUNDREDTH * all_ for part, all_ in zip(reserved, self.whole, strict=True)
        )

    def fits(self, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether the remaining budget covers a whole plan."""
        try:
            return self.admits(add(taken, self.compute_charge(plan, taken).reserved))
        except NoFiniteEpsilonError:
            return False

    def is_charge_sufficient(self, plan: StepPlan, charge: Charge) -> bool:
        """Return whether a plan is (ε, δ)-DP with the stated ε and δ."""
        assert isinstance(charge, AddedCharge)
        return is_added_charge_sufficient(plan, charge, self.relation)

    def is_refund_allowed(
        self, plan: StepPlan, charge: Charge, granted: int, refund: Amounts
    ) -> bool:
        """Return whether the amounts freed are exactly those of what was not granted."""
        return refund == charge.held(granted)

    def read_charge(self, plan: StepPlan, fields: Json) -> AddedCharge:
        """Return a plan's cost as a ledger entry or a stored row states it."""
        return AddedCharge.from_json(fields, plan.steps)

    def entry_fields(self) -> Json:
        """Return the filter's name as a field of a dataset's first ledger entry."""
        return {"filter": self.name}

    def balance_fields(self, spent: Amounts, held: Amounts) -> Json:
        """Return the ledger-entry fields for changes of the spent and held amounts: decimals."""
        return added_balance_fields(spent, held)

    def read_balance(self, entry: Json) -> tuple[Amounts, Amounts]:
        """Return the changes of the spent and of the held amounts that a ledger entry states."""
        return read_added_balance(entry)

    def to_json(self) -> Json:
        """Return the filter's name as JSON, for storage."""
        return {"filter": self.name}


def added_balance_fields(spent: Amounts, held: Amounts) -> Json:
    """Return changes of the ε and δ spent and held as the fields of a ledger entry."""
    return {
        "spent_epsilon": write_units(spent[0]),
        "held_epsilon": write_units(held[0]),
        "spent_delta": write_units(spent[1]),
        "held_delta": write_units(held[1]),
    }


def read_added_balance(entry: Json) -> tuple[Amounts, Amounts]:
    """Return the changes of the ε and δ spent, and of those held, that a ledger entry states."""
    spent, held = (
        (read_units(entry[f"{part}_epsilon"]), read_units(entry[f"{part}_delta"]))
        for part in ("spent", "held")
    )
    return spent, held


def units_up(value: Fraction) -> int:
    """Return a number in units, rounded up: to a decimal of 17 digits if it is not one of them."""
    exact = value * UNITS
    if exact.denominator != 1:
        exact = rounding.as_written(rounding.fraction_up(value)) * UNITS
    return int(-(-exact // 1))


def units_down(value: float) -> int:
    """Return a number as it is written, in units, rounded down."""
    return int(rounding.as_written(value) * UNITS // 1)


def epsilon_up(units: int) -> float:
    """Return units as a number, rounded up; equal to it as written where that is possible."""
    return rounding.fraction_up(Fraction(max(units, 0), UNITS))


def write_units(units: int) -> str:
    """Return units as text: a decimal without an exponent, or a fraction where none is exact."""
    exact = Fraction(units, UNITS)
    scaled = exact * 10**_DIGITS
    if scaled.denominator != 1:
        return str(exact)
    text = f"{Decimal(int(scaled)).scaleb(-_DIGITS, Context(prec=_TEXT_MAX)):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def read_units(text: str) -> int:
    """Return the units that a text of `write_units` stands for.

    Raises:
        TypeError, ValueError, ZeroDivisionError: it is nothing of the kind.
    """
    if type(text) is not str or len(text) > _TEXT_MAX or not re.fullmatch(_AMOUNT, text):
        raise TypeError(f"an amount must be a decimal or a fraction in a text, not {text!r}")
    units = Fraction(text) * UNITS
    if units.denominator != 1 or write_units(int(units)) != text:
        raise ValueError(f"{text!r} is not written as the ledger writes amounts")
    return int(units)


def share_down(share: float, whole: int) -> int:
    """Return a share of a whole, as the share is written, rounded down."""
    return int(rounding.as_written(share) * whole // 1)


def compute_added_charge(
    plan: StepPlan, epsilon: float, delta: float, relation: NeighbouringRelation
) -> AddedCharge:
    """Return a plan's own ε and δ, with which it is (ε, δ)-DP whatever was released before.

    Args:
        plan: all steps together.
        epsilon: ε of the budget, which the choice of δᵢ is made for.
        delta: δ of the budget.
        relation: when two datasets are neighbours.

    Raises:
        MethodNotApplicableError: no dominating pair is proved for a release.
        NoFiniteEpsilonError: no finite ε is proved at any part of the budget's δ.
        ChargeUndecidedError: the time limit ended the computation.
    """
    if not plan.step.atom_counts:
        return AddedCharge(plan.steps, 0, 0)
    simple = simple_amounts(plan.step, relation)
    if simple is not None:
        return AddedCharge(plan.steps, simple[0], simple[1])
    if not delta:
        raise NoFiniteEpsilonError(
            "this plan has no finite ε at δ = 0, which is this budget's: use Laplace noise or "
            "another pure release, or create a dataset with a δ above 0"
        )
    whole = _whole_amounts(plan.canonical, epsilon, delta, relation)
    return AddedCharge(plan.steps, whole[0], whole[1], is_whole=True)


def simple_amounts(form: CanonicalForm, relation: NeighbouringRelation) -> Amounts | None:
    """Return ε and δ by basic composition of releases whose losses are known exactly, in units.

    None if the loss of a release has no bound, as that of Gaussian noise.

    Raises:
        MethodNotApplicableError: no dominating pair is proved for a release.
    """
    question = Question(form, relation, adds_curves=False)
    require_proof(question)
    amounts = (0, 0)
    for each in question.alternatives:
        cost = release_laws.simple_cost(each.release_groups, relation)
        if cost.mu or not cost.is_known:
            return None
        found = units_up(cost.loss.epsilon), units_up(cost.loss.delta)
        amounts = max(amounts[0], found[0]), max(amounts[1], found[1])
    return amounts


@lru_cache(maxsize=4096)
def _whole_amounts(
    form: CanonicalForm, epsilon: float, delta: float, relation: NeighbouringRelation
) -> Amounts:
    """Return units of ε and δ of a run as a whole, at the part of δ that leaves most of a budget.

    The choice depends on the plan and the budget alone.
    """
    question = Question(form, relation, adds_curves=False)
    total, bound = rounding.as_written(epsilon), rounding.as_written(delta)
    with _limit_seconds(question):
        least = _delta_of(question, 0.0)
    if least <= _DELTA_SHARES[0] * delta:
        return 0, units_up(Fraction(least))
    shares = [(Fraction(), Fraction(least) / bound)]
    if _is_small_run(form, epsilon, delta, relation):
        shares.append((Fraction(_SMALL * epsilon) / total, Fraction(_SMALL * delta) / bound))
    undecided = None
    try:
        with _limit_seconds(question):
            for share in _DELTA_SHARES:
                part = rounding.down(share * delta)
                found = _epsilon_of(question, part)
                if math.isfinite(found):
                    shares.append((Fraction(found) / total, Fraction(part) / bound))
    except ChargeUndecidedError as error:
        undecided = error
    small = [each for each in shares if max(each) <= _HUNDREDTH]
    if undecided is not None and not small:
        raise undecided
    weight = 1 if small else Fraction(_DELTA_WEIGHT)
    best = min(small or shares, key=lambda each: each[0] + weight * each[1])
    return units_up(best[0] * total), units_up(best[1] * bound)


@lru_cache(maxsize=4096)
def _is_small_run(
    form: CanonicalForm, epsilon: float, delta: float, relation: NeighbouringRelation
) -> bool:
    """Return whether a run is (ε, δ)-DP with a hundredth of a budget's ε and δ: one question.

    A run that is not small costs no more to recognise, and one that is small has a charge then,
    however long a better one takes.
    """
    question = Question(form, relation, adds_curves=False)
    with _limit_seconds(question):
        return _delta_of(question, _SMALL * epsilon) <= _SMALL * delta


def _epsilon_of(question: Question, delta: float) -> float:
    """Return an upper bound on ε at δ; ∞ if no finite ε is proved."""
    try:
        bounds = [
            ACCOUNTANTS["pld"].epsilon_bound(each, delta).value for each in question.alternatives
        ]
    except NoFiniteEpsilonError:
        return math.inf
    return max(bounds)


def _delta_of(question: Question, epsilon: float) -> float:
    """Return an upper bound on δ at ε."""
    return max(
        ACCOUNTANTS["pld"].delta_bound(each, epsilon).value for each in question.alternatives
    )


def is_added_charge_sufficient(
    plan: StepPlan, charge: AddedCharge, relation: NeighbouringRelation
) -> bool:
    """Return whether a plan is (ε, δ)-DP with the ε and δ that a charge states."""
    if charge.steps != plan.steps:
        return False
    if not plan.step.atom_counts:
        return True
    if not charge.is_whole:
        least = simple_amounts(plan.step, relation)
        return least is not None and charge.epsilon >= least[0] and charge.delta >= least[1]
    stated, at = (Fraction(each, UNITS) for each in (charge.epsilon, charge.delta))
    # another machine or version may have computed a narrower interval: then this one narrows it too
    for tolerance in _VERIFIED_TOLERANCES:
        question = Question(plan.canonical, relation, tolerance, adds_curves=False)
        require_proof(question)
        with _limit_seconds(question):
            if stated:
                bound, found = stated, _epsilon_of(question, rounding.fraction_down(at))
            else:
                bound, found = at, _delta_of(question, 0.0)
        if not math.isfinite(found):
            return False
        if Fraction(found) * (1 - _ROUNDING) <= bound:
            return True
    return False


def _share(part: int, whole: int) -> float:
    """Return a part's share of a whole, rounded up; 1 for a part of nothing."""
    if not part:
        return 0.0
    return rounding.fraction_up(Fraction(part, whole)) if whole else 1.0


def _limit_seconds(question: Question) -> AbstractContextManager[None]:
    """Return a context manager that limits the CPU time; a timeout refuses the plan."""
    return limit_seconds(
        question,
        "a run charged by addition",
        "the ε of this plan could not be computed within {} s; nothing was charged. Use fewer "
        "different releases",
    )
