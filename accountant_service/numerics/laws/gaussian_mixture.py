"""Gaussian noise whose mean is drawn at random: a mixture of normal laws against one.

A person's contribution to a noisy sum has, independently of everybody else, a norm of at most s_j
with probability w_j, in units of the noise's standard deviation. Then

    N₁ = Σ_j w_j·N(s_j)   against   N₀ = N(0)

dominates the addition and the removal of the person. *Proof.* Given everybody else's part, the
outputs are N(0, I) and a mixture over the person's choices S of N(v_S, I), |v_S| ≤ s_j for a share
w_j of them. Under N(0, I) the likelihood ratio is R = Σ_S w_S·X_S with lognormal
X_S = exp(⟨v_S, z⟩ − |v_S|²/2), and both profiles, E[(R − e^x)₊] and E[(1 − e^x·R)₊], are means of
convex functions of R. Of all sums of variables with given laws, the sum of increasing functions of
one variable is the largest in convex order; and it increases in convex order with each of its
terms, as a lognormal variable of mean 1 does with |v_S|. The largest is the R of one dimension with
|v_S| = s_j. ∎ Contributions in one direction attain it in every step, so adaptive compositions are
exact as well.

A person with k records, each in the batch with probability q, independently, and of norm at most μ,
has s_j = jμ with w_j = Binomial(j; k, q) (Ganesh 2024, arXiv 2401.10294v2, Theorem 3.1). Numbers of
sampled records whose probability is below e^−100 count as infinite loss.

R increases with z: Λ(z) = log Σ_j w_j·e^{s_j·z − s_j²/2}, which is inverted by Newton's method.

**Moments.** E_{N₀}[R^a] is an integral over z by the trapezoidal rule of spacing h, as in
`sampled_gaussian`. Let s be the largest s_j. In the strip |Im z| ≤ y < π/s all terms of R lie
within an angle of sy, so |R| lies between cos(sy/2) and 1 times its value at the real part, and the
error is at most 2K·e^{y²/2}·max(1, cos(sy/2)^a)/(e^{2πy/h} − 1). Beyond the last node z₁ the slope
of log R is at most s. Left of the first node z₀, R lies between its first term and its value at z₀.
With a < 0 the first term, of shift r and weight w, leaves e^{a(log w − r²/2) + a²r²/2}·Φ(z₀ − ar).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np
from scipy import special

from accountant_service.numerics.floats.special_functions import (
    LOG_SQRT_TWO_PI,
    Array,
    log_binomial_pmf,
    log_normal_tail,
    log_sum_exp,
)
from accountant_service.numerics.laws.dominating_pair import (
    LOSS_MAX,
    IntervalMasses,
    normal_masses,
)
from accountant_service.numerics.time_limit import check_time

_EPS: Final = float(np.finfo(float).eps)
_LOG_ERROR: Final = -80.0  # of the quadrature, relative
_TAIL_DEVIATIONS: Final = 13.0
_STRIP: Final = np.linspace(0.02, 0.98, 49)
_WEIGHT_MIN: Final = -100.0  # log of the least weight of a large shift that is kept
_TABLE: Final = 4096  # nodes from which Newton's method starts
_NEWTON_STEPS: Final = 6
_SMALL_STEP: Final = 1e-9  # relative: the next one would be below rounding errors
_BLOCK: Final = 1 << 13  # outputs whose terms are computed together
_LOG_OMITTED: Final = -50.0  # log of the share of the largest term, below which terms are left out
_TILTS: Final = 10  # about how many moments share the nodes
LEAST_OUTPUT: Final = 41.0  # distance from 0 beyond which a normal law has no mass


@dataclass(frozen=True, slots=True)
class GaussianMixturePair:
    """The pair of output laws for a person whose contribution's norm is drawn at random.

    Attributes:
        shifts: the norms in standard deviations of the noise, increasing, the last above 0.
        log_weights: the log of each one's probability.
        dropped: an upper bound on the probability of larger norms: they count as infinite loss.
        weight_error: an upper bound on the relative errors of the probabilities.
    """

    is_symmetric: ClassVar[bool] = False
    infinite_is_certain: ClassVar[bool] = False  # it is an allowance, of which no lower bound holds
    shifts: tuple[float, ...]
    log_weights: tuple[float, ...]
    dropped: float = 0.0
    weight_error: float = 0.0

    @property
    def infinite_masses(self) -> tuple[float, float]:
        """0, and the probability of larger norms than are considered."""
        return 0.0, self.dropped

    @property
    def largest_shift(self) -> float:
        """The mean output if the largest norm that is considered is drawn."""
        return self.shifts[-1]

    @property
    def _unit(self) -> float:
        """The least norm above 0."""
        return next(shift for shift in self.shifts if shift > 0)

    def scaled(self, factor: float) -> GaussianMixturePair:
        """Return the pair for norms `factor` times as large."""
        return replace(self, shifts=tuple(factor * shift for shift in self.shifts))

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each log-likelihood-ratio interval's probability, without and with the person."""
        inner, residual = self._outputs_at(edges[np.isfinite(edges)])
        below, above = int((edges == -np.inf).sum()), int((edges == np.inf).sum())
        z = np.concatenate([np.full(below, -np.inf), inner, np.full(above, np.inf)])
        error = np.concatenate([np.zeros(below), residual, np.zeros(above)])
        without_record, rounding = normal_masses(z, self._unit)
        with_record, with_rounding = self.mixture_masses(z, 1.0)
        with_record[-1] += self.infinite_masses[1]
        with_rounding[-1] += self.infinite_masses[1]
        return IntervalMasses(
            without_record,
            with_record,
            rounding + 64 * _EPS * without_record,
            with_rounding,
            error,
        )

    def mixture_masses(self, z: Array, sign: float) -> tuple[Array, Array]:
        """Return the masses of Σ w_j·N(sign·s_j) between increasing outputs, and their errors.

        In each block of outputs, shifts whose density is below e^−50 of the largest are left out.
        """
        shifts, log_weights = self.weights()
        mass, rounding = np.zeros(len(z) - 1), np.zeros(len(z) - 1)
        for start in range(0, len(mass), _BLOCK):
            edges = z[start : start + _BLOCK + 1]
            part = slice(start, start + len(edges) - 1)
            for j in range(*self._window(sign * edges)):
                shift, weight = float(shifts[j]), math.exp(log_weights[j])
                own, own_rounding = normal_masses(edges - sign * shift, max(shift, self._unit))
                mass[part] += weight * own
                rounding[part] += weight * own_rounding
        share = 64 * _EPS + self.weight_error + len(shifts) * math.exp(_LOG_OMITTED)
        return mass, rounding + share * mass

    def _window(self, z: Array) -> tuple[int, int]:
        """Return the range of the indices j that count at outputs between the least and greatest.

        The ratio of the terms of two shifts, the larger one above, increases with z. So a shift
        below those that count at the least output counts nowhere, and one above those that count
        at the greatest output as well.
        """
        check_time()
        shift, log_weights = self.weights()
        ends = np.array([z.min(), z.max()])
        terms = np.multiply.outer(np.where(np.isfinite(ends), ends, 0.0), shift)
        terms += log_weights - 0.5 * shift * shift
        counts = terms >= terms.max(axis=1, keepdims=True) + _LOG_OMITTED
        first = 0 if math.isinf(ends[0]) else int(np.argmax(counts[0]))
        last = 0 if math.isinf(ends[1]) else int(np.argmax(counts[1][::-1]))
        return first, len(shift) - last

    def weights(self) -> tuple[Array, Array]:
        """Return the shifts, and the log probability of each, as arrays."""
        return np.array(self.shifts), np.array(self.log_weights)

    def log_ratio(self, z: Array) -> Array:
        """Return the log-likelihood ratio Λ at each output z."""
        return self.ratio_and_slope(z)[0]

    def ratio_and_slope(self, z: Array) -> tuple[Array, Array]:
        """Return the log-likelihood ratio Λ at each output z, and its slope dΛ/dz.

        Blocks of outputs are fastest if the outputs increase or decrease.
        """
        shift, log_weight = self.weights()
        ratio, slope = np.empty_like(z), np.empty_like(z)
        for start in range(0, len(z), _BLOCK):
            part = slice(start, start + _BLOCK)
            window = slice(*self._window(z[part]))
            terms = np.multiply.outer(shift[window], z[part])
            terms += (log_weight[window] - 0.5 * shift[window] ** 2)[:, None]
            peak = terms.max(axis=0)
            terms -= peak
            np.exp(terms, out=terms)
            total = terms.sum(axis=0)
            ratio[part], slope[part] = peak + np.log(total), (shift[window] @ terms) / total
        return ratio, slope

    def ratio_rounding(self, z: Array) -> Array:
        """Return bounds on the rounding errors of `log_ratio` at each output z."""
        last = self.largest_shift
        of_terms = 1 + len(self.shifts) + last * np.abs(z) + 0.5 * last * last
        return 8 * _EPS * of_terms + self.weight_error

    def largest_output(self) -> float:
        """Return an output whose log-likelihood ratio is beyond all that are discretised."""
        last = self.largest_shift
        reach = LOSS_MAX + 50.0 - self.log_weights[-1]
        return max(reach / last + 0.5 * last, LEAST_OUTPUT)

    def _outputs_at(self, log_ratios: Array) -> tuple[Array, Array]:
        """Return the output z at each log-likelihood ratio, and bounds on the ratios' errors.

        Λ is increasing and convex. It may have a least value: smaller ones have no output.
        """
        lowest = self.log_ratio(np.array([-LEAST_OUTPUT]))[0]
        limits = (-LEAST_OUTPUT, self.largest_output())
        z = invert_increasing(self.ratio_and_slope, log_ratios, limits, self.largest_shift)
        off = np.abs(self.log_ratio(z) - log_ratios) + self.ratio_rounding(z)
        unreached = log_ratios <= lowest
        return np.where(unreached, -np.inf, z), np.where(unreached, 0.0, off)

    def limits(self, tail_deviations: float) -> tuple[float, float]:
        """Return limits of the log-likelihood ratio; `tail_deviations` sets the mass outside."""
        ends = np.array([-tail_deviations, self.largest_shift + tail_deviations], dtype=float)
        low, high = self.log_ratio(ends)
        return float(low), float(high)

    def log_moments(self, orders: Array, sample_rate: float) -> Array:  # noqa: ARG002
        """Return upper bounds on log E[e^{a·loss}] of outputs without the person, per order a."""
        spacing = min(self._spacing(float(order)) for order in orders)
        first = -math.ceil((_TAIL_DEVIATIONS + self._reach_below(float(orders.min()))) / spacing)
        last = math.ceil(self._last_node(float(orders.max())) / spacing)
        z = spacing * np.arange(first, last + 1, dtype=float)
        ratio = self.log_ratio(z)
        found = np.empty_like(orders)
        for i, order in enumerate(orders):
            nodes = math.ceil(self._last_node(float(order)) / spacing) - first + 1
            found[i] = self._log_moment(float(order), z[:nodes], ratio[:nodes], spacing)
        return np.maximum(found, 0.0)

    def _log_moment(self, order: float, z: Array, ratio: Array, spacing: float) -> float:
        """Return an upper bound on log E[e^{`order`·loss}] without the person, from nodes z."""
        exponent = order * ratio - 0.5 * z * z
        total = float(log_sum_exp(exponent)) + math.log(spacing) - LOG_SQRT_TWO_PI
        slope = max(order, 0.0) * self.largest_shift
        right = order * float(ratio[-1]) + slope * (0.5 * slope - float(z[-1]))
        right += float(log_normal_tail(np.array([z[-1] - slope]))[0])
        left = order * float(ratio[0]) + float(special.log_ndtr(z[0]))
        if order < 0:  # R is at least its first term
            tilt = order * self.shifts[0]
            lowest = order * (self.log_weights[0] - 0.5 * self.shifts[0] ** 2)
            left = lowest + 0.5 * tilt * tilt + float(special.log_ndtr(z[0] - tilt))
        missing = np.logaddexp(np.logaddexp(left, right), total + _LOG_ERROR + math.log(4))
        error = 8 * _EPS * (8 + abs(order) * (1 + float(np.abs(ratio).max())) + float(z[-1] ** 2))
        return float(np.logaddexp(total, missing)) + min(error, 1e-9)

    def _spacing(self, order: float) -> float:
        """Return the widest trapezoidal spacing whose relative error is below e^`_LOG_ERROR`."""
        y = np.minimum(math.pi / (self.largest_shift) * _STRIP, 12.6)
        cost = 0.5 * y * y + min(order, 0.0) * np.log(np.cos(0.5 * self.largest_shift * y))
        return float(np.max(2 * math.pi * y / (cost - _LOG_ERROR)))

    def _last_node(self, order: float) -> float:
        """Return the last quadrature node; a bound replaces the moment's tail beyond it."""
        return max(order, 0.0) * self.largest_shift + _TAIL_DEVIATIONS

    def _reach_below(self, order: float) -> float:
        """Return how far below 0 the moment's integrand has its mass."""
        return max(-order, 0.0) * self.shifts[0]

    def count_nodes(self, tilt: float) -> float:
        """Return how many terms a log-moment at this `tilt` sums, which measures its cost."""
        nodes = (self._last_node(tilt + 1) + _TAIL_DEVIATIONS) / min(
            self._spacing(tilt + 1), self._spacing(-tilt)
        )
        terms = len(self.shifts) * min(1.0, 20 / self.largest_shift)
        return nodes * (2 + terms / _TILTS)

    def total_variation(self) -> float:
        """Return an upper bound on the total variation of outputs without and with the person."""
        return total_variation_of(self.masses(np.array([-np.inf, 0.0, np.inf])))


def total_variation_of(masses: IntervalMasses) -> float:
    """Return an upper bound on a total variation distance, from masses of Λ < 0 and Λ > 0.

    Outcomes with |Λ| up to the edge's error may be on the wrong side: they add their mass times Λ.
    """
    difference = float(masses.with_record[1] - masses.without_record[1])
    rounding = float(masses.with_record_rounding[1] + masses.without_record_rounding[1])
    return difference + rounding + 2 * float(np.max(masses.edge_error))


def invert_increasing(
    value_and_slope: Callable[[Array], tuple[Array, Array]],
    values: Array,
    limits: tuple[float, float],
    middle: float,
) -> Array:
    """Return about where an increasing function has each of the increasing `values`.

    Args:
        value_and_slope: returns the function's values and slopes.
        values: to be reached.
        limits: between which the answers lie; values beyond are answered by the limits.
        middle: half of the first guesses are for answers up to about this far from 0, in units
            of standard deviations: there the masses are.
    """
    near = min(LEAST_OUTPUT + middle, limits[1])
    inner = np.linspace(max(limits[0], -near), near, _TABLE // 2)
    table = np.union1d(np.linspace(*limits, _TABLE // 2), inner)
    x: Array = np.interp(values, value_and_slope(table)[0], table)
    moving = np.arange(len(x))
    for _ in range(_NEWTON_STEPS):
        value, slope = value_and_slope(x[moving])
        step = (value - values[moving]) / np.maximum(slope, 1e-300)
        x[moving] = np.clip(x[moving] - np.clip(step, -1.0, 1.0), *limits)
        moving = moving[np.abs(step) > _SMALL_STEP * (1 + np.abs(x[moving]))]
        if not len(moving):
            break
    return np.maximum.accumulate(x)


@lru_cache(maxsize=16)
def several_records(records: int, sample_rate: float, mu: float) -> GaussianMixturePair:
    """Return the pair of a person with several records, each Poisson-sampled by itself.

    Args:
        records: k, the most records of one person.
        sample_rate: q in (0, 1).
        mu: the clip norm divided by the standard deviation of the noise.
    """
    participations = np.arange(records + 1, dtype=float)
    log_weights = log_binomial_pmf(participations, records, sample_rate)
    error = 8 * _EPS * float(special.gammaln(records + 1.0))
    return _without_improbable(mu * participations, log_weights, error)


def drawn_shifts(shifts: Sequence[float], probabilities: Sequence[float]) -> GaussianMixturePair:
    """Return the pair for shifts that are drawn with these probabilities.

    Args:
        shifts: in standard deviations of the noise, increasing, at least 0, the last above 0.
        probabilities: of each, above 0; together 1.
    """
    log_weights = np.log(np.array(probabilities))
    error = 4 * _EPS * (1 - float(log_weights.min()))
    return _without_improbable(np.array(shifts), log_weights, error)


def _without_improbable(shifts: Array, log_weights: Array, error: float) -> GaussianMixturePair:
    """Return the pair in which the largest shifts count as infinite loss, if hardly ever drawn.

    `error` bounds the relative errors of the weights.
    """
    likely = np.flatnonzero((log_weights >= _WEIGHT_MIN) & (shifts > 0))
    kept = 1 + (int(likely[-1]) if len(likely) else int(np.argmax(shifts > 0)))
    dropped = float(np.exp(log_weights[kept:]).sum())
    # with room for the rounding of this sum
    return GaussianMixturePair(
        tuple(shifts[:kept].tolist()), tuple(log_weights[:kept].tolist()), 1.01 * dropped, error
    )
