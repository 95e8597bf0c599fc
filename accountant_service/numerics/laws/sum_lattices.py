"""The choice of classes, lattices, windows and tilts for the sum of lognormal variables.

All from coarse quadratures: the choice affects the width of bounds, never their validity.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, Literal

import numpy as np
from scipy import special

from accountant_service.numerics.floats.special_functions import (
    Array,
    geometric_points,
    log_sum_exp,
)
from accountant_service.numerics.laws.dominating_pair import LOSS_MAX
from accountant_service.numerics.laws.lognormal_sum import (
    TERMS_MAX,
    SumLattice,
    quantile,
    round_step,
)

_DEVIATIONS_MAX: Final = 38.0  # beyond it a normal law has no mass in double precision
_DEVIATIONS: Final = [2.0 * 1.2**n for n in range(16)] + [_DEVIATIONS_MAX]  # that are tried
_POINTS_MAX: Final = 1 << 21  # of a class's window
_STEP_SHARE: Final = 0.9  # of the step at which the sum's lattice costs as much as the losses'
_BLOCK_SHARE: Final = 0.6  # of the spacing of losses that a block of lattice points covers
_BLOCKS_LEAST: Final = 64  # of a class's window
_LARGE: Final = 0.2  # expected number of summands above the first class
_MANY: Final = 6.0  # the same, above a first class of small sums: few terms of a sum are left out
_GROWTH: Final = 4  # of the largest summand from class to class
_GROWTH_FAR: Final = 16  # the same where it exceeds the mean of the sum
_FIRST_POINTS: Final = 32  # least number of points up to the first cut of the coarsest lattice
_LOW_REACH: Final = 64.0  # of the first class's sums over the lowest
_SPREAD: Final = 2.0  # standard deviations of the sum that the first class's summands reach
_MARGIN: Final = 7.0  # natural log of the tail of the losses over that of windows
_TILT_EXPONENT: Final = 18.0  # of a mass that a tilt brings to the centre, times 1, 4, 9, …
_TILT_ROOM: Final = 12.0  # more, for the tilt to be useful
_TILT_LARGE: Final = 4.0  # expected number of large summands under a tilt
_TILTS_MAX: Final = 6  # on either side
_EXACT: Final = 52.5  # natural log of a tail that needs no tilt, for one summand and spacing 1
_NARROWEST: Final = 1e-9  # distance from 1 of the limits of ratios
_NODES: Final = 128
_REACH: Final = 8.0  # deviations of a summand that estimates of its rounding cover
_BELOW: Final = 8.0  # deviations below a class's limit that are covered
_RATES: Final = 32
_FASTEST: Final = 100.0  # rate, times the largest or the least sum
_LIMIT_RATES: Final = 64


@lru_cache(maxsize=64)
def ratio_limits(mu: float, bins: int, deviations: float) -> tuple[float, float]:
    """Return a least and a greatest likelihood ratio; `deviations` sets the mass beyond.

    It is the tail beyond `deviations` standard deviations, by Chernoff's bound. No summand exceeds
    its quantile.
    """
    x, log_mass = _quadrature(mu, -deviations, deviations + mu)
    tail = 0.5 * deviations * deviations
    fastest = max(10 / x[0], 2 * deviations / mu)  # the best rate is about deviations/(μ√b)
    rates = geometric_points(0.1 / x[-1], fastest, _LIMIT_RATES)
    down = log_sum_exp(log_mass - rates[:, None] * x)
    low = float(((-tail - bins * down) / (bins * rates)).max())
    rates = geometric_points(0.1, LOSS_MAX, _LIMIT_RATES) / x[-1]
    exponent = log_mass + rates[:, None] * x
    up = (bins - 1) * log_sum_exp(exponent) + log_sum_exp(exponent + np.log(x))
    high = float(((tail + up) / (bins * rates)).min())
    floor = math.exp(-LOSS_MAX)
    return max(min(low, 1 - _NARROWEST), floor), min(max(high, 1 + _NARROWEST), 1 / floor)


def _deviations(mu: float, summand: float) -> float:
    """Return the standard normal z at which the lognormal exp(μz − μ²/2) equals `summand`."""
    return math.log(summand) / mu + 0.5 * mu


def _quadrature(mu: float, low: float, high: float) -> tuple[Array, Array]:
    """Return quadrature nodes exp(μz − μ²/2) for z from `low` to `high`, and log-weights."""
    z = np.linspace(low, high, _NODES)
    x = np.exp(np.minimum(mu * z - 0.5 * mu * mu, LOSS_MAX))
    return x, -0.5 * z * z + math.log((z[1] - z[0]) / math.sqrt(2 * math.pi))


@lru_cache(maxsize=8)  # upper and lower bounds use the same
def choose_lattices(
    mu: float,
    bins: int,
    low: float,
    high: float,
    spacing: float,
    sums: Literal["large", "small", "all"] = "all",
) -> tuple[SumLattice, ...]:
    """Divide outcomes by ranges of their largest summand; choose a grid of sums for each.

    Args:
        mu: of each summand.
        bins: number of summands.
        low: the lower limit.
        high: the upper limit.
        spacing: of the lattice of log(S/b); the lattice of S should be about as accurate.
        sums: whose masses should have small relative errors. "small" also makes the lattice as
            accurate for sums far below b.
    """
    small_sums = sums == "small"
    lowest, largest = bins * math.exp(low), bins * math.exp(min(high, LOSS_MAX))
    tail = _negative_log_tail(mu, bins, low, high) + _MARGIN
    end = min(largest, quantile(mu, min(math.sqrt(2 * tail) + mu, _DEVIATIONS_MAX)))
    deviation = math.sqrt(math.expm1(min(mu * mu, 30.0)))
    step = min(_STEP_SHARE * spacing * math.sqrt(1.5 * bins), 0.5 * deviation)
    start, first_cut, scale = quantile(mu, -_DEVIATIONS_MAX), _first_cut(mu, bins), 1.0
    if small_sums:  # classes of smaller sums, on finer lattices
        while bins * first_cut * scale > _LOW_REACH * lowest and (
            bins <= TERMS_MAX or _expected_above(mu, bins, first_cut * scale / _GROWTH) <= _MANY
        ):
            scale /= _GROWTH
    rounding = _RoundingVariance(mu, bins)
    accuracy = 1.5 * (_STEP_SHARE * spacing) ** 2
    step = scale * step
    while 2 * step <= scale * first_cut / _FIRST_POINTS and (
        rounding.of_sum(2 * step) <= accuracy * (scale * bins) ** 2
    ):
        step *= 2
    step = round_step(step)
    # errors of transforms are about 4e-13 a summand, and matter relative to the spacing's square
    exact = _EXACT - math.log(bins) + 2 * math.log(spacing)
    found: list[SumLattice] = []
    above, cut, factor = 0, _round_up_grid_points(scale * first_cut / step), 1
    while not found or above * step < end:
        allowed = accuracy * max(above * step, scale * bins) ** 2
        while above % (2 * factor) == 0 < above and (rounding.of_sum(2 * factor * step) <= allowed):
            factor *= 2
        found.append(
            _class_lattice(
                _ClassEstimates(
                    mu, bins, above * step, min(cut * step, 2 * end), tail, lowest, exact
                ),
                factor * step, above // factor, cut // factor, start, largest, sums,
                _BLOCK_SHARE * spacing * max(above * step, lowest if small_sums else bins)
                if sums != "all" else 0.0,
            )
        )  # fmt: skip
        growth = _GROWTH if above * step < bins else _GROWTH_FAR
        above, cut = cut, growth * cut
    return tuple(found)


def _round_up_grid_points(points: float) -> int:
    """Round a number of grid points up to a multiple of a large power of 2."""
    least = 2 * max(2, math.ceil(points / 2))
    unit = 1 << max(1, int(math.log2(least / _FIRST_POINTS)))
    return -(-least // unit) * unit


class _RoundingVariance:
    """Estimates of the variance that rounding each summand to a grid adds to the sum."""

    def __init__(self, mu: float, bins: int) -> None:
        self._bins = bins
        self._x, log_mass = _quadrature(mu, -_REACH, _REACH)
        self._mass = np.exp(log_mass)

    def of_sum(self, step: float) -> float:
        """Return about six times the variance that a grid spacing of `step` adds to the sum."""
        share = self._x / step
        share = np.where(share < 1, share, 0.5 - math.sqrt(1 / 12))  # far above, its mean is 1/6
        return 6 * self._bins * float(self._mass @ (share * (1 - share))) * step**2 + step**2


def _expected_above(mu: float, bins: int, cut: float) -> float:
    """Return the expected number of summands above a cut."""
    return bins * float(special.ndtr(-_deviations(mu, cut)))


def _first_cut(mu: float, bins: int) -> float:
    """Return the upper limit of the lowest range into which the largest summand may fall."""
    z = -float(special.ndtri(min(_LARGE / bins, 0.1)))
    x, log_mass = _quadrature(mu, -8.0, z)
    deviation = math.sqrt(bins * float(np.exp(log_mass) @ (x - 1) ** 2))
    return max(quantile(mu, z), _SPREAD * deviation)


def _negative_log_tail(mu: float, bins: int, low: float, high: float) -> float:
    """Estimate −log P(the privacy loss is below `low` or above `high`)."""
    for deviations in _DEVIATIONS:
        least, most = ratio_limits(mu, bins, deviations)
        if math.log(least) <= low and math.log(most) >= high:
            break
    return 0.5 * deviations * deviations


class _ClassEstimates:
    """Estimates of log-moments of the sums S in a class of outcomes, to choose its grid.

    The outcomes of the class have a largest summand from `above` to `cut`.
    """

    def __init__(
        self,
        mu: float,
        bins: int,
        above: float,
        cut: float,
        tail: float,
        lowest: float,
        exact: float,
    ) -> None:
        reach = math.sqrt(2 * tail) + 1
        most = min(_deviations(mu, cut), reach + mu)
        split = min(_deviations(mu, above), most) if above > 0 else most
        self.bins, self.tail, self.exact = bins, tail, exact
        self.small = x, log_mass = _quadrature(mu, min(-reach, split - _BELOW), split)
        self.large = _quadrature(mu, split, _deviations(mu, cut)) if above > 0 else None
        mean = float(np.exp(log_mass) @ np.abs(x - 1) ** 2)
        deviation = math.sqrt(bins * mean)
        slowest = min(0.05 / deviation, 0.5 / cut)
        self.rates_up = geometric_points(slowest, max(600 * slowest, _FASTEST / cut), _RATES)
        slowest = 0.05 / deviation
        fastest = max(1200 * slowest, _FASTEST / max(above, lowest))
        self.rates_down = -geometric_points(slowest, fastest, _RATES)

    def log_moments(self, rates: Array) -> tuple[Array, Array]:
        """Estimate log E[e^{rS}], and the expected number of large summands, per rate r."""
        small = log_sum_exp(self.small[1] + rates[:, None] * self.small[0])
        if self.large is None:
            return self.bins * small, np.zeros_like(rates)
        large = log_sum_exp(self.large[1] + rates[:, None] * self.large[0])
        both = math.log(self.bins) + large + (self.bins - 1) * np.logaddexp(small, large)
        return both, self.bins * np.exp(np.minimum(large - small, 300.0))


def _class_lattice(
    law: _ClassEstimates,
    step: float,
    above: int,
    cut: int,
    start: float,
    largest: float,
    sums: str,
    length: float,
) -> SumLattice:
    """Choose the grid and the tilts for sums whose largest summand is from `above` to `cut`.

    The largest summand of the class's outcomes is from `above` to `cut`, in units of `step`, and
    blocks of lattice points are at most about `length`.
    """
    up, many = law.log_moments(law.rates_up)
    down, few = law.log_moments(law.rates_down)
    if law.bins <= TERMS_MAX:
        many, few = np.zeros(_RATES), np.zeros(_RATES)  # no terms are left out
    mass = float(law.log_moments(np.zeros(1))[0][0])
    high = min(
        float(((up + law.tail + max(math.log(largest / law.bins), 0.0)) / law.rates_up).min()),
        largest,
    )
    # in a coarse lattice small summands are 0, and the sum may be that of the largest alone
    low = above * step
    if low < law.bins:
        low = max(low, float(((down + law.tail) / law.rates_down).max()))
    begin = min(math.floor(start / step), max(above - 1, 0))
    block = 1 << max(int(math.log2(max(length / step, 1.0))), 0)
    first = max(math.floor(low / step) - 2, 0)
    first -= (first - law.bins * begin) % block  # blocks start at sums of `begin`s
    first += block if first < 0 else 0
    points = max((high - first * step) / step + 16, _BLOCKS_LEAST * block)
    size = min(1 << math.ceil(math.log2(points)), _POINTS_MAX)
    ends = (first * step, (first + size) * step)
    tilts = [0.0]
    is_exact = law.tail + mass <= law.exact  # without tilts
    if sums != "small" and not is_exact:
        tilts += _choose_tilts(law.rates_up, up, many, mass, law.tail, ends, block * step)
    if sums != "large" and not is_exact:
        tilts += _choose_tilts(law.rates_down, down, few, mass, law.tail, ends, block * step)
    least = above if above else begin
    stride = _choose_stride(math.gcd(least - begin, cut - least), block) if above else 1
    return SumLattice(step, first, size, begin, least, cut, tuple(tilts), block, stride)


def _choose_stride(length: int, block: int) -> int:
    """Return the spacing of the points for summands in a class's range: at most half a block.

    Few summands of an outcome lie there, and no more than the block of the sum is known. The
    spacing divides `length`.
    """
    stride = 1
    while 4 * stride <= block and length % (2 * stride) == 0:
        stride *= 2
    return stride


def _choose_tilts(
    rates: Array,
    logs: Array,
    expected: Array,
    mass: float,
    tail: float,
    ends: tuple[float, float],
    length: float,
) -> list[float]:
    """Choose exponential tilts that move improbable sums to the middle of the grid.

    Under a rate the sum is where the masses are about e^{−exponent} of the class.

    Args:
        rates: to choose from.
        logs: log-moments of the class at each rate.
        expected: about the number of large summands at each rate.
        mass: log of the class's mass.
        tail: −log of masses that are negligible.
        ends: the lowest and the highest sum on the lattice.
        length: of a block of lattice points, over which a tilt should hardly change.
    """
    sums = np.gradient(logs, rates)
    exponent = rates * sums - logs + mass
    useful = (sums >= ends[0]) & (sums <= ends[1]) & (expected <= _TILT_LARGE)
    useful &= np.abs(rates) * length <= 1
    chosen: list[float] = []
    for number in range(1, _TILTS_MAX + 1):
        aim = _TILT_EXPONENT * number**2
        near = np.flatnonzero(useful & (exponent <= aim))
        if aim + _TILT_ROOM > tail + mass or not len(near):
            break
        if not chosen or rates[near[-1]] != chosen[-1]:
            chosen.append(float(rates[near[-1]]))
    return chosen
