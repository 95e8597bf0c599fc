"""The privacy profile δ(ε) at many ε, for one or many numbers of repetitions, from both sides.

A line integral of a composition bounds δ at every ε, and is accurate around one. A few lines cover
a range. Repetitions of the same composition share a line, as in `epsilon_curve`. Where no line
integral can be computed, a pair of FFT lattices is, for a single number of repetitions.

A lattice bounds δ only near its ε. Between such places chords do: δ(ε) = sup_A P(A) − e^ε·Q(A) is a
supremum of decreasing lines in y = e^ε, so it is convex and decreasing, and 1 at y = 0.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from accountant_service.numerics.engines import enumeration, lattice_refinement, saddle_point
from accountant_service.numerics.engines.fft_lattice import LatticeProfile
from accountant_service.numerics.engines.line_integral import (
    EvaluatedIntegral,
    IntegrationSettings,
    integrate_composition,
)
from accountant_service.numerics.engines.saddle_point import SaddlePoint
from accountant_service.numerics.errors import SlowDecayError
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.bounds import check_bounds
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import Composition, Direction
from accountant_service.numerics.time_limit import check_time

_LATTICE_WIDTH: Final = 2e-3  # relative width of δ; coarse, as lattices are costly
_SETTINGS: Final = (
    IntegrationSettings(math.log(1e-8), smoothing=0.0, work_limit=1 << 18),
    IntegrationSettings(math.log(1e-5), smoothing=0.0, work_limit=1 << 20),
)
_LATTICE_POINTS_MAX: Final = 1 << 17  # a tenth of a second
_UNDERFLOW: Final = 1e-300  # more than any Q of an attack that is computed as zero
_WORK_MAX: Final = 12  # line integrals for each direction
_LATTICE_WORK: Final = 3  # a lattice costs at least as much as this many line integrals
_EXPONENT_MAX: Final = 700.0  # e^x stays a double
_RETREAT: Final = 0.6  # of an ε where no engine gives narrow bounds: where to try again


class ProfileBounds(Protocol):
    """Interface of bounds on δ(ε) and on attacks' error rates, as any engine computes them.

    An attack is a test whether the record is in the data, which accuses if a loss is large.
    """

    def delta(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ at each ε."""
        ...

    def delta_table(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ: a row per number of repetitions, a column per ε."""
        ...

    def attack_rates(self, thresholds: Array) -> tuple[Array, Array]:
        """Return upper bounds on attacks' FPR and lower bounds on their TPR, per loss threshold.

        An attack accuses if the privacy loss is at least its threshold. The first array has upper
        bounds on false-positive rates, the second lower bounds on true-positive rates.
        """
        ...


@dataclass(frozen=True, slots=True)
class LatticeProfileBounds:
    """Bounds on δ(ε) and on attacks' error rates, from an upper and a lower FFT computation."""

    upper: LatticeProfile
    lower: LatticeProfile

    def delta(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ at each ε."""
        return self.lower.deltas(epsilons), self.upper.deltas(epsilons)

    def delta_table(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ as tables with one row, a column per ε."""
        lower, upper = self.delta(epsilons)
        return lower[np.newaxis], upper[np.newaxis]

    def attack_rates(self, thresholds: Array) -> tuple[Array, Array]:
        """Return upper bounds on attacks' FPR and lower bounds on their TPR, per loss threshold.

        The attacks are those that prove the lower profile; only the number of thresholds matters.
        """
        every = np.linspace(0, len(self.lower.p) - 1, 8 * len(thresholds)).astype(int)
        true_positives = np.clip(self.lower.p[every], 0.0, None) * math.exp(self.lower.log_scale_p)
        false_positives = self.lower.q[every] * math.exp(self.lower.log_scale_q) + _UNDERFLOW
        return np.minimum(false_positives, 1.0), np.minimum(true_positives, 1.0)


def bounds_near(
    releases: Composition, direction: Direction, epsilon: float
) -> ProfileBounds | None:
    """Return bounds on δ(ε) that are tight near a given ε; None if no engine can compute them."""
    exact = enumeration.profile(releases, direction)
    if exact is not None:
        return exact
    saddle = saddle_point.find_at_epsilon(releases, direction, epsilon)
    line = _line_near(releases, saddle, np.asarray(1.0))
    return line if line is not None else _lattice_near(releases, saddle)


def _line_near(
    releases: Composition, saddle: SaddlePoint, repetitions: Array
) -> EvaluatedIntegral | None:
    """Bound δ(ε) near `saddle`'s ε by an integral; None if its integrand decays too slowly."""
    for settings in _SETTINGS:
        with contextlib.suppress(SlowDecayError):
            return integrate_composition(releases, saddle, settings, repetitions)
    return None


def _lattice_near(releases: Composition, saddle: SaddlePoint) -> LatticeProfileBounds | None:
    """Bound δ(ε) near `saddle`'s ε by FFT convolution; None if that needs too many points."""
    upper, lower = lattice_refinement.lattice_profiles(
        releases, saddle, _LATTICE_WIDTH, _LATTICE_POINTS_MAX
    )
    return LatticeProfileBounds(upper, lower) if upper is not None and lower is not None else None


class PrivacyProfile:
    """Bounds on δ(ε) of a composition, for each of several numbers of repetitions.

    Each call of `cover` adds line integrals; all of them bound δ everywhere.
    """

    def __init__(
        self, releases: Composition, direction: Direction, repetitions: Array | None = None
    ) -> None:
        """Store the composition; bounds are added when they are needed.

        Args:
            releases: the repeated composition: each release with its count.
            direction: of add-or-remove.
            repetitions: numbers ≥ 1, one unless given.
        """
        self.direction = direction
        self.repetitions = np.ones(1) if repetitions is None else repetitions
        self._releases = releases
        most = int(self.repetitions.max())
        self.largest = [(release, count * most) for release, count in releases]
        self._found: list[ProfileBounds] = []
        self._last: tuple[Array, Array, Array] | None = None  # ε and bounds of `cover`
        self._work = 0
        self._hopeless = math.inf  # the least ε near which no engine gives bounds

    def delta(self, epsilons: Array) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ: a row per number of repetitions, a column per ε.

        They are widened by the margin of floating-point errors. At the points of the last `cover`
        its answer is returned, which nobody can write to.
        """
        if self._last is not None and np.array_equal(self._last[0], epsilons):
            return self._last[1], self._last[2]
        shape = (len(self.repetitions), len(epsilons))
        lower, upper = np.zeros(shape), np.ones(shape)
        for found in self._found:
            lower, upper = _intersect(lower, upper, found, epsilons)
        return lower, upper

    def renyi_bound(self, epsilons: Array) -> Array:
        """Return Rényi upper bounds on δ: a row per number of repetitions, a column per ε."""
        middle = float(epsilons[len(epsilons) // 2])
        saddle = saddle_point.find_at_epsilon(self.largest, self.direction, middle)
        shares = self.repetitions / self.repetitions.max()
        log_deltas = saddle_point.renyi_log_deltas(saddle, shares, epsilons)
        bound: Array = np.exp(np.clip(log_deltas, -600.0, 0.0)) * (1 + rounding.MARGIN)
        return bound

    def cover(
        self, epsilons: Array, relative_width: float, absolute_width: float
    ) -> tuple[Array, Array]:
        """Return lower and upper bounds on δ at every ε, refined to the given widths if possible.

        Where an FFT lattice is needed, its own width is enough.

        Args:
            epsilons: increasing, at least 0.
            relative_width: of bounds on δ that are narrow enough.
            absolute_width: the same; one of the two suffices.

        Returns:
            The bounds at each ε, as `delta` does.

        Raises:
            TimeoutError: the CPU time is up (`time_limit`).
            ContradictionError: a lower bound is above an upper one.
        """
        lower, upper = self.delta(epsilons)
        upper = _lower_to_chords(upper, epsilons)
        tried = np.zeros(len(epsilons), dtype=bool)
        while self._work < _WORK_MAX:
            has_lattice = any(isinstance(each, LatticeProfileBounds) for each in self._found)
            relative = max(relative_width, 2 * _LATTICE_WIDTH if has_lattice else 0.0)
            wide = (upper - lower > relative * upper + absolute_width).any(axis=0)
            pending = np.flatnonzero(wide & ~tried & (epsilons < self._hopeless))
            if not len(pending):
                break
            at = pending[-1]
            if has_lattice:  # the few that are allowed go where the bounds are widest
                at = pending[int(np.argmax((upper - lower)[:, pending].max(axis=0)))]
            tried[at] = True
            epsilon = float(epsilons[at])
            found = self._add_near(epsilon)
            if found is None:
                self._hopeless = _RETREAT * epsilon
                continue
            lower, upper = _intersect(lower, upper, found, epsilons)
            upper = _lower_to_chords(upper, epsilons)
            if (upper - lower > relative * upper + absolute_width)[:, at].any():
                tried |= (epsilons <= epsilon) & (epsilons > _RETREAT * epsilon)  # no better there
        lower.setflags(write=False)
        upper.setflags(write=False)
        self._last = epsilons.copy(), lower, upper
        return lower, upper

    def _add_near(self, epsilon: float) -> ProfileBounds | None:
        """Compute and store bounds on δ that are tight near one ε; return None if impossible."""
        check_time()
        saddle = saddle_point.find_at_epsilon(self.largest, self.direction, epsilon)
        found: ProfileBounds | None = None
        if len(self.repetitions) == 1:
            found = enumeration.profile(self.largest, self.direction)
        if found is None:
            found = _line_near(self._releases, saddle, self.repetitions)
        self._work += 1
        if found is None and len(self.repetitions) == 1:
            found = _lattice_near(self.largest, saddle)
            self._work += _LATTICE_WORK
        if found is not None:
            self._found.append(found)
        return found


def _intersect(
    lower: Array, upper: Array, found: ProfileBounds, epsilons: Array
) -> tuple[Array, Array]:
    """Narrow bounds on δ by new ones, which first get a margin for floating-point errors.

    Raises:
        ContradictionError: a lower bound is above an upper one.
    """
    low, high = found.delta_table(epsilons)
    lower = np.maximum(lower, rounding.down_each(low))
    upper = np.minimum(upper, high * (1 + rounding.MARGIN))
    wrong = np.flatnonzero(~(lower <= upper))
    if len(wrong):
        check_bounds(float(lower.flat[wrong[0]]), float(upper.flat[wrong[0]]))
    return lower, upper


def _lower_to_chords(upper: Array, epsilons: Array) -> Array:
    """Lower upper bounds on δ to the chords between others, in y = e^ε, rounded up.

    A chord is above δ whichever its ends are, so rounding may choose others than the best. Its
    value is a sum of products ≥ 0, each with a relative error far below the margin.

    Args:
        upper: a row per number of repetitions, a column per ε.
        epsilons: increasing, at least 0.
    """
    lowered: Array = np.minimum.accumulate(upper, axis=1)
    x = np.append(-np.inf, epsilons)  # δ = 1 at y = 0
    y = np.exp(np.minimum(x, _EXPONENT_MAX))
    for at, row in enumerate(lowered):
        ends = lower_hull(y, np.append(1.0, row))
        inside = np.minimum(epsilons, x[ends[-1]])
        first = np.searchsorted(x[ends[1:]], inside)
        left, right = ends[first], ends[first + 1]
        width = np.expm1(x[left] - x[right])
        share_left = np.expm1(inside - x[right]) / width
        share_right = np.exp(inside - x[right]) * np.expm1(x[left] - inside) / width
        chord = share_left * np.append(1.0, row)[left] + share_right * row[right - 1]
        lowered[at] = np.minimum(row, rounding.up_each(chord))
    return lowered


def lower_hull(x: Array, y: Array) -> NDArray[np.intp]:
    """Return the indexes of the vertices of points' lower convex hull, in increasing order of x.

    This is Andrew's monotone chain.
    """
    across, up = x.tolist(), y.tolist()
    hull: list[int] = []
    for at in np.lexsort((y, x)).tolist():
        while len(hull) >= 2:
            a, b = hull[-2:]
            turn = (across[b] - across[a]) * (up[at] - up[a])
            if turn > (up[b] - up[a]) * (across[at] - across[a]):
                break
            hull.pop()
        if not hull or across[at] > across[hull[-1]]:
            hull.append(at)
    return np.array(hull)
