"""Rényi moments of the Gaussian mechanism on a fixed-size sample drawn without replacement.

Wang, Balle & Kasiviswanathan 2019 (arXiv 1808.00087v2), Theorem 9 with the tightening of its
section on Gaussian noise, for integer orders α ≥ 2:

    (α−1)·ε′(α) ≤ log(1 + q²·C(α,2)·min{4(e^{ε(2)} − 1), 2e^{ε(2)}}
                        + 4·Σ_{j=3}^{α} q^j·C(α,j)·√(B(2⌊j/2⌋)·B(2⌈j/2⌉))),

with ε(α) = α/(2σ²) the Rényi divergence of the unsampled Gaussian, σ its noise over its
*replace-one* sensitivity, and B(l) = Σ_i (−1)^i C(l,i) e^{i(i−1)/(2σ²)}. Papers/000 prints the
same expression as its Theorem 1, eq. (7).

The alternating sum B(l) cancels catastrophically; it is the l-th central moment
E_{z∼N(0,σ²)}[(e^{(2z−1)/(2σ²)} − 1)^l], which for even l is the integral of a positive entire
function: the trapezoidal rule gives it to full precision.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
from scipy import special

from accountant_service.numerics.floats.special_functions import LOG_SQRT_TWO_PI, Array, log_sum_exp

ORDER_MAX: Final = 256
_TAIL_DEVIATIONS: Final = 13.0
_LOG_ERROR: Final = -340.0


@lru_cache(maxsize=64)
def _log_central_moments(sigma: float, order_max: int) -> Array:
    """Return logs of even central moments of the likelihood ratio of N(1, σ²) to N(0, σ²).

    The array is cached and read-only.
    """
    even = np.arange(0, order_max + 2, 2, dtype=float)
    # Strip of half-width 12σ, spacing σ/8: the rule errs by at most 2^l·e^{72 − 2π·12·8}, below
    # _LOG_ERROR for l ≤ 256, which is added. The integrand's mode lies within σ√l of 0 or l.
    spacing = sigma / 8
    reach = (_TAIL_DEVIATIONS + math.sqrt(even[-1])) * sigma
    z = np.arange(-reach, even[-1] + reach, spacing)
    log_weight = -0.5 * (z / sigma) ** 2 - LOG_SQRT_TWO_PI + math.log(spacing / sigma)
    log_ratio = (2 * z - 1) / (2 * sigma * sigma)
    with np.errstate(divide="ignore"):
        log_gap = np.where(
            log_ratio > 300, log_ratio, np.log(np.abs(np.expm1(np.minimum(log_ratio, 300))))
        )
    rows = [log_sum_exp(order * log_gap + log_weight) for order in even[1:]]
    moments = np.array([0.0, *np.logaddexp(rows, _LOG_ERROR)])
    moments.flags.writeable = False
    return moments


def log_moments(orders: Array, sample_rate: float, noise_multiplier: float) -> Array:
    """Return upper bounds on a fixed-size sampled release's log-moments (α − 1)·D_α, per order.

    The expression above with the general term of Theorem 9, 2·e^{j(j−1)/(2σ²)}, wherever that is
    smaller; never above the unsampled α(α−1)/(2σ²), because sampling costs nothing; and between
    whole orders the chord, because (α−1)·D_α is convex in α (and 0 at α = 1).

    Args:
        orders: from 1 to `ORDER_MAX`, any real numbers.
        sample_rate: q = batch size / dataset size, in [0, 1].
        noise_multiplier: standard deviation of the noise over the replace-one sensitivity.
    """
    if sample_rate == 0.0:
        return np.zeros_like(orders)
    whole = np.arange(2.0, math.ceil(float(orders.max())) + 1.0)
    bound = _bound(whole, sample_rate, noise_multiplier, general_term=True)
    unsampled = whole * (whole - 1) / (2 * noise_multiplier**2)
    table = np.concatenate([[0.0], np.minimum(bound, unsampled)])
    upper: Array = np.interp(orders, np.concatenate([[1.0], whole]), table)
    return upper


def log_moments_as_in_paper(orders: Array, sample_rate: float, noise_multiplier: float) -> Array:
    """Return upper bounds on log-moments as Wang et al. 2019 published them, not improved.

    Args:
        orders: whole numbers from 2 to `ORDER_MAX`, as floats.
        sample_rate: q in (0, 1].
        noise_multiplier: σ of the formula.
    """
    return _bound(orders, sample_rate, noise_multiplier, general_term=False)


def _bound(orders: Array, q: float, sigma: float, *, general_term: bool) -> Array:
    """Return the upper bound on the log-moment at each order (Wang et al. 2019, Theorem 9).

    With `general_term`, each term from the third on is the smaller of its two forms in the theorem.
    """
    order_max = int(orders.max())
    j = np.arange(3.0, max(order_max, 3) + 1.0)
    moments = _log_central_moments(sigma, order_max + 2)
    terms = math.log(4) + 0.5 * (
        moments[(j // 2).astype(int)] + moments[((j + 1) // 2).astype(int)]
    )
    if general_term:
        terms = np.minimum(terms, math.log(2) + j * (j - 1) / (2 * sigma * sigma))
    log_terms = terms + j * math.log(q) + _log_binomial(orders[:, None], j)
    first = min(math.log(4) + _log_expm1(1 / sigma**2), math.log(2) + 1 / sigma**2)
    second_order = 2 * math.log(q) + np.log(orders * (orders - 1) / 2) + first
    log_sum = np.logaddexp(np.logaddexp.reduce(log_terms, axis=1), second_order)
    return np.logaddexp(0.0, log_sum)


def _log_binomial(n: Array, k: Array) -> Array:
    """Return the log of the binomial coefficient C(n, k); −∞ where k > n."""
    inside = k <= n
    kept = np.where(inside, k, 0.0)
    value = special.gammaln(n + 1) - special.gammaln(kept + 1) - special.gammaln(n - kept + 1)
    return np.where(inside, value, -np.inf)


def _log_expm1(x: float) -> float:
    """Return log(e^x − 1) without overflow."""
    return x + math.log(-math.expm1(-x))
