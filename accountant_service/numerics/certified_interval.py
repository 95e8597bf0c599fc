"""The certified interval: a line integral where it decays, a lattice where it does not.

Each direction of add-or-remove is first bounded by Rényi moments, which often settles the cheaper
direction. Then `line_integral` gives both bounds at once, to eight digits or more, whenever the
characteristic function of the composed loss decays: for Gaussian noise and all but the fewest or
rarest releases. Few or rare releases go to `rare_events`. If the interval is still too wide,
`lattice_refinement` narrows it with an FFT lattice, refined from the measured width.

Every attempt of every engine only narrows the interval. A question first makes the attempts of all
coarser tolerances and stops at its own, so a smaller tolerance never loosens a bound. The results
of coarser attempts are cached: asking again for more digits costs only the finer attempts, and the
answer does not depend on earlier questions. Contradicting bounds are an error, never an interval.
"""

from __future__ import annotations

import contextlib
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from accountant_service.numerics.engines import rare_events, saddle_point
from accountant_service.numerics.engines.fft_lattice import POINTS_MAX, LatticeProfile
from accountant_service.numerics.engines.lattice_refinement import RefinedLattice
from accountant_service.numerics.engines.line_integral import (
    EvaluatedIntegral,
    IntegrationSettings,
    integrate_composition,
)
from accountant_service.numerics.engines.saddle_point import SaddlePoint
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.bounds import (
    EPSILON_NEGLIGIBLE,
    Bounds,
    check_bounds,
    relative_width,
    widen_bounds,
)
from accountant_service.numerics.laws.dominating_pair import (
    Composition,
    Direction,
    ReleaseLaw,
    distinct_directions,
)

_ROUNDS_MAX: Final = 6
_USELESS_ROUNDS: Final = 2  # in a row, after which no finer grid is tried
_NARROWER: Final = 0.9  # of a width: more is no progress
_FIRST_TARGET_WIDTH: Final = 1e-3  # the widest relative width to aim at
_DELTA_REFINED_MAX: Final = 0.99  # beyond it nobody is protected, and every engine is slow
_ACCURACY: Final = 1e-8  # relative, of δ, where a line integral is cheap
_ACCURACY_SHARE: Final = 0.01  # of the tolerance, where a line integral is costly
_SMOOTHING_SHARE: Final = 0.15  # of the tolerance that smoothing may cost
_RARE_SHARE: Final = 0.05  # of the tolerance: the error of δ allowed where δ is steep
_LATTICE_SHARE: Final = 0.4  # of the tolerance that the first lattice aims at
_COSTLY_SHARE: Final = 0.6  # the same, of laws whose discretisation takes most of the time
_OTHER_SHARE: Final = 1.0  # the same, in the direction that is probably the better one
_LOCATING_WIDTH: Final = 0.05  # relative, of the bounds that a coarse lattice aims at
_SLOPE_STEP: Final = 0.02  # of ε, over which a slope is computed
_SLOPE_MAX: Final = 2.0  # of the mean slope of log δ from 0 to ε
_SMOOTHED_ATTEMPTS: Final = 3
_RARE_ATTEMPTS: Final = 2
_POINTS_EXTENDED_MAX: Final = 1 << 18  # of a lattice in longer numbers: a third of a second a law
_WORK_FAST: Final = 1 << 17  # a millisecond
_WORK_THOROUGH: Final = 1 << 20
_WORK_SMOOTHED: Final = 1 << 25  # half a second


Engine = Callable[[Composition, SaddlePoint, IntegrationSettings], EvaluatedIntegral]


@dataclass(frozen=True, slots=True)
class _SearchStart:
    """The first integration point (saddle point) and Rényi bound of a search for ε or δ.

    Attributes:
        saddle: the saddle point that Rényi moments suggest.
        bound: the upper bound that Rényi moments prove.
        log_delta: log of the δ at which a lattice has to be accurate.
    """

    saddle: SaddlePoint
    bound: float
    log_delta: float


@dataclass(frozen=True, slots=True)
class _Question(ABC):
    """Base of the questions about a composition: ε at a given δ, or δ at a given ε.

    The answer is the ε or δ in question. It is bounded in both directions of the neighbouring
    relation, by engines that each need a saddle point: the point of the line of integration where
    the integrand is about largest.

    Attributes:
        releases: with their counts.
    """

    releases: tuple[tuple[ReleaseLaw, int], ...]

    @property
    @abstractmethod
    def accepts_wide_bounds(self) -> bool:
        """Return whether the first bounds found are accepted, however wide they are."""

    @abstractmethod
    def relative_width(self, bounds: Bounds) -> float:
        """Return the width of an interval around the answer, divided by the answer."""

    def is_decided(self, bounds: Bounds) -> bool:  # noqa: ARG002
        """Return whether bounds answer a question whose asker does not need the value itself."""
        return False

    @abstractmethod
    def start(self, direction: Direction, other_lower_bound: float) -> _SearchStart:
        """Return the first integration point (saddle point) and Rényi bound of the search.

        An upper bound up to `other_lower_bound`, the other direction's lower bound, settles it.
        """

    @abstractmethod
    def next_saddle(self, saddle: SaddlePoint, bounds: Bounds) -> SaddlePoint:
        """Return the integration point (saddle point) for the ε or δ that `bounds` suggest."""

    @abstractmethod
    def epsilon_scale(self, saddle: SaddlePoint) -> float:
        """Return the change of ε that changes the answer (ε or δ) by about 100 %."""

    @abstractmethod
    def bounds_from_integral(self, line: EvaluatedIntegral, known_upper: float) -> Bounds:
        """Return the bounds on the answer (ε or δ) that a computed integral for δ(ε) proves."""

    @abstractmethod
    def bound_from_profile(self, profile: LatticeProfile) -> float:
        """Return the bound on the answer (ε or δ) that a bound on the profile δ(ε) proves.

        It is an upper bound if the profile is one, else a lower bound.
        """

    @abstractmethod
    def rare_event_guesses(self, saddle: SaddlePoint) -> list[SaddlePoint]:
        """Return the integration points (saddle points) that the rare-event engine tries first."""


@dataclass(frozen=True, slots=True)
class _EpsilonAtDelta(_Question):
    """Question: which is the smallest ε for which a composition is (ε, δ)-DP, at a given δ?

    Attributes:
        delta: δ.
        undecided: the interval of ε that bounds must not touch to decide a comparison; or None.
    """

    delta: float
    undecided: tuple[float, float] | None = None

    @property
    def accepts_wide_bounds(self) -> bool:
        """Return whether δ is near 1, where no record is protected and any bounds will do."""
        return self.delta > _DELTA_REFINED_MAX

    def is_decided(self, bounds: Bounds) -> bool:
        """Return whether the bounds lie on one side of the ε that is compared with."""
        if self.undecided is None:
            return False
        return bounds.upper < self.undecided[0] or bounds.lower > self.undecided[1]

    def relative_width(self, bounds: Bounds) -> float:
        """Return the width of bounds on ε, divided by max(ε, `EPSILON_NEGLIGIBLE`)."""
        return relative_width(bounds)

    def start(self, direction: Direction, other_lower_bound: float) -> _SearchStart:
        """Return the integration point (saddle point) for ε at this δ, and the Rényi bound on ε."""
        log_delta = math.log(self.delta)
        if self.undecided is not None:
            other_lower_bound = max(other_lower_bound, self.undecided[0])
        saddle = saddle_point.find_at_delta(self.releases, direction, log_delta, other_lower_bound)
        return _SearchStart(saddle, max(saddle.bound, 0.0), saddle.log_delta)

    def next_saddle(self, saddle: SaddlePoint, bounds: Bounds) -> SaddlePoint:
        """Return the integration point (saddle point) for the ε that `bounds` suggest."""
        return replace(saddle, epsilon=_likely_value(bounds))

    def epsilon_scale(self, saddle: SaddlePoint) -> float:
        """Return the ε of `saddle`, or `EPSILON_NEGLIGIBLE` (0.05) if that is larger."""
        return max(saddle.epsilon, EPSILON_NEGLIGIBLE)

    def bounds_from_integral(self, line: EvaluatedIntegral, known_upper: float) -> Bounds:
        """Return the bounds on ε at δ that a computed integral for δ(ε) proves."""
        return Bounds(*line.epsilon(self.delta, known_upper))

    def bound_from_profile(self, profile: LatticeProfile) -> float:
        """Return the bound on ε at δ that an upper or lower bound on δ(ε) proves."""
        return profile.epsilon(self.delta)

    def rare_event_guesses(self, saddle: SaddlePoint) -> list[SaddlePoint]:
        """Return integration points at guesses of ε; none if the rare-event engine is unusable.

        To compare with an ε, δ at that ε is enough.
        """
        with contextlib.suppress(SlowDecayError):
            guesses = rare_events.guess_saddle_points(self.releases, saddle)
            if self.undecided is None:
                return guesses
            return [replace(saddle, epsilon=self.undecided[1]), *guesses]
        return []


@dataclass(frozen=True, slots=True)
class _DeltaAtEpsilon(_Question):
    """Question: which is the smallest δ for which a composition is (ε, δ)-DP, at a given ε?"""

    epsilon: float

    @property
    def accepts_wide_bounds(self) -> bool:
        """Return False: bounds on δ(ε) are always refined."""
        return False

    def relative_width(self, bounds: Bounds) -> float:
        """Return the width of bounds on δ, divided by δ; 0 if δ is negligible."""
        if bounds.upper <= 1e-250:
            return 0.0
        return (bounds.upper - bounds.lower) / bounds.upper

    def start(self, direction: Direction, other_lower_bound: float) -> _SearchStart:
        """Return the integration point (saddle point) for this ε, and the Rényi bound on δ(ε)."""
        saddle = saddle_point.find_at_epsilon(
            self.releases, direction, self.epsilon, _log_or_minus_infinity(other_lower_bound)
        )
        bound = math.exp(min(max(saddle.bound, -690.0), 0.0))
        return _SearchStart(saddle, bound, min(0.0, max(-600.0, saddle.bound - 10.0)))

    def next_saddle(self, saddle: SaddlePoint, bounds: Bounds) -> SaddlePoint:
        """Return the integration point (saddle point) at the same ε, with the δ in `bounds`."""
        return replace(saddle, log_delta=_log_or_minus_infinity(_likely_value(bounds)))

    def epsilon_scale(self, saddle: SaddlePoint) -> float:
        """Return the change of ε over which δ(ε) changes by about its own size."""
        return 1 / (1.0 + saddle.tilt)

    def bounds_from_integral(self, line: EvaluatedIntegral, known_upper: float) -> Bounds:
        """Return the bounds on δ(ε) that a computed integral proves."""
        lower, upper = line.delta(np.array([self.epsilon]))
        return Bounds(float(lower[0]), min(float(upper[0]), known_upper))

    def bound_from_profile(self, profile: LatticeProfile) -> float:
        """Return the bound on δ(ε) that an upper or lower bound on the profile proves."""
        return profile.delta(self.epsilon)

    def rare_event_guesses(self, saddle: SaddlePoint) -> list[SaddlePoint]:
        """Return only the given integration point (`saddle`), since ε is known."""
        return [saddle]


def epsilon_bounds(
    releases: Composition, delta: float, tolerance: float, threshold: float | None = None
) -> Bounds:
    """Return a proved interval around the smallest ε for which a composition is (ε, δ)-DP.

    Args:
        releases: each release with its count (≥ 1), at least one.
        delta: in (0, 1).
        tolerance: the width to reach, relative to max(ε, `EPSILON_NEGLIGIBLE`).
        threshold: an ε; the search ends as soon as the interval lies on one side of it.

    Returns:
        The interval. It is wider than the tolerance if the work limit ends the search, if δ is so
        large that nobody is protected, or if a threshold is given.
    """
    margin = max(tolerance, rounding.MARGIN)  # more than the final widening
    undecided = None if threshold is None else (threshold * (1 - margin), threshold * (1 + margin))
    return _narrow_to_tolerance(_EpsilonAtDelta(tuple(releases), delta, undecided), tolerance)


def delta_bounds(releases: Composition, epsilon: float, tolerance: float) -> Bounds:
    """Return a proved interval around the smallest δ for which a composition is (ε, δ)-DP.

    Args:
        releases: each release with its count (≥ 1), at least one.
        epsilon: at least 0.
        tolerance: the width to reach, relative to δ.
    """
    return _narrow_to_tolerance(_DeltaAtEpsilon(tuple(releases), epsilon), tolerance)


def _is_alike(one: SaddlePoint, other: SaddlePoint) -> bool:
    """Return whether integrals for δ(ε) through these two points would hardly differ."""
    same_epsilon = abs(one.epsilon - other.epsilon) < 0.02 * other.epsilon
    return same_epsilon and abs(one.log_delta - other.log_delta) < 1.0


def _slope(profile: LatticeProfile, saddle: SaddlePoint) -> float:
    """Return −d log δ/dε of a profile near the ε of `saddle`, or the tilt there if not known."""
    epsilon = saddle.epsilon
    step = _SLOPE_STEP * max(epsilon, EPSILON_NEGLIGIBLE)
    first, last = profile.deltas(np.array([epsilon, epsilon + step]))
    if not 0 < last < first < 1:
        return saddle.tilt
    steepest = _SLOPE_MAX * -math.log(first) / max(epsilon, EPSILON_NEGLIGIBLE)
    return min(math.log(first / last) / step, steepest)


def _likely_value(bounds: Bounds) -> float:
    """Estimate a value from its bounds: their geometric mean, or the upper bound.

    It is the upper bound if the two are close or the lower bound is 0.
    """
    lower, upper = bounds.lower, bounds.upper
    return math.sqrt(lower * upper) if 1.5 * lower < upper and lower > 0 else upper


def _log_or_minus_infinity(value: float) -> float:
    """Return log(value), or −∞ if the value is not positive."""
    return math.log(value) if value > 0 else -math.inf


def _narrow_to_tolerance(question: _Question, tolerance: float) -> Bounds:
    """Return proved bounds on ε or δ, narrowed until their relative width is the tolerance.

    The targets get finer one by one. The search ends at a target that is missed and narrows
    nothing: finer targets cost more.
    """
    found = before = Bounds(0.0, math.inf)
    target_widths = _target_widths(tolerance)
    for number, target_width in enumerate(target_widths, start=1):
        found = _combine_directions(
            _search_both_directions(question, target_widths[:number], max(target_width, tolerance))
        )
        width = question.relative_width(found)
        if (
            question.accepts_wide_bounds
            or question.is_decided(found)
            or width <= tolerance
            or (width > target_width and found == before)
        ):
            break
        before = found
    return widen_bounds(found, tolerance)


def _target_widths(tolerance: float) -> tuple[float, ...]:
    """Return the relative interval widths to aim at: powers of ten from 1e-3 to the tolerance."""
    digits_max = max(3, math.ceil(-math.log10(tolerance)))
    return tuple(10.0**-digits for digits in range(3, digits_max + 1))


def _combine_directions(searches: tuple[_DirectionSearch, ...]) -> Bounds:
    """Return bounds on the maximum of ε (or δ) for adding and for removing a record.

    Raises:
        ContradictionError: a lower bound is above an upper one.
    """
    for search in searches:
        check_bounds(search.lower * (1 - rounding.MARGIN), search.upper * (1 + rounding.MARGIN))
    return Bounds(
        max(search.lower for search in searches), max(search.upper for search in searches)
    )


@lru_cache(maxsize=64)  # asking for more digits starts from what fewer digits found
def _search_both_directions(
    question: _Question, target_widths: tuple[float, ...], stop_width: float
) -> tuple[_DirectionSearch, ...]:
    """Search for the answer when a record is removed and when one is added; results are cached.

    Args:
        question: about which composition, ε or δ.
        target_widths: the relative widths that the attempts aim at, one after the other.
        stop_width: the relative width at which the last attempts stop: the last target, or a
            tolerance above it.
    """
    *coarser, target_width = target_widths
    if coarser:
        found = _search_both_directions(question, tuple(coarser), coarser[-1])
        searches = [search.copy() for search in found]
    else:
        searches = []
        for direction in distinct_directions(
            question.releases
        ):  # removing first: it settles the other more often
            other_lower_bound = max((search.lower for search in searches), default=0.0)
            searches.append(_DirectionSearch(question, direction, other_lower_bound))
            searches[-1].narrow_by_line_integrals(other_lower_bound, target_width, stop_width)
    for search in searches:
        search.narrow_by_line_integrals(
            max(search.lower for search in searches), target_width, stop_width
        )
    _narrow_by_lattices(searches, target_width, stop_width)
    return tuple(searches)


def _narrow_by_lattices(
    searches: list[_DirectionSearch], target_width: float, stop_width: float
) -> None:
    """Narrow all searches' bounds to `stop_width`, by FFTs on ever finer grids of losses.

    A direction whose upper bound lies below the other's lower bound no longer matters. Where two
    finer grids in turn narrow nothing, another error than that of the grid decides, and finer ones
    would only take longer.
    """
    for search in searches:
        search.locate_by_lattice(max(search.lower for search in searches), stop_width)
    rounds, useless, ratios = 0, 0, [math.inf] * len(searches)
    while rounds < _ROUNDS_MAX:
        for search in searches:
            best = max(search.lower for search in searches)
            search.narrow_by_lattice(best, target_width, stop_width)
        before, best = ratios, max(search.lower for search in searches)
        ratios = [search.width_ratio(best, stop_width) for search in searches]
        wide = [(one, other) for one, other in zip(before, ratios, strict=True) if other > 1]
        is_narrower = any(other < _NARROWER * one for one, other in wide)
        rounds, useless = rounds + 1, 0 if is_narrower else useless + 1
        if not wide:
            return
        if useless == _USELESS_ROUNDS or rounds == _ROUNDS_MAX:
            changed = [search.change_lattice() for search in searches]
            if not any(changed):
                return
            rounds, useless = 0, 0


class _DirectionSearch:
    """A search for bounds on ε or δ, either for a removed or for an added record."""

    def __init__(self, question: _Question, direction: Direction, other_lower_bound: float) -> None:
        start = question.start(direction, other_lower_bound)
        self.question, self.saddle, self.log_delta = question, start.saddle, start.log_delta
        self.lower, self.upper = 0.0, start.bound
        self.smoothing_factor = 1.0  # a factor on the smoothing width that the tilt suggests
        self.last_integral_width = math.inf  # the target width of the last line integrals
        self.lattice: RefinedLattice | None = None
        self.slope = self.saddle.tilt  # about −d log δ/dε at the answer
        self.other_tilt: float | None = None  # to try where lattices of the first narrow nothing
        self.extended = False  # whether lattices are transformed in longer numbers than doubles

    def copy(self) -> _DirectionSearch:
        """Return a copy whose bounds can be narrowed without changing this search."""
        other = copy.copy(self)
        other.lattice = copy.copy(self.lattice)
        return other

    def narrow_by_line_integrals(
        self, other_lower_bound: float, target_width: float, stop_width: float
    ) -> None:
        """Narrow the bounds on ε or δ by computing integrals for δ(ε).

        The first attempt is cheap and accurate. Later attempts cost more and are less accurate,
        and the last are smoothed as well. Each one aims at the answer that the one before found.
        Each target width is tried once.
        """
        if target_width >= self.last_integral_width or self._is_settled(
            other_lower_bound, stop_width
        ):
            return
        self.last_integral_width, self.smoothing_factor = target_width, 1.0
        for engine, settings, saddle in self._integrals_to_try(target_width):
            with contextlib.suppress(SlowDecayError):
                line = engine(self.question.releases, saddle, settings)
                found = self.question.bounds_from_integral(line, self.upper)
                self.lower = max(self.lower, found.lower)
                self.upper = min(self.upper, found.upper)
                self.saddle = self.question.next_saddle(self.saddle, Bounds(self.lower, self.upper))
                if settings.smoothing:  # smoothing costs more where δ is steeper than the tilt
                    self.smoothing_factor *= min(
                        1.0, math.sqrt(0.5 / max(self.width_ratio(self.lower, target_width), 1e-9))
                    )
            # before the next attempt is prepared
            if self._is_settled(other_lower_bound, stop_width):
                return

    def _is_settled(self, other_lower_bound: float, stop_width: float) -> bool:
        """Return whether the bounds are narrow enough, or cannot affect the answer.

        The answer is the larger one of the two directions. A direction whose upper bound is at most
        the other's lower bound does not affect it.
        """
        if self.upper <= other_lower_bound:
            return True
        if self.question.is_decided(Bounds(other_lower_bound, math.inf)):
            return True
        return self.width_ratio(self.lower, stop_width) <= 1

    def _integrals_to_try(
        self, target_width: float
    ) -> Iterator[tuple[Engine, IntegrationSettings, SaddlePoint]]:
        """Yield integrals for δ(ε) to try in turn: each one's engine, settings and point."""
        if target_width == _FIRST_TARGET_WIDTH:
            yield integrate_composition, self._fast_settings(), self.saddle
        yield integrate_composition, self._thorough_settings(target_width), self.saddle
        if self.question.accepts_wide_bounds:
            return
        yield from self._rare_event_integrals(target_width)
        for _ in range(_SMOOTHED_ATTEMPTS):
            yield (
                rare_events.integrate_rare_events,
                self._smoothed_settings(target_width),
                self.saddle,
            )
            yield integrate_composition, self._smoothed_settings(target_width), self.saddle

    def _rare_event_integrals(
        self, target_width: float
    ) -> Iterator[tuple[Engine, IntegrationSettings, SaddlePoint]]:
        """Yield rare-event integrals to try: engine, settings, and point at a guessed or found ε.

        No point is tried twice.
        """
        settings = IntegrationSettings(math.log(_RARE_SHARE * target_width), 0.0, _WORK_SMOOTHED)
        guesses = self.question.rare_event_guesses(self.saddle)
        tried: list[SaddlePoint] = []
        for _ in range(len(guesses) + _RARE_ATTEMPTS):
            guess = guesses.pop(0) if guesses else self.saddle
            if not any(_is_alike(guess, other) for other in tried):
                tried.append(guess)
                yield rare_events.integrate_rare_events, settings, guess

    def _fast_settings(self) -> IntegrationSettings:
        """Return settings for an integral for δ(ε) that is accurate, or else gives up early."""
        return IntegrationSettings(math.log(_ACCURACY), 0.0, _WORK_FAST)

    def _thorough_settings(self, target_width: float) -> IntegrationSettings:
        """Return settings for bounds of `target_width` on ε or δ, with a higher work limit."""
        width = target_width * self.question.epsilon_scale(self.saddle)
        accuracy = min(_ACCURACY_SHARE * width * (1.0 + self.saddle.tilt), 1e-3)
        return IntegrationSettings(math.log(accuracy), 0.0, _WORK_THOROUGH)

    def _smoothed_settings(self, target_width: float) -> IntegrationSettings:
        """Return settings that smooth the integrand as much as bounds of `target_width` allow."""
        width = target_width * self.question.epsilon_scale(self.saddle)
        smoothing = self.smoothing_factor * math.sqrt(
            _SMOOTHING_SHARE * width / (0.5 + self.saddle.tilt)
        )
        return replace(
            self._thorough_settings(target_width), smoothing=smoothing, work_limit=_WORK_SMOOTHED
        )

    def _first_lattice(self, target_width: float, best_lower: float) -> RefinedLattice:
        """Return a first, coarse grid of privacy losses, which `narrow_by_lattice` refines.

        It is coarse if the other direction may be the worse one.
        """
        releases = self.question.releases
        is_costly = any(getattr(law, "is_costly_to_discretise", False) for law, _ in releases)
        share = _COSTLY_SHARE if is_costly else _LATTICE_SHARE
        share = share if best_lower <= self.lower else _OTHER_SHARE
        width = share * target_width * self.question.epsilon_scale(self.saddle)
        # the lattice takes the tilt for the slope of log δ: it is finer where that is too low
        width *= min(1.0, (1 + self.saddle.tilt) / (1 + self.slope))
        points = _POINTS_EXTENDED_MAX if self.extended else POINTS_MAX
        return RefinedLattice.around(
            releases, self.saddle, self.log_delta, width, points, extended=self.extended
        )

    def width_ratio(self, best_lower: float, width: float) -> float:
        """Return the relative width of the bounds on ε or δ, divided by the `width` aimed at.

        The interval reaches from the best lower bound to this direction's upper bound. The ratio is
        0 if the interval is as narrow as the question needs.
        """
        bounds = Bounds(best_lower, max(best_lower, self.upper))
        if self.question.is_decided(bounds):
            return 0.0
        return self.question.relative_width(bounds) / width

    def locate_by_lattice(self, best_lower: float, stop_width: float) -> None:
        """Find about where the answer is, from an upper bound on a coarse grid of losses.

        Rényi bounds are far too high for releases with heavy tails, and a fine grid that is made
        for such an answer, or tilted as they say, is of no use.
        """
        if self.lattice is not None or self.question.accepts_wide_bounds:
            return
        if self._is_settled(best_lower, stop_width):
            return
        width = _LOCATING_WIDTH * self.question.epsilon_scale(self.saddle)
        lattice = RefinedLattice.around(self.question.releases, self.saddle, self.log_delta, width)
        upper, _ = lattice.profiles(lambda _: False)
        if upper is not None:
            self.upper = min(self.upper, self.question.bound_from_profile(upper))
            self.saddle = self.question.next_saddle(self.saddle, Bounds(self.lower, self.upper))
            self.slope = _slope(upper, self.saddle)
            # where bounds on moments bend, or a loss has two parts, the saddle point's tilt may be
            # far from the slope at the answer
            tilts = self.saddle.tilt, self.slope
            self.saddle, self.other_tilt = replace(self.saddle, tilt=min(tilts)), max(tilts)

    def change_lattice(self) -> bool:
        """Begin new lattices, at the other tilt and then in longer numbers; return False after."""
        if self.lattice is None or self.extended:
            return False
        if self.other_tilt is not None and self.other_tilt > self.saddle.tilt:
            tilt = self.other_tilt
        else:  # rounding decides: δ may be a small difference of its lower bounds on P and Q
            tilt, self.extended = self.lattice.target.tilt, True
        self.saddle, self.lattice, self.other_tilt = replace(self.saddle, tilt=tilt), None, None
        return True

    def narrow_by_lattice(self, best_lower: float, target_width: float, stop_width: float) -> None:
        """Narrow the bounds on ε or δ by an FFT on a grid of losses, finer at every call.

        Args:
            best_lower: the best lower bound of either direction. If the upper bound is below it,
                the lower bound is not computed.
            target_width: the relative width to aim at.
            stop_width: the relative width at which to stop.
        """
        if self.question.accepts_wide_bounds or self.width_ratio(best_lower, stop_width) <= 1:
            return
        if self.lattice is None:
            self.lattice = self._first_lattice(target_width, best_lower)
        else:
            self.lattice.refine(math.sqrt(1 / self.width_ratio(best_lower, target_width)))
        read = self.question.bound_from_profile
        upper, lower = self.lattice.profiles(lambda profile: read(profile) > best_lower)
        if upper is not None:
            self.upper = min(self.upper, read(upper))
        if lower is not None:
            self.lower = max(self.lower, read(lower))
