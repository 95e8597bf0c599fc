"""Before any data is touched: the noise that a run needs, whether it fits, and what is held.

A run may release something before its first step (`before`). Without a ledger all of it is one
composition within the run's (ε, δ). A dataset of the ledger holds a reservation for each release
and one for the steps; nothing is granted until all of them are held.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from training_client.budget import Budget, LedgerBudget
from training_client.checkpoint import Checkpoint
from training_client.digits import up
from training_client.errors import BudgetExhaustedError, DataError, TrainingStoppedError
from training_client.plan import Mechanism, Plan, composition
from training_client.recipe import Recipe
from training_client.service import AccountingService, Reservation

Say = Callable[[str], None]
_PURPOSE = "accountant-train"
_DOUBLINGS = 20
_NARROW = 1.001  # noise is searched for as closely as this


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run whose noise is still to be found.

    Attributes:
        size: private records.
        sample_rate: q.
        clip_norm: C.
        steps: to make.
        before: what is released before the first of them.
        public: records of the same data that were given up.
    """

    size: int
    sample_rate: float
    clip_norm: float
    steps: int
    before: tuple[Mechanism, ...] = ()
    public: int = 0

    def __post_init__(self) -> None:
        """Refuse a batch that is larger than the data."""
        if self.sample_rate > 1:
            raise DataError(
                f"a batch of {self.sample_rate * self.size:g} is more than {self.size} records: "
                "lower --batch-size"
            )

    @classmethod
    def of(cls, recipe: Recipe, batch_size: int, clip_norm: float, steps: int) -> Wanted:
        """A recipe's run, with batches of an expected size."""
        size = recipe.private_size
        given_up = recipe.size - size
        return cls(size, batch_size / size, clip_norm, steps, recipe.before, given_up)

    def plan(self, noise_multiplier: float) -> Plan:
        """The run with so much noise."""
        return Plan(self.size, self.sample_rate, self.clip_norm, noise_multiplier)


def asked(
    accounting: AccountingService,
    wanted: Wanted,
    epsilon: float,
    delta: float,
    say: Say,
    noise: float | None = None,
) -> Budget:
    """A budget of this run's own.

    Args:
        accounting: who answers.
        wanted: the run.
        epsilon: what may be spent.
        delta: at which.
        say: told what was found.
        noise: σ; the least that fits by default. With less the run is shorter, which is said.

    Raises:
        BudgetExhaustedError: the run does not fit, or not even its first step with this noise.
    """
    used = noise
    if used is None:
        used = _least_noise(accounting, wanted, epsilon, delta)
        say(
            f"Budget ε = {epsilon:g} at δ = {delta:g}: {wanted.steps} steps at q = "
            f"{wanted.sample_rate:g} need noise multiplier σ = {up(used)}"
        )
    if delta >= 1 / wanted.size:
        say(
            f"Note: δ = {delta:g} is not less than one over {wanted.size} records: what gives one "
            "of them away whole may keep to that"
        )
    plan, steps = wanted.plan(used), wanted.steps
    budget = Budget(accounting, plan, epsilon, delta, before=wanted.before, steps=steps)
    if noise is None:
        budget.begin()  # or say so now, before any data is touched
        return budget
    spent = budget.planned(wanted.steps).epsilon
    if spent <= epsilon:
        say(
            f"{wanted.steps} steps at q = {wanted.sample_rate:g} with σ = {noise:g} take ε = "
            f"{up(spent)} of {epsilon:g} at δ = {delta:g}"
        )
        return budget
    enough = ""
    with suppress(TrainingStoppedError):  # if there is any
        enough = f"; all would with σ = {up(_least_noise(accounting, wanted, epsilon, delta))}"
    try:
        budget.begin()
    except BudgetExhaustedError as error:
        raise BudgetExhaustedError(f"{error} of {wanted.steps}{enough}") from None
    say(
        f"Note: with σ = {noise:g} not all {wanted.steps} steps fit ε = {epsilon:g} at δ = "
        f"{delta:g}, and the run ends with the last that does{enough}"
    )
    return budget


def _least_noise(
    accounting: AccountingService, wanted: Wanted, epsilon: float, delta: float
) -> float:
    """The least σ with which all steps fit, after what comes before them."""
    alone = accounting.noise_multiplier(
        sample_rate=wanted.sample_rate, steps=wanted.steps, epsilon=epsilon, delta=delta
    )
    if not wanted.before:
        return alone

    def fits(noise: float) -> bool:
        whole = composition(wanted.before, wanted.plan(noise).mechanism(wanted.steps))
        return accounting.epsilon(whole, delta).epsilon <= epsilon

    enough = next((noise for k in range(_DOUBLINGS) if fits(noise := alone * 2**k)), None)
    if enough is None:
        raise BudgetExhaustedError(
            f"what is released before the first step leaves nothing of ε = {epsilon:g}: give it "
            "more noise (--pca-noise), or the run more budget"
        )
    lacking = max(alone, enough / 2)
    while enough > _NARROW * lacking:
        middle = math.sqrt(lacking * enough)
        lacking, enough = (lacking, middle) if fits(middle) else (middle, enough)
    return enough


def reserved(
    accounting: AccountingService,
    wanted: Wanted,
    dataset: str,
    say: Say,
    noise: float | None = None,
) -> LedgerBudget:
    """A dataset's budget: hold what comes before, quote the steps, hold them too.

    Args:
        accounting: the ledger.
        wanted: the run.
        dataset: whose budget.
        say: told what was found.
        noise: σ; the least that fits by default.

    Raises:
        BudgetExhaustedError: the plan does not fit; the message says what would. Nothing is held.
        DataError: the dataset has fewer records than the training data, which then are another's.
    """
    known = accounting.dataset(dataset)
    budget = known.get("budget") or {}
    records, size = wanted.size + wanted.public, known.get("size")
    differ = f"the ledger's dataset {dataset!r} has {size} records, the training data {records}"
    if size is not None and size < records:
        raise DataError(f"{differ}: they are not of it. Name the right one by --dataset or --data")
    if size not in (None, records):  # a part of it may be trained on
        say(f"Note: {differ}: is it the right one?")
    releases: list[Reservation] = []
    try:
        for each in wanted.before:
            releases.append(_held(accounting, dataset, each))  # noqa: PERF401
        plan = _fitting(accounting, wanted, dataset, noise)
        held = accounting.reserve(dataset, plan.mechanism(wanted.steps), _PURPOSE)
    except TrainingStoppedError:
        with suppress(TrainingStoppedError):  # their leases end anyway
            for release in releases:
                accounting.release(release)
        raise
    say(
        f"Dataset {dataset!r} allows {wanted.steps} steps at q = {wanted.sample_rate:g} with noise "
        f"multiplier σ = {up(plan.noise_multiplier)}: reserved as {held.identifier}"
    )
    return LedgerBudget(
        accounting, plan, dataset, float(budget["delta"]), held, wanted.before, tuple(releases)
    )


def _held(accounting: AccountingService, dataset: str, release: Mechanism) -> Reservation:
    """Budget for what comes before the first step."""
    try:
        return accounting.reserve(dataset, release, _PURPOSE)
    except BudgetExhaustedError as error:
        raise BudgetExhaustedError(
            f"what is released before the first step ({release['kind']} noise, σ = "
            f"{release['noise_multiplier']:g}) does not fit: {error}. Give it more (--pca-noise)"
        ) from None


def _fitting(
    accounting: AccountingService, wanted: Wanted, dataset: str, noise: float | None
) -> Plan:
    """The plan, if it fits what is left of a dataset's budget."""
    if noise is None:
        noise = accounting.affordable_noise(dataset, wanted.plan(1.0).mechanism(wanted.steps))
    plan = wanted.plan(noise)
    quote = accounting.quote(dataset, plan.mechanism(wanted.steps))
    if not quote.fits:
        least = quote.noise_multiplier
        raise BudgetExhaustedError(
            f"{wanted.steps} steps with σ = {noise:g} do not fit what is left of the budget of "
            f"{dataset!r}. {quote.steps or 'No'} such steps would"
            + ("" if least is None else f"; all of them would with σ = {up(least)}")
        )
    return plan


def resumed(
    accounting: AccountingService, kept: Checkpoint, before: tuple[Mechanism, ...], say: Say
) -> LedgerBudget:
    """What is left of a run that died: steps that were never granted, or its certificate alone.

    Args:
        accounting: the ledger.
        kept: the run as it was.
        before: what it released before its first step, and was charged for.
        say: told what was found.

    Raises:
        NoGuaranteeError: the reservation is for another plan.
    """
    held = accounting.reservation(kept.reservation)
    delta = float(accounting.dataset(kept.dataset)["budget"]["delta"])
    say(
        f"Resuming {held.identifier} from a checkpoint after {kept.steps} steps; "
        f"{held.steps_granted} of {held.steps_reserved} were granted and stay spent"
        + ("" if held.state == "open" else f"; it is {held.state}, and no more will be")
    )
    return LedgerBudget(accounting, kept.plan, kept.dataset, delta, held, before)
