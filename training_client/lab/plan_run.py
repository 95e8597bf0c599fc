"""Plan a run before any data is read: find its noise multiplier, and plan or reserve its budget.

A run may release something before its first step (its initial releases, such as a PCA). Without a
ledger everything is one composition within the run's (ε, δ). With a ledger, the dataset holds one
reservation for each initial release and one for the steps; nothing is granted until all are held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from training_client.budget import Budget, LedgerBudget
from training_client.client import AccountingService, Quote, Reservation
from training_client.errors import BudgetExhaustedError, DataError, TrainingStoppedError
from training_client.lab.checkpoint import Checkpoint
from training_client.lab.number_format import format_upper_bound
from training_client.lab.recipe import Recipe
from training_client.lab.schedules import parse_schedule
from training_client.plan import BALLS_IN_BINS, POISSON, Mechanism, Plan, Schedule, compose

Notify = Callable[[str], None]
_PURPOSE = "accountant-train"
_DOUBLINGS_MAX = 20
_NOISE_TOLERANCE = 1.001  # the search ends when the bounds differ by this factor


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
    phases = spec.plan(1.0).phases(spec.steps)
    # if no step has more noise than `alone`, it is too little, or just enough
    alone /= max(phase.noise_multiplier for _, phase in phases)

    def fits(noise: float) -> bool:
        """Return whether the whole run fits (ε, δ) with this noise multiplier."""
        whole = compose(spec.initial_releases, spec.plan(noise).mechanism(spec.steps))
        return accounting.epsilon(whole, delta).epsilon <= epsilon

    enough = next((noise for k in range(_DOUBLINGS_MAX) if fits(noise := alone * 2**k)), None)
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
    too_small = max(alone, enough / 2)
    while enough > _NOISE_TOLERANCE * too_small:
        middle = math.sqrt(too_small * enough)
        too_small, enough = (too_small, middle) if fits(middle) else (middle, enough)
    return enough


def reserve_budget(
    accounting: AccountingService,
    spec: RunSpec,
    dataset: str,
    notify: Notify,
    noise: float | None = None,
) -> LedgerBudget:
    """Reserve budget in a dataset's ledger for a run's initial releases and its steps.

    Args:
        accounting: the ledger.
        spec: the run.
        dataset: the name of the ledger's dataset.
        notify: called with messages for the user.
        noise: σ; by default the smallest that fits.

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
    releases: list[Reservation] = []
    try:
        for release in spec.initial_releases:  # not a comprehension: what is held must be released
            releases.append(_reserve_release(accounting, dataset, release))  # noqa: PERF401
        plan, quote = _find_fitting_plan(accounting, spec, dataset, noise)
        reservation = accounting.reserve(dataset, plan.mechanism(spec.steps), _PURPOSE)
    except TrainingStoppedError:
        with suppress(TrainingStoppedError):  # their leases expire anyway
            for held in releases:
                accounting.release(held)
        raise
    notify(
        f"Dataset {dataset!r} allows {spec.steps} steps at q = {spec.sample_rate:g} with noise "
        f"multiplier σ = {format_upper_bound(plan.noise_multiplier)}: reserved as "
        f"{reservation.identifier}"
    )
    if quote.share is not None:
        notify(_describe_rest(quote.share, quote.steps, spec.steps))
    return LedgerBudget(
        accounting, plan, dataset, float(budget["delta"]), reservation, spec.initial_releases,
        tuple(releases),
    )  # fmt: skip


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
) -> LedgerBudget:
    """Return an interrupted run's reservation, with the steps not yet granted.

    If the reservation has ended, no step is left and the run only gets its certificate.

    Args:
        accounting: the ledger.
        checkpoint: the interrupted run.
        initial_releases: the releases before its first step, which were charged already.
        notify: called with messages for the user.

    Raises:
        NoGuaranteeError: the reservation is for another plan.
    """
    held = accounting.reservation(checkpoint.reservation)
    delta = float(accounting.dataset(checkpoint.dataset)["budget"]["delta"])
    budget = LedgerBudget(
        accounting, checkpoint.plan, checkpoint.dataset, delta, held, initial_releases
    )
    notify(
        f"Resuming {held.identifier} from a checkpoint after {checkpoint.steps} steps; "
        f"{budget.made} of {budget.reserved} were granted and stay spent"
        + (
            ""
            if held.state == "open"
            else f"; the reservation is {held.state}, so no more will be granted"
        )
    )
    return budget
