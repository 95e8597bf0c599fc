"""Plans and what they cost a dataset: steps, charges, quotes and the running total.

Nothing here needs the database. The service makes these calculations before a transaction begins,
in separate processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from accountant_service import calculator, mechanisms
from accountant_service.errors import CodedError, NoFiniteEpsilonError, TooExpensiveError
from accountant_service.guarantee import Assumption, Guarantee, Status
from accountant_service.ledger import privacy_filter, rules
from accountant_service.ledger.errors import DatasetSizeError
from accountant_service.ledger.privacy_filter import RenyiFilter
from accountant_service.ledger.rules import Dataset, NewDataset, Reservation
from accountant_service.mechanisms import (
    CanonicalForm,
    Composed,
    DpSgd,
    Mechanism,
    Repeated,
    canonical_form,
)

_NOISE_MULTIPLIER_MAX: Final = 1e6
_PLAN_BYTES_MAX: Final = 1 << 17
_PLANNED_AT_ONCE: Final = Assumption(
    "all runs and their steps granted were planned before any result was seen",
    False,
    "decision 0004",
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A mechanism divided into equal steps, which are granted and charged one by one.

    Attributes:
        mechanism: all steps together.
        step: one step, in canonical form.
        steps: the number of steps; 1 for a mechanism that repeats nothing.
        canonical: all steps together, in canonical form.
    """

    mechanism: Mechanism
    step: CanonicalForm
    steps: int
    canonical: CanonicalForm

    @classmethod
    def of(cls, mechanism: Mechanism) -> StepPlan:
        """Divide a mechanism into its steps."""
        canonical = canonical_form(mechanism)
        match mechanism:
            case DpSgd() if mechanism.sampling != "shuffled" and mechanism.step_count() > 0:
                step: Mechanism = replace(mechanism, steps=1, epochs=None)
                return cls(mechanism, canonical_form(step), mechanism.step_count(), canonical)
            case Repeated(count, inner) if count > 0:
                return cls(mechanism, canonical_form(inner), count, canonical)
            case _:
                return cls(mechanism, canonical, 1, canonical)


@dataclass(frozen=True, slots=True)
class Charge:
    """The cost of a plan under one dataset's policy.

    Attributes:
        mechanism: the plan, as JSON.
        mechanism_hash: its canonical hash.
        step_cost: atto-nats of one step.
        steps: the number of steps.
    """

    mechanism: Any
    mechanism_hash: str
    step_cost: int
    steps: int


@dataclass(frozen=True, slots=True)
class Quote:
    """The cost of a plan, and whether it fits in the remaining budget.

    Attributes:
        fits: True if the whole plan fits.
        affordable_steps: the most steps that fit; None if any number does.
        least_noise_multiplier: the least with which all steps fit; None if there is none.
        epsilon_after: the filter's ε after the plan.
        micronats: the plan's cost.
        guarantee: of the plan alone; None if it has no finite ε.
    """

    fits: bool
    affordable_steps: int | None
    least_noise_multiplier: float | None
    epsilon_after: float
    micronats: int
    guarantee: Guarantee | None


@dataclass(frozen=True, slots=True)
class CombinedQuote:
    """A quote for several plans, charged one after the other.

    Attributes:
        fits: True if all of them can be charged and fit.
        epsilon_after: the filter's ε after all of them; None if one cannot be charged.
    """

    fits: bool
    epsilon_after: float | None


def choose_policy(new: NewDataset) -> RenyiFilter:
    """Choose the Rényi filter that is a new dataset's accounting policy.

    Raises:
        CodedError: the planned mechanism cannot be charged, or is for another size.
    """
    step = None
    if new.planned_mechanism is not None:
        _require_dataset_size(new.size, new.planned_mechanism, "/planned_mechanism")
        step = StepPlan.of(new.planned_mechanism).step
    return privacy_filter.choose_filter(new.epsilon, new.delta, new.relation, step)


def compute_charge(dataset: Dataset, mechanism: Mechanism) -> Charge:
    """Compute the charge of a plan.

    Raises:
        CodedError: the plan cannot be charged, is for another number of records, or is too large
            to be stored and repeated in every answer.
    """
    _require_dataset_size(dataset.size, mechanism)
    plan = StepPlan.of(mechanism)
    described = mechanisms.to_json(plan.mechanism)
    size = len(json.dumps(described))
    if size > _PLAN_BYTES_MAX:
        raise TooExpensiveError(
            f"a reserved plan may have {_PLAN_BYTES_MAX} bytes as JSON, and this one has "
            f"{size}: put equal releases into one `repeated`, or reserve it in parts"
        )
    step_cost = dataset.policy.step_cost(plan.step)
    return Charge(described, plan.canonical.hash, step_cost, plan.steps)


def quote_plan(dataset: Dataset, mechanism: Mechanism) -> Quote:
    """Return whether a plan fits, and the largest part of it that does."""
    _require_dataset_size(dataset.size, mechanism)
    plan, policy = StepPlan.of(mechanism), dataset.policy
    step_cost = policy.step_cost(plan.step)
    micronats = privacy_filter.compute_cost(step_cost, plan.steps)
    steps, noise_multiplier = find_affordable(dataset, mechanism, step_cost, plan.steps)
    try:
        guarantee = calculator.prove_epsilon(plan.mechanism, policy.relation, policy.delta)
    except NoFiniteEpsilonError:  # the plan does not fit; the question itself is valid
        guarantee = None
    return Quote(
        rules.fits_budget(dataset, step_cost, plan.steps),
        steps,
        noise_multiplier,
        policy.epsilon_of(dataset.balance.taken + micronats),
        micronats,
        guarantee,
    )


def combine_quotes(dataset: Dataset, quotes: Sequence[Quote | CodedError]) -> CombinedQuote:
    """Return whether all plans fit, one after the other."""
    costs = [each.micronats for each in quotes if isinstance(each, Quote)]
    total = dataset.balance.taken + sum(costs)
    if len(costs) < len(quotes):
        return CombinedQuote(False, None)
    return CombinedQuote(total <= dataset.policy.budget, dataset.policy.epsilon_of(total))


def find_affordable(
    dataset: Dataset, mechanism: Mechanism, step_cost: int, steps: int
) -> tuple[int | None, float | None]:
    """Return the most steps of a plan that fit, and the least noise with which all steps fit.

    The steps are None if any number fits. The noise multiplier is None if no noise is enough, or
    if the plan does not have exactly one noise multiplier.
    """
    micronats = rules.remaining_micronats(dataset)
    affordable = privacy_filter.count_affordable_steps(step_cost, micronats)
    return affordable, _find_least_noise_multiplier(dataset.policy, mechanism, steps, micronats)


def _find_least_noise_multiplier(
    policy: RenyiFilter, run: Mechanism, steps: int, micronats: int
) -> float | None:
    """Bisect for the least noise multiplier with which all steps of a `dp_sgd` run fit.

    It is rounded up to four digits.
    """
    if not isinstance(run, DpSgd) or run.sampling == "shuffled":
        return None
    one_step = replace(run, steps=1, epochs=None)

    def fits(noise_multiplier: float) -> bool:
        step = canonical_form(replace(one_step, noise_multiplier=noise_multiplier))
        return privacy_filter.compute_cost(policy.step_cost(step), steps) <= micronats

    low, high = 0.01, _NOISE_MULTIPLIER_MAX
    if not fits(high):
        return None
    while high > low * (1 + 1e-4):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def estimate_running_total(policy: RenyiFilter, runs: Sequence[Reservation]) -> Guarantee:
    """Account for all steps granted so far as if they had been one plan.

    The result is an estimate: runs are chosen, and stopped, after results were seen. The budget's
    claim is the proven one.
    """
    granted = tuple(
        with_steps(mechanisms.from_json(run.mechanism), run.steps_granted) for run in runs
    )
    found = calculator.prove_epsilon(Composed(granted), policy.relation, policy.delta)
    return replace(
        found,
        status=Status.ESTIMATE,
        assumptions=(*found.assumptions, _PLANNED_AT_ONCE),
        certified=None,
        certified_reason=f"a hypothesis fails: {_PLANNED_AT_ONCE.statement}",
    )


def with_steps(mechanism: Mechanism, steps: int) -> Mechanism:
    """Return a plan with another number of steps; a plan that releases nothing is unchanged."""
    if not canonical_form(mechanism).atom_counts:
        return mechanism
    match mechanism:
        case DpSgd():
            return replace(mechanism, steps=steps, epochs=None)
        case Repeated():
            return replace(mechanism, count=steps)
        case _:
            return Repeated(steps, mechanism)


def _require_dataset_size(
    records: int, mechanism: Mechanism, mechanism_at: str = "/mechanism"
) -> None:
    """Refuse a mechanism for another number of records, since its sample rate would differ."""
    for pointer, size in mechanisms.find_dataset_size_mismatches(records, mechanism):
        error = DatasetSizeError(
            f"dataset_size is {size}, but this dataset has {records} records: the sample rate is "
            "the batch size divided by the number of records",
            pointer,
        )
        error.mechanism_at = mechanism_at
        raise error
