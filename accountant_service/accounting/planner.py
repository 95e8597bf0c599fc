"""Plan a run: which batch size, number of steps and noise multiplier to use within a budget.

At a budget (ε, δ) and a compute limit (examples processed: batch size times steps), every batch
size B has a number of steps T and a least noise multiplier σ. Each averaged gradient then has noise
of standard deviation σ·C/B in every coordinate, where C is the clipping norm, and the mean of all T
gradients has σ·C/(B√T). Batch size trades the number of steps for noise, at the same compute:

* `effective_noise` σ/B is the noise of one averaged gradient, in units of the clipping norm. Sander
  et al. 2023 call it the effective noise, McKenna et al. 2025 the noise-batch ratio.
* `signal_to_noise` B√T/σ is the clipping norm divided by the noise of the mean of all gradients.
  For full batches it is N·μ at any T, with μ that of the Gaussian mechanism with the same (ε, δ):
  `signal_to_noise_limit`. Smaller batches approach it from below as the number of steps grows
  (Räisä et al. 2024: the noise-induced variance does not depend on the batch size in the limit).

Subsampling adds variance too, v/(B·T) in the mean of all gradients: it is the same for all batch
sizes that use the whole compute limit, so it does not affect the comparison.

The recommendation is a rule of thumb, not a theorem: the smallest batch whose signal-to-noise is at
least `SHARE` of that of the largest batch within the limit. Larger batches gain little and take
fewer steps; smaller ones lose signal quickly. What trains best depends on data and model. It is
found by bisection of round batch sizes, whatever runs the frontier has.

All numbers of a run are whole, so that a command can account for it and train it. The batches
of a balls-in-bins epoch are equal: their size divides the number of records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from accountant_service.accounting import noise_frontier, solver
from accountant_service.accounting.guarantee import (
    Guarantee,
    NeighbouringRelation,
    count_exposed_records,
)
from accountant_service.accounting.methods import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.accounting.noise_frontier import SolvedRun
from accountant_service.errors import AccountingError, UnreachableTargetError
from accountant_service.mechanisms import DpSgd
from accountant_service.mechanisms.kinds import COUNT_MAX
from accountant_service.writing import number_format
from accountant_service.writing.presentation import Presented, Row

PlannedSampling = Literal["poisson", "balls_in_bins"]
SAMPLINGS: Final[tuple[PlannedSampling, ...]] = ("poisson", "balls_in_bins")
SHARE: Final = 0.9  # of the best signal-to-noise, that the recommended run must reach
STEPS_MIN: Final = 100  # of a recommended run, unless another number is requested
POINTS_MAX: Final = 40  # batch sizes for each sampling
BINS_MAX: Final = 500  # batches of an epoch of balls in bins; more take seconds
_SHOWN_STEPS_MIN: Final = 10  # fewest steps on the frontier
_SHOWN_RATE_MIN: Final = 1e-3  # smallest sample rate on the frontier
_NAMES: Final = {"poisson": "Poisson", "balls_in_bins": "balls-in-bins"}
_ALIKE: Final = 1.1  # ratio of batch sizes up to which the better sampling is recommended
_NEAR: Final = 1.15  # ratio of batch sizes within which one that divides the records is preferred
_FEW_SIZES: Final = 2  # batch sizes that divide the records, below which a note says so
_DIVISIONS_MAX: Final = 10_000  # batches of an epoch for which a size that divides is looked for
_MORE_STEPS: Final = 1.5  # ratio of steps that is worth mentioning
_WASTEFUL: Final = 0.5  # share of the best signal-to-noise below which a batch is called too small
_NEAR_LIMIT: Final = 0.9  # share of the limit above which more epochs gain little
_FAR_FROM_LIMIT: Final = 0.75  # share below which more epochs gain much

DE: Final = "De et al. 2022, arXiv 2204.13650"
MCKENNA: Final = "McKenna et al. 2025, arXiv 2501.18914"
PONOMAREVA: Final = "Ponomareva et al. 2023, arXiv 2303.00654"
RAISA: Final = "Räisä et al. 2024, arXiv 2402.03990"
SANDER: Final = "Sander et al. 2023, arXiv 2210.03403"
SOURCES: Final = {
    SANDER: "calls σ/B the effective noise; the privacy cost mostly depends on the total amount "
    "of noise over the run",
    RAISA: "the noise in the sum of all gradients stops depending on the batch size in the limit "
    "of many steps; with fewer steps larger batches have less of it",
    MCKENNA: "§4.1: larger batches bring diminishing returns in σ/B; §4.2: beyond a critical "
    "compute budget, more compute brings little",
    DE: "large batches, many epochs and careful tuning gave the best private image classifiers",
    PONOMAREVA: "how to choose δ, batch size and steps, and how to report the guarantee",
}


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a plan: a privacy budget, a dataset and a compute limit.

    Attributes:
        epsilon: ε of the budget, above 0.
        delta: δ of the budget, in (0, 1).
        dataset_size: number of records, at least 1.
        examples: most examples processed, batch size times steps; at least 1.
        relation: the neighbouring relation.
        steps_min: fewest steps of a recommended run.
    """

    epsilon: float
    delta: float
    dataset_size: int
    examples: int
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    steps_min: int = STEPS_MIN

    @property
    def target(self) -> solver.Target:
        """The privacy budget as a solver's target, with the default accounting method."""
        accountant = ACCOUNTANTS[DEFAULT_METHOD]
        return solver.Target(accountant, self.relation, self.epsilon, self.delta)


@dataclass(frozen=True, slots=True)
class BatchRange:
    """The range of batch sizes to plan runs for, and how many to try.

    Attributes:
        points: most batch sizes for each sampling, from 2 to `POINTS_MAX`.
        smallest: the smallest batch size; None to choose it.
        largest: the largest batch size; None to choose it.
    """

    points: int = 20
    smallest: int | None = None
    largest: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class PlannedRun(Presented):
    """A planned run: a batch size, its number of steps, and nearly the least noise.

    Attributes:
        sampling: how batches are drawn.
        batch_size: expected records in a batch; divides N with balls-in-bins sampling.
        sample_rate: batch size over dataset size.
        steps: number of steps.
        epochs: passes over the dataset: examples processed over dataset size.
        noise_multiplier: σ, rounded up.
        effective_noise: σ/B: noise of an averaged gradient, over the clipping norm.
        signal_to_noise: B√T/σ: the clipping norm over the noise of the mean of all gradients.
        epsilon: a proved upper bound of ε at the budget's δ; at most the budget's ε.
        run: the run, as a mechanism.
    """

    sampling: PlannedSampling
    batch_size: int
    sample_rate: float
    steps: int
    epochs: float
    noise_multiplier: float
    effective_noise: float
    signal_to_noise: float
    epsilon: float
    run: DpSgd

    def __str__(self) -> str:
        """Return the run in a line."""
        return ", ".join(f"{name} {value}" for name, value in self.table())

    def table(self) -> list[Row]:
        """Return the numbers that the run is made with, and its ε."""
        return [
            ("sampling", self.sampling),
            ("batch size", str(self.batch_size)),
            ("steps", str(self.steps)),
            ("noise multiplier", number_format.round_up(self.noise_multiplier)),
            ("ε", number_format.round_up(self.epsilon)),
        ]


@dataclass(frozen=True, slots=True)
class Advice:
    """A warning or a note about a plan, with the publication that it rests on.

    Attributes:
        code: stable, kebab-case.
        is_warning: True if something is probably wrong; False for a hint.
        message: in words.
        source: the publication that it rests on, if any.
    """

    code: str
    is_warning: bool
    message: str
    source: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Presented):
    """Planned runs by batch size within a budget, with a recommended run and advice.

    Attributes:
        recommended: the recommended run.
        reason: why it is recommended, in words.
        current: today's choice with the least noise within the budget, if it was given.
        runs: the frontier, by sampling and increasing batch size; the recommended run is in it.
        signal_to_noise_limit: N·μ: the signal-to-noise of full batches within the budget.
        guarantee: the guarantee of the recommended run.
        current_guarantee: the guarantee of today's choice, if it was given.
        advice: warnings and notes.
    """

    recommended: PlannedRun
    reason: str
    current: PlannedRun | None
    runs: tuple[PlannedRun, ...]
    signal_to_noise_limit: float
    guarantee: Guarantee
    current_guarantee: Guarantee | None
    advice: tuple[Advice, ...]

    def __str__(self) -> str:
        """Return the recommended run, and why it is recommended."""
        return f"{self.recommended}. {self.reason}"

    def table(self) -> list[Row]:
        """Return all runs in rows, with an arrow at the recommended one."""
        heads = tuple(label for label, _ in self.recommended.table())
        rows = [
            (*(value for _, value in each.table()), "←" if each == self.recommended else "")
            for each in self.runs
        ]
        return [(*heads, ""), *rows]


@dataclass(frozen=True, slots=True)
class CurrentChoice:
    """The batch size and steps that the user has in mind now, without noise.

    Attributes:
        batch_size: records in a batch, at most the dataset's size.
        steps: number of steps; None for as many as the compute limit allows.
    """

    batch_size: int
    steps: int | None = None


def plan(
    goal: Goal,
    samplings: Sequence[PlannedSampling] = SAMPLINGS,
    batches: BatchRange | None = None,
    current: CurrentChoice | None = None,
) -> Plan:
    """Plan runs by batch size within a goal: steps and least noise, with a recommendation.

    Args:
        goal: the budget, the dataset and the compute limit.
        samplings: one or more of `SAMPLINGS`.
        batches: the range of batch sizes; chosen by default. Their number does not affect the
            recommendation.
        current: today's choice, to compare with.

    Raises:
        AccountingError: no run of a sampling has an answer, or no noise reaches the budget.
    """
    batches = batches or BatchRange()
    frontier, skipped = _solve_frontier(goal, samplings, batches)
    best, recommended = _recommend(goal, [run.sampling for run in frontier], batches)
    found = None if current is None else _solve_current(goal, samplings[0], current)
    limit = _signal_to_noise_limit(goal)
    recommended, guarantee = _certify(goal, recommended)
    current_guarantee = None
    if found is not None:
        found, current_guarantee = _certify(goal, found)
    frontier = _insert(frontier, recommended)
    return Plan(
        recommended,
        _explain(goal, best, recommended),
        found,
        tuple(frontier),
        limit,
        guarantee,
        current_guarantee,
        (*skipped, *_advise(goal, frontier, recommended, found, limit)),
    )


def _insert(frontier: Iterable[PlannedRun], recommended: PlannedRun) -> list[PlannedRun]:
    """Return the frontier with the recommended run, in its place; it replaces an equal one."""
    place = SAMPLINGS.index(recommended.sampling), recommended.batch_size
    runs = {(SAMPLINGS.index(run.sampling), run.batch_size): run for run in frontier}
    return [run for _, run in sorted((runs | {place: recommended}).items())]


def _solve_frontier(
    goal: Goal, samplings: Sequence[PlannedSampling], batches: BatchRange
) -> tuple[list[PlannedRun], list[Advice]]:
    """Solve the noise of runs for each sampling; return them, and warnings about failures."""
    frontier: list[PlannedRun] = []
    skipped: list[Advice] = []
    errors: list[AccountingError] = []
    first_solved: list[SolvedRun] = []
    for sampling in [each for each in SAMPLINGS if each in samplings]:
        runs = _candidates(goal, sampling, batches)
        try:
            if sampling == "balls_in_bins":
                first_solved = first_solved or _solve_poisson_runs(goal, runs)
            solved = _solve(goal, runs, first_solved)
        except AccountingError as error:
            errors.append(error)
            solved, reason = [], error.detail
        else:
            reason = _why_no_bins(goal)
        first_solved = first_solved or solved
        frontier += [_describe(goal, sampling, each) for each in solved]
        if not solved:
            skipped.append(Advice("sampling-left-out", True, f"{sampling}: {reason}"))
    if not frontier:
        raise errors[0] if errors else UnreachableTargetError(skipped[0].message)
    return frontier, skipped


def _why_no_bins(goal: Goal) -> str:
    """Return why no run by balls in bins can be planned."""
    if goal.examples < goal.dataset_size:
        return "balls in bins needs whole epochs, and the compute limit is less than one"
    return (
        f"balls in bins needs a batch size that divides the {goal.dataset_size} records, and none "
        "in the range does"
    )


def _solve_poisson_runs(goal: Goal, runs: Sequence[DpSgd]) -> list[SolvedRun]:
    """Solve the noise of Poisson-sampled runs first, to predict that of balls-in-bins runs."""
    alike = [DpSgd(1.0, sample_rate=each.rate(), steps=each.step_count()) for each in runs]
    return _solve(goal, alike, [])


def _solve(goal: Goal, runs: Sequence[DpSgd], alike: Sequence[SolvedRun]) -> list[SolvedRun]:
    """Find nearly the least noise within the budget for each run.

    Raises:
        AccountingError: a run has no answer.
    """
    return noise_frontier.solve_noise_multipliers(runs, goal.target, alike)


def _candidates(goal: Goal, sampling: PlannedSampling, batches: BatchRange) -> list[DpSgd]:
    """Return the runs to solve, by increasing batch size, without their noise."""
    sizes = _batch_sizes(goal, batches)
    if sampling == "balls_in_bins":
        equal = [each for each in _equal_batches(goal) if _is_within(batches, each)]
        sizes = sorted({min(equal, key=lambda one: abs(math.log(one / each))) for each in sizes}
                       if equal else [])  # fmt: skip
    return [_unsolved_run(goal, sampling, each) for each in sizes]


def _unsolved_run(
    goal: Goal, sampling: PlannedSampling, batch_size: int, steps: int | None = None
) -> DpSgd:
    """Return a run with a placeholder for the noise; with as many steps as the limit allows."""
    if steps is None and sampling == "balls_in_bins":
        steps = goal.dataset_size // batch_size * _whole_epochs(goal)
    return DpSgd(
        1.0,
        dataset_size=goal.dataset_size,
        batch_size=batch_size,
        steps=max(goal.examples // batch_size, 1) if steps is None else steps,
        sampling=sampling,
    )


def _whole_epochs(goal: Goal) -> int:
    """Return the number of whole epochs within the compute limit."""
    return min(goal.examples // goal.dataset_size, COUNT_MAX // BINS_MAX)


def _equal_batches(goal: Goal) -> list[int]:
    """Return the sizes of balls-in-bins batches that divide the records, if an epoch is allowed."""
    return _divisors(goal.dataset_size, BINS_MAX) if _whole_epochs(goal) else []


def _divisors(size: int, batches_max: int) -> list[int]:
    """Return the increasing batch sizes that divide `size` into at most `batches_max` batches."""
    parts = range(min(size, batches_max), 0, -1)
    return [size // count for count in parts if not size % count]


def _is_within(batches: BatchRange, batch_size: int) -> bool:
    """Return whether a batch size is within the limits that were given."""
    return (batches.smallest or 1) <= batch_size <= (batches.largest or batch_size)


def _size_limits(goal: Goal, batches: BatchRange) -> tuple[int, int]:
    """Return the smallest and the largest batch size to consider."""
    size, examples = goal.dataset_size, goal.examples
    low = max(math.ceil(size * _SHOWN_RATE_MIN), math.ceil(examples / COUNT_MAX), 1)
    high = min(size, examples // _SHOWN_STEPS_MIN)
    low = batches.smallest or min(low, batches.largest or low, size, examples)
    return low, batches.largest or max(high, low)


def _batch_sizes(goal: Goal, batches: BatchRange) -> list[int]:
    """Return increasing batch sizes at about equal ratios, rounded to few digits."""
    low, high = _size_limits(goal, batches)
    ratio = (high / low) ** (1 / (batches.points - 1))
    exact = [low * ratio**each for each in range(1, batches.points - 1)]
    found: set[int] = set()
    for digits in (2, 3, 12):
        inner = (int(float(number_format.round_nearest(each, digits))) for each in exact)
        found = {low, high, *(each for each in inner if low < each < high)}
        if len(found) == batches.points:
            break
    return sorted(found)


def _round_batch_sizes(goal: Goal, sampling: PlannedSampling, batches: BatchRange) -> list[int]:
    """Return the increasing batch sizes that may be recommended.

    They divide the number of records; Poisson sampling also has numbers of two digits where none
    that divides is near.
    """
    if sampling == "balls_in_bins":
        return [each for each in _equal_batches(goal) if _is_within(batches, each)]
    low, high = _size_limits(goal, batches)
    even = [each for each in _divisors(goal.dataset_size, _DIVISIONS_MAX) if low <= each <= high]
    short = [digits * 10**power for power in range(len(str(high))) for digits in range(1, 100)]
    between = [
        each
        for each in {*short, low, high}
        if low <= each <= high and not any(each / _NEAR < one < each * _NEAR for one in even)
    ]
    return sorted({*even, *between})


def _describe(goal: Goal, sampling: PlannedSampling, solved: SolvedRun) -> PlannedRun:
    """Return a solved run with its batch size, epochs and signal-to-noise ratio."""
    run, steps = solved.run, solved.run.step_count()
    batch_size, sigma = run.batch_size or goal.dataset_size, run.noise_multiplier
    return PlannedRun(
        sampling,
        batch_size,
        run.rate(),
        steps,
        steps * batch_size / goal.dataset_size,
        sigma,
        sigma / batch_size,
        batch_size * math.sqrt(steps) / sigma,
        solved.epsilon,
        run,
    )


def _recommend(
    goal: Goal, samplings: Iterable[PlannedSampling], batches: BatchRange
) -> tuple[PlannedRun, PlannedRun]:
    """Return the run with the best signal-to-noise ratio, and the one that is recommended.

    The best has the largest batch. Recommended is the smallest batch that has nearly its ratio, by
    the sampling with the smaller one. Runs with fewer steps than the goal requires count only if
    there are no others.

    Raises:
        AccountingError: a run has no answer.
    """
    listed = {
        sampling: [
            _unsolved_run(goal, sampling, each)
            for each in _round_batch_sizes(goal, sampling, batches)
        ]
        for sampling in dict.fromkeys(samplings)
    }
    has_long = any(_is_long(goal, run) for runs in listed.values() for run in runs)
    searches = [
        _SignalSearch(goal, sampling, long)
        for sampling, runs in listed.items()
        if (long := [run for run in runs if _is_long(goal, run) or not has_long])
    ]
    best = max((each.solve(-1) for each in searches), key=lambda run: run.signal_to_noise)
    enough = SHARE * best.signal_to_noise
    smallest = [run for each in searches if (run := each.find_smallest(enough)) is not None]
    least = min(each.batch_size for each in smallest)
    alike = [each for each in smallest if each.batch_size <= _ALIKE * least]
    return best, max(alike, key=lambda each: each.signal_to_noise)


def _is_long(goal: Goal, run: DpSgd) -> bool:
    """Return whether a run has as many steps as the goal requires of a recommended one."""
    return run.step_count() >= goal.steps_min


class _SignalSearch:
    """Bisection of the runs of one sampling by increasing batch size; solves only those it needs.

    Each is solved by itself, so that its noise does not depend on the others.
    """

    def __init__(self, goal: Goal, sampling: PlannedSampling, runs: Sequence[DpSgd]) -> None:
        self._goal, self._sampling, self._runs = goal, sampling, runs
        self._solved: dict[int, PlannedRun] = {}

    def solve(self, at: int) -> PlannedRun:
        """Return the run at an index with its noise; -1 is the one with the largest batch."""
        at %= len(self._runs)
        if at not in self._solved:
            solved = _solve(self._goal, [self._runs[at]], [])[0]
            self._solved[at] = _describe(self._goal, self._sampling, solved)
        return self._solved[at]

    def find_smallest(self, enough: float) -> PlannedRun | None:
        """Return the smallest batch with enough signal-to-noise; None if the largest has less."""
        if self.solve(-1).signal_to_noise < enough:
            return None
        low, high = -1, len(self._runs) - 1  # the run at `high` has enough
        while high - low > 1:
            middle = (low + high) // 2
            if self.solve(middle).signal_to_noise >= enough:
                high = middle
            else:
                low = middle
        return self.solve(high)


def _solve_current(goal: Goal, sampling: PlannedSampling, choice: CurrentChoice) -> PlannedRun:
    """Find nearly the least noise within the budget for the user's batch size and steps."""
    run = _unsolved_run(goal, sampling, choice.batch_size, choice.steps)
    return _describe(goal, sampling, _solve(goal, [run], [])[0])


def _certify(goal: Goal, planned: PlannedRun) -> tuple[PlannedRun, Guarantee]:
    """Return a run with its guarantee; solve its noise again if it exceeds the budget."""
    target = goal.target
    guarantee = target.guarantee(planned.run)
    if guarantee.epsilon <= goal.epsilon:
        return planned, guarantee
    least = solver.noise_multiplier(planned.run, target)
    run = noise_frontier.with_noise(planned.run, least.value)
    solved = SolvedRun(run, least.guarantee.epsilon, least.value)
    return _describe(goal, planned.sampling, solved), least.guarantee


def _signal_to_noise_limit(goal: Goal) -> float:
    """Return the signal-to-noise ratio of full-batch training within the budget."""
    mu = noise_frontier.largest_gaussian_mu(goal.epsilon, goal.delta)
    return goal.dataset_size * mu / goal.relation.sensitivity


def _explain(goal: Goal, best: PlannedRun, chosen: PlannedRun) -> str:
    """Explain in words why a run is recommended."""
    if best.steps < goal.steps_min:
        return (
            f"No batch size allows {goal.steps_min} steps within the compute limit. Of all runs, "
            f"this is the smallest batch with {_percent(SHARE)} of the best signal-to-noise."
        )
    share = chosen.signal_to_noise / best.signal_to_noise
    enough = f"{_percent(SHARE)} of the best signal-to-noise"
    divides = not goal.dataset_size % chosen.batch_size
    kind = f"that divides the {goal.dataset_size} records" if divides else "round one"
    text = (
        f"With {_NAMES[chosen.sampling]} sampling, a batch of {chosen.batch_size} is the "
        f"smallest {kind} {'and' if divides else 'that'} reaches {enough} within the compute "
        f"limit, among runs of at least {goal.steps_min} steps: it has {_percent(share)} of it. "
    )
    if chosen.steps < _MORE_STEPS * best.steps:
        return text + "Larger batches would have less noise, but allow too few steps."
    return text + (
        f"The best, a batch of {best.batch_size}, allows {best.steps} steps; this one allows "
        f"{chosen.steps}. Smaller batches lose more signal."
    )


def _advise(
    goal: Goal,
    frontier: Sequence[PlannedRun],
    chosen: PlannedRun,
    current: PlannedRun | None,
    limit: float,
) -> list[Advice]:
    """Return all warnings and notes about a plan."""
    found = [*_advise_on_budget(goal, chosen), *_advise_on_epochs(chosen, limit)]
    bins = [each.batch_size for each in frontier if each.sampling == "balls_in_bins"]
    if 0 < len(bins) <= _FEW_SIZES < len(frontier) - len(bins):
        found.append(_advise_on_divisors(goal, bins))
    if current is not None:
        found += _advise_on_current(goal, chosen, current)
    wasteful = [each for each in frontier if _is_wasteful(each, chosen)]
    if wasteful:
        largest = max(each.batch_size for each in wasteful)
        found.append(
            Advice(
                "small-batches-lose-signal",
                False,
                f"Batches of {largest} or fewer have less than half of the recommended "
                "run's signal-to-noise at the same privacy and compute.",
                RAISA,
            )
        )
    found.append(
        Advice(
            "memory-is-not-the-limit",
            False,
            "The batch is the number of records whose clipped gradients are added before the noise "
            "is. It may be processed in physical batches of any size, so memory does not limit it.",
        )
    )
    return found


def _advise_on_divisors(goal: Goal, sizes: Sequence[int]) -> Advice:
    """Return a note that few batch sizes divide the number of records."""
    size = goal.dataset_size
    rounder = size - size % 10 ** max(len(str(size)) - 2, 1)
    listed = " and ".join(map(str, sizes))
    text = (
        f"Balls in bins needs a batch size that divides the {size} records: of the sizes in the "
        f"range, only {listed} {'do' if len(sizes) > 1 else 'does'}. With {rounder} records, more "
        "would."
    )
    return Advice("few-sizes-divide", False, text)


def _is_wasteful(run: PlannedRun, chosen: PlannedRun) -> bool:
    """Return whether a run has a smaller batch and below half the signal-to-noise of `chosen`."""
    weak = run.signal_to_noise < _WASTEFUL * chosen.signal_to_noise
    return weak and run.batch_size < chosen.batch_size


def _advise_on_budget(goal: Goal, chosen: PlannedRun) -> list[Advice]:
    """Return warnings if δ is too large or the recommended run has too few steps."""
    found = []
    if count_exposed_records(goal.dataset_size, goal.delta) >= 1:
        share = number_format.round_nearest(1 / goal.dataset_size, 3)
        found.append(
            Advice(
                "delta-too-large",
                True,
                f"δ = {number_format.round_nearest(goal.delta)} is not below 1/N = {share}: it "
                "would allow publishing some record in full. Choose δ well below 1/N.",
                PONOMAREVA,
            )
        )
    if chosen.steps < goal.steps_min:
        found.append(
            Advice(
                "few-steps",
                True,
                f"The recommended run has {chosen.steps} steps. Allow more epochs, or give a "
                "smaller largest batch.",
            )
        )
    return found


def _advise_on_epochs(chosen: PlannedRun, limit: float) -> list[Advice]:
    """Return a note on whether more epochs would reduce the noise."""
    share = chosen.signal_to_noise / limit
    text = (
        f"The recommended run has {_percent(share)} of the signal-to-noise that any number of "
        "full batches would have within this budget: "
    )
    if share >= _NEAR_LIMIT:
        text += "more epochs hardly reduce the noise."
        return [Advice("more-epochs-gain-little", False, text, MCKENNA)]
    if share < _FAR_FROM_LIMIT:
        text += "more epochs, with larger batches, would reduce the noise."
        return [Advice("more-epochs-help", False, text, DE)]
    return []


def _advise_on_current(goal: Goal, chosen: PlannedRun, current: PlannedRun) -> list[Advice]:
    """Return warnings about the user's current choice, compared with the recommended run."""
    ratio = current.signal_to_noise / chosen.signal_to_noise
    sigma = number_format.round_up(current.noise_multiplier, 5)
    text = (
        f"Today's batch of {current.batch_size} with {current.steps} steps needs σ = "
        f"{sigma} and has {_percent(ratio)} of the recommended run's signal-to-noise."
    )
    found = [Advice("current-choice", ratio < _WASTEFUL, text, RAISA)]
    used = current.batch_size * current.steps
    if used > goal.examples * (1 + 1e-9):
        text = f"Today's choice processes {used} examples, above the compute limit."
        found.append(Advice("current-choice-above-limit", True, text))
    return found


def _percent(share: float) -> str:
    """Format a fraction as a whole percentage, rounded down."""
    return f"{math.floor(100 * share)} %"
