"""Bounds of the law of a sum of independent lognormal variables, on a lattice.

X = exp(μz − μ²/2) with z standard normal has the mean 1. The plain law of X is Q; the tilted law
has the density x with respect to it, and is that of exp(μz + μ²/2). S is the sum of b independent
X. Balls-in-bins sampling needs the law of S under Q, and with one tilted summand.

* **Above**: each cell's mass goes to its two ends with its mean kept. The sum is then larger in
  convex order.
* **Below**: each summand is rounded to the nearest lattice point.

The masses of the sum are powers of transforms. A single transform has the same error at every
point, so the masses are also computed under exponential tilts e^{θx}, and each point takes its best
bound. All errors are added outward: cell masses, exponents, transforms, and mass that wraps around
(Chernoff's bound). The proof is in docs/accountants/balls_in_bins.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from accountant_service.numerics.floats.convolution import LatticeMasses, convolve_binary
from accountant_service.numerics.floats.special_functions import Array, lattice_points, log_sum_exp
from accountant_service.numerics.laws.dominating_pair import normal_masses
from accountant_service.numerics.time_limit import check_time

_EPS: Final = float(np.finfo(float).eps)
_UNDERFLOW: Final = 1e-300  # more than any mass that is computed as zero
_EXPONENT_MAX: Final = 700.0
_BLOCKS: Final = 1024  # of a summand's masses, for Chernoff bounds
_THRESHOLDS: Final = (0.7, 0.4, 0.2, 0.1)  # of large summands, in shares of what is lacking
_TILTS_UP: Final = (1.0, 4.0, 8.0)  # standard deviations from the mean to a tilted sum
_TILTS_DOWN: Final = (4.0, 8.0)
_RATES: Final = 64  # that are tried to find them
_WINDOW_DEVIATIONS: Final = 4.0  # above the mean, in every window
_RATE_RATIO: Final = 1.5  # of neighbouring tilts at least
_WRAP_POINTS: Final = 64  # over which mass that wraps around is thought to spread
_RATES_DOWN: Final[Array] = 0.25 * 2.0 ** np.arange(
    14.0
)  # of tilts, in standard deviations of the sum
_RATES_UP: Final[Array] = 1.4 ** np.arange(20.0)  # of tilts, relative to the least


@dataclass(frozen=True, slots=True)
class SumLattice:
    """A window of lattice points for the sum, and the largest summand.

    Attributes:
        step: the spacing, of at most 24 significant bits, so that multiples are exact.
        first: index of the first point of the window.
        size: number of points of the window.
        start: index of the lattice point below which a summand has no mass in double precision.
        cut: index of the lattice point beyond which summands are cut off.
    """

    step: float
    first: int
    size: int
    start: int
    cut: int

    @property
    def low(self) -> float:
        """The lowest sum of the window."""
        return self.first * self.step

    @property
    def end(self) -> float:
        """The first sum above the window."""
        return (self.first + self.size) * self.step

    def points(self) -> Array:
        """Return the values of the sum in the window."""
        return lattice_points(self.first, self.size, self.step)


@dataclass(frozen=True, slots=True)
class SumAbove:
    """Upper bounds of the masses of the sum of b summands that are larger in convex order.

    Attributes:
        mass: upper bounds of the masses at the points of the window.
        below: upper bound of the mass below the window.
        beyond: upper bound of the mass of all outcomes with a summand that was cut off, or with a
            sum above the window.
        tilted_beyond: the same with one tilted summand.
        summand: one summand up to the cut.
    """

    mass: Array
    below: float
    beyond: float
    tilted_beyond: float
    summand: _Blocks


def round_step(step: float) -> float:
    """Return the step rounded to 20 significant bits."""
    mantissa, exponent = math.frexp(step)
    return math.ldexp(round(mantissa * (1 << 20)) / (1 << 20), exponent)


def quantile(mu: float, deviations: float) -> float:
    """Return X at z = `deviations`."""
    return math.exp(min(mu * deviations - 0.5 * mu * mu, _EXPONENT_MAX))


def sum_above(mu: float, bins: int, lattice: SumLattice) -> SumAbove:
    """Return upper bounds of the sum of `bins` summands that are larger in convex order."""
    edges = lattice_points(lattice.start, lattice.cut + 1 - lattice.start, lattice.step)
    plain, plain_error, tilted, tilted_error = _cell_masses(mu, edges)
    low = edges[:-1]
    upward = (tilted - plain * low) / lattice.step
    upward_error = (
        tilted_error + low * plain_error + 4 * _EPS * (tilted + low * plain)
    ) / lattice.step + _UNDERFLOW
    whole = plain + plain_error
    upward = np.clip(upward, 0.0, plain)
    mass = np.zeros(len(edges))
    mass[:-1] += np.minimum(plain - upward + plain_error + upward_error, whole)
    mass[1:] += np.minimum(upward + upward_error, whole)
    mass *= 1 + 4 * _EPS
    summand = LatticeMasses(lattice.start, mass, bins)
    blocks = _Blocks(summand, lattice.step)
    others = _Blocks(replace(summand, count=bins - 1), lattice.step)
    one = _Blocks(LatticeMasses(lattice.start, mass * edges * (1 + 4 * _EPS), 1), lattice.step)
    plain_tail, tilted_tail = tails_beyond(mu, float(edges[-1]))
    return SumAbove(
        _bound_masses([summand], lattice, outward=1)[0],
        _mass_below([blocks], lattice.low) if lattice.first > 0 else _UNDERFLOW,
        min(1.0, bins * plain_tail + _mass_above([blocks], lattice.end)),
        min(1.0, tilted_tail + (bins - 1) * plain_tail + _mass_above([others, one], lattice.end)),
        blocks,
    )


def mass_below(law: SumAbove, level: float) -> float:
    """Return an upper bound of the mass of sums below a level."""
    return _mass_below([law.summand], level)


def log_powers_above(law: SumAbove, level: float, powers: Array) -> Array:
    """Return logs of upper bounds of E[S^a; S > level], for each power a.

    S^a·e^{−rS} decreases beyond S = a/r.
    """
    rates: Array = 2.0 / float(law.summand.points[-1]) * _RATES_UP
    logs = law.summand.count * law.summand.log_moments(rates) - rates * level
    allowed = np.greater_equal.outer(rates * level, powers)
    least: Array = np.where(allowed, logs[:, None], math.inf).min(axis=0)
    return least + powers * math.log(level)


def sum_below(
    mu: float, bins: int, lattice: SumLattice, *, tilted: bool, outward: int
) -> tuple[Array, float]:
    """Return bounds of the masses of the sum of rounded summands, none of them cut off.

    The second result bounds the mass in all that wrapped around: lower bounds hold without it.

    Args:
        mu: of each summand.
        bins: number of summands.
        lattice: to which they are rounded.
        tilted: whether one of the summands has the tilted law.
        outward: 1 for upper bounds, −1 for lower ones.
    """
    halves = (np.arange(lattice.start, lattice.cut) + 0.5) * lattice.step
    edges = np.concatenate([[max(lattice.start - 0.5, 0.0) * lattice.step], halves])
    plain, plain_error, other, other_error = _cell_masses(mu, edges)
    summands = [LatticeMasses(lattice.start, np.maximum(plain + outward * plain_error, 0.0), bins)]
    if tilted:
        one = LatticeMasses(lattice.start, np.maximum(other + outward * other_error, 0.0), 1)
        summands = [replace(summands[0], count=bins - 1), one]
    return _bound_masses(summands, lattice, outward=outward)


def _cell_masses(mu: float, edges: Array) -> tuple[Array, Array, Array, Array]:
    """Return the plain and the tilted mass of each cell, each followed by its rounding error."""
    with np.errstate(divide="ignore"):
        z = np.log(edges) / mu + 0.5 * mu
    plain, plain_error = normal_masses(z, mu)
    tilted, tilted_error = normal_masses(z - mu, mu)
    return plain, plain_error, tilted, tilted_error


def tails_beyond(mu: float, edge: float) -> tuple[float, float]:
    """Return upper bounds of the plain and of the tilted mass of a summand above `edge`."""
    plain, plain_error, tilted, tilted_error = _cell_masses(mu, np.array([edge, np.inf]))
    return float((plain + plain_error)[0]), float((tilted + tilted_error)[0])


class _Blocks:
    """A summand's masses, merged into few blocks.

    A block's mass moves to its two ends with its mean kept, which by convexity can only raise the
    mean of e^{rx}, for any r, and of x·e^{rx} for r ≥ 0, also of the blocks below a threshold.
    """

    def __init__(self, summand: LatticeMasses, step: float) -> None:
        self.count, points = summand.count, len(summand.mass)
        first = summand.first
        starts = _block_starts(points, min(max(round(1 / step) - first, 0), points - 1))
        last = np.append(starts[1:], points) - 1
        mass = np.add.reduceat(summand.mass, starts)
        moment = np.add.reduceat(summand.mass * np.arange(points), starts) - mass * starts
        upward = np.clip(moment / np.maximum(last - starts, 1), 0.0, mass)
        self.lows = (starts + first) * step
        self.points = np.concatenate([self.lows, (last + first) * step])
        room = 1 + _EPS * (int((last - starts).max()) + 16)
        self.mass = np.concatenate([mass - upward, upward]) * room + _UNDERFLOW
        self.log_mass = np.log(self.mass)

    def log_moments(self, rates: Array, threshold: float = math.inf) -> Array:
        """Return upper bounds of log E[e^{rx}; x below the threshold], for each rate r."""
        kept = self.points < threshold
        exponent = rates[:, None] * self.points[kept]
        largest = np.abs(exponent).max(axis=1) + 700.0
        total = log_sum_exp(self.log_mass[kept] + exponent)
        rounded: Array = total + _EPS * (4 * largest + len(self.mass) + 16)
        return rounded


@lru_cache(maxsize=64)
def _block_starts(points: int, centre: int) -> NDArray[np.int64]:
    """Return where blocks of lattice points start: single points near `centre`, longer far off."""
    single = np.arange(_BLOCKS // 4)
    growing = np.geomspace(len(single), max(points, len(single) + 1), _BLOCKS // 4).astype(np.int64)
    offsets = np.concatenate([single, growing])
    starts = np.unique(np.concatenate([[0], centre - offsets, centre + offsets]))
    return starts[(starts >= 0) & (starts < points)]


def _mass_above(parts: Sequence[_Blocks], level: float) -> float:
    """Return an upper bound of the mass of sums above a level.

    By Chernoff's bound, of all outcomes or of those without summands above a threshold. Two such
    summands are improbable; with one, the others must make up for what it lacks.
    """
    largest = max(float(part.points[-1]) for part in parts)
    mean = math.fsum(part.count * float(part.mass @ part.points) for part in parts)
    best = min(1.0, _chernoff(parts, [level], math.inf)[0])
    lows = parts[0].lows
    for share in _THRESHOLDS:
        for excess in (level - mean, level - largest - mean):
            above_at = int(np.searchsorted(lows, share * excess)) + 1
            if excess <= 0 or above_at >= len(lows):
                continue
            threshold = float(lows[above_at])
            above = [float(part.mass[part.points >= threshold].sum()) for part in parts]
            expected = math.fsum(part.count * each for part, each in zip(parts, above, strict=True))
            if max(above) < 0.25:
                none, one = _chernoff(parts, [level, level - largest], threshold)
                best = min(best, none + 2 * expected * min(one, 1.0) + expected**2)
    return best


def _chernoff(parts: Sequence[_Blocks], levels: Sequence[float], threshold: float) -> list[float]:
    """Return Chernoff bounds of the mass of sums above levels, all summands below a threshold."""
    points = parts[0].points[parts[0].points < threshold]
    mass = parts[0].mass[parts[0].points < threshold]
    count = sum(part.count for part in parts)
    deviation = math.sqrt(count * float(mass @ points**2) + 1e-12)
    rates: Array = min(0.5 / deviation, 2.0 / float(points.max() + 1e-300)) * _RATES_UP
    logs = _sum_log_moments(parts, rates, threshold)
    return [_exp_up(float((logs - rates * level).min())) for level in levels]


def _sum_log_moments(parts: Sequence[_Blocks], rates: Array, threshold: float = math.inf) -> Array:
    """Return upper bounds of the log-moments of the sum, all summands below the threshold."""
    logs = [part.count * part.log_moments(rates, threshold) for part in parts]
    total: Array = np.sum(logs, axis=0)
    return total


def _mass_below(parts: Sequence[_Blocks], level: float) -> float:
    """Return Chernoff's bound of the mass of sums below a level."""
    rates: Array = _RATES_DOWN / math.sqrt(sum(part.count for part in parts))
    logs = _sum_log_moments(parts, -rates)
    return min(1.0, _exp_up(float((logs + rates * level).min())))


def _mass_outside(summands: Sequence[LatticeMasses], lattice: SumLattice) -> float:
    """Return an upper bound of the mass of sums outside the window."""
    parts = [_Blocks(each, lattice.step) for each in summands]
    below = _mass_below(parts, lattice.low) if lattice.first > 0 else 0.0
    return min(1.0, below + _mass_above(parts, lattice.end))


def _useful_rates(summand: LatticeMasses, lattice: SumLattice, bins: int) -> list[float]:
    """Return rates of tilts, the first of them 0.

    A tilted sum is about z deviations off if its log-moment is z²/2. In between, the relative error
    grows with the square of the distance. With a tail that decays slowly, the tilts are those
    under which a single large summand is just becoming probable.
    """
    block = _Blocks(summand, lattice.step)
    mean = float(block.mass @ block.points)
    deviation = math.sqrt(bins * max(float(block.mass @ (block.points - mean) ** 2), 1e-12))
    chosen = [0.0]
    for sign, aims in ((1.0, _TILTS_UP), (-1.0, _TILTS_DOWN)):
        least = min(0.3 / deviation, 1.0 / float(block.points[-1]))
        rates = sign * np.geomspace(least, 100.0 / deviation, _RATES)
        exponent = block.log_mass + rates[:, None] * (block.points - mean)
        log_moments = log_sum_exp(exponent)
        sums = bins * (np.exp(exponent - log_moments[:, None]) @ block.points)
        reach = np.searchsorted(bins * log_moments, 0.5 * np.square(aims)) - 1
        last = 0.0
        for at in reach[reach >= 0].tolist():
            apart = abs(rates[at]) >= _RATE_RATIO * last
            if apart and lattice.low <= sums[at] <= lattice.end:
                last = abs(rates[at])
                chosen.append(float(rates[at]))
    return chosen


def _exp_up(log_value: float) -> float:
    """Return e^x, rounded up; at least `_UNDERFLOW`."""
    return math.exp(min(log_value, _EXPONENT_MAX)) * (1 + 1e-12) + _UNDERFLOW


def _bound_masses(
    summands: Sequence[LatticeMasses], lattice: SumLattice, *, outward: int
) -> tuple[Array, float]:
    """Return upper (`outward` = 1) or lower (−1) bounds of the masses of the sum in the window.

    Each point has the best bound of those under several tilts and in several windows. A small sum
    has small summands only. Without large ones, it can be tilted further in a shorter window.
    Mass that wraps around can only raise an upper bound; lower bounds are without it but for the
    second result in all.
    """
    best = np.full(lattice.size, 1.0 if outward > 0 else 0.0)
    least = np.full(lattice.size, math.inf)
    total_wrapped = 0.0
    bins = sum(each.count for each in summands)
    for window, used in _nested_windows(lattice, summands[0], bins):
        kept = [
            replace(each, mass=each.mass[: window.first + used - each.first]) for each in summands
        ]
        found, score = best[:used], least[:used]
        for rate in _useful_rates(kept[0], window, bins):
            bound, error, wrapped, heaviest = _bound_under_tilt(kept, window, rate, outward)
            if outward > 0:
                np.minimum(found, bound[:used], out=found)
                continue
            better = error[:used] < score
            found[better], score[better] = bound[:used][better], error[:used][better]
            total_wrapped += wrapped * float(heaviest[:used][better].max(initial=0.0))
    return best, total_wrapped * (1 + 1e-9)


def _nested_windows(
    lattice: SumLattice, summand: LatticeMasses, bins: int
) -> Iterator[tuple[SumLattice, int]]:
    """Yield the window and shorter ones at its low end, each with how many points it serves.

    Those of a shorter window are its lower half, so that little mass wraps around. They reach some
    deviations above the mean.
    """
    yield lattice, lattice.size
    points = (np.arange(len(summand.mass)) + summand.first) * lattice.step
    deviation = math.sqrt(bins * float(summand.mass @ (points - 1) ** 2))
    size = lattice.size // 4
    highest = bins + _WINDOW_DEVIATIONS * deviation
    while size >= 64 and (lattice.first + size // 2) * lattice.step > highest:
        yield replace(lattice, size=size), size // 2
        size //= 8


def _bound_under_tilt(
    summands: Sequence[LatticeMasses], lattice: SumLattice, rate: float, outward: int
) -> tuple[Array, Array, float, Array]:
    """Return bounds of the sum's masses in the window, from one tilt.

    Returns:
        The bounds; how far they may be off; for lower bounds, the tilted mass that wrapped around
        and is not subtracted; the factors from tilted masses to masses, rounded up.
    """
    bins = sum(each.count for each in summands)
    relative = lattice.points() - bins
    check_time()
    tilted, log_moment, rounding = _tilt(summands, lattice.step, rate, outward)
    mass, error = convolve_binary(tilted, lattice.first, lattice.size)
    off = rounding + 4 * _EPS * (4 + abs(rate) * (np.abs(relative) + bins))
    log_weight = np.minimum(log_moment - rate * relative, _EXPONENT_MAX)
    heaviest = np.exp(log_weight + off)
    if outward > 0:
        bound = (np.maximum(mass, 0.0) + error) * heaviest + _UNDERFLOW
        return bound, error * heaviest, 0.0, heaviest
    bound = np.maximum(mass - error, 0.0) * np.exp(log_weight - off)
    bound[log_weight >= _EXPONENT_MAX] = 0.0
    wrapped = _mass_outside(tilted, lattice)
    return bound, (error + wrapped / _WRAP_POINTS) * heaviest, wrapped, heaviest


def _tilt(
    summands: Sequence[LatticeMasses], step: float, rate: float, outward: int
) -> tuple[list[LatticeMasses], float, float]:
    """Return the tilted masses, the sum's log-moment, and a bound of its rounding error.

    The tilt is e^{rate·(x − 1)}. Every tilted mass is rounded outward by the error of its exponent.
    """
    tilted, total, rounding = [], 0.0, 0.0
    for each in summands:
        tilt = rate * ((np.arange(len(each.mass)) + each.first) * step - 1)
        with np.errstate(divide="ignore"):
            log_mass = np.log(each.mass)
        exponent = log_mass + tilt
        log_moment = float(log_sum_exp(exponent))
        terms = np.abs(log_mass) + np.abs(tilt) + abs(rate) + abs(log_moment)
        error = np.where(np.isfinite(exponent), 4 * _EPS * (4 + terms), 0.0)
        tilted.append(replace(each, mass=np.exp(exponent - log_moment + outward * error)))
        total += each.count * log_moment
        rounding += each.count * 4 * _EPS * abs(log_moment)
    return tilted, total, rounding
