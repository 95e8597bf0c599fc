"""The certified interval: a line integral where it decays, a lattice where it does not.

Each direction of add-or-remove is first bounded by Rényi's way, which often settles the cheaper
one. Then `contour` gives both bounds at once, to eight digits or more, whenever the characteristic
function of the composed loss decays: for Gaussian noise and all but the fewest or rarest releases.
What is left, `lattice` encloses, refined from the measured width until it is as asked.

Every attempt of every engine only narrows the interval. A question makes the attempts of all
coarser questions first, and stops when it is as narrow as asked: asking for more digits never
loosens a bound. Bounds that contradict each other are an error, never an interval.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from accountant_service.numerics import rare_events, rounding, saddle_point
from accountant_service.numerics.contour import Contour, Effort, contour
from accountant_service.numerics.lattice import (
    SPACING_MAX,
    Aim,
    LatticeTooLargeError,
    Profile,
    cells_max,
    lower_profile,
    reach_for,
    upper_profile,
)
from accountant_service.numerics.privacy_loss import DIRECTIONS, Composition, Direction
from accountant_service.numerics.saddle_point import TILT_MIN, SaddlePoint
from accountant_service.numerics.tilted_loss import UndampedError

_ROUNDS_MAX: Final = 6
_LEVEL_FIRST: Final = 1e-3  # the widest relative width that is aimed at
_DELTA_HASTY: Final = 0.99  # beyond it nobody is protected, and every engine is slow
EPSILON_NEGLIGIBLE: Final = 0.05  # the tolerance is relative to ε, but never to less than this
_ACCURACY: Final = 1e-8  # relative, of δ, where a contour is cheap
_ACCURACY_SHARE: Final = 0.01  # of the tolerance, where it is not
_BLUR_SHARE: Final = 0.15  # of the tolerance that a blur may cost
_MARGIN_SHARE: Final = 5e-4  # of the tolerance, outward at the end, for good measure
_RARE_SHARE: Final = 0.05  # of the tolerance, that δ may be off by where it is steep
_BLURRED_ATTEMPTS: Final = 3
_RARE_ATTEMPTS: Final = 2
_WORK_CHEAP: Final = 1 << 17  # a millisecond
_WORK_THOROUGH: Final = 1 << 20
_WORK_BLURRED: Final = 1 << 24  # a third of a second


Engine = Callable[[Composition, SaddlePoint, Effort], Contour]


@dataclass(frozen=True, slots=True)
class Bounds:
    """A proved enclosure of a value: lower ≤ value ≤ upper (upper may be infinite)."""

    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is read off, how wide it may be, and how.

    Attributes:
        log_delta: log of the δ at which a lattice has to be accurate.
        at_delta: whether it is ε at that δ that is asked for.
        tolerance: the relative width that is asked for.
        hasty: whether what two contours say is enough, however wide.
        width: the relative width of bounds.
        epsilon_width: the width in ε that a relative width of 1 amounts to, at a saddle point.
        of_contour, of_profile: the bounds, given an upper one, and the bound of a lattice.
        moved: the saddle point, moved to where the answer turned out to lie.
    """

    log_delta: float
    at_delta: bool
    tolerance: float
    hasty: bool
    width: Callable[[Bounds], float]
    epsilon_width: Callable[[SaddlePoint], float]
    of_contour: Callable[[Contour, float], tuple[float, float]]
    of_profile: Callable[[Profile], float]
    moved: Callable[[SaddlePoint, float, float], SaddlePoint]


def epsilon_bounds(releases: Composition, delta: float, tolerance: float) -> Bounds:
    """A proved interval around the smallest ε with which the composition is (ε, δ)-DP.

    Args:
        releases: each release with its count (≥ 1), at least one.
        delta: in (0, 1).
        tolerance: the width to reach, relative to max(ε, `EPSILON_NEGLIGIBLE`).

    Returns:
        The interval, as narrow as the work limit allows when the tolerance is out of reach, and
        as it comes for a δ so large that nobody is protected.
    """
    log_delta = math.log(delta)
    reading = _Reading(
        log_delta,
        True,
        tolerance,
        delta > _DELTA_HASTY,
        relative_width,
        lambda saddle: max(saddle.epsilon, EPSILON_NEGLIGIBLE),
        lambda line, bound: line.epsilon(delta, bound),
        lambda profile: profile.epsilon(delta),
        lambda saddle, lower, upper: replace(saddle, epsilon=_likely(lower, upper)),
    )
    sides: list[_Side] = []
    for direction in DIRECTIONS:  # removing first: it settles the other more often
        enough = max((side.lower for side in sides), default=0.0)
        saddle = saddle_point.of_delta(releases, direction, log_delta, enough)
        sides.append(_Side(releases, saddle, max(saddle.bound, 0.0), reading))
        sides[-1].trace(enough, _LEVEL_FIRST)
    return _narrow(sides)


def relative_width(bounds: Bounds) -> float:
    """The width of bounds of ε, relative to what a tolerance is relative to."""
    if math.isinf(bounds.upper):
        return math.inf
    return (bounds.upper - bounds.lower) / max(bounds.upper, EPSILON_NEGLIGIBLE)


class ContradictionError(ArithmeticError):
    """A proved lower bound lies above a proved upper bound: one of the proofs is wrong."""


def consistent(lower: float, upper: float) -> Bounds:
    """Return the bounds as an interval.

    Raises:
        ContradictionError: no value satisfies both.
    """
    if not lower <= upper:
        raise ContradictionError(
            f"the proved lower bound {lower!r} is above the proved upper bound {upper!r}"
        )
    return Bounds(lower, upper)


def outward(bounds: Bounds, tolerance: float) -> Bounds:
    """Return bounds a little wider than they came out, for good measure: at the end, once.

    Raises:
        ContradictionError: the lower one is above the upper one by more than rounding explains.
    """
    consistent(bounds.lower * (1 - rounding.MARGIN), bounds.upper * (1 + rounding.MARGIN))
    margin = max(rounding.MARGIN, _MARGIN_SHARE * tolerance)
    return Bounds(bounds.lower * (1 - margin), bounds.upper * (1 + margin))


def delta_bounds(releases: Composition, epsilon: float, tolerance: float) -> Bounds:
    """A proved interval around the composition's δ(ε).

    Args:
        releases: each release with its count (≥ 1), at least one.
        epsilon: at least 0.
        tolerance: the width to reach, relative to δ.
    """
    sides: list[_Side] = []

    def width(bounds: Bounds) -> float:
        if bounds.upper <= 1e-250:
            return 0.0
        return (bounds.upper - bounds.lower) / bounds.upper

    for direction in DIRECTIONS:
        enough = max((side.lower for side in sides), default=0.0)
        saddle = saddle_point.of_epsilon(releases, direction, epsilon, _log(enough))
        reading = _Reading(
            min(0.0, max(-600.0, saddle.bound - 10.0)),
            False,
            tolerance,
            False,
            width,
            lambda saddle: 1 / (1.0 + saddle.tilt),
            lambda line, _: _at(line, epsilon),
            lambda profile: profile.delta(epsilon),
            lambda saddle, lower, upper: replace(saddle, log_delta=_log(_likely(lower, upper))),
        )
        bound = math.exp(min(max(saddle.bound, -690.0), 0.0))
        sides.append(_Side(releases, saddle, bound, reading))
        sides[-1].trace(enough, _LEVEL_FIRST)
    return _narrow(sides)


def _alike(one: SaddlePoint, other: SaddlePoint) -> bool:
    """Whether two are so near that they lead to the same contour, about."""
    same_epsilon = abs(one.epsilon - other.epsilon) < 0.02 * other.epsilon
    return same_epsilon and abs(one.log_delta - other.log_delta) < 1.0


def _likely(lower: float, upper: float) -> float:
    """A value between two bounds: the upper one, unless it is still far off."""
    return math.sqrt(lower * upper) if 1.5 * lower < upper and lower > 0 else upper


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _at(line: Contour, epsilon: float) -> tuple[float, float]:
    lower, upper = line.delta(np.array([epsilon]))
    return float(lower[0]), float(upper[0])


def _narrow(sides: list[_Side]) -> Bounds:
    """Narrow each direction, level by level, until the interval of the costlier one is as asked.

    A level that is not reached and narrows nothing is the last: finer ones ask for more work.
    """
    reading, before = sides[0].reading, Bounds(0.0, math.inf)
    for level in _levels(reading.tolerance):
        for side in sides:
            side.trace(max(side.lower for side in sides), level)
        _refine(sides, level)
        for side in sides:
            consistent(side.lower * (1 - rounding.MARGIN), side.upper * (1 + rounding.MARGIN))
        found = Bounds(max(side.lower for side in sides), max(side.upper for side in sides))
        width = reading.width(found)
        if reading.hasty or width <= reading.tolerance or (width > level and found == before):
            break
        before = found
    return outward(found, reading.tolerance)


def _levels(tolerance: float) -> list[float]:
    """Return the relative widths to aim at: powers of ten from 1e-3 down to the tolerance."""
    return [10.0**-digits for digits in range(3, max(3, math.ceil(-math.log10(tolerance))) + 1)]


def _refine(sides: list[_Side], level: float) -> None:
    """Narrow each direction by its lattice.

    A direction whose upper bound lies below the other's lower bound no longer matters.
    """
    for _ in range(_ROUNDS_MAX):
        for side in sides:
            best = max(side.lower for side in sides)
            side.refine(best, level)


class _Side:
    """One direction: its best bounds so far, and the lattice that narrows them."""

    def __init__(
        self, releases: Composition, saddle: SaddlePoint, bound: float, reading: _Reading
    ) -> None:
        self.releases, self.saddle, self.reading = releases, saddle, reading
        self.lower, self.upper = 0.0, bound
        self.blur = 1.0  # of what the tilt suggests
        self.traced = math.inf  # the level of the last contours
        self.lattice: _Lattice | None = None

    def trace(self, enough: float, level: float) -> None:
        """Narrow both bounds by contours, unless the upper one is below `enough` already.

        The first attempt is cheap and accurate, the others cost more and are less so, the last
        are blurred as well; each aims at where the one before found the answer. Each level is
        tried once.
        """
        if level >= self.traced or self._settled(enough, level):
            return
        self.traced, self.blur = level, 1.0
        for engine, effort, saddle in self._attempts(level):
            with contextlib.suppress(UndampedError):
                line = engine(self.releases, saddle, effort)
                lower, upper = self.reading.of_contour(line, self.upper)
                self.lower, self.upper = max(self.lower, lower), min(self.upper, upper)
                self.saddle = self.reading.moved(self.saddle, self.lower, self.upper)
                if effort.blur:  # it costs more where δ is steeper than the tilt
                    self.blur *= min(
                        1.0, math.sqrt(0.5 / max(self._excess(self.lower, level), 1e-9))
                    )
            if self._settled(enough, level):  # before the next attempt is prepared
                return

    def _settled(self, enough: float, level: float) -> bool:
        """Whether no more is asked of this direction, at a level."""
        width = max(level, self.reading.tolerance)
        return self.upper <= enough or self._excess(self.lower, width) <= 1

    def _attempts(self, level: float) -> Iterator[tuple[Engine, Effort, SaddlePoint]]:
        """What to try next, given what the attempts before have found."""
        if level == _LEVEL_FIRST:
            yield contour, self._cheap(), self.saddle
        yield contour, self._thorough(level), self.saddle
        if self.reading.hasty:
            return
        yield from self._rare_attempts(level)
        for _ in range(_BLURRED_ATTEMPTS):
            yield rare_events.contour, self._blurred(level), self.saddle
            yield contour, self._blurred(level), self.saddle

    def _rare_attempts(self, level: float) -> Iterator[tuple[Engine, Effort, SaddlePoint]]:
        """At the ε of one event, of many, and where these found it; nowhere twice."""
        effort = Effort(math.log(_RARE_SHARE * level), 0.0, _WORK_BLURRED)
        guesses: list[SaddlePoint] = []
        with contextlib.suppress(UndampedError):
            guesses = rare_events.estimates(self.releases, self.saddle)
        if not self.reading.at_delta:
            guesses = [self.saddle]
        tried: list[SaddlePoint] = []
        for _ in range(len(guesses) + _RARE_ATTEMPTS):
            guess = guesses.pop(0) if guesses else self.saddle
            if not any(_alike(guess, other) for other in tried):
                tried.append(guess)
                yield rare_events.contour, effort, guess

    def _cheap(self) -> Effort:
        return Effort(math.log(_ACCURACY), 0.0, _WORK_CHEAP)

    def _thorough(self, level: float) -> Effort:
        width = level * self.reading.epsilon_width(self.saddle)
        accuracy = min(_ACCURACY_SHARE * width * (1.0 + self.saddle.tilt), 1e-3)
        return Effort(math.log(accuracy), 0.0, _WORK_THOROUGH)

    def _blurred(self, level: float) -> Effort:
        width = level * self.reading.epsilon_width(self.saddle)
        blur = self.blur * math.sqrt(_BLUR_SHARE * width / (0.5 + self.saddle.tilt))
        return replace(self._thorough(level), blur=blur, work=_WORK_BLURRED)

    def _first_lattice(self, level: float) -> _Lattice:
        width = level * self.reading.epsilon_width(self.saddle)
        return _Lattice.around(self.releases, self.saddle, self.reading.log_delta, width)

    def _excess(self, best: float, width: float) -> float:
        """How many times wider than `width` the interval from the best lower bound is."""
        return self.reading.width(Bounds(best, max(best, self.upper))) / width

    def refine(self, best: float, level: float) -> None:
        """Narrow the bounds by a lattice, finer every time, until they are as asked.

        Args:
            best: the best lower bound of either direction. If the upper bound is below it, the
                lower one is left out.
            level: the relative width to aim at.
        """
        if self.reading.hasty or self._excess(best, max(level, self.reading.tolerance)) <= 1:
            return
        if self.lattice is None:
            self.lattice = self._first_lattice(level)
        else:
            self.lattice.refine(math.sqrt(1 / self._excess(best, level)))
        read = self.reading.of_profile
        upper, lower = self.lattice.profiles(lambda profile: read(profile) > best)
        if upper is not None:
            self.upper = min(self.upper, read(upper))
        if lower is not None:
            self.lower = max(self.lower, read(lower))


class _Lattice:
    """One direction's lattice: where it is accurate, and how fine."""

    def __init__(self, releases: Composition, aim: Aim, log_delta: float, spacing: float) -> None:
        self.releases, self.aim, self.log_delta = releases, aim, log_delta
        self.loss_range = _loss_range(releases, aim.direction, log_delta)
        self.finest = self.loss_range / (cells_max(len(releases)) - 3)
        self.spacing = max(min(spacing, self.loss_range / 8), self.finest)
        self.exhausted = False

    @classmethod
    def around(
        cls, releases: Composition, saddle: SaddlePoint, log_delta: float, width: float
    ) -> _Lattice:
        """A lattice that is accurate around a saddle point, to about this width in ε."""
        aim = Aim(saddle.direction, saddle.tilt, saddle.epsilon)
        return cls(releases, aim, log_delta, _first_spacing(releases, aim, width))

    def refine(self, factor: float) -> None:
        """A finer spacing, within the lattice limit."""
        self.spacing = max(self.finest, self.spacing * min(0.7, max(0.1, 0.85 * factor)))

    def profiles(
        self, lower_wanted: Callable[[Profile], bool] = lambda _: True
    ) -> tuple[Profile | None, Profile | None]:
        """The upper and the lower profile at the present spacing, or at the finest that fits.

        Args:
            lower_wanted: whether the lower one is, given the upper one.

        Returns:
            None for what is not wanted, and for both if no lattice fits.
        """
        while not self.exhausted:
            try:
                upper = upper_profile(self.releases, self.aim, self.spacing, self.log_delta)
                if upper.floor > self.aim.epsilon and self.aim.tilt > TILT_MIN:
                    # tilted so far that the ε to be read off lies below the window
                    self.aim = replace(self.aim, tilt=self.aim.tilt / 2)
                    continue
                lower = None
                if lower_wanted(upper):
                    lower = lower_profile(self.releases, self.aim, self.spacing, self.log_delta)
            except LatticeTooLargeError as error:
                self.finest = self.spacing = self.spacing * max(1.2, error.excess)
                self.exhausted = self.spacing > min(2 * self.loss_range, SPACING_MAX)
                continue
            self.exhausted = self.spacing <= self.finest
            return upper, lower
        return None, None


def lattice_profiles(
    releases: Composition, saddle: SaddlePoint, tolerance: float
) -> tuple[Profile | None, Profile | None]:
    """An upper and a lower profile of one direction, about as accurate as asked around ε.

    Args:
        releases: with their counts.
        saddle: around the ε of interest.
        tolerance: relative, of δ.
    """
    width = tolerance / (1.0 + saddle.tilt)
    log_delta = max(saddle.log_delta, -600.0) - 10.0
    return _Lattice.around(releases, saddle, log_delta, width).profiles()


def _first_spacing(releases: Composition, aim: Aim, width: float) -> float:
    """A guess of the spacing that gives this width in ε, from T·(s+1)·h²/8 ≈ width.

    Quantised to quarter powers of two, so that neighbouring questions share a lattice and ε is
    monotone between them.
    """
    steps = sum(count for _, count in releases)
    wanted = math.sqrt(4 * width / (steps * (aim.tilt + 1)))
    return float(2.0 ** (math.floor(4 * math.log2(wanted)) / 4))


def _loss_range(releases: Composition, direction: Direction, log_delta: float) -> float:
    """The longest range of losses that one release's cells must cover."""
    reach = reach_for(sum(count for _, count in releases), log_delta)
    limits = [release.loss_limits(direction, reach) for release, _ in releases]
    return max(high - low for low, high in limits)
