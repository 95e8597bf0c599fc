"""Solve for a run's noise multiplier, number of steps or sample rate within a target.

A target is (ε, δ), or the largest risk allowed. The guarantee or risk at every returned value is
computed and satisfies the target. A returned step count meets the target; one step more misses it,
or is undecided: its proved interval contains the target.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from accountant_service.accounting import referee
from accountant_service.accounting.guarantee import Guarantee, Interval, NeighbouringRelation
from accountant_service.accounting.methods import (
    ACCOUNTANTS,
    DEFAULT_METHOD,
    TOLERANCE,
    Accountant,
    Question,
)
from accountant_service.accounting.risk import RiskMeasure
from accountant_service.errors import (
    AccountingError,
    NoFiniteEpsilonError,
    TooExpensiveError,
    UnreachableTargetError,
)
from accountant_service.mechanisms import (
    Composed,
    DpSgd,
    FreeParameter,
    Mechanism,
    MechanismError,
    Repeated,
    canonical_form,
)
from accountant_service.mechanisms.field_types import RATE_MIN
from accountant_service.mechanisms.kinds import COUNT_MAX, NOISE_MAX, NOISE_MIN
from accountant_service.numerics.floats import search
from accountant_service.writing.number_format import round_nearest as shown

_RELATIVE_WIDTH: Final = 1e-6  # largest relative distance of a solution from the exact boundary
_GUESS_WIDTH: Final = 1e-2
_NEAR: Final = 0.05  # of log(cost / allowed cost): nearer trials are evaluated as reported
_FINER_TOLERANCES: Final = (1e-6, 1e-8, 1e-9)  # to decide whether one step more fits


class SolverTarget(ABC):
    """Base class of the privacy targets that a solved run must meet: (ε, δ) or a risk.

    Attributes:
        relation: the neighbouring relation.
        tolerance: relative width that proved intervals should have.
        earlier: releases made before the run, which count towards the target; or None.
    """

    relation: NeighbouringRelation
    tolerance: float
    earlier: Mechanism | None

    @abstractmethod
    def log_ratio(self, run: Mechanism) -> float:
        """Return log(privacy cost of the run / allowed cost): at most 0 if the target is met.

        It is infinite if the run has no finite cost or is too expensive to account for: the search
        treats such a run as one that misses the target.
        """

    def quick_log_ratio(self, run: Mechanism) -> float:
        """Return a number like `log_ratio` that costs less where it is far from 0.

        It may be negative for a run whose `log_ratio` is not, if that takes a wider bound.
        """
        return self.log_ratio(run)

    @abstractmethod
    def guarantee(self, run: Mechanism) -> Guarantee:
        """Return the (ε, δ) guarantee of a run that is reported beside the solution."""

    @abstractmethod
    def undecided_margin(self, run: Mechanism, following: Guarantee) -> float | None:
        """Bound the true cost's distance from the target; None if finer bounds cannot help.

        Args:
            run: with one step more than the solution.
            following: its guarantee.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Return the target in words."""

    def risk(self, run: Mechanism) -> Interval | None:  # noqa: ARG002
        """Return proved bounds on the risk of an attack, or None if the target is (ε, δ)."""
        return None

    @abstractmethod
    def at_tolerance(self, tolerance: float) -> SolverTarget:
        """Return the same target with another tolerance of the proved interval."""

    def fast_target(self) -> Target | None:
        """Return another target, quicker to solve for, whose solution is a first guess; or None."""
        return None

    def require_reachable(self, others: Mechanism, quantity: str) -> None:
        """Raise if the other releases alone miss the target, so that no value can meet it.

        Args:
            others: the mechanism without the releases that the solved number changes.
            quantity: that number, in words.

        Raises:
            UnreachableTargetError: they miss it.
            AccountingError: their cost cannot be computed.
        """
        if not self.question(others).form.atom_counts or self.log_ratio(others) <= 0:
            return
        which = "other" if self.earlier is None else "earlier"
        missed = f"the {which} releases alone cost more than {self}"
        try:
            self.guarantee(others)
            self.risk(others)  # it may be too expensive, which is no proof
        except NoFiniteEpsilonError as error:
            said = f"{missed}: {error.detail}, or leave some of them out"
            raise UnreachableTargetError(said) from None
        raise UnreachableTargetError(
            f"{missed}: the target cannot be met with any {quantity}. "
            "Allow more, or leave some of them out"
        )

    def question(self, run: Mechanism) -> Question:
        """Return the accounting question for a run composed with earlier releases."""
        released = run if self.earlier is None else Composed((self.earlier, run))
        return Question(canonical_form(released), self.relation, self.tolerance)


@dataclass(frozen=True)
class Target(SolverTarget):
    """An (ε, δ) target, and the accounting method by which a run must meet it.

    Attributes:
        accountant: the accounting method.
        relation: the neighbouring relation.
        epsilon: largest ε allowed.
        delta: δ of the target.
        tolerance: relative width that proved intervals should have.
        earlier: releases made before the run, which count towards the target; or None.
    """

    accountant: Accountant
    relation: NeighbouringRelation
    epsilon: float
    delta: float
    tolerance: float = TOLERANCE
    earlier: Mechanism | None = None

    def guarantee(self, run: Mechanism) -> Guarantee:
        """Return the run's guarantee at the target's δ, checked against the certified interval."""
        return referee.epsilon(self.accountant, self.question(run), self.delta)

    def log_ratio(self, run: Mechanism) -> float:
        """Return log(ε of the run / largest ε allowed); infinite without a finite ε."""
        return self._log_ratio_of(self.question(run))

    def quick_log_ratio(self, run: Mechanism) -> float:
        """Return the same from bounds that need only lie on one side of the largest ε allowed."""
        return self._log_ratio_of(replace(self.question(run), threshold=self.epsilon))

    def _log_ratio_of(self, question: Question) -> float:
        """Return log(upper bound on ε / largest ε allowed); infinite without a finite ε."""
        try:
            epsilon = self.accountant.epsilon(question, self.delta).epsilon
        except (NoFiniteEpsilonError, TooExpensiveError):
            return math.inf
        return _log_ratio(epsilon, self.epsilon)

    def undecided_margin(self, run: Mechanism, following: Guarantee) -> float | None:
        """Bound the true ε's distance from the target; None if finer bounds cannot help."""
        proved = following.certified
        is_default = self.accountant.name == DEFAULT_METHOD
        if not is_default or proved is None or proved.lower > self.epsilon:
            return None
        if not self.question(run).is_attained:
            return None  # only an upper bound is proved, at any tolerance
        return max(self.epsilon - proved.lower, proved.upper - self.epsilon)

    def at_tolerance(self, tolerance: float) -> Target:
        """Return the same target with another tolerance of the proved interval."""
        return replace(self, tolerance=tolerance)

    def fast_target(self) -> Target | None:
        """Return the same target with fast Rényi accounting, for a first guess of the solution."""
        if self.accountant.name != DEFAULT_METHOD:
            return None
        return replace(self, accountant=ACCOUNTANTS["subsampled_rdp"])

    def __str__(self) -> str:
        """Return ε, δ and the method as text."""
        return f"ε = {shown(self.epsilon)} at δ = {shown(self.delta)} with {self.accountant.name}"


@dataclass(frozen=True)
class RiskTarget(SolverTarget):
    """A solver's target: the largest risk of a membership attack, bounded by the default method.

    Attributes:
        measure: the measure of risk.
        relation: the neighbouring relation.
        limit: largest risk allowed, above that of guessing.
        tolerance: relative width that proved intervals should have.
        earlier: releases made before the run, which count towards the target; or None.
    """

    measure: RiskMeasure
    relation: NeighbouringRelation
    limit: float
    tolerance: float = TOLERANCE
    earlier: Mechanism | None = None

    def guarantee(self, run: Mechanism) -> Guarantee:
        """Return an (ε, δ) guarantee of the run that implies the bound on the risk."""
        return self.measure.guarantee(self.question(run))

    def at_tolerance(self, tolerance: float) -> RiskTarget:
        """Return the same target with another tolerance of the proved interval."""
        return replace(self, tolerance=tolerance)

    def risk(self, run: Mechanism) -> Interval:
        """Return proved bounds on the risk of a membership attack on the run."""
        return self.measure.risk(self.question(run))

    def log_ratio(self, run: Mechanism) -> float:
        """Return log(risk / allowed risk), with the risk of mere guessing subtracted from both."""
        try:
            upper = self.risk(run).upper
        except (NoFiniteEpsilonError, TooExpensiveError):
            return math.inf
        ratio = _log_ratio(self.measure.excess(upper), self.measure.excess(self.limit))
        return min(ratio, 0.0) if upper <= self.limit else max(ratio, 5e-324)

    def undecided_margin(self, run: Mechanism, following: Guarantee) -> float | None:  # noqa: ARG002
        """Bound the true risk's distance from the limit; None if finer bounds cannot help."""
        proved = self.risk(run)
        if proved.lower > self.limit or not self.question(run).is_attained:
            return None
        return max(self.limit - proved.lower, proved.upper - self.limit)

    def __str__(self) -> str:
        """Return the risk measure and the limit as text."""
        return f"{self.measure.name} = {shown(self.limit)}"


def _log_ratio(cost: float, limit: float) -> float:
    """Return log(cost / limit), which is ≤ 0 exactly if the cost is at most the limit."""
    difference = _log(cost) - _log(limit)
    return min(difference, 0.0) if cost <= limit else max(difference, 5e-324)


def _log(cost: float) -> float:
    """Return the logarithm of a cost; a cost of 0 counts as 1e-30, far below any target."""
    return math.log(max(cost, 1e-30))


@dataclass(frozen=True, slots=True)
class Solution:
    """The solved parameter of a run (noise, steps or sample rate), with its guarantee.

    Attributes:
        value: noise multiplier, number of steps or sample rate.
        guarantee: the guarantee at that value; it satisfies the target.
        next: for steps, the guarantee of one step more; it is not proved to satisfy the target.
        risk: bounds of the risk at that value, if the target is a risk; proved if the guarantee is.
        undecided: for steps, the largest possible distance from the target to the true ε of one
            step more, if its proved interval contains the target; None if one step more is proved
            to miss the target.
    """

    value: float
    guarantee: Guarantee
    next: Guarantee | None = None
    undecided: float | None = None
    risk: Interval | None = None


def noise_multiplier(run: DpSgd, target: SolverTarget) -> Solution:
    """Return the least noise multiplier with which a run meets the target.

    Its relative distance from the exact boundary is at most 1e-6.

    Args:
        run: the run; its noise multiplier is ignored.
        target: what the run must satisfy.

    Raises:
        UnreachableTargetError: the run misses the target even with the largest noise multiplier.
    """

    def with_noise(sigma: float) -> DpSgd:
        """Return the run with this noise multiplier."""
        return replace(run, noise_multiplier=sigma)

    def with_noise_by_poisson(sigma: float) -> DpSgd:
        """Return the run with Poisson batches, whose noise is nearly the same and found sooner."""
        return replace(run, noise_multiplier=sigma, sampling="poisson")

    similar = with_noise_by_poisson if run.sampling == "balls_in_bins" else None
    unknown = _Unknown(
        with_noise, NOISE_MAX, NOISE_MIN, "noise multiplier", Repeated(0, run), similar
    )
    with _pointing_into_request(target):
        sigma = _solve(unknown, target, 1.0)
        return _solution(sigma, with_noise(sigma), target)


def _solution(value: float, run: Mechanism, target: SolverTarget) -> Solution:
    """Build the solution from a parameter value and its run: add guarantee and risk."""
    return Solution(value, target.guarantee(run), risk=target.risk(run))


def sample_rate(run: DpSgd, target: SolverTarget) -> Solution:
    """Return the largest sample rate with which a run meets the target.

    Its relative distance from the exact boundary is at most 1e-6.

    Args:
        run: the run, given by `sample_rate` and `steps`; its rate is ignored.
        target: what the run must satisfy.

    Raises:
        UnreachableTargetError: the run misses the target even with the smallest sample rate.
    """

    def with_rate(rate: float) -> DpSgd:
        """Return the run with this sample rate."""
        return replace(run, sample_rate=rate)

    unknown = _Unknown(with_rate, RATE_MIN, 1.0, "sample rate", Repeated(0, run))
    with _pointing_into_request(target):
        rate = _solve(unknown, target, 0.01)
        return _solution(rate, with_rate(rate), target)


def steps(run: DpSgd, target: SolverTarget) -> Solution:
    """Return the largest number of steps with which a run meets the target.

    One step more misses it, or is undecided even at the finest useful tolerance. With balls in bins
    the steps are those of whole epochs, and one epoch more misses it.

    Args:
        run: the run; its step count is ignored.
        target: what the run must satisfy.

    Raises:
        UnreachableTargetError: every number of steps up to the limit meets the target, or the
            earlier releases alone miss it.
    """
    unit = run.unit_steps()

    def with_units(count: int) -> DpSgd:
        """Return the run with `count` steps, or `count` epochs of balls in bins."""
        return replace(run, steps=count * unit, epochs=None)

    whole = _Whole(with_units, COUNT_MAX // unit, "steps", Repeated(0, run), unit)
    with _pointing_into_request(target):
        return _solve_whole(whole, target)


def parameter(free: FreeParameter, target: SolverTarget) -> Solution:
    """Return the value of a mechanism's free parameter that costs most within the target.

    A number is within a relative 1e-6 of the boundary. A whole number is the largest that meets the
    target; one more misses it, or is undecided.

    Args:
        free: the mechanism, and which of its numbers is free.
        target: what it must satisfy.

    Raises:
        UnreachableTargetError: no allowed value meets the target, or every whole number does.
    """
    with _pointing_into_request(target, "/mechanism"):
        if free.is_whole:
            most, least = int(free.most), int(free.least)
            whole = _Whole(free.with_value, most, free.name, free.others(), least=least)
            return _solve_whole(whole, target)
        ends = free.most_private, free.least_private
        start = min(max(1.0 if free.cost_falls else 0.01, free.least), free.most)
        value = _solve(_Unknown(free.with_value, *ends, free.name, free.others()), target, start)
        return _solution(value, free.with_value(value), target)


@contextmanager
def _pointing_into_request(target: SolverTarget, mechanism_at: str | None = None) -> Iterator[None]:
    """Let the pointers of errors lead to the earlier releases or the mechanism of the request.

    Args:
        target: what is solved for; the accountants see its earlier releases and the rest as a sum.
        mechanism_at: where the mechanism is; None for a run, whose fields are the request's own.
    """
    try:
        yield
    except AccountingError as error:
        if error.pointer is None:
            raise
        error.mechanism_at = mechanism_at or ""
        is_earlier = False
        if target.earlier is not None:
            is_earlier = error.pointer.startswith("/mechanisms/0")
            error.pointer = error.pointer[len("/mechanisms/0") :]
        if is_earlier:
            error.mechanism_at = "/earlier"
        elif mechanism_at is None:
            error.pointer = None
        raise


@dataclass(frozen=True, slots=True)
class _Whole:
    """A whole number to solve for, with which the cost rises.

    Attributes:
        with_count: returns the mechanism with this number.
        most: the largest number allowed.
        name: in words.
        others: the mechanism without the releases that this number changes.
        unit: the number of steps in one.
        least: the smallest number allowed.
    """

    with_count: Callable[[int], Mechanism]
    most: int
    name: str
    others: Mechanism
    unit: int = 1
    least: int = 0

    def largest(self, target: SolverTarget, start: int) -> int | None:
        """Return the largest number that meets the target; None if any number does."""

        def search_with(trials: _Trials[int]) -> int | None:
            """Return the largest number whose trial meets the target."""

            def log_ratio(count: int) -> float:
                """Return log(privacy cost / allowed cost); −∞ below the numbers allowed."""
                return -math.inf if count < self.least else trials.log_ratio(count)

            return search.find_largest_integer(log_ratio, self.most, min(self.most, max(1, start)))

        trials = _Trials(self.with_count, target)
        found = search_with(trials)
        if found is None or found < max(self.least, 1) or trials.confirm(found):
            return found
        return search_with(_Trials(self.with_count, target, is_exact=True))


def _solve_whole(whole: _Whole, target: SolverTarget) -> Solution:
    """Return the largest number that meets the target, decided as well as bounds can be."""
    target.require_reachable(whole.others, f"number of {whole.name}")
    guess = _estimate(target, lambda fast_target: whole.largest(fast_target, 1))
    found = _solve_count(whole, target, int(guess or 1))
    for tolerance in _FINER_TOLERANCES:
        if found.undecided is None:
            break
        found, coarser = _recheck_next(whole, target.at_tolerance(tolerance), found), found
        if found.undecided is not None and found.undecided > 0.5 * (coarser.undecided or 0.0):
            break  # a finer tolerance does not narrow the interval further
    return found


def _solve_count(whole: _Whole, target: SolverTarget, start: int) -> Solution:
    """Return the largest number that meets the target, with the guarantee of one more."""
    count = whole.largest(target, start)
    if count is None:
        raise _explain_free_count(whole, whole.most, target)
    if count < whole.least:
        raise UnreachableTargetError(
            f"even the least number of {whole.name}, {whole.least}, does not meet {target}: allow "
            "more"
        )
    solved = whole.with_count(count)
    try:
        longer = whole.with_count(count + 1)
    except MechanismError:
        raise _explain_free_count(whole, count, target) from None
    following = target.guarantee(longer)
    margin = target.undecided_margin(longer, following)
    found = _solution(count * whole.unit, solved, target)
    return replace(found, next=following, undecided=margin)


def _explain_free_count(whole: _Whole, most: int, target: SolverTarget) -> UnreachableTargetError:
    """Return the error if the largest number allowed meets the target."""
    return UnreachableTargetError(
        f"even {most * whole.unit} {whole.name} cost no more than {target}: ask for less"
    )


def _recheck_next(whole: _Whole, finer: SolverTarget, found: Solution) -> Solution:
    """Check at a finer tolerance whether one more fits; return the updated solution."""
    count = int(found.value) // whole.unit + 1
    longer = whole.with_count(count)
    if finer.log_ratio(longer) <= 0:
        return _solve_count(whole, finer, count)
    following = finer.guarantee(longer)
    margin = finer.undecided_margin(longer, following)
    return replace(found, next=following, undecided=margin)


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A number to solve for that need not be whole.

    Attributes:
        with_value: returns the mechanism with this number.
        most_private: the number allowed that costs least.
        least_private: the one that costs most.
        name: in words.
        others: the mechanism without the releases that this number changes.
        similar: returns another mechanism, quicker to account for, to guess the number by.
    """

    with_value: Callable[[float], Mechanism]
    most_private: float
    least_private: float
    name: str
    others: Mechanism
    similar: Callable[[float], Mechanism] | None = None


def _solve(
    unknown: _Unknown,
    target: SolverTarget,
    start: float,
    relative_width: float = _RELATIVE_WIDTH,
) -> float:
    """Find the value closest to `least_private` that meets the target."""
    target.require_reachable(unknown.others, unknown.name)
    guess = _estimate(target, lambda fast_target: _solve(unknown, fast_target, start, _GUESS_WIDTH))
    if guess is None and unknown.similar is not None:
        similar = replace(unknown, with_value=unknown.similar, similar=None)
        with suppress(AccountingError):
            guess = _solve(similar, target, start, _GUESS_WIDTH)
    start, ratio = (guess, 1.1) if guess else (start, 4.0)
    trials = _Trials(unknown.with_value, target)
    found = _boundary(trials, unknown, start, ratio, relative_width)
    if trials.confirm(found):
        return found
    exact = _Trials(unknown.with_value, target, is_exact=True)
    return _boundary(exact, unknown, start, ratio, relative_width)


Number = TypeVar("Number", int, float)


class _Trials(Generic[Number]):
    """The trials of a search: quick until one is near the target, then as they are reported.

    Near the target a quick trial may have narrower bounds than a reported answer. So the value that
    a search ends with has to be confirmed.
    """

    def __init__(
        self,
        with_value: Callable[[Number], Mechanism],
        target: SolverTarget,
        *,
        is_exact: bool = False,
    ) -> None:
        self.target = target
        self.with_value: Callable[[Number], Mechanism] = with_value
        self._is_exact = is_exact
        self._found: dict[Number, float] = {}  # a search evaluates its bracket's ends again
        self._confirmed: set[Number] = set()

    def log_ratio(self, value: Number) -> float:
        """Return log(privacy cost / allowed cost) of the run with this value; roughly, if far."""
        if value not in self._found:
            try:
                self._found[value] = self._price(value)
            except MechanismError:  # it contradicts another field
                self._found[value] = math.inf
        return self._found[value]

    def _price(self, value: Number) -> float:
        run = self.with_value(value)
        found = 0.0 if self._is_exact else self.target.quick_log_ratio(run)
        self._is_exact = self._is_exact or abs(found) < _NEAR
        if self._is_exact:
            found = self.target.log_ratio(run)
            self._confirmed.add(value)
        return found

    def confirm(self, value: Number) -> bool:
        """Return whether the run with this value meets the target, as it is reported."""
        if value in self._confirmed:
            return self._found[value] <= 0
        return self.target.log_ratio(self.with_value(value)) <= 0


def _boundary(
    trials: _Trials[float],
    unknown: _Unknown,
    start: float,
    ratio: float,
    relative_width: float,
) -> float:
    """Return the value closest to `least_private` whose trial meets the target, by bracketing."""
    log_ratio = trials.log_ratio
    fit = unfit = start
    if log_ratio(start) <= 0:
        while log_ratio(unfit := _step_towards(unknown.least_private, fit, ratio)) <= 0:
            if unfit == unknown.least_private:
                return unfit
            fit, ratio = unfit, 4.0
    else:
        while log_ratio(fit := _step_towards(unknown.most_private, unfit, ratio)) > 0:
            if fit == unknown.most_private:
                raise _explain_unreachable(unknown, trials.target)
            unfit, ratio = fit, 4.0
    return search.find_boundary(
        log_ratio, feasible=fit, infeasible=unfit, relative_width=relative_width
    )


def _explain_unreachable(unknown: _Unknown, target: SolverTarget) -> UnreachableTargetError:
    """Return the error if no value meets the target.

    Raises:
        AccountingError: the cost has no bound, or takes too long.
    """
    target.guarantee(unknown.with_value(unknown.most_private))
    low, high = sorted((unknown.most_private, unknown.least_private))
    return UnreachableTargetError(
        f"no {unknown.name} between {shown(low)} and {shown(high)} reaches {target}: allow more, "
        "or release less"
    )


def _estimate(target: SolverTarget, solve: Callable[[SolverTarget], float | None]) -> float | None:
    """Solve with fast approximate accounting; None if there is none, or if it fails."""
    fast_target = target.fast_target()
    try:
        return None if fast_target is None else solve(fast_target)
    except AccountingError:
        return None


def _step_towards(end: float, value: float, ratio: float) -> float:
    """Multiply or divide a value by `ratio`, towards `end` but not past it."""
    return min(value * ratio, end) if end > value else max(value / ratio, end)
