"""Solve for a run's noise multiplier, number of steps or sample rate within (ε, δ).

The guarantee at every returned value is computed and satisfies ε ≤ target. A returned step count
meets the target; one step more misses it, or is undecided: its proved interval contains the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from accountant_service.accountants import (
    ACCOUNTANTS,
    DEFAULT_METHOD,
    TOLERANCE,
    Accountant,
    Question,
    referee,
)
from accountant_service.errors import (
    AccountingError,
    NoFiniteEpsilonError,
    TooExpensiveError,
    UnreachableTargetError,
)
from accountant_service.guarantee import Guarantee, NeighbouringRelation
from accountant_service.mechanisms import DpSgd, canonical_form
from accountant_service.mechanisms.codec import COUNT_MAX, NOISE_MAX, NOISE_MIN, RATE_MIN
from accountant_service.numerics.floats import search

_RELATIVE_WIDTH: Final = 1e-6  # largest relative distance of a solution from the exact boundary
_GUESS_WIDTH: Final = 1e-2
_FINER_TOLERANCES: Final = (1e-6, 1e-8, 1e-9)  # to decide whether one step more fits


@dataclass(frozen=True, slots=True)
class Target:
    """The (ε, δ) that the solved run must satisfy, and the method that accounts for it.

    Attributes:
        accountant: the accounting method.
        relation: the neighbouring relation.
        epsilon: largest ε allowed.
        delta: δ of the target.
        tolerance: relative width that proved intervals should have.
    """

    accountant: Accountant
    relation: NeighbouringRelation
    epsilon: float
    delta: float
    tolerance: float = TOLERANCE

    def guarantee(self, run: DpSgd) -> Guarantee:
        """Return the run's guarantee at the target's δ, checked against the certified interval."""
        return referee.epsilon(self.accountant, self.question(run), self.delta)

    def log_epsilon_ratio(self, run: DpSgd) -> float:
        """Return log(ε of the run / target ε); at most 0 if the run meets the target.

        It is infinite if no ε is finite or the run is too expensive to account for: the search
        treats such a run as one that misses the target.
        """
        try:
            epsilon = self.accountant.epsilon(self.question(run), self.delta).epsilon
        except (NoFiniteEpsilonError, TooExpensiveError):
            return math.inf
        difference = _log(epsilon) - _log(self.epsilon)
        # the sign is that of the exact comparison, not of a difference of rounded logarithms
        return min(difference, 0.0) if epsilon <= self.epsilon else max(difference, 5e-324)

    def question(self, run: DpSgd) -> Question:
        """Return the question about a run, under the target's relation and tolerance."""
        return Question(canonical_form(run), self.relation, self.tolerance)


def _log(epsilon: float) -> float:
    """Return log ε; an ε of 0 counts as 1e-30, far below any target."""
    return math.log(max(epsilon, 1e-30))


@dataclass(frozen=True, slots=True)
class Solution:
    """A solved value with the guarantee at that value.

    Attributes:
        value: noise multiplier, number of steps or sample rate.
        guarantee: the guarantee at that value; it satisfies the target.
        next: for steps, the guarantee of one step more; it is not proved to satisfy the target.
        undecided: for steps, the largest possible distance from the target to the true ε of one
            step more, if its proved interval contains the target; None if one step more is proved
            to miss the target.
    """

    value: float
    guarantee: Guarantee
    next: Guarantee | None = None
    undecided: float | None = None


def noise_multiplier(run: DpSgd, target: Target) -> Solution:
    """Return the least noise multiplier with which the method's ε meets the target.

    Its relative distance from the exact boundary is at most 1e-6.

    Args:
        run: the run; its noise multiplier is ignored.
        target: ε, δ and the accountant.

    Raises:
        UnreachableTargetError: the run misses the target even with the largest noise multiplier.
    """

    def with_noise(sigma: float) -> DpSgd:
        return replace(run, noise_multiplier=sigma)

    sigma = _solve(with_noise, target, 1.0, NOISE_MAX, NOISE_MIN, "noise multiplier")
    return Solution(sigma, target.guarantee(with_noise(sigma)))


def sample_rate(run: DpSgd, target: Target) -> Solution:
    """Return the largest sample rate with which the method's ε meets the target.

    Its relative distance from the exact boundary is at most 1e-6.

    Args:
        run: the run, given by `sample_rate` and `steps`; its rate is ignored.
        target: ε, δ and the accountant.

    Raises:
        UnreachableTargetError: the run misses the target even with the smallest sample rate.
    """

    def with_rate(rate: float) -> DpSgd:
        return replace(run, sample_rate=rate)

    rate = _solve(with_rate, target, 0.01, RATE_MIN, 1.0, "sample rate")
    return Solution(rate, target.guarantee(with_rate(rate)))


def steps(run: DpSgd, target: Target) -> Solution:
    """Return the largest number of steps with which the method's ε meets the target.

    One step more misses it, or is undecided even at the finest useful tolerance.

    Args:
        run: the run; its step count is ignored.
        target: ε, δ and the accountant.

    Raises:
        UnreachableTargetError: every number of steps up to the limit meets the target.
    """
    guess = _estimate_by_renyi(target, lambda guide: _largest_step_count(run, guide, 1))
    found = _solve_steps(run, target, int(guess or 1))
    for tolerance in _FINER_TOLERANCES:
        if found.undecided is None:
            break
        found, coarser = _decide_next_step(run, replace(target, tolerance=tolerance), found), found
        if found.undecided is not None and found.undecided > 0.5 * (coarser.undecided or 0.0):
            break  # a finer tolerance does not narrow the interval further
    return found


def _with_steps(run: DpSgd, count: int) -> DpSgd:
    """Return the run with another number of steps."""
    return replace(run, steps=count, epochs=None)


def _largest_step_count(run: DpSgd, target: Target, start: int) -> int | None:
    """Return the most steps that meet the target; None if any number of steps does."""
    return search.find_largest_integer(
        lambda n: target.log_epsilon_ratio(_with_steps(run, n)), COUNT_MAX, start
    )


def _solve_steps(run: DpSgd, target: Target, start: int) -> Solution:
    """Return the most steps that meet the target, accounted at the target's own tolerance."""
    count = _largest_step_count(run, target, min(COUNT_MAX, max(1, start)))
    if count is None:
        raise UnreachableTargetError(
            f"even {COUNT_MAX} steps cost no more than ε = {target.epsilon:g}: ask for a smaller ε"
        )
    fits, following = (target.guarantee(_with_steps(run, n)) for n in (count, count + 1))
    return Solution(count, fits, following, _undecided_margin(target, run, following))


def _decide_next_step(run: DpSgd, finer: Target, found: Solution) -> Solution:
    """Account for one more step at a finer tolerance, and return the updated solution."""
    count = int(found.value) + 1
    following = finer.guarantee(_with_steps(run, count))
    if following.epsilon <= finer.epsilon:
        return _solve_steps(run, finer, count)
    return replace(found, next=following, undecided=_undecided_margin(finer, run, following))


def _undecided_margin(target: Target, run: DpSgd, following: Guarantee) -> float | None:
    """Return the distance to the target within which one more step is undecided, or None."""
    proved = following.certified
    is_default = target.accountant.name == DEFAULT_METHOD
    if not is_default or proved is None or proved.lower > target.epsilon:
        return None
    if not target.question(run).is_attained:
        return None  # only an upper bound is proved, at any tolerance
    return max(target.epsilon - proved.lower, proved.upper - target.epsilon)


def _solve(
    with_value: Callable[[float], DpSgd],
    target: Target,
    start: float,
    most_private: float,
    least_private: float,
    quantity: str,
    relative_width: float = _RELATIVE_WIDTH,
) -> float:
    """Return the least private value that meets the target, by a bracketing search from `start`."""

    @cache  # the final search evaluates the bracket's ends again
    def log_epsilon_ratio(value: float) -> float:
        return target.log_epsilon_ratio(with_value(value))

    guess = _estimate_by_renyi(
        target,
        lambda guide: _solve(
            with_value, guide, start, most_private, least_private, quantity, _GUESS_WIDTH
        ),
    )
    fit = unfit = start = guess or start
    ratio = 1.1 if guess else 4.0
    if log_epsilon_ratio(start) <= 0:
        while log_epsilon_ratio(unfit := _step_towards(least_private, fit, ratio)) <= 0:
            if unfit == least_private:
                return least_private
            fit, ratio = unfit, 4.0
    else:
        while log_epsilon_ratio(fit := _step_towards(most_private, unfit, ratio)) > 0:
            if fit == most_private:
                # raises its own error if that is too expensive
                target.guarantee(with_value(most_private))
                low, high = sorted((most_private, least_private))
                raise UnreachableTargetError(
                    f"no {quantity} between {low:g} and {high:g} reaches "
                    f"ε = {target.epsilon:g} at δ = {target.delta:g} with "
                    f"{target.accountant.name}: allow a larger ε or δ, or fewer steps"
                )
            unfit, ratio = fit, 4.0
    return search.find_boundary(
        log_epsilon_ratio, feasible=fit, infeasible=unfit, relative_width=relative_width
    )


def _estimate_by_renyi(target: Target, solve: Callable[[Target], float | None]) -> float | None:
    """Return the solution by Rényi accounting, a fast first guess; None if there is none."""
    if target.accountant.name != DEFAULT_METHOD:
        return None
    try:
        return solve(replace(target, accountant=ACCOUNTANTS["subsampled_rdp"]))
    except AccountingError:
        return None


def _step_towards(end: float, value: float, ratio: float) -> float:
    """Multiply or divide a value by `ratio` towards an end, without passing it."""
    return min(value * ratio, end) if end > value else max(value / ratio, end)
