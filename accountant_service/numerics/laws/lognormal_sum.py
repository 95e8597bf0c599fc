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
masses lie below that error, they are computed again under exponential tilts e^{θx}. All errors are
added outward: cell masses, exponents, transforms, terms left out, and mass that wraps around
(Chernoff's bound). The proof is in docs/accountants/balls_in_bins.md.
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
    invert_transform,
    transform_masses,
)
from accountant_service.numerics.floats.special_functions import Array, lattice_points, log_sum_exp
from accountant_service.numerics.laws.dominating_pair import normal_masses
from accountant_service.numerics.time_limit import check_time

_EPS: Final = float(np.finfo(float).eps)
_UNDERFLOW: Final = 1e-300  # more than any mass that is computed as zero
_EXPONENT_MAX: Final = 700.0
_BLOCKS: Final = 256  # of a summand's masses, for Chernoff bounds
TERMS_MAX: Final = 40  # of the binomial expansion
_TERM_LEAST: Final = 1e-18  # relative to the class
_FASTEST: Final = 100.0  # rate of Chernoff bounds, times the lowest sum or the deviation
_RATES: Final = 32
_RATES_UP: Final[Array] = 1.35 ** np.arange(32.0)  # of Chernoff bounds, relative to the least


@dataclass(frozen=True, slots=True)
class SumLattice:
    """A class of outcomes, by the range of their largest summand, and a lattice for their sums.

    Attributes:
        step: the spacing, of at most 24 significant bits, so that multiples are exact.
        first: index of the first point of the window.
        size: number of points of the window, a power of two.
        start: index of the lattice point below which a summand has no mass in double precision.
        above: index of the lattice point that the largest summand exceeds; `start` for the first
            class, where no summand need exceed any.
        cut: index of the lattice point that no summand exceeds.
        tilts: rates of the exponential tilts under which masses are computed.
    """

    step: float
    first: int
    size: int
    start: int
    above: int
    cut: int
    tilts: tuple[float, ...] = (0.0,)

    @property
    def is_first(self) -> bool:
        """Return whether this is the class of the smallest summands, with no lower limit."""
        return self.above == self.start

    @property
    def low(self) -> float:
        """The lowest sum on the lattice."""
        return self.first * self.step

    @property
    def end(self) -> float:
        """The first sum beyond the lattice."""
        return (self.first + self.size) * self.step

    @property
    def largest(self) -> float:
        """The largest value that a summand may have in this class of outcomes."""
        return self.cut * self.step

    def points(self) -> Array:
        """Return the sums at the lattice's points."""
        return lattice_points(self.first, self.size, self.step)


@dataclass(frozen=True, slots=True)
class SumAbove:
    """Upper bounds on the distribution of a lognormal sum, enlarged in convex order.

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
    """Return the lattice spacing rounded to 20 significant bits, so that multiples are exact."""
    mantissa, exponent = math.frexp(step)
    return math.ldexp(round(mantissa * (1 << 20)) / (1 << 20), exponent)


def quantile(mu: float, deviations: float) -> float:
    """Return exp(μz − μ²/2) at z = `deviations`: a quantile of a lognormal summand."""
    return math.exp(min(mu * deviations - 0.5 * mu * mu, _EXPONENT_MAX))


def sum_above(mu: float, bins: int, lattices: Sequence[SumLattice]) -> SumAbove:
    """Return upper bounds on the distribution of the sum of `bins` lognormal summands."""
    summands = [_Summands(_split_to_cell_ends(mu, lattice), ()) for lattice in lattices]
    classes = tuple(
        _ClassMoments(each, lattice, bins) for each, lattice in zip(summands, lattices, strict=True)
    )
    masses, below, beyond, tilted_beyond = [], [], [], 0.0
    for each, moments, lattice in zip(summands, classes, lattices, strict=True):
        masses.append(_bound_masses(each, lattice, bins)[0])
        below.append(moments.mass_below(lattice.low))
        beyond.append(moments.mass_above(lattice.end))
        tilted_beyond += _exp_up(float(moments.log_power_above(lattice.end, np.ones(1))[0])) / bins
    plain_tail, tilted_tail = tails_beyond(mu, lattices[-1].largest)
    return SumAbove(
        np.concatenate([each.points() for each in lattices]),
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
    """Return lower and upper bounds on the masses of a sum whose summands are rounded.

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
        cells = _rounded_cell_masses(mu, lattice)
        low, high = (
            _round_cells(cells, -1, tilted=tilted),
            _round_cells(cells, 1, tilted=not tilted),
        )
        moments = _ClassMoments(low, lattice, bins)
        mass, wrap = _bound_masses(low, lattice, bins, moments)
        lower.append(mass)
        wrapped += wrap
        upper.append(_bound_masses(high, lattice, bins)[0])
    return np.concatenate(lower), wrapped, np.concatenate(upper)


@dataclass(frozen=True, slots=True)
class _Summands:
    """The probabilities of one summand, split into those below and within a class's range.

    Attributes:
        plain: of the plain law.
        one: of the tilted law, if one summand has it; else nothing.
    """

    plain: tuple[Array, ...]
    one: tuple[Array, ...]


def _split_to_cell_ends(mu: float, lattice: SumLattice) -> tuple[Array, ...]:
    """Return a summand's masses on a lattice: each cell's mass moved to its ends, mean kept."""
    edges = lattice_points(lattice.start, lattice.cut + 1 - lattice.start, lattice.step)
    plain, plain_error, tilted, tilted_error = _cell_masses(mu, edges)
    low = edges[:-1]
    upward = (tilted - plain * low) / lattice.step
    upward_error = (
        tilted_error + low * plain_error + 4 * _EPS * (tilted + low * plain)
    ) / lattice.step + _UNDERFLOW
    whole = plain + plain_error
    upward = np.clip(upward, 0.0, plain)
    to_low = np.minimum(plain - upward + plain_error + upward_error, whole)
    to_high = np.minimum(upward + upward_error, whole)
    return tuple(
        (np.append(to_low[part], 0.0) + np.append(0.0, to_high[part])) * (1 + 4 * _EPS)
        for part in _cell_ranges(lattice)
    )


def _cell_ranges(lattice: SumLattice) -> list[slice]:
    """Return slices of cells: those below a class's range, and those within it."""
    if lattice.is_first:
        return [slice(None)]
    split = lattice.above - lattice.start
    return [slice(split), slice(split, None)]


def _rounded_cell_masses(mu: float, lattice: SumLattice) -> list[tuple[Array, Array, Array, Array]]:
    """Return a rounded summand's masses in the cells below a class's range, and within it."""
    ends = [lattice.start, lattice.cut]
    if not lattice.is_first:
        ends.insert(1, lattice.above)
    cells = []
    for low, high in itertools.pairwise(ends):
        edges: Array = (np.arange(low - 1.0, high + 1.0) + 0.5) * lattice.step
        edges[0] = max(edges[0], 0.0) if low == lattice.start else low * lattice.step
        edges[-1] = high * lattice.step
        cells.append(_cell_masses(mu, edges))
    return cells


def _round_cells(
    cells: list[tuple[Array, Array, Array, Array]], outward: int, *, tilted: bool
) -> _Summands:
    """Return bounds on masses: upper if `outward` is 1, lower if −1; also tilted if `tilted`."""
    plain = tuple(np.maximum(mass + outward * error, 0.0) for mass, error, _, _ in cells)
    one = tuple(np.maximum(mass + outward * error, 0.0) for _, _, mass, error in cells)
    return _Summands(plain, one if tilted else ())


def _cell_masses(mu: float, edges: Array) -> tuple[Array, Array, Array, Array]:
    """Return a summand's probability and tilted mass in each cell, each with its rounding error."""
    with np.errstate(divide="ignore"):
        z = np.log(edges) / mu + 0.5 * mu
    plain, plain_error = normal_masses(z, mu)
    tilted, tilted_error = normal_masses(z - mu, mu)
    return plain, plain_error, tilted, tilted_error


def tails_beyond(mu: float, edge: float) -> tuple[float, float]:
    """Return upper bounds on the probability and the tilted mass of a summand above `edge`."""
    plain, plain_error, tilted, tilted_error = _cell_masses(mu, np.array([edge, np.inf]))
    return float((plain + plain_error)[0]), float((tilted + tilted_error)[0])


class _Blocks:
    """The masses of one summand, merged into a few blocks of lattice points.

    A block's mass moves to its two ends with its mean kept, which by convexity can only raise the
    mean of e^{rx}, for any r.
    """

    def __init__(self, mass: Array, first: int, step: float) -> None:
        points = len(mass)
        starts = _block_starts(points, min(max(round(1 / step) - first, 0), points - 1))
        last = np.append(starts[1:], points) - 1
        merged = np.add.reduceat(mass, starts)
        moment = np.add.reduceat(mass * np.arange(points), starts) - merged * starts
        upward = np.clip(moment / np.maximum(last - starts, 1), 0.0, merged)
        self.points = np.concatenate([(starts + first) * step, (last + first) * step])
        room = 1 + _EPS * (points + 16)
        self.log_mass = np.log(np.concatenate([merged - upward, upward]) * room + _UNDERFLOW)

    def log_moments(self, rates: Array) -> Array:
        """Return upper bounds on log E[e^{rx}] of a summand x, for each rate r."""
        exponent = rates[:, None] * self.points
        largest = np.abs(exponent).max(axis=1) + 700.0
        total = log_sum_exp(self.log_mass + exponent)
        rounded: Array = total + _EPS * (4 * largest + len(self.log_mass) + 16)
        return rounded


@lru_cache(maxsize=64)
def _block_starts(points: int, centre: int) -> NDArray[np.int64]:
    """Return where blocks of lattice points start: single points near `centre`, longer far off."""
    single = np.arange(_BLOCKS // 4)
    growing = np.geomspace(len(single), max(points, len(single) + 1), _BLOCKS // 4).astype(np.int64)
    offsets = np.concatenate([single, growing])
    starts = np.unique(np.concatenate([[0], centre - offsets, centre + offsets]))
    return starts[(starts >= 0) & (starts < points)]


class _ClassMoments:
    """Exponential moments of the sums S of a class of outcomes, for Chernoff bounds."""

    def __init__(self, summands: _Summands, lattice: SumLattice, bins: int) -> None:
        firsts = (lattice.start, lattice.above)
        self.bins = bins
        self.least = (lattice.above + (bins - 1) * lattice.start) * lattice.step * (1 - 1e-9)
        self.plain, self.one = (
            [_Blocks(m, f, lattice.step) for m, f in zip(masses, firsts, strict=False)]
            for masses in (summands.plain, summands.one)
        )
        points, log_mass = self.plain[0].points, self.plain[0].log_mass
        deviation = math.sqrt(bins * float(np.exp(log_mass) @ (points - 1) ** 2) + 1e-12)
        slowest = min(0.1 / deviation, 0.2 / lattice.largest)
        self.rates_up: Array = slowest * _RATES_UP
        inverse = 1 / max(lattice.low, 1e-200)
        slowest = min(0.5 / deviation, inverse)
        fastest = _FASTEST * max(inverse, 1 / deviation, 0.1)
        self.rates_down: Array = np.geomspace(slowest, fastest, _RATES)

    def log_moments(self, rates: Array) -> Array:
        """Return upper bounds on log E[e^{rS}; the outcome is in the class], for each rate r.

        With a and c the moments of summands below the class and in it, (a + c)^b − a^b is at most
        b·c·(a + c)^{b−1}.
        """
        small, *large = (each.log_moments(rates) for each in self.plain)
        count = self.bins - len(self.one[:1])
        both = np.logaddexp(small, large[0]) if large else small
        logs = count * both
        if large:
            logs = math.log(count) + large[0] + (count - 1) * both
        if self.one:
            small_one, *large_one = (each.log_moments(rates) for each in self.one)
            logs = logs + small_one
            if large_one:
                logs = np.logaddexp(logs, large_one[0] + count * both)
        rounded: Array = logs + 8 * _EPS * (1 + count * np.abs(both) + np.abs(logs))
        return rounded

    def mass_above(self, level: float, tilt: float = 0.0, log_scale: float = 0.0) -> float:
        """Return Chernoff's bound on E[e^{tilt·S}] over sums S > level, divided by e^log_scale."""
        rates = tilt + self.rates_up
        logs = self.log_moments(rates) - self.rates_up * level
        return _exp_up(float(logs.min()) - log_scale)

    def mass_below(self, level: float, tilt: float = 0.0, log_scale: float = 0.0) -> float:
        """Return Chernoff's bound on E[e^{tilt·S}] over sums S < level, divided by e^log_scale.

        It is 0 up to the least sum of the class.
        """
        if level <= self.least:
            return 0.0
        logs = self.log_moments(tilt - self.rates_down) + self.rates_down * level
        return _exp_up(float(logs.min()) - log_scale)

    def log_power_above(self, level: float, powers: Array) -> Array:
        """Return logs of upper bounds on E[Sᵃ] over sums S > level, for each power a.

        S^a·e^{−rS} decreases beyond S = a/r.
        """
        logs = self.log_moments(self.rates_up) - self.rates_up * level
        allowed = np.greater_equal.outer(self.rates_up * level, powers)
        least: Array = np.where(allowed, logs[:, None], _EXPONENT_MAX).min(axis=0)
        return least + powers * math.log(level) + 1e-12


def mass_below(law: SumAbove, level: float) -> float:
    """Return an upper bound on the probability of a sum below a level."""
    return math.fsum(each.mass_below(level) for each in law.classes)


def _exp_up(log_value: float) -> float:
    """Return e^x, rounded up; at least `_UNDERFLOW`."""
    return math.exp(min(log_value, _EXPONENT_MAX)) * (1 + 1e-12) + _UNDERFLOW


def _bound_masses(
    summands: _Summands, lattice: SumLattice, bins: int, moments: _ClassMoments | None = None
) -> tuple[Array, float]:
    """Return upper bounds on the masses of a class's sums; lower ones if `moments` is given.

    Each point has the best bound of those under several tilts. Mass that wraps around can only
    raise an upper bound; lower bounds are without it but for the second result in all.
    """
    outward = 1 if moments is None else -1
    found, score, total_wrapped = np.zeros(lattice.size), np.full(lattice.size, math.inf), 0.0
    for rate in lattice.tilts:
        check_time()
        tilted, log_moment = _tilt(summands, lattice, rate, outward)
        if not all(np.isfinite(mass).all() for mass in tilted.plain + tilted.one):
            continue
        mass, error = compose_class(tilted, lattice, bins)
        log_scale, points = bins * log_moment, lattice.points()
        log_weight = np.minimum(log_scale - rate * points, _EXPONENT_MAX)
        off = 8 * _EPS * (4 + abs(log_scale) + abs(rate) * points)
        heaviest = np.exp(log_weight + off)
        if moments is None:
            bound = (np.maximum(mass, 0.0) + error) * heaviest + _UNDERFLOW
        else:
            bound = np.maximum(mass - error, 0.0) * np.exp(log_weight - off)
            bound[log_weight >= _EXPONENT_MAX] = 0.0
        uncertain = error * heaviest
        used = np.flatnonzero(uncertain < score)
        if not len(used):
            continue
        wrapped = 0.0
        if moments is not None:
            # sums above the window wrap around to its first points, those below it to its last
            above = lattice.end + int(used[0]) * lattice.step
            below = lattice.low - (lattice.size - 1 - int(used[-1])) * lattice.step
            wrapped = moments.mass_above(above, rate, log_scale)
            wrapped += moments.mass_below(below, rate, log_scale)
            wrapped *= float(heaviest[used].max())
        if wrapped <= float((score - uncertain)[used].sum()):
            found[used], score[used] = bound[used], uncertain[used]
            total_wrapped += wrapped
    return found, total_wrapped * (1 + 1e-9)


def _tilt(
    summands: _Summands, lattice: SumLattice, rate: float, outward: int
) -> tuple[_Summands, float]:
    """Return masses multiplied by e^{rate·x} and normalised, and the log of the normalising factor.

    The tilt is e^{rate·x}. Every tilted mass is rounded outward by the error of its exponent.
    """
    if rate == 0.0:
        return summands, 0.0
    log_moment = 0.0

    def tilted(mass: Array, first: int) -> Array:
        """Return tilted masses."""
        tilt = rate * lattice_points(first, len(mass), lattice.step)
        with np.errstate(divide="ignore"):
            log_mass = np.log(mass)
        exponent = log_mass + tilt - log_moment
        terms = np.abs(log_mass) + np.abs(tilt) + abs(log_moment)
        error = np.where(np.isfinite(exponent), 4 * _EPS * (4 + terms), 0.0)
        with np.errstate(over="ignore"):  # the tilt is then of no use
            found: Array = np.exp(exponent + outward * error)
        return found

    with np.errstate(divide="ignore"):
        own = np.log(summands.plain[0]) + rate * lattice_points(
            lattice.start, len(summands.plain[0]), lattice.step
        )
    log_moment = float(log_sum_exp(own))
    firsts = (lattice.start, lattice.above)
    plain, one = (
        tuple(tilted(mass, first) for mass, first in zip(masses, firsts, strict=False))
        for masses in (summands.plain, summands.one)
    )
    return _Summands(plain, one), log_moment


def compose_class(summands: _Summands, lattice: SumLattice, bins: int) -> tuple[Array, float]:
    """Return the masses of a class's sums on its lattice, and an upper bound on their errors.

    Mass outside the window is wrapped around into it.
    """
    small, *large = _transform(summands.plain, lattice)
    if not summands.one:
        total, left_out = _binomial_terms(small, large, summands, bins)
    else:
        terms, left_out = _binomial_terms(small, large, summands, bins - 1)
        small_one, *large_one = _transform(summands.one, lattice)
        total = small_one * terms
        if large_one:
            total = total + large_one[0] * (small.power(bins - 1) + terms)
        left_out *= float(sum(mass.sum() for mass in summands.one)) * (1 + 1e-9)
    mass, error = invert_transform(total, lattice.size)
    shift = (bins * lattice.start - lattice.first) % lattice.size
    return np.roll(mass, shift), error + left_out


def _transform(masses: tuple[Array, ...], lattice: SumLattice) -> list[ComplexBalls]:
    """Return the FFTs of a summand's masses below a class's range, and within it."""
    offsets = (0, lattice.above - lattice.start)
    return [
        transform_masses(np.concatenate([np.zeros(offset), mass]), lattice.size)
        for mass, offset in zip(masses, offsets, strict=False)
    ]


def _binomial_terms(
    small: ComplexBalls, large: list[ComplexBalls], summands: _Summands, count: int
) -> tuple[ComplexBalls, float]:
    """Return (φ + χ)^count − φ^count for φ = `small` and χ = `large`, and the mass left out.

    The first class has φ^count and leaves nothing out. The terms beyond n have at most the mass
    Σ x^j/j! over j > n, which is at most x^{n+1}/(n + 1)!·e^x, for x = count·χ(0), if φ(0) ≤ 1.
    """
    if not large:
        return small.power(count), 0.0
    expected = count * float(summands.plain[1].sum()) * (1 + 1e-9)
    whole = max(1.0, float(summands.plain[0].sum()) * (1 + 1e-9))
    terms, left_out = 1, 0.5 * expected**2
    while terms < min(count, TERMS_MAX) and left_out > _TERM_LEAST * expected:
        terms += 1
        left_out *= expected / (terms + 1)
    total, power = small.power(0).scaled(math.comb(count, terms)), small.power(0)
    for term in range(terms - 1, 0, -1):
        power = power * small
        total = total * large[0] + power.scaled(math.comb(count, term))
    left_out *= _exp_up(min(expected, _EXPONENT_MAX) + count * math.log(whole))
    found = total * large[0] * small.power(count - terms)
    return found, left_out if terms < count else 0.0
