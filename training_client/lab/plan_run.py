"""Plan a run without its data: find its noise multiplier, and plan or reserve its budget.

A run may release something before its first step (its initial releases, such as a PCA). Without a
ledger everything is one composition within the run's (ε, δ). With a ledger, the dataset holds one
reservation for each initial release and one for the steps, or with scheduled noise one for each
phase of equal noise; nothing is granted until all are held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training_client.budget import (
    RELEASE_PATIENCE_SECONDS,
    Budget,
    LedgerBudget,
    read_grants,
    require_granted,
    require_recorded_grants,
)
from training_client.client import AccountingService, Quote, Reservation
from training_client.errors import BudgetExhaustedError, DataError, TrainingStoppedError
from training_client.lab.checkpoint import Checkpoint
from training_client.lab.number_format import format_upper_bound
from training_client.lab.recipe import Recipe
from training_client.lab.schedules import parse_schedule
from training_client.phased_budget import ChargedBudget, PhasedLedgerBudget
from training_client.plan import BALLS_IN_BINS, POISSON, Mechanism, Plan, Schedule, compose

Notify = Callable[[str], None]
_PURPOSE = "accountant-train"
_DOUBLINGS_MAX = 20
_NOISE_TOLERANCE = 1.001  # the search ends when the bounds differ by this factor
_PHASES_NOISE_STEP = 1.1  # by which σ is raised until all phases of scheduled noise fit a ledger
_PHASES_NOISE_TOLERANCE = 1.02  # of σ where that begins
_PHASES_ATTEMPTS_MAX = 10


@dataclass(frozen=True, slots=True)
class RunSpec:
    """A run's specification without its noise multiplier, which is chosen later.

    Attributes:
        size: the number of private records.
        sample_rate: q.
        clip_norm: C.
        steps: the number of steps to make.
        initial_releases: mechanisms that run before the first step.
        public: the number of records of the same data that are given up as public.
        sampling: how batches are drawn, as in `Plan`.
        schedules: texts of schedules (see `schedules`), by the names of the plan's attributes.
    """

    size: int
    sample_rate: float
    clip_norm: float
    steps: int
    initial_releases: tuple[Mechanism, ...] = ()
    public: int = 0
    sampling: str = POISSON
    schedules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an expected batch larger than the data set, and schedules longer than the run."""
        if self.sample_rate > 1:
            raise DataError(
                f"--batch-size {self.sample_rate * self.size:g} is more than {self.size} records: "
                "lower it"
            )
        for name in self.schedules:
            self._require_fitting_schedule(name)

    def _require_fitting_schedule(self, name: str) -> None:
        """Raise if a schedule has more steps than the run, or noise that changes in an epoch."""
        option, pieces = f"--{name.replace('_', '-')}", self._schedule(name).pieces
        named = sum(steps for steps, _ in pieces)
        if named > self.steps:
            raise DataError(
                f"{option} names {named} steps, and the run has {self.steps}: shorten it, or raise "
                "--steps"
            )
        epoch = self._steps_per_charge
        if name == "noise_schedule" and any(steps % epoch for steps, _ in pieces[:-1]):
            raise DataError(
                f"{option} {self.schedules[name]} changes the noise within an epoch, which has "
                f"{epoch} steps and one noise multiplier: use multiples of {epoch} steps"
            )

    @property
    def _steps_per_charge(self) -> int:
        """The number of steps paid for together: an epoch for balls-in-bins sampling."""
        return round(1 / self.sample_rate) if self.sampling == BALLS_IN_BINS else 1

    def _schedule(self, name: str) -> Schedule:
        """Return the run's schedule of this name; a noise curve changes only between charges."""
        level = self._steps_per_charge if name == "noise_schedule" else 1
        return parse_schedule(name, self.schedules[name], self.steps, level)

    @property
    def noise_note(self) -> str:
        """A phrase to append after σ: that --noise-schedule multiplies it; empty if it does not."""
        return ", times the factors of --noise-schedule" if self.changes_noise else ""

    @property
    def changes_noise(self) -> bool:
        """Return whether the noise changes from step to step."""
        return "noise_schedule" in self.schedules

    @classmethod
    def from_recipe(
        cls,
        recipe: Recipe,
        batch_size: int,
        clip_norm: float,
        steps: int,
        sampling: str = POISSON,
        schedules: Mapping[str, str] | None = None,
    ) -> RunSpec:
        """Make the specification of a configured run with an expected batch size.

        Balls-in-bins sampling has ⌈N/B⌉ batches in an epoch; `steps` are rounded up to epochs.
        """
        size, releases = recipe.private_size, recipe.initial_releases
        public = recipe.size - size
        if sampling == BALLS_IN_BINS and batch_size <= size:
            bins = math.ceil(size / batch_size)
            steps = bins * math.ceil(steps / bins)
            rate = 1 / bins
        else:
            rate = batch_size / size
        return cls(size, rate, clip_norm, steps, releases, public, sampling, schedules or {})

    def plan(self, noise_multiplier: float) -> Plan:
        """Return the plan of the run with this noise multiplier."""
        schedules: dict[str, Any] = {name: self._schedule(name) for name in self.schedules}
        plan = Plan(self.size, self.sample_rate, self.clip_norm, noise_multiplier, self.sampling)
        return replace(plan, **schedules)

    def announce_epochs(self, notify: Notify) -> None:
        """Tell the user how balls-in-bins sampling divides the run into epochs."""
        if self.sampling == BALLS_IN_BINS:
            bins = self.plan(1.0).steps_per_charge
            notify(
                f"Balls-in-bins sampling: {self.steps} steps are {self.steps // bins} epochs of "
                f"{bins} batches, of {self.size / bins:g} records on average"
            )


def plan_budget(
    accounting: AccountingService,
    spec: RunSpec,
    epsilon: float,
    delta: float,
    notify: Notify,
    noise: float | None = None,
) -> Budget:
    """Choose a run's noise for its own budget (ε, δ), without a ledger.

    Args:
        accounting: the accounting service.
        spec: the run.
        epsilon: the ε that the run may spend.
        delta: the δ of the budget.
        notify: called with messages for the user.
        noise: σ; by default the smallest that fits. With a smaller σ the run ends early, and the
            user is told.

    Raises:
        BudgetExhaustedError: the run does not fit, or not even its first step with this noise.
    """
    sigma = noise
    if sigma is None:
        sigma = _find_noise(accounting, spec, epsilon, delta)
        notify(
            f"Budget ε = {epsilon:g} at δ = {format_upper_bound(delta)}: {spec.steps} steps at q = "
            f"{spec.sample_rate:g} need noise multiplier σ = {format_upper_bound(sigma)}"
            f"{spec.noise_note}"
        )
    if delta >= 1 / spec.size:
        notify(
            f"Note: δ = {format_upper_bound(delta)} is not less than 1/{spec.size}, "
            "one over the number of records: "
            "a mechanism that publishes one whole record could satisfy it"
        )
    budget = Budget(
        accounting, spec.plan(sigma), epsilon, delta, before=spec.initial_releases, steps=spec.steps
    )
    if noise is None:
        budget.begin()  # fail now, before any data is read
        return budget
    spent = budget.planned_guarantee(spec.steps).epsilon
    if spent <= epsilon:
        notify(
            f"{spec.steps} steps at q = {spec.sample_rate:g} with σ = {noise:g}{spec.noise_note} "
            f"take ε = {format_upper_bound(spent)} of {epsilon:g} at δ = "
            f"{format_upper_bound(delta)}"
        )
        return budget
    hint = ""
    with suppress(TrainingStoppedError):  # no noise may be enough
        needed = _find_noise(accounting, spec, epsilon, delta)
        hint = f"; all would with σ = {format_upper_bound(needed)}"
    try:
        budget.begin()
    except BudgetExhaustedError as error:
        raise BudgetExhaustedError(f"{error} of {spec.steps}{hint}") from None
    notify(
        f"Note: with σ = {noise:g} not all {spec.steps} steps fit ε = {epsilon:g} at δ = "
        f"{format_upper_bound(delta)}, and the run ends with the last that does{hint}"
    )
    return budget


def _find_noise(
    accounting: AccountingService, spec: RunSpec, epsilon: float, delta: float
) -> float:
    """Return the smallest noise multiplier with which the whole run fits (ε, δ)."""
    alone = accounting.noise_multiplier(
        sample_rate=spec.sample_rate,
        steps=spec.steps,
        epsilon=epsilon,
        delta=delta,
        sampling=spec.sampling,
    )
    if not spec.initial_releases and not spec.changes_noise:
        return alone

    def fits(noise: float) -> bool:
        """Return whether the whole run fits (ε, δ) with this noise multiplier."""
        whole = compose(spec.initial_releases, spec.plan(noise).mechanism(spec.steps))
        return accounting.epsilon(whole, delta).epsilon <= epsilon

    enough = _search_noise(spec, alone, fits)
    if enough is None and not spec.initial_releases:
        raise BudgetExhaustedError(
            f"no σ that is tried fits ε = {epsilon:g}: raise the smallest factor of "
            "--noise-schedule, or --epsilon"
        )
    if enough is None:
        raise BudgetExhaustedError(
            f"the releases before the first step use up ε = {epsilon:g}: raise --pca-noise or "
            "--epsilon"
        )
    return enough


def _search_noise(
    spec: RunSpec, alone: float, fits: Callable[[float], bool], tolerance: float = _NOISE_TOLERANCE
) -> float | None:
    """Return the least σ, up to a tolerance, with which a run fits; None if it never does.

    Args:
        spec: the run.
        alone: the least noise multiplier of the steps without initial releases and noise schedule.
        fits: whether the run fits with this σ.
        tolerance: the search ends when the bounds differ by this factor.
    """
    phases = spec.plan(1.0).phases(spec.steps)
    # if no step has more noise than `alone`, it is too little, or just enough
    least = alone / max(phase.noise_multiplier for _, phase in phases)
    enough = next((noise for k in range(_DOUBLINGS_MAX) if fits(noise := least * 2**k)), None)
    if enough is None:
        return None
    too_small = max(least, enough / 2)
    while enough > tolerance * too_small:
        middle = math.sqrt(too_small * enough)
        too_small, enough = (too_small, middle) if fits(middle) else (middle, enough)
    return enough


def reserve_budget(
    accounting: AccountingService,
    spec: RunSpec,
    dataset: str,
    notify: Notify,
    noise: float | None = None,
    record: Path | None = None,
    check_data: Callable[[], object] = lambda: None,
) -> ChargedBudget:
    """Reserve budget in a dataset's ledger for a run's initial releases and its steps.

    Args:
        accounting: the ledger.
        spec: the run.
        dataset: the name of the ledger's dataset.
        notify: called with messages for the user.
        noise: σ; by default the smallest that fits.
        record: a file where each grant is recorded, as of `LedgerBudget`.
        check_data: loads the data and raises unless they fit the run. It is called once the steps
            are known to fit the budget and before anything is reserved, because a reservation that
            is given back stays in the record.

    Raises:
        BudgetExhaustedError: the plan does not fit; the message says what would. Nothing is held.
        DataError: the dataset has fewer records than the training data.
    """
    document = accounting.dataset(dataset)
    budget = document.get("budget") or {}
    records, size = spec.size + spec.public, document.get("size")
    mismatch = f"the ledger's dataset {dataset!r} has {size} records, the training data {records}"
    if size is not None and size < records:
        raise DataError(f"{mismatch}: they cannot be part of it. Check --dataset and --data")
    if size not in (None, records):  # the training data may be a part of the dataset
        notify(f"Note: {mismatch}: is it the right one?")
    quoted = None if spec.changes_noise else _find_fitting_plan(accounting, spec, dataset, noise)
    check_data()
    releases: list[Reservation] = []
    try:
        for release in spec.initial_releases:  # not a comprehension: what is held must be released
            releases.append(_reserve_release(accounting, dataset, release))  # noqa: PERF401
        if quoted is None:
            return _reserve_phases(accounting, spec, dataset, noise, releases, notify, record)
        if releases:  # less is left now
            quoted = _find_fitting_plan(accounting, spec, dataset, noise)
        plan, quote = quoted
        reservation = accounting.reserve(dataset, plan.mechanism(spec.steps), _PURPOSE)
    except BaseException:  # an interrupt too: nobody else knows the reservations
        with suppress(TrainingStoppedError):  # their leases expire anyway
            for held in releases:
                accounting.release(held, RELEASE_PATIENCE_SECONDS)
        raise
    notify(_describe_reserved(spec, dataset, plan.noise_multiplier, [reservation.identifier]))
    if quote.share is not None:
        notify(_describe_rest(quote.share, quote.steps, spec.steps))
    return LedgerBudget(
        accounting, plan, dataset, float(budget["delta"]), reservation, spec.initial_releases,
        tuple(releases), record=record,
    )  # fmt: skip


def _describe_reserved(
    spec: RunSpec, dataset: str, noise: float, reservations: Sequence[str]
) -> str:
    """Describe the steps that budget is reserved for, and the identifiers of the reservations."""
    return (
        f"Dataset {dataset!r} allows {spec.steps} steps at q = {spec.sample_rate:g} with noise "
        f"multiplier σ = {format_upper_bound(noise)}{spec.noise_note}: reserved as "
        f"{', '.join(reservations)}"
    )


def _reserve_phases(
    accounting: AccountingService,
    spec: RunSpec,
    dataset: str,
    noise: float | None,
    releases: Sequence[Reservation],
    notify: Notify,
    record: Path | None,
) -> PhasedLedgerBudget:
    """Reserve budget for each phase of a run with scheduled noise, or for none.

    Without a given σ, the search begins at the least with which the run would fit as one release.
    A ledger adds up the phases' charges, which is more, so σ is raised until they fit.

    Raises:
        BudgetExhaustedError: not all phases fit. Nothing is held.
    """
    sigma = _find_composed_noise(accounting, spec, dataset) if noise is None else noise
    attempts = 1 if noise is not None else _PHASES_ATTEMPTS_MAX
    for attempt in range(attempts):
        plan = spec.plan(sigma * _PHASES_NOISE_STEP**attempt)
        try:
            budget = PhasedLedgerBudget.reserve(
                accounting, plan, dataset, spec.steps, purpose=_PURPOSE,
                before=spec.initial_releases, releases=tuple(releases), record=record,
            )  # fmt: skip
        except BudgetExhaustedError as error:
            refusal = error
            continue
        notify(_describe_reserved(spec, dataset, plan.noise_multiplier, budget.reservations))
        return budget
    raise BudgetExhaustedError(
        f"{refusal}. Nothing is reserved: raise --noise-multiplier, or lower --steps"
    )


def _find_composed_noise(accounting: AccountingService, spec: RunSpec, dataset: str) -> float:
    """Return about the least σ with which scheduled steps fit a dataset's budget as one release."""
    constant = replace(spec, schedules={})
    alone = accounting.affordable_noise(dataset, constant.plan(1.0).mechanism(spec.steps))

    def fits(noise: float) -> bool:
        """Return whether the composition of all steps fits the remaining budget."""
        return accounting.quote(dataset, spec.plan(noise).mechanism(spec.steps)).fits

    found = _search_noise(spec, alone, fits, _PHASES_NOISE_TOLERANCE)
    if found is None:
        raise BudgetExhaustedError(
            f"no σ that is tried fits what is left of the budget of {dataset!r}: raise the "
            "smallest factor of --noise-schedule"
        )
    return found


def _reserve_release(
    accounting: AccountingService, dataset: str, release: Mechanism
) -> Reservation:
    """Reserve budget for one release that precedes training."""
    try:
        return accounting.reserve(dataset, release, _PURPOSE)
    except BudgetExhaustedError as error:
        raise BudgetExhaustedError(
            f"the release before the first step ({release['kind']} noise, σ = "
            f"{release['noise_multiplier']:g}) does not fit: {error}. Raise --pca-noise"
        ) from None


def _find_fitting_plan(
    accounting: AccountingService, spec: RunSpec, dataset: str, noise: float | None
) -> tuple[Plan, Quote]:
    """Return a plan that fits the dataset's remaining budget, and its quote; else raise."""
    if noise is None:
        noise = accounting.affordable_noise(dataset, spec.plan(1.0).mechanism(spec.steps))
    plan = spec.plan(noise)
    quote = _count_in_steps(accounting.quote(dataset, plan.mechanism(spec.steps)), plan)
    if not quote.fits:
        sigma = quote.noise_multiplier
        raise BudgetExhaustedError(
            f"{spec.steps} steps with σ = {noise:g} do not fit what is left of the budget of "
            f"{dataset!r}. {quote.steps or 'No'} such steps would"
            + ("" if sigma is None else f"; all of them would with σ = {format_upper_bound(sigma)}")
            + _describe_unused_budget(quote)
        )
    return plan, quote


def _count_in_steps(quote: Quote, plan: Plan) -> Quote:
    """Return the quote with its numbers of paid units (steps or epochs) converted to steps."""
    fitting, alone = (
        None if charges is None else charges * plan.steps_per_charge
        for charges in (quote.steps, quote.steps_alone)
    )
    return replace(quote, steps=fitting, steps_alone=alone)


def _describe_unused_budget(quote: Quote) -> str:
    """Describe how many steps the whole budget would allow, if more than the remaining one."""
    if quote.steps is None or quote.steps_alone is None or quote.steps_alone <= quote.steps:
        return ""
    return f". As the only run of the whole budget, {quote.steps_alone} would"


def _describe_rest(share: float, affordable: int | None, steps: int) -> str:
    """Describe the share of the budget that a run takes, and the steps that still fit after it."""
    taken = f"It takes {format_upper_bound(100 * share)} % of the dataset's budget"
    if affordable is None:
        return taken
    rest = affordable - steps
    if rest < 1:
        return f"{taken}, after which no such step fits"
    return f"{taken}, after which about {rest} more such step{'s fit' if rest > 1 else ' fits'}"


def resume_budget(
    accounting: AccountingService,
    checkpoint: Checkpoint,
    initial_releases: tuple[Mechanism, ...],
    notify: Notify,
    record: Path,
) -> ChargedBudget:
    """Return an interrupted run's reservations, with the steps not yet granted.

    If the reservation of the next step has ended, no step is left and the run only gets its
    certificate.

    Args:
        accounting: the ledger.
        checkpoint: the interrupted run.
        initial_releases: the releases before its first step, which were charged already.
        notify: called with messages for the user.
        record: the file where the interrupted run recorded each grant.

    Raises:
        NoGuaranteeError: the reservation is for another plan, or the ledger granted fewer steps
            than the run has made or recorded.
    """
    others = read_grants(record).keys() - set(checkpoint.reservations)  # initial releases
    releases = tuple(accounting.reservation(other) for other in sorted(others))
    for release in releases:
        require_recorded_grants(record, release)
    budget, held = _reserved_budget(accounting, checkpoint, initial_releases, releases, record)
    require_granted(checkpoint.steps, budget.made)
    notify(
        f"Resuming {', '.join(budget.reservations)} from a checkpoint after {checkpoint.steps} "
        "steps; "
        f"{budget.made} of {budget.reserved} were granted and stay spent"
        + (
            ""
            if held.state == "open"
            else f"; reservation {held.identifier} is {held.state}, so no more will be granted"
        )
    )
    return budget


def _reserved_budget(
    accounting: AccountingService,
    checkpoint: Checkpoint,
    before: tuple[Mechanism, ...],
    releases: tuple[Reservation, ...],
    record: Path,
) -> tuple[ChargedBudget, Reservation]:
    """Return the budget of an interrupted run, and the reservation that its next step draws on."""
    plan, dataset = checkpoint.plan, checkpoint.dataset
    if plan.noise_schedule is not None:
        phased = PhasedLedgerBudget.resume(
            accounting, plan, dataset, checkpoint.reservations,
            before=before, releases=releases, record=record,
        )  # fmt: skip
        return phased, phased.current_phase.reservation
    held = accounting.reservation(checkpoint.reservations[0])
    delta = float(accounting.dataset(dataset)["budget"]["delta"])
    return LedgerBudget(
        accounting, plan, dataset, delta, held, before, releases, record=record
    ), held
