"""The reference filter: a budget is a number of equal reference steps, exchanged for other steps.

A budget (ε, δ) begins as a stack of N reference steps, the most that are (ε, δ′)-DP together. A run
of T steps of another mechanism takes the least number n of reference steps that dominates the
whole run. So whatever is chosen from earlier results, everything released is dominated by the
stack that the budget began with. docs/accountants/filters.md has the theorem and its proof.

Amounts are reference steps and units of slack. Slack is the part of δ that exchanges may lose:
δ = δ′ + slack. Steps and slack are charged up and given back down.

With δ = 0 the reference is a release with a small pure ε, a power of ten. A run costs as many of
them as its pure ε is: by basic composition, which also holds for releases chosen from earlier
results (Rogers et al. 2016, arXiv 1605.08294, section 3). There is no slack.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np

from accountant_service import mechanisms
from accountant_service.accounting import release_laws
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, Question
from accountant_service.accounting.methods.base import TOLERANCE, report_contradictions
from accountant_service.accounting.methods.pld import dominating_pairs, has_quick_curve
from accountant_service.errors import (
    AccountingError,
    NoFiniteEpsilonError,
)
from accountant_service.ledger.errors import ChargeUndecidedError, UnsuitableReferenceError
from accountant_service.ledger.filters import renyi
from accountant_service.ledger.filters.base import (
    Amounts,
    Charge,
    Json,
    PrivacyFilter,
    add,
    count_units_within,
)
from accountant_service.ledger.filters.proofs import limit_seconds, require_proof
from accountant_service.ledger.filters.reference_step import (
    choose_reference_step,
    divide_gaussian_step,
    is_unsampled_gaussian,
)
from accountant_service.ledger.step_plan import StepPlan, charged_form
from accountant_service.mechanisms import ApproximateDp, CanonicalForm, Gaussian, Mechanism
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.numerics import domination
from accountant_service.numerics.engines.saddle_point import count_by_renyi
from accountant_service.numerics.floats import rounding, search
from accountant_service.numerics.floats.bounds import EPSILON_NEGLIGIBLE
from accountant_service.numerics.laws.dominating_pair import Composition

SLACK_SHARE: Final = 1e-3  # of δ, that exchanges may lose together: it costs hardly a step
# smaller shares, for a reference that reveals everything with a fixed probability: its steps may
# need the whole δ
_SMALLER_SLACK_SHARES: Final = (1e-4, 1e-5, 1e-6, 1e-7, 0.0)
SLACK_UNITS: Final = 10**9  # the whole slack
_PURE_DIGITS: Final = 9  # of a budget of pure ε
_PURE_EXPONENT_MAX: Final = 300  # of its parts: 1e-300 is no less exact than any other double
_SLACK_EACH: Final = 8  # an exchange may use an eighth of the slack left
_EPSILON_POINTS: Final = 128  # numbers of reference steps whose ε is tabulated
_EPSILON_POINTS_FEW: Final = 16  # the same, where each needs a computation of its own
_TABLE_LENGTHS: Final = (_EPSILON_POINTS, _EPSILON_POINTS_FEW)


@dataclass(frozen=True, slots=True)
class ReferenceCharge(Charge):
    """A plan's cost: a number of reference-mechanism steps, and a part of δ (slack).

    Attributes:
        steps: the number of steps of the plan.
        reference_steps: the number of steps of the reference mechanism that dominates the plan.
        slack: the part of δ for the comparison that sets the charge, in units.
        return_slack: the part of δ for the comparison that sets the refund, in units.
        is_reference: whether the plan's step is a step of the reference mechanism.
    """

    reference_steps: int
    slack: int = 0
    return_slack: int = 0
    is_reference: bool = False

    @classmethod
    def from_json(cls, stored: Json, steps: int) -> ReferenceCharge:
        """Return the cost of a plan of `steps` steps, as stored in its reservation's row."""
        amounts = [stored[name] for name in ("charged_reference_steps", "slack", "return_slack")]
        if any(type(each) is not int for each in amounts):
            raise TypeError(f"a charge has three whole numbers, not {amounts}")
        reference_steps, slack, return_slack = amounts
        return cls(steps, reference_steps, slack, return_slack, bool(stored["is_reference"]))

    @property
    def reserved(self) -> Amounts:
        """The reference-mechanism steps, and the part of δ, held before the first grant."""
        return self.reference_steps, self.slack + self.return_slack

    @property
    def needs_slack(self) -> bool:
        """True if the cost includes a part of the slack."""
        return self.slack + self.return_slack > 0

    def spent(self, granted: int) -> Amounts:
        """Return the reference-mechanism steps, and the part of δ, spent so far.

        The first grant spends the part of δ for the comparison that sets the charge.
        """
        if granted == 0:
            return 0, 0
        return -(-self.reference_steps * granted // self.steps), self.slack

    def refund(self, granted: int) -> Amounts | None:
        """Return the budget freed if the run ends after `granted` steps; None if unknown yet."""
        if granted == 0:  # nothing was spent
            return self.reserved
        if granted == self.steps or not self.reference_steps:
            return 0, self.return_slack
        if self.is_reference:
            return self.held(granted)
        return None

    def least_refund(self, granted: int) -> Amounts:
        """Return a quick lower bound on the budget freed if the run ends after `granted` steps."""
        known = self.refund(granted)
        return (0, self.return_slack) if known is None else known

    def entry_fields(self) -> Json:
        """Return the cost as ledger-entry fields: reference-mechanism steps, and parts of δ."""
        return {
            "charged_reference_steps": self.reference_steps,
            "slack": self.slack,
            "return_slack": self.return_slack,
        }

    def to_json(self) -> Json:
        """Return the cost as JSON, for storage in a reservation's row."""
        return self.entry_fields() | {"is_reference": self.is_reference}


@dataclass(frozen=True, slots=True)
class ReferenceFilter(PrivacyFilter):
    """A filter that counts a budget in equal steps of one reference mechanism.

    A plan of other steps costs the least number of these reference steps that is found to dominate
    it. A comparison of mechanisms may use up a part of δ, called slack.

    Attributes:
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
        reference: one reference step; None until the first reservation.
        steps: the number of reference steps that the budget is; 0 without a reference.
        is_planned: whether the reference was given when the dataset was created. Otherwise a
            reservation replaces it as long as nothing is spent or held.
        slack_share: the share of δ that all comparisons together may use up.
        epsilons: ε of increasing numbers of reference steps, tabulated for display; empty until the
            reference is reserved. Without it, `epsilon_of` computes ε itself.
    """

    name: ClassVar[str] = "reference"
    epsilon: float
    delta: float
    relation: NeighbouringRelation
    reference: Mechanism | None = None
    steps: int = 0
    is_planned: bool = False
    slack_share: float = SLACK_SHARE
    epsilons: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def from_json(
        cls, stored: Json, epsilon: float, delta: float, relation: NeighbouringRelation
    ) -> ReferenceFilter:
        """Return the filter that a row or an entry stores.

        Raises:
            KeyError, TypeError, ValueError: it records none.
        """
        reference, epsilons = stored["reference"], tuple(stored.get("epsilons", ()))
        if not all(type(each) in (int, float) and math.isfinite(each) for each in epsilons):
            raise TypeError("the table of ε must have finite numbers")
        return cls(
            epsilon,
            delta,
            relation,
            None if reference is None else mechanisms.from_json(reference),
            int(stored["reference_steps"]),
            bool(stored["planned"]),
            float(stored["slack_share"]),
            epsilons,
        )

    @property
    def nothing(self) -> Amounts:
        """The amounts spent without releases: no reference-mechanism step, no part of δ."""
        return 0, 0

    @property
    def description(self) -> str:
        """A sentence that describes the filter."""
        return self.describe("the budget is")

    def describe(self, counted: str) -> str:
        """Return a sentence that describes the filter.

        Args:
            counted: of what the number of reference steps is, as a clause without it.
        """
        if self.reference is None:
            return "reference filter: the first run decides in which steps the budget is counted"
        return (
            f"reference filter: {counted} {self.steps} reference steps "
            f"({self.reference.describe_step()}); any other run is charged as the fewest "
            f"of them that are known to dominate it, for which {100 * self.slack_share:g} % of δ "
            "is set aside"
        )

    @property
    def whole(self) -> Amounts:
        """The reference steps and the units of slack of the whole budget."""
        return self.steps, SLACK_UNITS

    def admits(self, taken: Amounts) -> bool:
        """Return whether the budget covers these reference-mechanism steps and this part of δ."""
        return taken[0] <= self.steps and taken[1] <= SLACK_UNITS

    def share_of(self, taken: Amounts) -> float:
        """Return the fraction of the budget's reference-mechanism steps that is spent or held.

        It is 0 without a reference mechanism, and 1 if the budget has no steps.
        """
        if self.reference is None:
            return 0.0
        return taken[0] / self.steps if self.steps else 1.0

    def fits_share(self, taken: Amounts, reserved: Amounts, share: float) -> bool:
        """Return whether a holder may reserve further steps and slack within a share of each.

        Slack that the holder has used up does not keep it from steps that need none.
        """
        steps, slack = add(taken, reserved)
        return (not reserved[0] or self.share_of((steps, 0)) <= share) and (
            not reserved[1] or slack <= count_units_within(share, SLACK_UNITS)
        )

    def largest_share_of(self, taken: Amounts) -> float:
        """Return the larger of the fractions of the budget's steps and of its slack."""
        steps = self.share_of(taken) if taken[0] else 0.0
        return max(steps, taken[1] / SLACK_UNITS)

    def limit_slack(self, taken: Amounts, share: float, holder_taken: Amounts) -> Amounts:
        """Return the amounts taken, with the slack raised until only a cap's part of it remains."""
        left = count_units_within(share, SLACK_UNITS) - holder_taken[1]
        return taken[0], max(taken[1], SLACK_UNITS - max(left, 0))

    def apply_cap(self, taken: Amounts, share: float, holder_taken: Amounts) -> Amounts:
        """Return the amounts taken, raised until only steps and slack of the cap remain."""
        left = count_units_within(share, self.steps) - holder_taken[0]
        _, slack = self.limit_slack(taken, share, holder_taken)
        return max(taken[0], self.steps - max(left, 0)), slack

    def epsilon_of(self, taken: Amounts) -> float:
        """Return an upper bound on ε, at the budget's δ, of these reference-mechanism steps."""
        if taken[0] <= 0 or self.reference is None:
            return 0.0
        if taken[0] > self.steps:
            return math.inf
        if not self.epsilons:
            return _compute_epsilon(self, taken[0])
        counts = _tabulated_counts(self.steps, len(self.epsilons))
        return self.epsilons[int(np.searchsorted(counts, taken[0]))]

    def compute_epsilon(self, count: int) -> float:
        """Return an upper bound on ε of a number of reference steps, at most the budget's ε."""
        if self.reference is None:
            raise ValueError("the dataset has no reference yet")
        step = Question(charged_form(self.reference), self.relation, adds_curves=False)
        return min(self._epsilon_of_question(step.repeated(count)), self.epsilon)

    def tabulated(self) -> ReferenceFilter:
        """Return a copy with a table of ε by number of reference-mechanism steps, for display."""
        if self.reference is None or self.steps == 0 or self.epsilons or not self.delta:
            return self  # a sum of pure ε needs no table
        step = Question(charged_form(self.reference), self.relation, adds_curves=False)
        points = _EPSILON_POINTS if has_quick_curve(step) else _EPSILON_POINTS_FEW
        try:
            epsilons = _compute_table(self, points)
        except AccountingError:  # the whole budget's ε bounds every number of steps
            epsilons = (self.epsilon,) * points
        return replace(self, epsilons=epsilons)

    def is_table_sound(self) -> bool:
        """Return whether the table of ε states at least what is proved, without a table too.

        A larger ε is a bound as well: an earlier version may have proved less. A smaller one may
        differ by the accuracy of the bounds, the width of the interval that they are the upper end
        of: another machine or version may have computed a narrower interval.

        Raises:
            AccountingError: the proved ε could not be computed, so nothing is known of the table.
        """
        if not self.epsilons:
            return True
        if not self.steps or self.reference is None or len(self.epsilons) not in _TABLE_LENGTHS:
            return False
        if any(type(each) is not float for each in self.epsilons):
            return False
        stated = np.array(self.epsilons)
        if np.any(np.diff(stated) < 0) or stated[-1] > self.epsilon:
            return False
        if stated[0] == self.epsilon:  # the budget's ε bounds any number of steps
            return True
        proved = np.array(_compute_table(self, len(self.epsilons)))
        accuracy = TOLERANCE * np.maximum(proved, EPSILON_NEGLIGIBLE)
        return bool(np.all(stated >= proved - accuracy))

    def compute_table(self, points: int) -> tuple[float, ...]:
        """Return ε of `points` increasing numbers of reference steps, at most the budget's ε.

        Raises:
            AccountingError: ε could not be computed.
        """
        if self.reference is None:
            raise ValueError("the dataset has no reference yet")
        step = Question(charged_form(self.reference), self.relation, adds_curves=False)
        counts = _tabulated_counts(self.steps, points)
        different = sorted(set(counts.tolist()))
        bounds = ACCOUNTANTS["pld"].epsilon_bounds(step, different, self._steps_delta)
        known = dict(zip(different, (each.value for each in bounds), strict=True))
        values = [min(known[each], self.epsilon) for each in counts.tolist()]
        return tuple(np.maximum.accumulate(values).tolist())

    @property
    def _steps_delta(self) -> float:
        """The part of the budget's δ that pays for the reference-mechanism steps."""
        if not self.slack_share:
            return self.delta
        return rounding.down(self.delta * (1 - self.slack_share))

    def _slack_delta(self, units: int) -> float:
        """Convert slack units (parts of the δ kept for comparisons) to a δ, rounded down."""
        return rounding.down(rounding.down(self.delta * self.slack_share) * (units / SLACK_UNITS))

    def _composition(self, step: CanonicalForm, times: int = 1) -> Composition:
        """Return a step's dominating pairs with counts, repeated `times` times.

        Raises:
            AccountingError: no pair is proved for one of its releases.
        """
        question = Question(step, self.relation, adds_curves=False)
        require_proof(question)
        return [(release, count * times) for release, count in dominating_pairs(question)]

    def _reference_composition(self, times: int = 1) -> Composition:
        """Return the reference step's dominating pairs with counts, repeated `times` times."""
        if self.reference is None:
            raise ValueError("the dataset has no reference yet")
        return self._composition(charged_form(self.reference), times)

    def has_step_of(self, plan: StepPlan) -> bool:
        """Return whether a plan's step equals the reference mechanism's step."""
        reference = self.reference
        is_same = reference is not None and charged_form(reference).hash == plan.step.hash
        if is_same and plan.step.premises.has_parts:  # the reference may have no parts
            require_proof(Question(plan.step, self.relation))
        return is_same

    def _is_comparison_exact(self, plan: StepPlan) -> bool:
        """Return whether plan and reference compare exactly: both are unsampled Gaussian."""
        reference = self.reference
        return reference is not None and is_unsampled_gaussian(charged_form(reference), plan.step)

    # --- the reference

    @property
    def reference_part(self) -> ReferenceFilter:
        """This filter."""
        return self

    @property
    def initial(self) -> ReferenceFilter:
        """The filter that the dataset was created with: without the reference of a run."""
        if self.is_planned or self.reference is None:
            return self
        return replace(self, reference=None, steps=0, slack_share=SLACK_SHARE)

    def may_be_replaced(self, taken: Amounts) -> bool:
        """Return whether the next reservation may still set the reference mechanism."""
        return not self.is_planned and not any(taken)

    def after_reserving(self, plan: StepPlan, taken: Amounts) -> ReferenceFilter:
        """Return the filter with a reference mechanism set from the plan, if none is fixed yet.

        Nothing was released then, so the choice of the reference tells nothing.
        """
        if not self.may_be_replaced(taken) or not plan.step.atom_counts:
            return self
        return self.with_reference(plan, is_planned=False)

    def with_reference(self, plan: StepPlan, *, is_planned: bool) -> ReferenceFilter:
        """Return a copy with a reference mechanism derived from a plan, and its number of steps.

        The budget is counted in reference steps from then on. If `is_planned`, the dataset's
        creator chose the reference, and no reservation may replace it.

        Raises:
            UnsuitableReferenceError: the mechanism cannot be a reference.
        """
        if not plan.step.atom_counts:
            raise UnsuitableReferenceError("the mechanism releases nothing: choose another one")
        if not self.delta:
            return self._with_pure_reference(is_planned=is_planned)
        step = choose_reference_step(plan)
        policy = replace(self, slack_share=SLACK_SHARE)
        try:
            steps = policy.count_reference_steps(charged_form(step))
            if isinstance(step, Gaussian):
                step = divide_gaussian_step(step, steps)
                steps = policy.count_reference_steps(charged_form(step))
            elif self._may_reveal_everything(charged_form(step)):
                policy, steps = policy._with_all_steps(charged_form(step), steps)
        except AccountingError as error:
            raise UnsuitableReferenceError(
                f"this mechanism cannot be the reference of a budget: {error.detail}. Create the "
                'dataset with a planned_mechanism that pld accounts for, or with "filter": '
                '"renyi"',
                error.pointer,
            ) from error
        return replace(policy, reference=step, steps=steps, is_planned=is_planned, epsilons=())

    def _with_pure_reference(self, *, is_planned: bool) -> ReferenceFilter:
        """Return a copy that counts pure ε, in parts that are a power of ten."""
        digits = min(math.floor(_PURE_DIGITS - math.log10(self.epsilon)), _PURE_EXPONENT_MAX)
        unit = float(f"1e{-digits}")
        steps = math.floor(rounding.as_written(self.epsilon) / rounding.as_written(unit))
        reference = ApproximateDp(unit, 0.0)
        return replace(self, reference=reference, steps=steps, is_planned=is_planned, epsilons=())

    def _count_pure(self, form: CanonicalForm) -> Fraction | None:
        """Return the pure ε of a mechanism in reference steps; None if it has none."""
        question = Question(form, self.relation, adds_curves=False)
        require_proof(question)
        total = Fraction()
        for each in question.alternatives:
            cost = release_laws.simple_cost(each.release_groups, self.relation)
            if not cost.is_pure:
                return None
            total = max(total, cost.loss.epsilon)
        assert isinstance(self.reference, ApproximateDp)
        return total / rounding.as_written(self.reference.epsilon)

    def _may_reveal_everything(self, step: CanonicalForm) -> bool:
        """Return whether a step has an infinite privacy loss with some probability.

        Raises:
            AccountingError: `pld` cannot account for it.
        """
        question = Question(step, self.relation, adds_curves=False)
        require_proof(question)
        costs = (
            release_laws.simple_cost(each.release_groups, self.relation)
            for each in question.alternatives
        )
        return any(each.loss.delta > 0 for each in costs)

    def _with_all_steps(self, step: CanonicalForm, steps: int) -> tuple[ReferenceFilter, int]:
        """Return a copy with as much slack as leaves all steps that the whole δ admits.

        Args:
            step: the reference step.
            steps: the number of steps that `self` admits.
        """
        whole = replace(self, slack_share=0.0).count_reference_steps(step)
        found, count = self, steps
        for share in _SMALLER_SLACK_SHARES:
            if count == whole:
                break
            found = replace(self, slack_share=share)
            count = found.count_reference_steps(step)
        return found, count

    def count_reference_steps(self, step: CanonicalForm) -> int:
        """Return the most repetitions of a step whose ε is within the budget's."""
        question = Question(step, self.relation, adds_curves=False)

        def log_ratio(count: int) -> float:
            """Return log(ε of `count` steps / the budget's ε), positive if these do not fit."""
            found = self._epsilon_of_question(question.repeated(count))
            if math.isinf(found):
                return math.inf
            ratio = math.log(max(found, 1e-30) / self.epsilon)
            return min(ratio, 0.0) if found <= self.epsilon else max(ratio, 5e-324)

        guess = int(min(max(self._guess_reference_steps(step), 1), COUNT_MAX))
        found = search.find_largest_integer(log_ratio, COUNT_MAX, guess)
        return COUNT_MAX if found is None else found

    def _guess_reference_steps(self, step: CanonicalForm) -> float:
        """Estimate how many repetitions of a step use up the budget's ε."""
        found = 2 * self._count_by_renyi(step)
        if found or self.epsilon <= 0:
            return found
        pairs = self._composition(step)
        return 1.2 * count_by_renyi(pairs, self.epsilon, math.log(self._steps_delta))

    def _count_by_renyi(self, step: CanonicalForm) -> int:
        """Return a quick lower bound on a step's admitted repetitions, by a Rényi filter."""
        try:
            policy = renyi.choose_filter(self.epsilon, self.delta, self.relation, step)
            return policy.count_steps(policy.step_costs(step), policy.nothing) or 0
        except AccountingError:
            return 0

    def _epsilon_of_question(self, question: Question) -> float:
        """Return an upper bound on a composition's ε, at the part of δ kept for steps; it may be ∞.

        Raises:
            AccountingError: `pld` cannot account for it.
        """
        require_proof(question)
        try:
            with report_contradictions(question, f"δ = {self._steps_delta!r}"):
                return ACCOUNTANTS["pld"].epsilon_bound(question, self._steps_delta).value
        except NoFiniteEpsilonError:
            return math.inf

    def allows_replacement(self, other: PrivacyFilter, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether this filter may still change to `other`, with a new reference mechanism.

        That is allowed as long as nothing was released and the reference was not planned.
        """
        return (
            self.may_be_replaced(taken)
            and isinstance(other, ReferenceFilter)
            and other
            == replace(
                self,
                reference=other.reference,
                steps=other.steps,
                slack_share=other.slack_share,
            )
            and other.is_sound()
        )

    def is_sound(self) -> bool:
        """Return whether all steps of the reference mechanism keep within the budget's ε."""
        if self.reference is None or self.steps == 0:
            return self.steps == 0
        question = Question(charged_form(self.reference), self.relation, adds_curves=False)
        found = self._epsilon_of_question(question.repeated(self.steps))
        return found <= self.epsilon * (1 + 1e-9)

    # --- charges

    def compute_charge(self, plan: StepPlan, taken: Amounts) -> ReferenceCharge:
        """Return a plan's cost: the fewest reference-mechanism steps that dominate it.

        A plan that no number of free steps dominates is charged one step more than the budget has,
        which is never admitted.

        Raises:
            ChargeUndecidedError: the time limit ended the computation.
        """
        if not plan.step.atom_counts:
            return ReferenceCharge(plan.steps, 0)
        if self.has_step_of(plan):
            return ReferenceCharge(plan.steps, plan.steps, is_reference=True)
        free, slack = self._remaining(taken)
        if not self.delta:
            pure = self._count_pure(plan.canonical)
            return ReferenceCharge(plan.steps, self.steps + 1 if pure is None else math.ceil(pure))
        if self._is_comparison_exact(plan):
            slack = 0
        block, reference = self._composition(plan.canonical), self._reference_composition()
        with _limit_comparison_time(plan, self.relation):
            found = domination.fewest_repetitions(block, reference, self._slack_delta(slack), free)
            if found is None:
                return ReferenceCharge(plan.steps, self.steps + 1, slack, slack)
            needs_slack = not domination.dominates(self._reference_composition(found), block, 0.0)
        return_slack = slack if plan.steps > 1 else 0  # a single step leaves nothing to give back
        return ReferenceCharge(plan.steps, found, slack if needs_slack else 0, return_slack)

    def _remaining(self, taken: Amounts) -> tuple[int, int]:
        """Return the reference-mechanism steps left, and the units of slack for one comparison."""
        return max(self.steps - taken[0], 0), max(SLACK_UNITS - taken[1], 0) // _SLACK_EACH

    def compute_refund(self, plan: StepPlan, charge: Charge, granted: int) -> Amounts:
        """Return the budget freed: the reference-mechanism steps that ungranted steps dominate.

        It is at most what is held. A comparison that is not decided in time frees nothing.
        """
        assert isinstance(charge, ReferenceCharge)
        known = charge.refund(granted)
        if known is not None:
            return known
        held, _ = charge.held(granted)
        if not self.delta:  # what is spent is at least the ε of the steps granted
            return held, 0
        try:
            with _limit_comparison_time(plan, self.relation):
                found = domination.most_repetitions(
                    self._reference_composition(),
                    self._composition(plan.step, plan.steps - granted),
                    self._slack_delta(charge.return_slack),
                    held,
                )
        except ChargeUndecidedError:
            found = 0
        return (found, 0) if found else charge.least_refund(granted)

    def count_affordable_steps(self, plan: StepPlan, taken: Amounts) -> int | None:
        """Return the most steps of a plan that the remaining reference-mechanism steps dominate.

        None if the steps cost nothing.
        """
        if not plan.step.atom_counts:
            return None
        free, slack = self._remaining(taken)
        if self.has_step_of(plan):
            return free
        if not free:
            return 0
        if not self.delta:
            pure = self._count_pure(plan.step)
            return 0 if pure is None else min(math.floor(free / pure), COUNT_MAX) if pure else None
        with _limit_comparison_time(plan, self.relation):
            return domination.most_repetitions(
                self._composition(plan.step),
                self._reference_composition(free),
                self._slack_delta(slack),
                COUNT_MAX,
            )

    def fits(self, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether the remaining reference-mechanism steps dominate the whole plan."""
        if not plan.step.atom_counts:
            return True
        if not self.delta:
            policy = self.after_reserving(plan, taken)
            pure = policy._count_pure(plan.canonical)
            return pure is not None and pure <= policy.steps - taken[0]
        if self.may_be_replaced(taken):
            question = Question(plan.canonical, self.relation, adds_curves=False)
            has_slack = not self._may_reveal_everything(plan.canonical)
            policy = self if has_slack else replace(self, slack_share=0.0)
            return policy._epsilon_of_question(question) <= self.epsilon
        free, slack = self._remaining(taken)
        if self.has_step_of(plan):
            return plan.steps <= free
        if not free:
            return False
        with _limit_comparison_time(plan, self.relation):
            return domination.dominates(
                self._reference_composition(free),
                self._composition(plan.canonical),
                self._slack_delta(slack),
            )

    # --- the record

    def is_charge_sufficient(self, plan: StepPlan, charge: Charge) -> bool:
        """Return whether the stated reference-mechanism steps dominate the plan."""
        assert isinstance(charge, ReferenceCharge)
        if charge.is_reference:
            return self.has_step_of(plan) and charge.reference_steps >= plan.steps
        if not plan.step.atom_counts:
            return True
        if not self.delta:
            pure = self._count_pure(plan.canonical)
            return pure is not None and charge.reference_steps >= pure
        with _limit_comparison_time(plan, self.relation):
            return charge.reference_steps > 0 and domination.dominates(
                self._reference_composition(charge.reference_steps),
                self._composition(plan.canonical),
                self._slack_delta(charge.slack),
            )

    def is_refund_allowed(
        self, plan: StepPlan, charge: Charge, granted: int, refund: Amounts
    ) -> bool:
        """Return whether the ungranted steps dominate the reference-mechanism steps freed."""
        assert isinstance(charge, ReferenceCharge)
        known = charge.refund(granted)
        steps, slack = refund
        if known is not None or not steps:
            return refund == (known or (0, charge.return_slack))
        if not (0 < steps <= charge.held(granted)[0] and slack == 0):
            return False
        if not self.delta:
            return True
        with _limit_comparison_time(plan, self.relation):
            return domination.dominates(
                self._composition(plan.step, plan.steps - granted),
                self._reference_composition(steps),
                self._slack_delta(charge.return_slack),
            )

    def read_charge(self, plan: StepPlan, fields: Json) -> ReferenceCharge:
        """Return a plan's cost as a ledger entry or a stored row states it."""
        amounts = [fields[name] for name in ("charged_reference_steps", "slack", "return_slack")]
        if any(type(each) is not int or each < 0 for each in amounts):
            raise TypeError(f"a charge has three whole numbers, not {amounts}")
        steps, slack, return_slack = amounts
        is_reference = self.has_step_of(plan) and not slack and not return_slack
        return ReferenceCharge(plan.steps, steps, slack, return_slack, is_reference)

    def balance_fields(self, spent: Amounts, held: Amounts) -> Json:
        """Return the ledger-entry fields for changes of the spent and held amounts."""
        return {
            "spent_reference_steps": spent[0],
            "held_reference_steps": held[0],
            "spent_slack": spent[1],
            "held_slack": held[1],
        }

    def read_balance(self, entry: Json) -> tuple[Amounts, Amounts]:
        """Return the changes of the spent and of the held amounts that a ledger entry states."""
        names = ("spent_reference_steps", "spent_slack", "held_reference_steps", "held_slack")
        values = [entry[name] for name in names]
        if any(type(each) is not int for each in values):
            raise TypeError(f"{names} must be integers, not {values}")
        return (values[0], values[1]), (values[2], values[3])

    def to_json(self) -> Json:
        """Return the reference mechanism, its step count and table of ε as JSON, for storage."""
        return self.entry_fields() | {"epsilons": list(self.epsilons)}

    def entry_fields(self) -> Json:
        """Return the reference mechanism, its step count and slack share as ledger-entry fields.

        Raises:
            ValueError: a number is outside its range; the stack would have more than δ.
        """
        if not 0 <= self.slack_share < 1:
            raise ValueError(f"slack_share must be at least 0 and below 1, not {self.slack_share}")
        if not 0 <= self.steps <= COUNT_MAX:
            raise ValueError(f"reference_steps must be 0 to {COUNT_MAX}, not {self.steps}")
        return {
            "filter": self.name,
            "reference": None if self.reference is None else json_of(self.reference),
            "reference_steps": self.steps,
            "planned": self.is_planned,
            "slack_share": self.slack_share,
        }


def json_of(mechanism: Mechanism) -> Json:
    """Return a mechanism as a JSON object."""
    return mechanisms.to_json(mechanism)


def _limit_comparison_time(
    plan: StepPlan, relation: NeighbouringRelation
) -> AbstractContextManager[None]:
    """Return a context manager that limits a comparison's CPU time; a timeout refuses the plan."""
    return limit_seconds(
        Question(plan.canonical, relation),
        "an exchange",
        "it could not be decided within {} s how many reference steps this plan takes; nothing "
        "was charged. Use fewer different releases, or a mechanism more like the reference",
    )


@lru_cache(maxsize=1024)  # a filter's own table is not compared, so one without it finds this
def _compute_table(policy: ReferenceFilter, points: int) -> tuple[float, ...]:
    """Return a filter's table of ε, computed anew once."""
    return policy.compute_table(points)


@lru_cache(maxsize=4096)  # a dataset without a table is shown often
def _compute_epsilon(policy: ReferenceFilter, count: int) -> float:
    """Return ε of a number of a filter's reference steps, computed once."""
    return policy.compute_epsilon(count)


def _tabulated_counts(steps: int, points: int) -> np.ndarray:
    """Return the step counts at which ε is tabulated, spaced about evenly in ε."""
    fractions = (np.arange(1, points + 1) / points) ** 2  # ε grows like the square root
    return np.minimum(np.ceil(steps * fractions).astype(np.int64), steps)
