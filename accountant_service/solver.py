"""How much noise, how many steps, how large a sample: any accountant, always on the safe side.

Each answer has been evaluated: its guarantee satisfies ε ≤ target at the value returned. A step
count fits while the next one does not, or is undecided: its proved interval contains the target.
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
    verdict,
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
from accountant_service.numerics import search

_RELATIVE_WIDTH: Final = 1e-6  # how far a continuous answer may be from the boundary
_GUESS_WIDTH: Final = 1e-2
_FINER: Final = (1e-6, 1e-8, 1e-9)  # tolerances for deciding whether one step more fits


@dataclass(frozen=True, slots=True)
class Target:
    """What the solved run must satisfy, and who says so."""

    accountant: Accountant
    relation: NeighbouringRelation
    epsilon: float
    delta: float
    tolerance: float = TOLERANCE

    def guarantee(self, run: DpSgd) -> Guarantee:
        """The run's guarantee at the target's δ, judged by the referee."""
        return verdict.epsilon(self.accountant, self.question(run), self.delta)

    def excess(self, run: DpSgd) -> float:
        """log(ε/target): at most 0 where the run fits, infinite where nobody can say that it does.

        A value too expensive to account counts as one that does not fit; the search ends elsewhere.
        """
        try:
            epsilon = self.accountant.epsilon(self.question(run), self.delta).epsilon
        except (NoFiniteEpsilonError, TooExpensiveError):
            return math.inf
        excess = _log(epsilon) - _log(self.epsilon)
        # the comparison itself decides, not a difference of rounded logarithms
        return min(excess, 0.0) if epsilon <= self.epsilon else max(excess, 5e-324)

    def question(self, run: DpSgd) -> Question:
        """Return the question that a run is."""
        return Question(canonical_form(run), self.relation, self.tolerance)


def _log(epsilon: float) -> float:
    """log ε, with 0 far below any target."""
    return math.log(max(epsilon, 1e-30))


@dataclass(frozen=True, slots=True)
class Solution:
    """A solved value with the guarantee it was chosen for.

    Attributes:
        value: noise multiplier, steps or sample rate.
        guarantee: at that value; satisfies the target.
        next: for steps, the guarantee one step later; it is not proved to satisfy the target.
        undecided: for steps, how far the true ε one step later may be from the target, where its
            proved interval contains the target; None where that step is proved to be too much.
    """

    value: float
    guarantee: Guarantee
    next: Guarantee | None = None
    undecided: float | None = None


def noise_multiplier(run: DpSgd, target: Target) -> Solution:
    """The least noise multiplier with which the method shows the target met, to a relative 1e-6.

    Args:
        run: the run; its own noise multiplier is ignored.
        target: ε, δ and the accountant.

    Raises:
        UnreachableTargetError: even the largest noise multiplier is too little.
    """

    def with_noise(sigma: float) -> DpSgd:
        return replace(run, noise_multiplier=sigma)

    sigma = _solve(with_noise, target, 1.0, NOISE_MAX, NOISE_MIN, "noise multiplier")
    return Solution(sigma, target.guarantee(with_noise(sigma)))


def sample_rate(run: DpSgd, target: Target) -> Solution:
    """The largest sample rate with which the method shows the target met, to a relative 1e-6.

    Args:
        run: the run in `sample_rate` and `steps`; its own rate is ignored.
        target: ε, δ and the accountant.

    Raises:
        UnreachableTargetError: even the smallest sample rate is too large.
    """

    def with_rate(rate: float) -> DpSgd:
        return replace(run, sample_rate=rate)

    rate = _solve(with_rate, target, 0.01, RATE_MIN, 1.0, "sample rate")
    return Solution(rate, target.guarantee(with_rate(rate)))


def steps(run: DpSgd, target: Target) -> Solution:
    """The largest number of steps that is shown to meet the target.

    One step more is proved to miss it, or undecided even at the finest tolerance that helps.

    Args:
        run: the run; its own step count is ignored.
        target: ε, δ and the accountant.

    Raises:
        UnreachableTargetError: any number of steps meets the target.
    """
    guess = _guess(target, lambda guide: _largest(run, guide, 1))
    found = _steps(run, target, int(guess or 1))
    for tolerance in _FINER:
        if found.undecided is None:
            break
        found, before = _decide(run, replace(target, tolerance=tolerance), found), found
        if found.undecided is not None and found.undecided > 0.5 * (before.undecided or 0.0):
            break  # more digits are out of reach
    return found


def _with_steps(run: DpSgd, count: int) -> DpSgd:
    return replace(run, steps=count, epochs=None)


def _largest(run: DpSgd, target: Target, start: int) -> int | None:
    return search.largest_integer(lambda n: target.excess(_with_steps(run, n)), COUNT_MAX, start)


def _steps(run: DpSgd, target: Target, start: int) -> Solution:
    """The step count at the target's own tolerance."""
    count = _largest(run, target, min(COUNT_MAX, max(1, start)))
    if count is None:
        raise UnreachableTargetError(
            f"even {COUNT_MAX} steps cost no more than ε = {target.epsilon:g}: ask for a smaller ε"
        )
    fits, following = (target.guarantee(_with_steps(run, n)) for n in (count, count + 1))
    return Solution(count, fits, following, _undecided(target, run, following))


def _decide(run: DpSgd, finer: Target, found: Solution) -> Solution:
    """The solution with one step more looked at again, at a finer tolerance."""
    count = int(found.value) + 1
    following = finer.guarantee(_with_steps(run, count))
    if following.epsilon <= finer.epsilon:
        return _steps(run, finer, count)
    return replace(found, next=following, undecided=_undecided(finer, run, following))


def _undecided(target: Target, run: DpSgd, following: Guarantee) -> float | None:
    """How far the true ε may be from the target that its proved interval contains."""
    proved = following.certified
    own = target.accountant.name == DEFAULT_METHOD
    if not own or proved is None or proved.lower > target.epsilon:
        return None
    if not target.question(run).is_attained:
        return None  # only an upper bound is known, whatever the tolerance
    return max(target.epsilon - proved.lower, proved.upper - target.epsilon)


def _solve(
    with_value: Callable[[float], DpSgd],
    target: Target,
    start: float,
    best: float,
    worst: float,
    what: str,
    relative_width: float = _RELATIVE_WIDTH,
) -> float:
    """The value nearest `worst` that meets the target, bracketed outward from `start`."""

    @cache  # the bracket's ends are asked for again by the search inside
    def excess(value: float) -> float:
        return target.excess(with_value(value))

    guess = _guess(
        target, lambda guide: _solve(with_value, guide, start, best, worst, what, _GUESS_WIDTH)
    )
    fit = unfit = start = guess or start
    ratio = 1.1 if guess else 4.0
    if excess(start) <= 0:
        while excess(unfit := _towards(worst, fit, ratio)) <= 0:
            if unfit == worst:
                return worst
            fit, ratio = unfit, 4.0
    else:
        while excess(fit := _towards(best, unfit, ratio)) > 0:
            if fit == best:
                target.guarantee(with_value(best))  # if that is too expensive, say so
                raise UnreachableTargetError(
                    f"no {what} between {min(best, worst):g} and {max(best, worst):g} reaches "
                    f"ε = {target.epsilon:g} at δ = {target.delta:g} with "
                    f"{target.accountant.name}: allow a larger ε or δ, or fewer steps"
                )
            unfit, ratio = fit, 4.0
    return search.boundary(excess, fit=fit, unfit=unfit, relative_width=relative_width)


def _guess(target: Target, solve: Callable[[Target], float | None]) -> float | None:
    """What a fast method says, to start the slow one near its answer; None if it says nothing."""
    if target.accountant.name != DEFAULT_METHOD:
        return None
    try:
        return solve(replace(target, accountant=ACCOUNTANTS["subsampled_rdp"]))
    except AccountingError:
        return None


def _towards(end: float, value: float, ratio: float) -> float:
    """The next value to try: nearer by this ratio, or the end itself."""
    return min(value * ratio, end) if end > value else max(value / ratio, end)
