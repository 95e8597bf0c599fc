"""Bounds on the distribution of a sum of independent lognormal variables, on lattices.

X = exp(μz − μ²/2) with z standard normal has the mean 1. The plain law of X is Q; the tilted law
has the density x with respect to it, and is that of exp(μz + μ²/2). S is the sum of b independent
X. Balls-in-bins sampling needs the law of S under Q, and with one tilted summand.

Outcomes are divided into classes by their largest summand: up to c₀, from c₀ to c₁ = 4c₀, and so
on. Each class has its own lattice, coarser where the sums are larger.

* **Above**: each cell's mass goes to its two ends with its mean kept. The sum is then larger in
  convex order.
* **Below**: each summand is rounded to the nearest lattice point of its outcome's class.

With transforms φ and χ of the summands below a class and in it, the class has the transform
(φ + χ)^b − φ^b. Its binomial terms are added up, so that errors are relative to the class. Where
masses lie below that error, they are computed again under exponential tilts e^{θx}. The bounds are
proved in docs/accountants/balls_in_bins.md. All errors are added outward.

A sum of many summands is smooth, though its lattice is fine. So φ^b is negligible at all but the
lowest frequencies: for σ = 1 and b = 1000 at fewer than a hundred of 16 000. Only these are
computed. Let ρ be the largest modulus of φ at the others, and c = χ(0). There the transform of a
class is at most b·c·(ρ + c)^{b−1}, and that of the first class at most ρ^b; with one tilted summand
and t = b − 1 others it is at most φ′(0)·t·c·(ρ + c)^{t−1} + χ′(0)·(ρ + c)^t. This is added to the
error of each point.

The masses at all points are not needed either. Let a block have B = 2^k neighbouring points. With w
= e^{−θh + iω}, the factor 1 + w + … + w^{B−1} of a transform under the tilt θ gives the masses of
the blocks that start at each point, of which every B-th is computed by a shorter inverse transform.

* **Above**, a block's mass moves to its start and to the next block's start with its mean kept: the
  share for the latter has the factor Σ (d/B)·w^d. This is larger in convex order, as for cells.
* **Below**, the attacker sees the block of the sum. A function of what he sees is allowed.

Both factors are computed by doubling the block, with bounds of all errors. Under a tilt, mass that
wraps around counts with the largest weight within a block.

**Strides.** Few summands in the class's own range occur in an outcome, so its lattice has a longer
step: a power of two times the step of the class, at most half a block. Both proofs above hold for
cells of any length in the range, and all points are lattice points of the class.

* **Cell masses.** In narrow cells a series around the middle, off by 16·eps·(1 + z² + μ(1 + |z|))
  of the mass (`laws/lognormal_cells.py`). Others are differences of Φ's tails, each off by a few
  eps of Φ(−|z|)·(1 + z² + μ(1 + |z|)), and 2·eps more for the cell around 0. The step has 20
  significant bits, so that the edges are exact. The weights' errors are added to both ends (above).
  Below, masses are increased by their errors for both laws. A true mass is then at least 1 − r of
  the one computed with, if it is above 1e-280; so lower bounds are (1 − r)^b of what was composed,
  without the sums that have a smaller mass among their factors. Under a tilt, r includes what
  rounding up may add. Summands below z = −38 have a mass below 1e-300, which is added.
* **Transforms.** Every output of a transform of 2ⁿ points is a sum of the inputs times n factors of
  modulus 1. With butterflies of two or four points, one of n steps is a multiplication by such a
  factor and an addition, off by (√5 + 1)·eps/2 and less than 2.2 eps. So each output is off by
  η·Σ|inputs|, η = 3·eps·n, and an eps for each time that the masses are folded onto the window.
  From there on every number carries a bound of its modulus and of its error
  (`floats/complex_balls.py`): a product is off by e₁·|z₂| + |z₁|·e₂ + 4·eps·|z₁z₂|, a power by
  b·|φ|^{b−1}·e and 8·eps·b·(1 + |log φ|) of itself. The mean error over the frequencies, and η
  times the mean modulus, bound the error of each point.
* **Terms left out.** With x = b·χ(0), and φ(0) ≤ 1, the terms beyond n have at most the mass
  x^{n+1}/(n+1)!·e^x; if the masses, rounded up, exceed 1, φ(0)^b is one more factor. n is chosen so
  that this is 1e-18 of x, and no term is left out if b is small. It is added to the error of each
  point, times φ′(0) + χ′(0) where one summand is tilted.
* **Frequencies left out** have a transform below 1e-21 of the class: see above.
* **Tilts.** The error is the same at every point of a class. Where masses that count are smaller,
  they are computed again under tilts e^{θx}, divided by φ(0)^b; each block has the bound with the
  least error. Exponents, and b times the logarithm of the normaliser, are off by a few eps of their
  terms, which is rounded outward, in the bounds of Chernoff too. A block whose factor exceeds e^700
  takes nothing from that tilt, and a Chernoff bound or a moment beyond e^700 is infinite.
* **Wrap-around.** Mass outside a class's window can only raise upper bounds. For lower bounds the
  mass that wrapped around is bounded for each tilt, and times the largest factor of that tilt's
  points taken off. A sum above the window wraps around to its i-th point only if it exceeds the
  window's end by i steps, and a sum below likewise from the other end: so only what can reach the
  points for which the tilt is used is counted. The mass is taken off from the highest losses,
  because then the tails of what is left are below the true ones, and convolutions keep this order.
* **Mass outside the window**, by Chernoff's bound for each class: with a and c the exponential
  moments of summands up to the lower limit and within the class, that of the class is at most
  b·c·(a + c)^{b−1}. No mass is below the least sum, or above b times the largest summand. With one
  tilted summand the mean of S/b above s is at most s/b times the bound with a rate r ≥ 1/s, as
  S·e^{−rS} decreases there. The moments are those of blocks of masses moved to their ends with
  their means kept. A few coarse blocks choose the rates; at the best rates, the moments of many
  fine blocks are computed. Any rate and any division into blocks gives an upper bound.
* **Losses** are rounded outward by 8·eps·(1 + |loss|), sums over a cell by an eps a term.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from accountant_service.numerics.floats.complex_balls import (
    ComplexBalls,
    block_transforms,
    invert_transform,
    transform_masses,
)
from accountant_service.numerics.floats.special_functions import (
    Array,
    geometric_points,
    log_sum_exp,
)
from accountant_service.numerics.laws.lognormal_cells import cell_masses as _cell_masses
from accountant_service.numerics.time_limit import check_time

_EPS: Final = float(np.finfo(float).eps)
_UNDERFLOW: Final = 1e-300  # more than any mass that is computed as zero
_TINY: Final = 1e-280  # a mass that is mostly error
_EXPONENT_MAX: Final = 700.0  # a larger power of e may overflow: an upper bound is then infinite
_LARGEST_MASS: Final = 2.0  # more than any mass of a class's sums, with its rounding
_BLOCKS: Final = 64  # of a summand's masses, for Chernoff bounds at many rates
_FINE_BLOCKS: Final = 256  # the same, at the best rates
TERMS_MAX: Final = 40  # of the binomial expansion
_TERM_LEAST: Final = 1e-18  # relative to the class
_FREQUENCY_LEAST: Final = 1e-21  # of a class's transform, relative to the class
_BLOCK_CHOICES: Final = 16  # parts of the useful blocks that may be chosen under a tilt
_WRAPPED_COST: Final = 1000.0  # of mass taken off at the highest losses, over that of errors
_FASTEST: Final = 100.0  # rate of Chernoff bounds, times the lowest sum or the deviation
_RATES: Final = 32
_LESS: Final = 1 - 4 * _EPS  # for a product that is subtracted from an upper bound
_MORE: Final = 1 + 4 * _EPS  # for one that is added
_RATES_UP: Final[Array] = 1.35 ** np.arange(32.0)  # of Chernoff bounds, relative to the least


@dataclass(frozen=True, slots=True)
class SumLattice:
    """The outcomes whose largest summand is in one range, and a grid of values for their sum.

    Attributes:
        step: the spacing, of at most 24 significant bits, so that multiples are exact.
        first: index of the first point of the window.
        size: number of points of the window, a power of two.
        start: index of the lattice point below which a summand has no mass in double precision.
        above: index of the lattice point that the largest summand exceeds; `start` for the first
            class, where no summand need exceed any.
        cut: index of the lattice point that no summand exceeds.
        tilts: rates of the exponential tilts under which masses are computed.
        block: number of neighbouring points whose masses are added up, a power of two. The first
            point of the window differs from that of a sum of `start`s by a multiple of it.
        stride: spacing, in steps, of the points for summands in the class's range, a power of two
            that divides `above` − `start` and `cut` − `above`.
    """

    step: float
    first: int
    size: int
    start: int
    above: int
    cut: int
    tilts: tuple[float, ...] = (0.0,)
    block: int = 1
    stride: int = 1

    @property
    def is_first(self) -> bool:
        """Return whether this class has the outcomes whose summands are all in the lowest range."""
        return self.above == self.start

    @property
    def low(self) -> float:
        """The least sum on the grid."""
        return self.first * self.step

    @property
    def end(self) -> float:
        """The first sum beyond the grid."""
        return (self.first + self.size) * self.step

    @property
    def largest(self) -> float:
        """The upper end of the range of the largest summand."""
        return self.cut * self.step

    def limits(self) -> list[tuple[int, int]]:
        """Return the lowest and the highest index of summands below the class's range, and in it.

        The first class has one range.
        """
        ends = [self.start, self.cut] if self.is_first else [self.start, self.above, self.cut]
        return list(itertools.pairwise(ends))

    @property
    def strides(self) -> tuple[int, ...]:
        """Spacings, in steps, of the points for summands below the class's range and within it."""
        return (1,) if self.is_first else (1, self.stride)

    def places(self, part: int, count: int) -> Array:
        """Return the first `count` points for summands below the class's range, or within it."""
        first = (self.start, self.above)[part]
        places: Array = (first + self.strides[part] * np.arange(float(count))) * self.step
        return places

    def points(self) -> Array:
        """Return the least sum of each block of neighbouring grid points."""
        points: Array = np.arange(self.first, self.first + self.size, self.block).astype(float)
        return points * self.step


@dataclass(frozen=True, slots=True)
class SumAbove:
    """Upper bounds on the distribution of a lognormal sum, for upper bounds on δ.

    Attributes:
        points: values of the sum in the windows of all classes.
        mass: upper bounds of their masses.
        lows: the low end of each class's window.
        below: upper bounds of the mass below each of them.
        ends: the high ends of the windows, and the largest summand.
        beyond: upper bounds of the mass of sums above each window, and of outcomes with a summand
            that was cut off.
        tilted_beyond: upper bound of all mass beyond if one summand has the tilted law.
        classes: of outcomes, for Chernoff bounds.
    """

    points: Array
    mass: Array
    lows: Array
    below: Array
    ends: Array
    beyond: Array
    tilted_beyond: float
    classes: tuple[_ClassMoments, ...]


def round_step(step: float) -> float:
    """Round a grid spacing to 20 significant bits, so that its multiples are exact."""
    mantissa, exponent = math.frexp(step)
    return math.ldexp(round(mantissa * (1 << 20)) / (1 << 20), exponent)


def quantile(mu: float, deviations: float) -> float:
    """Return exp(μz − μ²/2) at z = `deviations`, a quantile of a lognormal summand."""
    return math.exp(min(mu * deviations - 0.5 * mu * mu, _EXPONENT_MAX))


def sum_above(mu: float, bins: int, lattices: Sequence[SumLattice]) -> SumAbove:
    """Return upper bounds on the distribution of the sum of `bins` lognormal summands."""
    summands = [_Summands(_split_to_cell_ends(mu, lattice), ()) for lattice in lattices]
    classes = tuple(
        _ClassMoments(each, lattice, bins) for each, lattice in zip(summands, lattices, strict=True)
    )
    points, masses, below, beyond, tilted_beyond = [], [], [], [], 0.0
    for each, moments, lattice in zip(summands, classes, lattices, strict=True):
        of_class = _bound_masses_at_ends(each, lattice, bins, moments)
        points.append(of_class[0])
        masses.append(of_class[1])
        below.append(float(moments.mass_below(np.array(lattice.low))))
        beyond.append(float(moments.mass_above(np.array(lattice.end))))
        tilted_beyond += _exp_up(float(moments.log_power_above(lattice.end, np.ones(1))[0])) / bins
    plain_tail, tilted_tail = tails_beyond(mu, lattices[-1].largest)
    return SumAbove(
        np.concatenate(points),
        np.concatenate(masses),
        np.array([each.low for each in lattices]),
        np.minimum(below, 1.0),
        np.array([each.end for each in lattices] + [lattices[-1].largest]),
        np.minimum([*beyond, bins * plain_tail], 1.0),
        min(1.0, tilted_tail + (bins - 1) * plain_tail + tilted_beyond),
        classes,
    )


def sum_below(
    mu: float, bins: int, lattices: Sequence[SumLattice], *, tilted: bool
) -> tuple[Array, float, Array]:
    """Return lower and upper bounds on the probabilities of a sum of rounded lognormals.

    The masses are those of the lattices' blocks.

    Args:
        mu: of each summand.
        bins: number of summands.
        lattices: of the classes.
        tilted: whether the lower bounds are of the law with one tilted summand, and the upper ones
            of the plain law; else the other way round.

    Returns:
        Lower bounds; the mass in all that wrapped around, without which they hold; upper bounds.
    """
    lower, upper, wrapped = [], [], 0.0
    for lattice in lattices:
        low, high = _bound_masses_below(mu, bins, lattice, tilted=tilted)
        lower.append(low.found[0])
        wrapped += low.wrapped
        upper.append(high.found[0])
    return np.concatenate(lower), wrapped, np.concatenate(upper)


@dataclass(frozen=True, slots=True)
class _Summands:
    """One lognormal summand's probabilities, below the largest summand's range and within it.

    Attributes:
        plain: of the plain law.
        one: of the tilted law, if one summand has it; else nothing.
    """

    plain: tuple[Array, ...]
    one: tuple[Array, ...]


def _split_to_cell_ends(mu: float, lattice: SumLattice) -> tuple[Array, ...]:
    """Discretise a lognormal summand: move each interval's mass to its ends, keeping the mean."""
    limits, strides = lattice.limits(), lattice.strides
    counts = [(high - low) // stride for (low, high), stride in zip(limits, strides, strict=True)]
    edges = np.append(
        np.concatenate([lattice.places(part, count) for part, count in enumerate(counts)]),
        lattice.largest,
    )
    plain, plain_error, tilted, tilted_error = _cell_masses(mu, edges)
    low, length = edges[:-1], np.diff(edges)
    upward = (tilted - plain * low) / length
    upward_error = (
        tilted_error + low * plain_error + 4 * _EPS * (tilted + low * plain)
    ) / length + _UNDERFLOW
    whole = plain + plain_error
    upward = np.clip(upward, 0.0, plain)
    to_low = np.minimum(plain - upward + plain_error + upward_error, whole)
    to_high = np.minimum(upward + upward_error, whole)
    ends = [0, *itertools.accumulate(counts)]
    return tuple(
        (np.append(to_low[first:last], 0.0) + np.append(0.0, to_high[first:last])) * (1 + 4 * _EPS)
        for first, last in itertools.pairwise(ends)
    )


def _rounded_cell_masses(mu: float, lattice: SumLattice) -> list[tuple[Array, Array, Array, Array]]:
    """Return the probabilities of a lognormal summand that is rounded to the nearest grid point."""
    cells = []
    for (low, high), stride in zip(lattice.limits(), lattice.strides, strict=True):
        edges: Array = (np.arange(low - stride, high + stride, float(stride)) + 0.5 * stride) * (
            lattice.step
        )
        edges[0] = max(edges[0], 0.0) if low == lattice.start else low * lattice.step
        edges[-1] = high * lattice.step
        cells.append(_cell_masses(mu, edges))
    return cells


def tails_beyond(mu: float, edge: float) -> tuple[float, float]:
    """Return upper bounds on P(X > edge) for a lognormal summand X, untilted and tilted."""
    plain, plain_error, tilted, tilted_error = _cell_masses(mu, np.array([edge, np.inf]))
    return float((plain + plain_error)[0]), float((tilted + tilted_error)[0])


class _Blocks:
    """One summand's probabilities, merged into a few blocks of neighbouring grid points.

    A block's mass moves to its two ends with its mean kept, which by convexity can only raise the
    mean of e^{rx}, for any r.
    """

    def __init__(self, mass: Array, places: Array, blocks: int) -> None:
        points = len(mass)
        starts = _block_starts(points, min(int(np.searchsorted(places, 1.0)), points - 1), blocks)
        last = np.append(starts[1:], points) - 1
        widths = last - starts
        # sums of terms ≥ 0: differences would lose a small share of a block whose masses are steep
        after = np.arange(points) - np.repeat(starts, widths + 1)
        before = np.repeat(np.maximum(widths, 1), widths + 1) - after  # 1 in a block of one point
        upward = np.add.reduceat(mass * after, starts) / np.maximum(widths, 1)
        downward = np.add.reduceat(mass * before, starts) / np.maximum(widths, 1)
        self.points = np.concatenate([places[starts], places[last]])
        self._farthest = float(np.abs(self.points).max())
        room = 1 + _EPS * (points + 16)
        self.log_mass = np.log(np.concatenate([downward, upward]) * room + _UNDERFLOW)

    def log_moments(self, rates: Array) -> Array:
        """Return upper bounds on log E[e^{rx}] of a summand x, for each rate r."""
        exponent = rates[:, None] * self.points
        largest = np.abs(rates) * self._farthest + 700.0
        total = log_sum_exp(exponent + self.log_mass)
        rounded: Array = total + _EPS * (4 * largest + len(self.log_mass) + 16)
        return rounded


@lru_cache(maxsize=64)
def _block_starts(points: int, centre: int, blocks: int) -> NDArray[np.int64]:
    """Return where each block of grid points starts; blocks grow with distance from `centre`."""
    single = np.arange(blocks // 4)
    reach = max(points, len(single) + 1)
    growing = geometric_points(len(single), reach, blocks // 4).astype(np.int64)
    offsets = np.concatenate([single, growing])
    starts = np.unique(np.concatenate([[0], centre - offsets, centre + offsets]))
    return starts[(starts >= 0) & (starts < points)]


class _ClassMoments:
    """Exponential moments of the sums S in a class of outcomes, for Chernoff bounds."""

    def __init__(self, summands: _Summands, lattice: SumLattice, bins: int) -> None:
        self.bins = bins
        self.least = (lattice.above + (bins - 1) * lattice.start) * lattice.step * (1 - 1e-9)
        self.most = bins * lattice.largest * (1 + 1e-9)
        self._summands, self._lattice = summands, lattice
        self._blocks: dict[int, tuple[list[_Blocks], list[_Blocks]]] = {}  # by their number
        small = self._merged(_BLOCKS)[0][0]
        points, log_mass = small.points, small.log_mass
        deviation = math.sqrt(bins * float(np.exp(log_mass) @ (points - 1) ** 2) + 1e-12)
        slowest = min(0.1 / deviation, 0.2 / lattice.largest)
        self.rates_up: Array = slowest * _RATES_UP
        inverse = 1 / max(lattice.low, 1e-200)
        slowest = min(0.5 / deviation, inverse)
        fastest = _FASTEST * max(inverse, 1 / deviation, 0.1)
        self.rates_down: Array = geometric_points(slowest, fastest, _RATES)
        self._known: dict[tuple[float, float], Array] = {}  # by the first and the last rate

    def _merged(self, blocks: int) -> tuple[list[_Blocks], list[_Blocks]]:
        """Return a plain and the tilted summand's masses, merged into about so many blocks."""
        if blocks not in self._blocks:
            plain, one = (
                [
                    _Blocks(mass, self._lattice.places(part, len(mass)), blocks)
                    for part, mass in enumerate(masses)
                ]
                for masses in (self._summands.plain, self._summands.one)
            )
            self._blocks[blocks] = plain, one
        return self._blocks[blocks]

    def _log_moments(self, rates: Array, blocks: int) -> Array:
        """Return, per rate r, upper bounds on log E[e^{rS}] over the outcomes of this class.

        With a and c the moments of summands below the class and in it, (a + c)^b − a^b is at most
        b·c·(a + c)^{b−1}.
        """
        plain, one = self._merged(blocks)
        small, *large = (each.log_moments(rates) for each in plain)
        count = self.bins - len(one[:1])
        both = np.logaddexp(small, large[0]) if large else small
        logs = count * both
        if large:
            logs = math.log(count) + large[0] + (count - 1) * both
        if one:
            small_one, *large_one = (each.log_moments(rates) for each in one)
            logs = logs + small_one
            if large_one:
                logs = np.logaddexp(logs, large_one[0] + count * both)
        rounded: Array = logs + 8 * _EPS * (1 + count * np.abs(both) + np.abs(logs))
        return rounded

    def _least(self, rates: Array, exponents: Array, *, fine: bool) -> Array:
        """Return the least log E[e^{rS}] + exponent over `rates`, for each row of `exponents`.

        The moments are those of coarse blocks, and at the best rates of fine ones if `fine`.
        """
        key = float(rates[0]), float(rates[-1])
        if key not in self._known:
            self._known[key] = self._log_moments(rates, _BLOCKS)
        logs = self._known[key]
        if fine:
            best = np.unique((logs + exponents).argmin(axis=-1))
            logs[best] = np.minimum(logs[best], self._log_moments(rates[best], _FINE_BLOCKS))
        least: Array = (logs + exponents).min(axis=-1)
        return least

    def mass_above(
        self, levels: Array, tilt: float = 0.0, log_scale: float = 0.0, *, fine: bool = True
    ) -> Array:
        """Return Chernoff's bounds on E[e^{tilt·S}] over sums S > level, divided by e^log_scale.

        It is 0 beyond the greatest sum of the class.
        """
        if (levels > self.most).all():
            return np.zeros_like(levels)
        exponents = np.multiply.outer(levels, self.rates_up) * _LESS
        least = self._least(tilt + self.rates_up, -exponents, fine=fine)
        return np.where(levels > self.most, 0.0, _each_exp_up(least - log_scale))

    def mass_below(
        self, levels: Array, tilt: float = 0.0, log_scale: float = 0.0, *, fine: bool = True
    ) -> Array:
        """Return Chernoff's bounds on E[e^{tilt·S}] over sums S < level, divided by e^log_scale.

        It is 0 up to the least sum of the class.
        """
        if (levels <= self.least).all():
            return np.zeros_like(levels)
        exponents = np.multiply.outer(levels, self.rates_down) * _MORE
        least = self._least(tilt - self.rates_down, exponents, fine=fine)
        return np.where(levels > self.least, _each_exp_up(least - log_scale), 0.0)

    def log_power_above(self, level: float, powers: Array, *, fine: bool = True) -> Array:
        """Return logs of upper bounds on E[Sᵃ] over sums S > level, for each power a.

        S^a·e^{−rS} decreases beyond S = a/r. No sum exceeds the greatest of the class.
        """
        if level > self.most:
            return np.full(len(powers), -math.inf)
        exponents = self.rates_up * level * _LESS
        allowed = np.less_equal.outer(powers, self.rates_up * level)
        least = self._least(self.rates_up, np.where(allowed, -exponents, math.inf), fine=fine)
        return least + powers * math.log(level) + 1e-12


def mass_below(law: SumAbove, level: float) -> float:
    """Return an upper bound on the probability that a lognormal sum is below a level."""
    return math.fsum(float(each.mass_below(np.array(level))) for each in law.classes)


def _exp_up(log_value: float) -> float:
    """Return exp(`log_value`) rounded up, at least `_UNDERFLOW`; inf beyond `_EXPONENT_MAX`."""
    if log_value > _EXPONENT_MAX:
        return math.inf
    return math.exp(log_value) * (1 + 1e-12) + _UNDERFLOW


def _each_exp_up(log_values: Array) -> Array:
    """Return the exponential of each value, rounded up as by `_exp_up`."""
    values = np.exp(np.minimum(log_values, _EXPONENT_MAX)) * (1 + 1e-12) + _UNDERFLOW
    found: Array = np.where(log_values > _EXPONENT_MAX, math.inf, values)
    return found


def _bound_masses_at_ends(
    summands: _Summands, lattice: SumLattice, bins: int, moments: _ClassMoments
) -> tuple[Array, Array]:
    """Return grid sums and upper bounds on their masses, moving each block's mass to its ends."""
    if lattice.block == 1:
        return lattice.points(), _bound_masses_above(summands, lattice, bins, moments)[0]
    low, high = _bound_masses_above(summands, lattice, bins, moments, parts=2)
    return np.append(lattice.points(), lattice.end), np.append(low, 0.0) + np.append(0.0, high)


@dataclass(frozen=True, slots=True)
class _TiltedBounds:
    """Bounds on sums' probabilities in a class of outcomes, computed under one tilt.

    Attributes:
        bound: of the masses of each part of each block.
        uncertain: the error in each.
        heaviest: the largest factor from tilted masses to masses, for each block.
    """

    bound: Array
    uncertain: Array
    heaviest: Array


class _BestBounds:
    """Upper or lower bounds on the probabilities of the sums: of several tilts the best.

    Mass that wraps around can only raise an upper bound; lower bounds are without it in all. A
    block that no tilt bounds has the bound 0 or `_LARGEST_MASS`.

    Attributes:
        found: the bounds, one row per part of a block: see `compose_class`.
        wrapped: upper bound of the mass in all that wrapped around, for lower bounds.
    """

    def __init__(
        self, lattice: SumLattice, moments: _ClassMoments, outward: int, parts: int = 1
    ) -> None:
        """Start without bounds.

        Args:
            lattice: of the class.
            moments: of the masses whose lower bounds are wanted. For upper bounds they only decide
                which tilts are of use, and may be those of other masses.
            outward: 1 for upper bounds, −1 for lower ones.
            parts: number of rows.
        """
        self._lattice, self._moments, self._outward = lattice, moments, outward
        blocks = lattice.size // lattice.block
        self.found = np.full((parts, blocks), _LARGEST_MASS if outward > 0 else 0.0)
        self.wrapped = 0.0
        self._score = np.full(blocks, math.inf)

    def improve(self, composed: tuple[Array, float], rate: float, log_scale: float) -> None:
        """Take over what was composed under the tilt `rate` for the blocks where it is better."""
        under = _untilt(composed, self._lattice, rate, log_scale, self._outward)
        used, wrapped = _choose_blocks(
            under, self._score, self._moments, self._lattice, rate, log_scale,
            fine=self._outward < 0,
        )  # fmt: skip
        self.found[:, used], self._score[used] = under.bound[:, used], under.uncertain[used]
        self.wrapped += wrapped * (1 + 1e-9)


def _bound_masses_above(
    summands: _Summands, lattice: SumLattice, bins: int, moments: _ClassMoments, parts: int = 1
) -> Array:
    """Return upper bounds on the probabilities of sums of `bins` plain summands, per part."""
    best = _BestBounds(lattice, moments, 1, parts)
    for rate in lattice.tilts:
        check_time()
        tilted, log_moment, _ = _tilt(summands, lattice, rate)
        if _can_be_composed(tilted, bins):
            (composed,) = compose_class(tilted, lattice, bins, rate, parts)
            best.improve(composed, rate, bins * log_moment)
    return best.found


def _bound_masses_below(
    mu: float, bins: int, lattice: SumLattice, *, tilted: bool
) -> tuple[_BestBounds, _BestBounds]:
    """Return lower and upper bounds on the probabilities of sums of rounded summands.

    Both come from the same transforms, of a summand's masses with their errors added. A true mass
    is at least 1 − r of the one with its error, unless that is tiny. So lower bounds are (1 − r)^b
    of what is composed without the tiny masses.

    Args:
        mu: of each summand.
        bins: number of summands.
        lattice: of the class.
        tilted: as for `sum_below`.
    """
    most, share = _masses_with_errors(_rounded_cell_masses(mu, lattice))
    moments = _ClassMoments(most if tilted else _Summands(most.plain, ()), lattice, bins)
    lower, upper = _BestBounds(lattice, moments, -1), _BestBounds(lattice, moments, 1)
    for rate in lattice.tilts:
        check_time()
        high, log_moment, rounding = _tilt(most, lattice, rate)
        if not _can_be_composed(high, bins):
            continue
        laws = compose_class(high, lattice, bins, rate)
        (mass, error), of_upper = reversed(laws) if tilted else laws
        upper.improve(of_upper, rate, bins * log_moment)
        tiny = _mass_with_tiny(most, high, bins)[int(tilted)] * _block_weight(lattice, rate)
        if math.isfinite(tiny) and share + rounding < 1:
            kept = math.log1p(-share - rounding)
            lower.improve((mass, error + tiny), rate, bins * (log_moment + kept))
    return lower, upper


def _masses_with_errors(cells: list[tuple[Array, Array, Array, Array]]) -> tuple[_Summands, float]:
    """Return a summand's probabilities with their errors added, and the share these may be.

    It is the largest share of twice the error in a mass that is not tiny.
    """
    plain = tuple(mass + error for mass, error, _, _ in cells)
    one = tuple(mass + error for _, _, mass, error in cells)
    errors = [each[at] for at in (1, 3) for each in cells]
    shares = [
        float((2 * error / mass)[mass > _TINY].max(initial=0.0))
        for mass, error in zip((*plain, *one), errors, strict=True)
    ]
    return _Summands(plain, one), max(shares) * _MORE


def _mass_with_tiny(masses: _Summands, tilted: _Summands, bins: int) -> tuple[float, float]:
    """Return upper bounds on a class's mass of sums that have a tiny mass among their factors.

    A mass is tiny up to `_TINY`, with a tilt or without. The first bound is for sums of plain
    summands, the second for those with one tilted summand. With masses a and c of summands below
    the class's range and in it, the class has the mass Σ aʲ·c·(a + c)^{b−1−j} over j < b. In each
    product one factor at a time is tiny; all others are at most max(1, a + c).

    Args:
        masses: a summand's probabilities.
        tilted: the same under a tilt.
        bins: number of summands.
    """
    plain, one = (
        [float(mass.sum()) * (1 + 1e-9) for mass in each] for each in (tilted.plain, tilted.one)
    )
    tiny, tiny_one = (
        [
            float(mass[(mass <= _TINY) | (before <= _TINY)].sum()) * (1 + 1e-9)
            for mass, before in zip(*each, strict=True)
        ]
        for each in ((tilted.plain, masses.plain), (tilted.one, masses.one))
    )
    power, others = _power_up(max(sum(plain), 1.0), bins), bins - 1
    if len(plain) == 1:
        return bins * tiny[0] * power, (tiny_one[0] + others * tiny[0] * one[0]) * power
    of_range = tiny[1] + others * sum(tiny) * plain[1]
    below = tiny_one[0] * plain[1] + one[0] * of_range
    within = tiny_one[1] + others * sum(tiny) * one[1]
    return bins * of_range * power, (within + others * below) * power


def _can_be_composed(summands: _Summands, bins: int) -> bool:
    """Return whether the mass of `bins` summands under a tilt is finite: else it is of no use."""
    with np.errstate(over="ignore"):
        whole = sum(float(mass.sum()) for mass in summands.plain)
        one = max(sum(float(mass.sum()) for mass in summands.one), 1.0)
    return bins * math.log(max(whole, 1.0)) + math.log(one) <= _EXPONENT_MAX


def _choose_blocks(
    under: _TiltedBounds,
    score: Array,
    moments: _ClassMoments,
    lattice: SumLattice,
    rate: float,
    log_scale: float,
    *,
    fine: bool,
) -> tuple[NDArray[np.int64], float]:
    """Choose the grid blocks where this tilt improves the bounds; bound the mass wrapped into them.

    Mass that wraps around may cost more than is gained. There is less of it far from the end that
    has the largest weights, so all useful blocks or only a part of them are chosen.

    With `fine` the bound on that mass is narrow, as lower bounds need; without, it only decides.

    Returns:
        The indices of the blocks, and an upper bound on the mass that wrapped around into them.
    """
    useful = np.flatnonzero(under.uncertain < score)
    if not len(useful) or (rate == 0.0 and not fine):
        return useful, 0.0
    if rate == 0.0:
        ends = useful[:1], useful[-1:]
        wrapped = _bound_wrapped(moments, lattice, rate, log_scale, *ends, fine=fine)
        return useful, float(wrapped[0])
    cuts = np.arange(_BLOCK_CHOICES) * len(useful) // _BLOCK_CHOICES
    ends = useful[cuts], np.full(_BLOCK_CHOICES, useful[-1])
    if rate < 0:
        ends = np.full(_BLOCK_CHOICES, useful[0]), useful[len(useful) - 1 - cuts]
    heaviest = under.heaviest[ends[0] if rate > 0 else ends[1]] * (1 + 1e-9)
    wrapped = _bound_wrapped(moments, lattice, rate, log_scale, *ends, fine=fine) * heaviest
    gains = np.append(0.0, np.cumsum((score - under.uncertain)[useful]))
    gain = gains[-1] - gains[cuts] if rate > 0 else gains[len(useful) - cuts]
    with np.errstate(invalid="ignore"):
        gain = gain - _WRAPPED_COST * wrapped
    gain = np.where(np.isfinite(gain), gain, -math.inf)
    at = int(np.argmax(gain))
    if gain[at] < 0:
        return useful[:0], 0.0
    kept = useful[cuts[at] :] if rate > 0 else useful[: len(useful) - cuts[at]]
    return kept, float(wrapped[at])


def _untilt(
    composed: tuple[Array, float], lattice: SumLattice, rate: float, log_scale: float, outward: int
) -> _TiltedBounds:
    """Undo the tilt: return upper (`outward` = 1) or lower (−1) bounds on the masses."""
    (mass, error), points = composed, lattice.points()
    log_weight = log_scale - rate * points
    is_of_use = log_weight <= _EXPONENT_MAX
    log_weight = np.minimum(log_weight, _EXPONENT_MAX)
    off = 8 * _EPS * (4 + abs(log_scale) + abs(rate) * np.abs(points))
    heaviest = np.exp(log_weight + off)
    if outward > 0:
        bound = (np.maximum(mass, 0.0) + error) * heaviest + _UNDERFLOW
    else:
        bound = np.maximum(mass - error, 0.0) * np.exp(log_weight - off)
    bound[:, ~is_of_use] = _LARGEST_MASS if outward > 0 else 0.0
    return _TiltedBounds(bound, np.where(is_of_use, error * heaviest, math.inf), heaviest)


def _bound_wrapped(
    moments: _ClassMoments,
    lattice: SumLattice,
    rate: float,
    log_scale: float,
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    *,
    fine: bool,
) -> Array:
    """Return upper bounds on the tilted mass that the FFT wraps around into ranges of blocks.

    Sums above the window wrap around to its first points, those below it to its last.
    """
    length = lattice.block * lattice.step
    above = lattice.end + first.astype(float) * length
    below = lattice.low - (lattice.size // lattice.block - 1 - last.astype(float)) * length
    wrapped = moments.mass_above(above, rate, log_scale, fine=fine)
    wrapped = wrapped + moments.mass_below(below, rate, log_scale, fine=fine)
    return wrapped * _block_weight(lattice, rate)


def _block_weight(lattice: SumLattice, rate: float) -> float:
    """Return the largest factor by which a tilt e^{−rate·x} changes masses within one block."""
    return _exp_up(max(0.0, -rate * (lattice.block - 1) * lattice.step))


def _tilt(summands: _Summands, lattice: SumLattice, rate: float) -> tuple[_Summands, float, float]:
    """Tilt a summand's probabilities by e^{rate·x} and normalise them; all are rounded up.

    Returns:
        The tilted probabilities; the log of what they were divided by; the largest share by which
        one that is not tiny may have been raised.
    """
    if rate == 0.0:
        return summands, 0.0, 0.0
    log_moment, raised = 0.0, 0.0

    def tilted(mass: Array, part: int) -> Array:
        """Return the tilted probabilities of summands below the range (0) or in it (1)."""
        nonlocal raised
        tilt = rate * lattice.places(part, len(mass))
        with np.errstate(divide="ignore"):
            log_mass = np.log(mass)
        exponent = log_mass + tilt - log_moment
        terms = np.abs(log_mass) + np.abs(tilt) + abs(log_moment)
        error = np.where(np.isfinite(exponent), 4 * _EPS * (4 + terms), 0.0)
        with np.errstate(over="ignore"):  # the tilt is then of no use
            found: Array = np.exp(exponent + error)
        raised = max(raised, float(error[(found > _TINY) & (mass > _TINY)].max(initial=0.0)))
        return found

    with np.errstate(divide="ignore"):
        own = np.log(summands.plain[0]) + rate * lattice.places(0, len(summands.plain[0]))
    log_moment = float(log_sum_exp(own))
    plain, one = (
        tuple(tilted(mass, part) for part, mass in enumerate(masses))
        for masses in (summands.plain, summands.one)
    )
    return _Summands(plain, one), log_moment, 2.0 * raised


def compose_class(
    summands: _Summands, lattice: SumLattice, bins: int, rate: float = 0.0, parts: int = 1
) -> list[tuple[Array, float]]:
    """Convolve `bins` summands by FFT; return the sums' masses per block, and an error bound.

    Mass outside the window is wrapped around into it. Only the lowest frequencies are computed: the
    others are bounded.

    Args:
        summands: with masses under a tilt.
        lattice: of the class.
        bins: number of summands.
        rate: of the tilt. A point at the distance x from its block's start has the weight
            e^{−rate·x}, so that the sum differs from that without a tilt by one factor.
        parts: 1 for the mass of each block; 2 for its shares for the block's start and the next
            block's start that keep the mean.

    Returns:
        The masses and the error for the sum of plain summands; then, if `summands` have one, those
        for the sum with one tilted summand.
    """
    last = (summands.plain, summands.one) if summands.one else ()
    common = bins - 1 if last else bins  # summands that both laws share
    small = transform_masses(summands.plain[0], lattice.size)
    kept, neglected = _choose_frequencies(small, summands, common)
    small, large = small.lowest(kept), _transform(summands.plain, lattice, kept, 1)
    terms, left_out = _binomial_terms(small, large, summands, common)
    laws = [terms]
    if last:
        lasts = [[small, *large], _transform(summands.one, lattice, kept)]
        laws = [each[0] * terms for each in lasts]
    if last and large:
        both = small.power(common) + terms
        laws = [law + each[1] * both for law, each in zip(laws, lasts, strict=True)]
    missing = [left_out * float(sum(mass.sum() for mass in each)) * (1 + 1e-9) for each in last]
    return [
        _sum_blocks(law, lattice, bins, rate, parts, *errors)
        for law, *errors in zip(laws, neglected, missing or [left_out], strict=True)
    ]


def _sum_blocks(
    total: ComplexBalls,
    lattice: SumLattice,
    bins: int,
    rate: float,
    parts: int,
    neglected: float,
    left_out: float,
) -> tuple[Array, float]:
    """Invert a Fourier transform: return each block's mass, and a bound on the errors.

    Args:
        total: the transform of the class's masses at the lowest frequencies.
        lattice: of the class.
        bins: number of summands.
        rate: of the tilt.
        parts: as for `compose_class`.
        neglected: the largest modulus of the transform at the other frequencies.
        left_out: the most mass that is missing in the transform.
    """
    plain, moment = block_transforms(
        lattice.size, len(total.value), lattice.block, rate * lattice.step
    )
    blocks = lattice.size // lattice.block
    mass, error = invert_transform(total * plain, lattice.size, blocks)
    rows = mass[None, :]
    if parts == 2:
        upward, upward_error = invert_transform(total * moment, lattice.size, blocks)
        rows = np.stack([mass - upward, upward])
        error += upward_error + _EPS * float(np.abs(mass).max() + np.abs(upward).max())
    # the other frequencies are at most half of them, and their conjugates
    error += neglected * float(plain.size[0]) * (1 + 2 / lattice.size)
    error += left_out * _block_weight(lattice, rate)
    shift, rest = divmod(bins * lattice.start - lattice.first, lattice.block)
    if rest:
        raise ValueError("the first point of the window is not that of a block")
    return np.roll(rows, shift % blocks, axis=1), error * (1 + 4 * _EPS)


def _transform(
    masses: tuple[Array, ...], lattice: SumLattice, frequencies: int, first: int = 0
) -> list[ComplexBalls]:
    """Return the FFTs of a summand's masses at the `frequencies` lowest frequencies.

    With `first` 1, only those of summands in the range of the largest.
    """
    found = []
    for mass, (low, _), stride in list(
        zip(masses, lattice.limits(), lattice.strides, strict=False)
    )[first:]:
        size, offset = lattice.size, low - lattice.start
        if 2 * stride * (frequencies - 1) <= size:  # beyond, this transform repeats itself
            size, offset, stride = size // stride, offset // stride, 1
        found.append(transform_masses(mass, size, offset, stride, frequencies))
    return found


def _choose_frequencies(
    small: ComplexBalls, summands: _Summands, count: int
) -> tuple[int, list[float]]:
    """Choose how many frequencies to compute; bound the transform of each law at all others.

    With ρ the largest modulus of φ at the others and c = χ(0), that of (φ + χ)^count − φ^count is
    at most count·c·(ρ + c)^{count−1} there, and that of (φ + χ)^count at most (ρ + c)^count.
    """
    most = [float(mass.sum()) * (1 + 1e-9) for mass in summands.plain[1:]]
    least = _FREQUENCY_LEAST ** (1 / max(count - 1, 1)) - sum(most)
    kept = 1 + int(np.flatnonzero(small.size > max(least, 0.0)).max(initial=0))
    rest = float(small.size[kept:].max(initial=0.0))
    last = (summands.plain, summands.one) if summands.one else ((np.ones(1),),)
    everything = len(small.size), [0.0] * len(last)
    if count == 1 or 4 * kept > 3 * len(small.size) or rest == 0:
        return everything
    both = _power_up(rest + sum(most), count)
    terms = _power_up(rest + sum(most), count - 1) * count * most[0] if most else both
    neglected = []
    for masses in last:
        first, *larger = (float(mass.sum()) * (1 + 1e-9) for mass in masses)
        neglected.append((first * terms + sum(larger) * both) * (1 + 1e-12))
    return (kept, neglected) if all(map(math.isfinite, neglected)) else everything


def _power_up(base: float, exponent: int) -> float:
    """Return an upper bound on a positive number raised to a whole power."""
    return _exp_up(exponent * math.log(base))


def _binomial_terms(
    small: ComplexBalls, large: list[ComplexBalls], summands: _Summands, count: int
) -> tuple[ComplexBalls, float]:
    """Return (small + large)^count − small^count, and a bound on the omitted binomial terms.

    The first class has φ^count and leaves nothing out. The terms beyond n have at most the mass
    Σ x^j/j! over j > n, which is at most x^{n+1}/(n + 1)!·e^x, for x = count·χ(0), if φ(0) ≤ 1.
    """
    if not large:
        return small.power(count), 0.0
    expected = count * float(summands.plain[1].sum()) * (1 + 1e-9)
    whole = max(1.0, float(summands.plain[0].sum()) * (1 + 1e-9))
    terms, left_out = 1, 0.5 * expected * expected  # ∞ where it overflows
    while terms < min(count, TERMS_MAX) and left_out > _TERM_LEAST * expected:
        terms += 1
        left_out *= expected / (terms + 1)
    total, power = small.power(0).scaled(math.comb(count, terms)), small.power(0)
    for term in range(terms - 1, 0, -1):
        power = power * small
        total = total * large[0] + power.scaled(math.comb(count, term))
    left_out *= _exp_up(expected + count * math.log(whole)) if left_out else 1.0
    found = total * large[0] * small.power(count - terms)
    return found, left_out if terms < count else 0.0
