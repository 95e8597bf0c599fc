"""The Gaussian mechanism, exactly: its privacy profile δ(ε) and the inverse.

A Gaussian mechanism is described by μ = sensitivity / standard deviation of the noise, so T
releases with noise multiplier σ have μ = √T/σ. The profile (Balle & Wang 2018, arXiv 1805.06530v2,
Theorem 8) is

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from scipy import special

from accountant_service.numerics.floats.special_functions import (
    LOG_SQRT_TWO_PI,
    Array,
    log_normal_tail,
)

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(10)
_LOG_MARGIN: Final = 1e-12  # a bound on the error of `log_delta`, with room
_SQRT_HALF_PI: Final = math.sqrt(math.pi / 2)


def _mills_ratio(x: Array) -> Array:
    """Return Mills' ratio P(Z > x)/n(x) of a standard normal Z with density n."""
    return _SQRT_HALF_PI * special.erfcx(x / math.sqrt(2.0))


def _mills_ratio_difference(centre: Array, mu: Array) -> Array:
    """Return m(c − μ/2) − m(c + μ/2) for Mills' ratio m, c = `centre`, without cancellation.

    As m′(x) = x·m(x) − 1, it is the integral of 1 − x·m(x) over the interval, by Gauss–Legendre.
    """
    small = np.minimum(mu, 0.5)
    x = np.maximum(centre, -0.5)[..., None] + 0.5 * small[..., None] * _NODES
    integral = 0.5 * small * ((1 - x * _mills_ratio(x)) @ _WEIGHTS)
    near = np.maximum(centre - mu / 2, -5.0)
    return np.where(mu < 0.5, integral, _mills_ratio(near) - _mills_ratio(centre + mu / 2))


def log_delta(epsilon: Array | float, mu: Array | float) -> Array:
    """Return log δ(ε) of a Gaussian mechanism; accurate even for extremely small δ.

    μ is the sensitivity divided by the standard deviation of the noise.

    With c = ε/μ, both terms of the profile carry the factor φ(c − μ/2) (because
    e^ε φ(c + μ/2) = φ(c − μ/2)), so δ = φ(c − μ/2)·[m(c − μ/2) − m(c + μ/2)] with m Mills' ratio.

    Args:
        epsilon: ε ≥ 0, any shape.
        mu: μ > 0, broadcast against `epsilon`.

    Returns:
        log δ, with the broadcast shape.
    """
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, float), np.asarray(mu, float))
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    log_density = -0.5 * low * low - LOG_SQRT_TWO_PI
    # left of −5 Mills' ratio grows like e^{x²/2}: there the tail is used instead
    difference = np.maximum(_mills_ratio_difference(epsilon / mu, mu), 5e-324)
    central = log_density + np.log(difference)
    far = np.minimum(low, -5.0)
    log_tail = log_normal_tail(far)
    correction = np.exp(-0.5 * far * far - LOG_SQRT_TWO_PI - log_tail) * _mills_ratio(high)
    return np.where(low < -5.0, log_tail + np.log1p(-correction), central)


def epsilon(delta: Array | float, mu: Array | float) -> Array:
    """Return an upper bound on a Gaussian mechanism's smallest ε ≥ 0 with δ(ε) ≤ `delta`.

    Args:
        delta: in (0, 1], any shape.
        mu: μ ≥ 0, broadcast against `delta`; zero costs nothing.

    Returns:
        ε with the broadcast shape, tight to where `log_delta` is off by 1e-12.
    """
    return _invert(delta, mu, _LOG_MARGIN)[1]


def epsilon_lower(delta: Array | float, mu: Array | float) -> Array:
    """Return a lower bound on a Gaussian mechanism's smallest ε ≥ 0 with δ(ε) ≤ `delta`."""
    return _invert(delta, mu, -_LOG_MARGIN)[0]


def _invert(delta: Array | float, mu: Array | float, log_margin: float) -> tuple[Array, Array]:
    """Return bounds on a Gaussian mechanism's ε at which log δ(ε) = log(delta) − log_margin."""
    delta, mu = np.broadcast_arrays(np.asarray(delta, float), np.asarray(mu, float))
    safe_mu = np.maximum(mu, 1e-300)
    log_target = np.log(delta) - log_margin
    # δ(ε) ≤ P(loss > ε) ≤ exp(−(ε − μ²/2)²/(2μ²)): at this ε the target certainly holds.
    high = safe_mu * safe_mu / 2 + safe_mu * np.sqrt(np.maximum(-2 * log_target, 0.0))
    free = (mu <= 1e-300) | (log_delta(np.zeros_like(safe_mu), safe_mu) <= log_target)
    low = np.zeros_like(high)
    for _ in range(64):
        middle = 0.5 * (low + high)
        fits = log_delta(middle, safe_mu) <= log_target
        high = np.where(fits, middle, high)
        low = np.where(fits, low, middle)
    return np.where(free, 0.0, low), np.where(free, 0.0, high)
