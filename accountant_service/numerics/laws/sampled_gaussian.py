"""Rényi moments of the Poisson-sampled Gaussian mechanism, for any real order, with their error.

The pair is μ₀ = N(0, σ²) and μ = (1−q)·N(0, σ²) + q·N(1, σ²). Everything a Rényi or moments
accountant needs is one function of a real order a:

    K(a) = log E_{z∼μ₀}[(μ(z)/μ₀(z))^a] = log E[(1 + u)^a],   u = q·(e^{(2z−1)/(2σ²)} − 1).

K(α)/(α−1) is the Rényi divergence D_α(μ‖μ₀); K(−λ) is the log-moment of the other direction
(E₁ of Abadi et al. 2016, with E₂ = K(λ+1)).

**How it is computed.** The trapezoidal rule on the real line. The integrand is analytic in the
strip |Im z| < πσ², where 1 + u has no zero, so the rule converges geometrically: with spacing h
the error is at most 2M/(e^{2πc/h} − 1), M a bound on ∫|f(x + iy)|dx over |y| ≤ c (Trefethen &
Weideman, SIAM Review 56(3), 2014, Theorem 5.1). Here |f(x + iy)| ≤ f(x)·e^{c²/(2σ²)} for a ≥ 1,
and a further factor cos(c/(2σ²))^a for a < 0, because |s + t·e^{iθ}| lies between (s+t)·cos(θ/2)
and s + t. The spacing is chosen so that the whole error is below e^{−80}(E + 1 + 2|a|), E the
moment itself. No series, no truncation of one, integer and fractional orders alike.

**Small moments.** For small q, E − 1 is of order q² and would drown in rounding. As E[u] = 0,
E − 1 = E[(1+u)^a − 1 − a·u], whose integrand has one sign and is computed without cancellation.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

from accountant_service.numerics.floats.special_functions import (
    LOG_SQRT_TWO_PI,
    Array,
    log1p_minus,
    log_normal_tail,
)

_LOG_ERROR: Final = -80.0  # natural log of the quadrature's relative error
_TAIL_DEVIATIONS: Final = 13.0  # integrated beyond either mode; the rest is bounded and added
_SMALL_MOMENT: Final = 1e-2  # below this, E − 1 is summed directly
_ELEMENTS_MAX: Final = 1 << 20  # of one block of orders × nodes (8 MiB)
_EPS: Final = float(np.finfo(float).eps)


def _spacing(order: float, sigma: float) -> float:
    """Return the widest trapezoidal spacing with a relative error below e^`_LOG_ERROR`."""
    half_width = np.minimum(sigma * sigma * np.pi * np.linspace(0.02, 0.98, 49), 12.6 * sigma)
    cost = half_width**2 / (2 * sigma * sigma)
    if order < 0:
        cost = cost + order * np.log(np.cos(half_width / (2 * sigma * sigma)))
    return float(np.max(2 * np.pi * half_width / (cost - _LOG_ERROR)))


def count_nodes(lowest: float, highest: float, sigma: float) -> float:
    """Return the number of quadrature nodes for moments of orders from `lowest` to `highest`."""
    low, high = integration_limits(lowest, highest, sigma)
    return (high - low) / min(_spacing(lowest, sigma), _spacing(highest, sigma))


def integration_limits(lowest: float, highest: float, sigma: float) -> tuple[float, float]:
    """Return limits of integration: 13 standard deviations below and above the integrands' maxima.

    The modes lie at 0 and at the order.
    """
    return min(lowest, 0.0) - _TAIL_DEVIATIONS * sigma, max(highest, 1.0) + _TAIL_DEVIATIONS * sigma


def log_truncation_error(orders: Array, q: float, sigma: float) -> Array:
    """Return logs of upper bounds on the part of each moment outside the integration limits.

    The moment of order a is E[(1 + u)^a].

    For a > 1: to the left 1 + u ≤ 1; to the right 1 + u ≤ (μ₁/μ₀)·(q + (1−q)·(μ₀/μ₁ at the end)).
    For a < 0: to the right 1 + u ≥ 1; to the left the integrand is log-concave, with a logarithmic
    slope of at least `_TAIL_DEVIATIONS` standard deviations where it is cut, so the rest is at most
    its value there divided by that slope. In both cases the linear term of the small-moment form
    adds at most (1 + 2|a|) times the Gaussian tail.
    """
    beyond = float(log_normal_tail(np.asarray(_TAIL_DEVIATIONS)))
    end = np.maximum(orders, 1.0) + _TAIL_DEVIATIONS * sigma
    odds = (1 - q) / q * np.exp(-np.minimum((2 * end - 1) / (2 * sigma * sigma), 700.0))
    growth = orders * (math.log(q) + np.log1p(odds)) + orders * (orders - 1) / (2 * sigma * sigma)
    right = np.where(orders > 0, growth + beyond, beyond)
    cut = np.minimum(orders, 0.0) / sigma - _TAIL_DEVIATIONS
    at_cut = orders * privacy_loss((2 * cut * sigma - 1) / (2 * sigma * sigma), q) - 0.5 * cut * cut
    left = np.where(orders > 0, beyond, at_cut - LOG_SQRT_TWO_PI - math.log(_TAIL_DEVIATIONS))
    linear = beyond + np.log1p(2 * np.abs(orders))
    total: Array = np.logaddexp(np.logaddexp(left, right), linear)
    return total


def log_moments(orders: Array, sample_rate: float, noise_multiplier: float) -> Array:
    """Return upper bounds on the log-moment of a Poisson-sampled Gaussian release at each order.

    The log-moment is K(a) = log E_{μ₀}[(μ/μ₀)^a], μ₀ and μ the laws without and with the record.

    They are tight to a relative 1e-10.

    Args:
        orders: real orders, each either > 1 or < 0; one-dimensional, any sequence.
        sample_rate: q in [0, 1].
        noise_multiplier: σ > 0.

    Returns:
        One value ≥ 0 for each order. Truncation and quadrature errors are added outward; the
        rounding of double precision is left to `rounding.up`.
    """
    q, sigma = sample_rate, noise_multiplier
    if q == 0.0:
        return np.zeros_like(orders)
    if q == 1.0:
        return orders * (orders - 1) / (2 * sigma * sigma)
    grid = _QuadratureGrid(q, sigma, float(orders.min()), float(orders.max()))
    log_moment = np.empty_like(orders)
    for group in _group_orders(orders, grid.size):
        log_moment[group] = grid.integrate(orders[group])
    quadrature = _LOG_ERROR + math.log(2) + np.logaddexp(log_moment, np.log1p(2 * np.abs(orders)))
    missing = np.logaddexp(log_truncation_error(orders, q, sigma), quadrature)
    share = np.exp(np.minimum(missing - log_moment, 0.0))
    # log(1 + x) ≤ x, which keeps the digits of a small moment
    upper: Array = np.where(share < 1e-3, log_moment + share, np.logaddexp(log_moment, missing))
    return upper


def privacy_loss(ratio: Array, q: float) -> Array:
    """Return the privacy loss log(1 − q + q·e^Λ), q the sample rate, Λ the log-likelihood `ratio`.

    Λ is the log-likelihood ratio without sampling, and q the sample rate.

    It is accurate to a few eps for any q in (0, 1] and any Λ.
    """
    if q == 1.0:
        return ratio
    near = np.log1p(q * np.expm1(np.clip(ratio, -40.0, 300.0)))
    loss = np.where(ratio < 300.0, near, math.log(q) + ratio)
    if q <= 0.5:
        return loss
    sums = np.logaddexp(math.log1p(-q), math.log(q) + np.minimum(ratio, 0.0))  # 1 − q is exact
    return np.where(ratio < -0.7, sums, loss)


def loss_error(loss: Array, ratio: Array, q: float) -> Array:
    """Return upper bounds on the errors of the values of `privacy_loss` at exact ratios.

    A value is off by a few eps of itself, and of the terms of log q + Λ where that is used.
    """
    if q == 1.0:
        return np.zeros_like(loss)
    terms = np.where(ratio < 300.0, 0.0, abs(math.log(q)))
    error: Array = 16 * _EPS * (np.abs(loss) + terms)
    return error


def _group_orders(orders: Array, nodes: int) -> list[NDArray[np.intp]]:
    """Split orders into groups that share quadrature nodes; return each group's positions.

    Groups span up to 16, then factors of four, in bounded memory.

    The result holds their positions.
    """
    size = np.floor(np.log2(np.maximum(np.abs(orders), 8.0)) / 2)
    block = max(1, _ELEMENTS_MAX // nodes)
    members = [np.flatnonzero(size == value) for value in np.unique(size)]
    return [group[i : i + block] for group in members for i in range(0, len(group), block)]


class _QuadratureGrid:
    """Quadrature nodes for log-moments of several orders, and the values that all orders use."""

    def __init__(self, q: float, sigma: float, lowest: float, highest: float) -> None:
        self.sigma = sigma
        spacing = min(_spacing(lowest, sigma), _spacing(highest, sigma))
        low, high = integration_limits(lowest, highest, sigma)
        count = math.ceil((high - low) / spacing) + 1
        self.z: Array = low + spacing * np.arange(count, dtype=float)
        self.size = len(self.z)
        log_ratio = (2 * self.z - 1) / (2 * sigma * sigma)
        excess = q * np.expm1(np.minimum(log_ratio, 300.0))  # u; past e^300 only its log is used
        self.log_weight = -0.5 * (self.z / sigma) ** 2 + (
            math.log(spacing / sigma) - LOG_SQRT_TWO_PI
        )
        self.capped = log_ratio > 300.0
        self.log_growth = privacy_loss(log_ratio, q)
        self.weight = np.exp(self.log_weight)
        self.linear = log1p_minus(excess) * self.weight  # w·(log(1 + u) − u)

    def integrate(self, orders: Array) -> Array:
        """Return log E[(likelihood ratio)^a] at each order a (`orders`), by quadrature.

        Near a moment of 1, it is computed from the sum less 1.
        """
        nodes = self._nodes(orders)
        weighted = orders[:, None] * self.log_growth[nodes]
        weighted += self.log_weight[nodes]
        peak = np.maximum(weighted.max(axis=1), 0.0)
        weighted -= peak[:, None]
        np.exp(weighted, out=weighted)
        log_moment: Array = np.log(weighted.sum(axis=1)) + peak
        small = log_moment < _SMALL_MOMENT
        if small.any():
            log_moment[small] = self._integrate_small_moments(orders[small])
        return log_moment

    def _nodes(self, orders: Array) -> slice:
        """Return the slice of the grid's nodes that these orders need."""
        low, high = integration_limits(float(orders.min()), float(orders.max()), self.sigma)
        first, last = np.searchsorted(self.z, [low, high])
        return slice(max(int(first) - 1, 0), int(last) + 1)

    def _integrate_small_moments(self, orders: Array) -> Array:
        """Return log-moments close to 0, computed without cancellation.

        They are log(1 + E[(1+u)^a − 1 − a·u]).

        With x = a·log(1+u) it is (e^x − 1 − x) + a·(log(1+u) − u). Where every |x| of the group is
        below 0.1 the first part is its power series, a matrix product; where it may exceed 300
        its e^x is joined with the (tiny) weight in log space; between, it is direct.
        """
        nodes = self._nodes(orders)
        weight, log_growth = self.weight[nodes], self.log_growth[nodes]
        if orders[0] < 0 and self.capped[nodes].any():
            # there E[u] = 0 lies in what is capped; and E − 1 is not small beside its terms
            direct = np.expm1(orders[:, None] * log_growth) @ weight
            return np.asarray(np.log1p(np.maximum(direct, 0.0)))
        size = np.abs(log_growth) * float(np.abs(orders).max())
        near, far = size < 0.1, size > 300
        powers = np.arange(2.0, 11.0)
        coefficients = (log_growth[near] ** powers[:, None]) @ weight[near]
        excess: Array = (orders[:, None] ** powers) @ (coefficients / special.factorial(powers))
        exponent = orders[:, None] * log_growth[~near & ~far]
        excess += (np.expm1(exponent) - exponent) @ weight[~near & ~far]
        exponent = orders[:, None] * log_growth[far]
        excess += np.exp(exponent + self.log_weight[nodes][far]).sum(axis=1)
        excess -= (1 + exponent) @ weight[far]
        excess += orders * self.linear[nodes].sum()
        return np.log1p(np.maximum(excess, 0.0))
