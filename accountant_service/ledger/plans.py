"""Plans and what they cost a dataset: charges, quotes and the running total.

Nothing here needs the database. The service makes these calculations before a transaction begins,
in separate processes.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import Assumption, Guarantee, Status, warn_about_delta
from accountant_service.accounting.methods import Question
from accountant_service.accounting.methods.renyi_curves import infinite_mass
from accountant_service.errors import CodedError, NoFiniteEpsilonError, TooExpensiveError
from accountant_service.ledger.errors import (
    ChargeUndecidedError,
    DatasetSizeError,
    UnsuitableReferenceError,
)
from accountant_service.ledger.filters import (
    AdditionFilter,
    EitherFilter,
    LateReferenceFilter,
    PrivacyFilter,
    ReferenceFilter,
    RenyiSumFilter,
    renyi,
)
from accountant_service.ledger.filters.base import Amounts, Charge, add, subtract
from accountant_service.ledger.rules import (
    CapUse,
    Dataset,
    NewDataset,
    Reservation,
    fits_cap,
    require_dataset_open,
)
from accountant_service.ledger.step_plan import StepPlan, charged_form, with_steps
from accountant_service.mechanisms import Composed, DpSgd, Mechanism

_NOISE_MULTIPLIER_MAX: Final = 1e6
_NOISE_MULTIPLIER_MIN: Final = 0.01
NOISE_SECONDS_MAX: Final = 3.0
# relative amounts by which a noise multiplier is raised until a reservation with it fits
_NOISE_EXCESSES: Final = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
_PREVIEW_SECONDS_MAX: Final = 5.0  # after it no further run is begun
_PLAN_BYTES_MAX: Final = 1 << 17
# σ and q of ordinary runs: a new budget is described by how many of their steps it admits
_ORDINARY_RUNS: Final = tuple(
    DpSgd(1.1, sample_rate=sample_rate, steps=1) for sample_rate in (0.001, 0.01, 0.1)
)
_PLANNED_AT_ONCE: Final = Assumption(
    "all runs and their steps granted were planned before any result was seen",
    False,
    "decision 0004",
)


@dataclass(frozen=True, slots=True)
class PlannedCharge:
    """A plan, and its cost in a dataset's budget.

    Attributes:
        mechanism: the plan, as JSON.
        mechanism_hash: its canonical hash.
        charge: of the whole plan.
        policy: the filter under which the charge was computed.
    """

    mechanism: Any
    mechanism_hash: str
    charge: Charge
    policy: PrivacyFilter


@dataclass(frozen=True, slots=True)
class Quote:
    """The cost of a plan, and whether it fits in the remaining budget.

    Attributes:
        fits: True if the whole plan fits.
        affordable_steps: the most steps that fit; None if any number does.
        affordable_alone: the most steps that would fit as the only plan of the whole budget.
        least_noise_multiplier: the least with which all steps fit; None if there is none.
        epsilon_after: the filter's ε after the plan; None if it does not fit.
        share: of the budget that the plan takes; None if it does not fit.
        charged: the plan's cost, in the filter's units; None if it does not fit.
        policy: the filter under which the plan is quoted.
        guarantee: of the plan alone; None if it has no finite ε.
    """

    fits: bool
    affordable_steps: int | None
    affordable_alone: int | None
    least_noise_multiplier: float | None
    epsilon_after: float | None
    share: float | None
    charged: Amounts | None
    policy: PrivacyFilter
    guarantee: Guarantee | None


@dataclass(frozen=True, slots=True)
class AdmittedRun:
    """An example run, and the number of its steps that a new budget covers.

    Attributes:
        step: one step of the run.
        steps: the most steps as the only run of the budget; None if they cannot be charged, or if
            the computation would take too long.
    """

    step: Mechanism
    steps: int | None


@dataclass(frozen=True, slots=True)
class BudgetPreview:
    """Examples of how many steps of typical runs a new budget covers.

    Attributes:
        runs: the planned run, if there is one, and ordinary runs.
        warnings: reasons why the budget may be of no use, each with what to do.
    """

    runs: tuple[AdmittedRun, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReferenceChoice:
    """The reference that an owner chooses, and what fits what is left without and with it.

    Attributes:
        policy: the dataset's filter with that reference.
        before: how many steps fit now.
        after: how many steps of the same runs fit with that reference.
    """

    policy: PrivacyFilter
    before: BudgetPreview
    after: BudgetPreview


@dataclass(frozen=True, slots=True)
class StepsLeft:
    """The number of further steps, like those of an earlier run, that a budget still covers.

    Attributes:
        run: the run's identifier.
        step: one step of the run.
        steps: the most that are known to fit. None means any number if `is_exact`, and otherwise
            that it could not be computed.
        is_exact: whether one more step does not fit.
        run_steps: the number of steps of the whole run.
    """

    run: str
    step: Mechanism
    steps: int | None
    is_exact: bool
    run_steps: int


@dataclass(frozen=True, slots=True)
class PlansTogether:
    """Plans of a combined quote that are charged one after the other, as reservations would be.

    Attributes:
        policy: the dataset's filter after the first plan, which may fix its reference.
        taken: the budget taken by earlier runs and by these plans.
    """

    policy: PrivacyFilter
    taken: Amounts


@dataclass(frozen=True, slots=True)
class CombinedQuote:
    """A quote for several plans that are charged one after the other.

    Attributes:
        fits: True if all of them can be charged and fit.
        epsilon_after: the filter's ε after all of them; None if they do not fit.
    """

    fits: bool
    epsilon_after: float | None


def choose_policy(new: NewDataset) -> PrivacyFilter:
    """Choose the privacy filter of a new dataset.

    Raises:
        CodedError: the planned mechanism cannot be charged, is for another size, or is too large.
    """
    try:
        return _choose_policy(new)
    except CodedError as error:
        error.mechanism_at = "/planned_mechanism"
        raise


def _choose_policy(new: NewDataset) -> PrivacyFilter:
    """Choose the privacy filter of a new dataset, for its planned mechanism if it has one."""
    plan = None
    if new.planned_mechanism is not None:
        plan = _read_plan(new.size, new.planned_mechanism)
    if new.filter == renyi.RenyiFilter.name:
        if plan is not None and not infinite_mass(Question(plan.step, new.relation)):
            # one order is the best mixture for one mechanism
            return renyi.choose_filter(new.epsilon, new.delta, new.relation, plan.step)
        planned = None if plan is None else plan.step
        return RenyiSumFilter.of_budget(new.epsilon, new.delta, new.relation, planned)
    if new.filter == EitherFilter.name:
        part = replace(new, delta=EitherFilter.half(new.delta))
        sides = (_choose_policy(replace(part, filter=name)) for name in EitherFilter.side_names)
        return EitherFilter(new.epsilon, new.delta, new.relation, tuple(sides))
    if new.filter == AdditionFilter.name:
        return AdditionFilter(new.epsilon, new.delta, new.relation)
    if plan is None and new.delta:
        return LateReferenceFilter.of_budget(new.epsilon, new.delta, new.relation)
    policy = ReferenceFilter(new.epsilon, new.delta, new.relation)
    return policy if plan is None else policy.with_reference(plan, is_planned=True).tabulated()


def preview_budget(policy: PrivacyFilter, planned: Mechanism | None = None) -> BudgetPreview:
    """Return how many steps of the planned run, and of typical runs, a new budget covers.

    Args:
        policy: the dataset's filter, from which nothing is taken.
        planned: the mechanism that the filter was chosen for.
    """
    runs = _count_example_runs(policy, policy.nothing, planned)
    warnings = []
    if planned is not None and not runs[0].steps:
        warnings.append(
            f"this budget admits no step of the planned mechanism "
            f"({runs[0].step.describe_step()}): plan more noise or a smaller sample rate, or "
            "create another dataset with a larger budget"
        )
    if not any(each.steps for each in runs):
        warnings.append(_explain_useless_budget(policy, runs))
    return BudgetPreview(runs, tuple(warnings))


def warn_of_size(preview: BudgetPreview, size: int, delta: float) -> BudgetPreview:
    """Return the preview of a new dataset's budget, with a warning if δ is large for its size."""
    warning = warn_about_delta(size, delta)
    return preview if warning is None else replace(preview, warnings=(*preview.warnings, warning))


def choose_reference(dataset: Dataset, mechanism: Mechanism) -> ReferenceChoice:
    """Return the filter with the reference that a dataset's owner chooses, and what fits then.

    Args:
        dataset: as last written.
        mechanism: whose step the reference is.

    Raises:
        CodedError: the dataset is closed or lets its owner choose none, or the mechanism cannot be
            the reference.
    """
    require_dataset_open(dataset)
    plan = _read_plan(dataset.size, mechanism)
    policy, taken = dataset.policy, dataset.balance.taken
    chosen = policy.with_owner_reference(plan, taken).tabulated()
    before, after = (
        BudgetPreview(_count_example_runs(each, taken, mechanism)) for each in (policy, chosen)
    )
    fits_now, fits_then = (any(run.steps for run in each.runs[1:]) for each in (before, after))
    if fits_now and not fits_then:
        raise UnsuitableReferenceError(
            "its steps dominate no ordinary run (σ = 1.1, q from 0.001 to 0.1), so none would fit "
            "any more: name a mechanism like that of a training run"
        )
    return ReferenceChoice(chosen, before, after)


@lru_cache(maxsize=256)
def _count_example_runs(
    policy: PrivacyFilter, taken: Amounts, planned: Mechanism | None
) -> tuple[AdmittedRun, ...]:
    """Return the most steps of a planned run, and of ordinary runs, that what is left covers.

    A count is None if the steps cannot be charged, or if it is not known in time.
    """
    deadline = time.monotonic() + _PREVIEW_SECONDS_MAX
    steps = (() if planned is None else (StepPlan.of(planned).step_mechanism,)) + _ORDINARY_RUNS
    return tuple(
        AdmittedRun(each, _count_admitted_steps(policy, taken, each, deadline)) for each in steps
    )


def _count_admitted_steps(
    policy: PrivacyFilter, taken: Amounts, step: Mechanism, deadline: float
) -> int | None:
    """Return the most steps that the rest of a budget covers; None if that is not known in time.

    The steps cannot be charged then, or the deadline has passed.
    """
    if time.monotonic() > deadline:
        return None
    plan = StepPlan.of(step)
    try:
        return policy.after_reserving(plan, taken).count_affordable_steps(plan, taken)
    except CodedError:
        return None


def _explain_useless_budget(policy: PrivacyFilter, runs: Sequence[AdmittedRun]) -> str:
    """Return advice for a budget that covers no step of any example run."""
    other = "renyi" if policy.name == ReferenceFilter.name else ReferenceFilter.name
    if any(each.steps is None for each in runs):
        return (
            f"this filter cannot charge ordinary runs under {policy.relation.value}: create "
            f'another dataset with "filter": "{other}", or quote your own run first'
        )
    way_out = "create another dataset with a larger ε or δ"
    if policy.name != ReferenceFilter.name:
        way_out += f', or with "filter": "{other}", which admits more of small budgets'
    return (
        "this budget admits no step of ordinary runs (σ = 1.1, q from 0.001 to 0.1): use more "
        f"noise, or {way_out}"
    )


def count_steps_left(dataset: Dataset, run: Reservation, *, allow_slow: bool = True) -> StepsLeft:
    """Return how many more steps like those of a run fit the remaining budget.

    Args:
        dataset: the run's.
        run: a reservation.
        allow_slow: whether to count steps other than the reference step, which takes seconds.
    """
    plan, taken = StepPlan.of(mechanisms.from_json(run.mechanism)), dataset.balance.taken
    unknown = StepsLeft(run.identifier, plan.step_mechanism, None, False, run.steps_reserved)
    is_exact = _is_counted_directly(dataset.policy, plan)
    if not (is_exact or allow_slow):
        return unknown
    try:
        policy = dataset.policy.after_reserving(plan, taken)
        return replace(unknown, steps=policy.count_affordable_steps(plan, taken), is_exact=is_exact)
    except CodedError:
        return unknown


def _is_counted_directly(policy: PrivacyFilter, plan: StepPlan) -> bool:
    """Return whether a filter counts a plan's steps without comparing two mechanisms."""
    if policy.reference_part is None or not plan.step.atom_counts:
        return True
    reference = policy.reference_part.reference
    return reference is not None and charged_form(reference).hash == plan.step.hash


def compute_charge(
    dataset: Dataset,
    mechanism: Mechanism,
    caps: Sequence[CapUse] = (),
    records: int | None = None,
) -> PlannedCharge:
    """Compute the cost of a plan in a dataset's budget, without storing anything.

    Args:
        dataset: as last written.
        mechanism: the plan.
        caps: of the key and team that ask, which limit the slack of the plan's exchange.
        records: the number that the plan is for; the dataset's, unless it is on several.

    Raises:
        CodedError: the dataset is closed, or the plan cannot be charged, is for another number of
            records, or is too large to be stored and repeated in every answer.
    """
    require_dataset_open(dataset)
    plan = _read_plan(dataset.size if records is None else records, mechanism)
    taken = dataset.balance.taken
    policy = dataset.policy.after_reserving(plan, taken)
    charge = _compute_capped_charge(policy, plan, taken, caps)
    described = mechanisms.to_json(plan.mechanism)
    return PlannedCharge(described, plan.canonical.hash, charge, policy.tabulated())


def state_of(dataset: Dataset, caps: Sequence[CapUse] = ()) -> Hashable:
    """Return all that a charge or a quote of a plan depends on, besides the plan.

    The datasets of a series that were not used yet have one state: what is computed for one of
    them holds for all.
    """
    return dataset.policy, dataset.balance.taken, dataset.closed_at, tuple(caps)


def _compute_capped_charge(
    policy: PrivacyFilter, plan: StepPlan, taken: Amounts, caps: Sequence[CapUse]
) -> Charge:
    """Return a plan's cost, with no more slack than an equal part of what the caps leave.

    If the plan does not fit with so little, its cost without caps is returned: the caps, and not
    the budget, then refuse it.
    """
    limited = taken
    for use in caps:
        limited = policy.limit_slack(limited, use.cap.share, use.taken)
    charge = policy.compute_charge(plan, limited)
    if limited != taken and not policy.admits(add(taken, charge.reserved)):
        return policy.compute_charge(plan, taken)
    return charge


def compute_refund(policy: PrivacyFilter, run: Reservation) -> Amounts:
    """Return the budget that a reservation frees if it ends now."""
    if run.refund_if_ended is not None:
        return run.refund_if_ended
    plan = StepPlan.of(mechanisms.from_json(run.mechanism))
    return policy.compute_refund(plan, run.charge, run.steps_granted)


def quote_plan(
    dataset: Dataset,
    mechanism: Mechanism,
    caps: Sequence[CapUse] = (),
    noise_seconds: float = NOISE_SECONDS_MAX,
    records: int | None = None,
) -> Quote:
    """Return a quote: whether a plan fits a budget, and the largest part of it that would fit.

    Args:
        dataset: as last written.
        mechanism: the plan.
        caps: of the key and team that ask.
        noise_seconds: CPU time for the search for the least noise multiplier.
        records: the number that the plan is for; the dataset's, unless it is on several.

    Raises:
        CodedError: the dataset is closed, or the plan is for another number of records or too
            large to be reserved.
    """
    require_dataset_open(dataset)
    plan = _read_plan(dataset.size if records is None else records, mechanism)
    taken = dataset.balance.taken
    policy = dataset.policy.after_reserving(plan, taken)
    charged = _compute_fitting_cost(policy, plan, taken, caps)
    fits = charged is not None
    try:
        guarantee = calculator.prove_epsilon(plan.mechanism, policy.relation, policy.delta)
    except NoFiniteEpsilonError:  # the plan does not fit; the question itself is valid
        guarantee = None
    return Quote(
        fits,
        _count_steps_in_time(policy, plan, taken, caps),
        _count_steps_in_time(policy, plan, policy.nothing),
        find_least_noise_multiplier(dataset, mechanism, caps, noise_seconds),
        None if charged is None else policy.epsilon_of(add(taken, charged)),
        None if charged is None else policy.share_of(charged),
        charged,
        policy,
        guarantee,
    )


def _compute_fitting_cost(
    policy: PrivacyFilter, plan: StepPlan, taken: Amounts, caps: Sequence[CapUse]
) -> Amounts | None:
    """Return a plan's cost; None if it does not fit, or cannot be computed in time."""
    try:
        reserved = _compute_capped_charge(policy, plan, taken, caps).reserved
    except ChargeUndecidedError:
        return None
    fits = policy.admits(add(taken, reserved)) and all(
        fits_cap(policy, use, reserved) for use in caps
    )
    return reserved if fits else None


def _count_steps_in_time(
    policy: PrivacyFilter, plan: StepPlan, taken: Amounts, caps: Sequence[CapUse] = ()
) -> int | None:
    """Return the most steps proved affordable before the time limit; None if steps are free."""
    try:
        found = policy.count_affordable_steps(plan, _apply_caps(policy, taken, caps))
    except ChargeUndecidedError:
        return 0
    if not found:
        return found
    if caps and not policy.has_scalar_caps:
        found = bisect.bisect_left(
            range(1, found + 1), True,
            key=lambda steps: not _fits_caps(policy, plan.with_steps(steps), taken, caps),
        )  # fmt: skip
    return _reduce_to_reservable(policy, plan, found, taken, caps)


def _reduce_to_reservable(
    policy: PrivacyFilter, plan: StepPlan, steps: int, taken: Amounts, caps: Sequence[CapUse]
) -> int:
    """Return a number of steps, at most `steps`, whose charge as a reservation fits."""
    if not steps or _is_counted_directly(policy, plan):
        return steps
    for fewer in (0, 1, steps >> 10, steps >> 6, steps >> 3, steps >> 1):
        part = plan.with_steps(max(steps - fewer, 1))
        try:
            chosen = policy.after_reserving(part, taken)
        except UnsuitableReferenceError:
            continue
        if _compute_fitting_cost(chosen, part, taken, caps) is not None:
            return part.steps
    return 0


def _fits_caps(
    policy: PrivacyFilter, plan: StepPlan, taken: Amounts, caps: Sequence[CapUse]
) -> bool:
    """Return whether a plan fits under every cap."""
    charged = policy.compute_charge(plan, taken).reserved
    return all(fits_cap(policy, use, charged) for use in caps)


def _apply_caps(policy: PrivacyFilter, taken: Amounts, caps: Sequence[CapUse]) -> Amounts:
    """Return the amounts taken, raised until no more remains than all caps allow."""
    for use in caps:
        taken = policy.apply_cap(taken, use.cap.share, use.taken)
    return taken


def charge_next(
    dataset: Dataset,
    mechanism: Mechanism,
    before: PlansTogether | None = None,
    caps: Sequence[CapUse] = (),
) -> PlansTogether:
    """Charge a plan after others of a combined quote, without storing anything.

    Args:
        dataset: as last written.
        mechanism: the plan. If it is the first, it may fix the dataset's reference, under which
            the others are charged.
        before: the plans before it; None if it is the first.
        caps: of the key and team that ask.

    Raises:
        CodedError: the plan cannot be charged, is for another number of records, or is too large.
    """
    plan = _read_plan(dataset.size, mechanism)
    before = before or PlansTogether(dataset.policy, dataset.balance.taken)
    policy = before.policy.after_reserving(plan, before.taken)
    earlier = subtract(before.taken, dataset.balance.taken)
    uses = [replace(use, taken=add(use.taken, earlier)) for use in caps]
    charge = _compute_capped_charge(policy, plan, before.taken, uses)
    return PlansTogether(policy, add(before.taken, charge.reserved))


def combine_quotes(
    dataset: Dataset, together: PlansTogether, caps: Sequence[CapUse] = ()
) -> CombinedQuote:
    """Return whether plans that were charged one after the other fit the budget and the caps."""
    policy, taken = together.policy, together.taken
    charged = subtract(taken, dataset.balance.taken)
    fits = policy.admits(taken) and all(fits_cap(policy, use, charged) for use in caps)
    return CombinedQuote(fits, policy.epsilon_of(taken) if fits else None)


def find_affordable(
    dataset: Dataset, mechanism: Mechanism, caps: Sequence[CapUse] = ()
) -> tuple[int | None, float | None]:
    """Return the most steps of a plan that fit, and the least noise with which all steps fit.

    Both are within the budget and within the caps of the key and team that ask.

    The steps are None if any number fits. The noise multiplier is None if no noise is enough, or
    if the plan does not have exactly one noise multiplier.
    """
    plan, taken = StepPlan.of(mechanism), dataset.balance.taken
    policy = dataset.policy.after_reserving(plan, taken)
    steps = _count_steps_in_time(policy, plan, taken, caps)
    return steps, find_least_noise_multiplier(dataset, mechanism, caps)


def fit_all(
    found: Sequence[tuple[int | None, float | None]],
) -> tuple[int | None, float | None]:
    """Return the steps and the noise of a plan that fit several budgets, given those of each."""
    steps = [each for each, _ in found if each is not None]
    noise = [each for _, each in found if each is not None]
    return min(steps, default=None), max(noise) if len(noise) == len(found) else None


def find_least_noise_multiplier(
    dataset: Dataset,
    run: Mechanism,
    caps: Sequence[CapUse] = (),
    seconds: float = NOISE_SECONDS_MAX,
) -> float | None:
    """Find the least noise multiplier with which a DP-SGD run fits the budget, or None.

    It is rounded up to four digits, or less precisely where the time does not suffice. A
    reservation with it fits, as long as the dataset and the caps do not change.
    """
    if not isinstance(run, DpSgd) or run.sampling == "shuffled":
        return None
    deadline = time.process_time() + seconds
    high = _search_least_noise(dataset, run, caps, deadline)
    for excess in _NOISE_EXCESSES:
        if high is None or high * (1 + excess) > _NOISE_MULTIPLIER_MAX:
            return None
        noise_multiplier = high * (1 + excess)
        if _is_reservable(dataset, replace(run, noise_multiplier=noise_multiplier), caps):
            return noise_multiplier
        if time.process_time() > deadline + seconds:
            return None
    return None


def _is_reservable(dataset: Dataset, mechanism: Mechanism, caps: Sequence[CapUse]) -> bool:
    """Return whether a plan fits, by the same computation as for a reservation.

    `PrivacyFilter.fits` is faster, and may differ by one reference step: of Gaussian noise on the
    whole dataset, for instance, a run may fit the budget that is no whole number of these.
    """
    plan, taken = StepPlan.of(mechanism), dataset.balance.taken
    try:
        policy = dataset.policy.after_reserving(plan, taken)
        return _compute_fitting_cost(policy, plan, taken, caps) is not None
    except UnsuitableReferenceError:
        return False


def _search_least_noise(
    dataset: Dataset, run: DpSgd, caps: Sequence[CapUse], deadline: float
) -> float | None:
    """Find the least noise multiplier with which a run fits by `PrivacyFilter.fits`, or None.

    Args:
        dataset: as last written.
        run: the plan.
        caps: of the key and team that ask.
        deadline: of the process's CPU time.
    """

    def fits(noise_multiplier: float) -> bool:
        """Return whether all steps fit with this noise multiplier."""
        plan = StepPlan.of(replace(run, noise_multiplier=noise_multiplier))
        policy, taken = dataset.policy, dataset.balance.taken
        try:
            if caps:  # a share of the budget is one of steps of the reference that this plan fixes
                policy = policy.after_reserving(plan, taken)
                taken = _apply_caps(policy, taken, caps)
            return policy.fits(plan, taken) and (
                policy.has_scalar_caps or _fits_caps(policy, plan, taken, caps)
            )
        except (ChargeUndecidedError, UnsuitableReferenceError):
            return False

    high = run.noise_multiplier
    while not fits(high):
        if high >= _NOISE_MULTIPLIER_MAX or time.process_time() > deadline:
            return None
        high = min(2 * high, _NOISE_MULTIPLIER_MAX)
    low = max(high / 2, _NOISE_MULTIPLIER_MIN)
    while low > _NOISE_MULTIPLIER_MIN and fits(low) and time.process_time() < deadline:
        high, low = low, max(low / 2, _NOISE_MULTIPLIER_MIN)
    while high > low * (1 + 1e-4) and time.process_time() < deadline:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def estimate_running_total(policy: PrivacyFilter, runs: Sequence[Reservation]) -> Guarantee:
    """Estimate the guarantee of all granted steps, as if they were one plan fixed in advance.

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


def _read_plan(records: int, mechanism: Mechanism) -> StepPlan:
    """Return a mechanism as a plan in steps, which a dataset can store.

    Raises:
        CodedError: it states a number of records other than `records`, or is too large to be
            stored and repeated in every answer.
    """
    _require_dataset_size(records, mechanism)
    plan = StepPlan.of(mechanism)
    size = len(json.dumps(mechanisms.to_json(plan.mechanism)))
    if size > _PLAN_BYTES_MAX:
        raise TooExpensiveError(
            f"a plan of the ledger may have {_PLAN_BYTES_MAX} bytes as JSON, and this one has "
            f"{size}: put equal releases into one `repeated`, or reserve it in parts",
            "",
        )
    return plan


def _require_dataset_size(records: int, mechanism: Mechanism) -> None:
    """Raise `DatasetSizeError` if a mechanism states a number of records other than `records`."""
    for each in mechanisms.find_dataset_size_mismatches(records, mechanism):
        name = each.pointer.rpartition("/")[2]
        reason = (
            "each record makes at most one report"
            if name == "reports"
            else "the sample rate is the batch size divided by the number of records"
        )
        raise DatasetSizeError(
            f"{name} is {each.stated}, but there are {each.records} records: {reason}",
            each.pointer,
        )
