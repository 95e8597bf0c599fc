"""Solve for the noise multipliers of many similar runs at once.

`solver.noise_multiplier` starts every run from nothing and needs eight to fifteen evaluations of ε.
Here the runs are solved from the largest sample rate to the smallest. The logarithm of σ, less that
of a closed-form approximation, is smooth in the logarithm of the sample rate, so the solved runs
predict the next one to about a part in a thousand. One or two evaluations remain.

A noise multiplier is returned only if a proved upper bound of ε at exactly this value meets the
target: predictions affect the number of evaluations, never the claim. If the search fails, the
general solver answers.

Balls in bins have no characteristic function, and that of a few steps with little noise decays
slowly. The interval of `pld` then needs lattices for its upper and its lower end. Here the upper
end suffices, and in the direction that costs less it may be coarse (`numerics.upper_bound`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from accountant_service.accounting import solver
from accountant_service.accounting.methods.pld import dominating_pairs
from accountant_service.errors import NoFiniteEpsilonError
from accountant_service.mechanisms import DpSgd
from accountant_service.mechanisms.kinds import NOISE_MAX, NOISE_MIN
from accountant_service.numerics.floats import search
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.balls_in_bins import BallsInBins
from accountant_service.numerics.laws.dominating_pair import DIRECTIONS, Composition, Direction
from accountant_service.numerics.upper_bound import DirectionBound, bound_direction
from accountant_service.writing import number_format

_DIGITS: Final = 5  # significant digits of a returned noise multiplier
_EXCESS_MAX: Final = 5e-4  # relative, of a noise multiplier above the least one
_MARGIN: Final = 2e-4  # relative, of a trial above the predicted least noise multiplier
_REPEATED_MARGIN: Final = 2e-5  # the same, once the run itself has been evaluated
_BOUND_EXCESS: Final = 6e-4  # relative, of the noise multiplier, that a coarse bound may cost
_ATTEMPTS: Final = 6
_MEASURABLE: Final = 1e-3  # relative distance of noise multipliers at which a slope is measured
_ORDER: Final = 4  # solved runs that predict the next one
_ORDER_ALIKE: Final = 3  # the same, of a correction that hardly changes
_SETTLED_SHARE: Final = 0.5  # of the distance between directions that a coarse bound may use
_COARSEST: Final = 0.1  # relative width of the coarsest bound
_FEW_STEPS: Final = 1000  # with little noise: the line integral of `pld` decays slowly
_LITTLE_NOISE: Final = 0.8
_LATTICE_EPSILON_MAX: Final = 40.0  # beyond these `pld` chooses the engine: masses underflow
_LATTICE_DELTA_MIN: Final = 1e-30
_TILT_SHARE: Final = 0.85  # of the slope: a tilt that is too large loses the bound

Evaluate = Callable[[DpSgd, float], float]


@dataclass(frozen=True, slots=True)
class SolvedRun:
    """A run with nearly the least noise multiplier that meets a privacy target.

    Attributes:
        run: with the noise multiplier, rounded up to five significant digits.
        epsilon: a proved upper bound of its ε at the target's δ; at most the target's ε.
        least: an estimate of the least noise multiplier: not proved, and not rounded.
    """

    run: DpSgd
    epsilon: float
    least: float


def solve_noise_multipliers(
    runs: Sequence[DpSgd], target: solver.Target, alike: Sequence[SolvedRun] = ()
) -> list[SolvedRun]:
    """Return each run with nearly the least noise multiplier that meets a privacy target.

    Each meets the target by a proved bound, and is at most a relative 1e-3 above the least one. For
    balls in bins the bound is not that of `pld`, whose interval at its default tolerance may end a
    relative 1e-3 above the target.

    Args:
        runs: with the same kind of sampling; their noise multipliers are ignored.
        target: ε and δ, with the default method.
        alike: solved runs with about the same rates, numbers of steps and noise multipliers, such
            as those with another sampling; they make the predictions better.

    Raises:
        AccountingError: a run has no answer, such as a target that no noise reaches.
    """
    search_state = _FrontierSearch(target, alike)
    order = sorted(range(len(runs)), key=lambda at: -runs[at].rate())
    found = {at: search_state.solve(runs[at]) for at in order}
    return [found[at] for at in range(len(runs))]


@lru_cache(maxsize=64)
def largest_gaussian_mu(epsilon: float, delta: float) -> float:
    """Return approximately the largest μ for which a μ-Gaussian mechanism is (ε, δ)-DP."""

    def excess(mu: float) -> float:
        """Return the ε of a μ-Gaussian mechanism at `delta`, minus the given ε."""
        return float(gaussian.epsilon(delta, mu)) - epsilon

    low, high = 1e-9, 1.0
    while excess(high) <= 0 and high < 1e6:
        low, high = high, 4 * high
    return search.find_boundary(excess, feasible=low, infeasible=high, relative_width=1e-9)


def _log_slope_of_epsilon(mu: float, target: solver.Target) -> float:
    """Estimate d(log ε)/d(log μ) of a Gaussian mechanism at the target's ε and δ."""
    larger = float(gaussian.epsilon(target.delta, mu * 1.01))
    return max(math.log(larger / target.epsilon) / math.log(1.01), 0.5)


class _FrontierSearch:
    """Solves for the noise of similar runs one by one, and predicts it from earlier solutions."""

    def __init__(self, target: solver.Target, alike: Sequence[SolvedRun]) -> None:
        self._target = target
        self._mu = largest_gaussian_mu(target.epsilon, target.delta)
        self._log_slope = _log_slope_of_epsilon(self._mu, target)
        self._lattice = _LatticeBound(target)
        self._alike: list[tuple[float, float]] = []  # log rate, log of σ over its approximation
        self._alike = [self._correction(each.run, each.least) for each in alike]
        self._solved: list[tuple[float, float]] = []  # the same
        self._steepness = 1.0  # elasticities as measured, over their estimates

    def solve(self, run: DpSgd) -> SolvedRun:
        """Return the run with nearly the least noise multiplier that meets the target."""
        found = self._search(run)
        if found is not None:
            return found
        least = solver.noise_multiplier(run, self._target)
        rounded = with_noise(run, _round_up(least.value))
        epsilon = self._exact_bound(rounded)
        if epsilon <= self._target.epsilon:
            return SolvedRun(rounded, epsilon, least.value)
        exact = with_noise(run, least.value)
        return SolvedRun(exact, least.guarantee.epsilon, least.value)

    def _search(self, run: DpSgd) -> SolvedRun | None:
        """Search for the noise from its prediction onwards; None if a few trials do not suffice."""
        sigma = _round_up(self._predict(run) * (1 + _MARGIN))
        before: tuple[float, float] | None = None
        for _ in range(_ATTEMPTS):
            if not NOISE_MIN < sigma < NOISE_MAX:
                return None
            trial = with_noise(run, sigma)
            epsilon = self._bound(trial)
            if not 0 < epsilon < math.inf:
                return None
            self._measure_elasticity(before, (sigma, epsilon))
            least = sigma * (epsilon / self._target.epsilon) ** (1 / self._elasticity(sigma))
            if epsilon <= self._target.epsilon and sigma <= least * (1 + _EXCESS_MAX):
                self._remember(run, least)
                return SolvedRun(trial, epsilon, least)
            before = (sigma, epsilon)
            sigma = _round_up(least * (1 + _REPEATED_MARGIN))
        return None

    def _bound(self, trial: DpSgd) -> float:
        """Return a proved upper bound on a trial run's ε; infinite if there is none."""
        if self._target.epsilon > _LATTICE_EPSILON_MAX or self._target.delta < _LATTICE_DELTA_MIN:
            return self._exact_bound(trial)
        releases = dominating_pairs(self._target.question(trial))
        few = trial.step_count() <= _FEW_STEPS and trial.noise_multiplier <= _LITTLE_NOISE
        if few or any(isinstance(law, BallsInBins) for law, _ in releases):
            found = self._lattice.epsilon(releases, self._elasticity(trial.noise_multiplier))
            if found < math.inf:
                return found
        return self._exact_bound(trial)

    def _exact_bound(self, trial: DpSgd) -> float:
        """Return the upper end of the certified interval of a trial run's ε, or infinity."""
        try:
            question = self._target.question(trial)
            return self._target.accountant.epsilon(question, self._target.delta).epsilon
        except NoFiniteEpsilonError:
            return math.inf

    def _measure_elasticity(
        self, earlier: tuple[float, float] | None, later: tuple[float, float]
    ) -> None:
        """Update the estimate of −d(log ε)/d(log σ) from two trials (σ, ε) of one run."""
        if earlier is None or abs(math.log(later[0] / earlier[0])) < _MEASURABLE:
            return
        measured = -math.log(later[1] / earlier[1]) / math.log(later[0] / earlier[0])
        expected = self._elasticity(later[0]) / self._steepness
        self._steepness = min(max(measured / expected, 0.25), 4.0)

    def _elasticity(self, sigma: float) -> float:
        """Estimate −d(log ε)/d(log σ) by the central limit theorem, corrected by earlier trials."""
        inverse = (self._target.relation.sensitivity / sigma) ** 2
        return self._steepness * self._log_slope * inverse / -math.expm1(-inverse)

    def _approximation(self, run: DpSgd) -> float:
        """Estimate the least noise by the central limit theorem, or from similar solved runs."""
        root = run.rate() * math.sqrt(max(run.step_count(), 1))
        sensitivity = self._target.relation.sensitivity
        by_limit = sensitivity / math.sqrt(math.log1p((self._mu / root) ** 2))
        at = math.log(run.rate())
        nearest = sorted(self._alike, key=lambda known: abs(known[0] - at))[:_ORDER]
        return by_limit * math.exp(_extrapolate(nearest, at))

    def _correction(self, run: DpSgd, least: float) -> tuple[float, float]:
        """Return log(sample rate), and log(`least` noise / noise by the central limit theorem)."""
        return math.log(run.rate()), math.log(least / self._approximation(run))

    def _predict(self, run: DpSgd) -> float:
        """Predict a run's least noise multiplier by extrapolation from the runs solved so far."""
        order = _ORDER_ALIKE if self._alike else _ORDER
        correction = _extrapolate(self._solved[-order:], math.log(run.rate()))
        return self._approximation(run) * math.exp(correction)

    def _remember(self, run: DpSgd, least: float) -> None:
        """Store a solved run's least noise multiplier, to predict that of later runs."""
        found = self._correction(run, least)
        if not self._solved or abs(found[0] - self._solved[-1][0]) > 1e-6:
            self._solved.append(found)
        self._lattice.keep_settings()


def _extrapolate(known: Sequence[tuple[float, float]], at: float) -> float:
    """Evaluate at x = `at` the polynomial through `known` points (x, y); 0 without points."""
    return sum(
        value * math.prod((at - other) / (point - other) for other, _ in known if other != point)
        for point, value in known
    )


class _LatticeBound:
    """Proved upper bounds on ε by FFT on a grid of losses; its spacing adapts to earlier bounds."""

    def __init__(self, target: solver.Target) -> None:
        self._epsilon, self._delta = target.epsilon, target.delta
        tilt = -math.log(target.delta) / target.epsilon / 2
        self._slopes: dict[Direction, float] = dict.fromkeys(DIRECTIONS, tilt)
        self._last: dict[Direction, float] = dict.fromkeys(DIRECTIONS, target.epsilon)
        self._found: dict[Direction, DirectionBound] = {}

    def keep_settings(self) -> None:
        """Derive the next run's grid settings from the bounds of this one.

        While a run is searched for, the settings stay: a bound may jump where they change.
        """
        for direction, found in self._found.items():
            self._slopes[direction], self._last[direction] = found.slope, found.epsilon
        self._found = {}

    def epsilon(self, releases: Composition, elasticity: float) -> float:
        """Return a proved upper bound on ε at δ, for a removed and for an added record.

        If the direction that cost more last time misses the target, its bound is returned: the
        trial fails whatever the other direction costs.
        """
        finest = _BOUND_EXCESS * elasticity
        bounds = []
        for direction in sorted(DIRECTIONS, key=lambda each: -self._last[each]):
            bounds.append(self._bound(releases, direction, finest))
            if bounds[-1] > self._epsilon:
                break
        return max(bounds)

    def _bound(self, releases: Composition, direction: Direction, finest: float) -> float:
        """Bound ε from above for a removed or an added record, tightly only near the target."""
        distance = self._epsilon / self._last[direction] - 1
        width = min(max(finest, _SETTLED_SHARE * distance), _COARSEST)
        while True:
            tilt = _TILT_SHARE * self._slopes[direction]
            found = bound_direction(releases, direction, self._delta, self._epsilon, tilt, width)
            if found.epsilon < 2 * self._epsilon:
                self._found[direction] = found
            if found.epsilon <= self._epsilon or width <= finest:
                return found.epsilon
            width = max(finest, width / 8)


def with_noise(run: DpSgd, sigma: float) -> DpSgd:
    """Return the run with another noise multiplier."""
    return replace(run, noise_multiplier=sigma)


def _round_up(sigma: float) -> float:
    """Return a noise multiplier rounded up to a few significant digits."""
    return float(number_format.round_up(sigma, _DIGITS))
