"""Special functions that stay accurate where the textbook formula cancels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy import special

Array = NDArray[np.float64]
ComplexArray = NDArray[np.complex128]
BoolArray = NDArray[np.bool_]

LOG_SQRT_TWO_PI: Final = 0.5 * math.log(2.0 * math.pi)
_SMALL: Final = 0.02  # below this the series, above it the direct form: both good to 1e-13


@lru_cache(maxsize=64)
def _unit_steps(count: int) -> Array:
    """Return `count` equally spaced numbers from 0 to 1, which must not be changed."""
    return np.linspace(0.0, 1.0, count)


def geometric_points(first: float, last: float, count: int) -> Array:
    """Return `count` numbers from `first` to `last` whose quotients are equal, up to rounding.

    It takes a sixteenth of the time of `numpy.geomspace`, which checks its arguments.
    """
    low, high = math.log(first), math.log(last)
    points: Array = np.exp(low + (high - low) * _unit_steps(count))
    return points


def log_sum_exp(exponents: Array, axis: int = -1) -> Array:
    """Return log Σ e^x along an axis, without overflow; at least one x must be finite."""
    peak = exponents.max(axis=axis, keepdims=True)
    scaled = exponents - peak
    np.exp(scaled, out=scaled)
    total: Array = np.log(scaled.sum(axis=axis)) + peak.squeeze(axis)
    return total


def log1p_minus(x: Array) -> Array:
    """Return log(1 + x) − x, without cancellation near zero.

    There it is a series of eight terms.
    """
    y = np.clip(x, -_SMALL, _SMALL)
    tail = 1 / 3 - y * (1 / 4 - y * (1 / 5 - y * (1 / 6 - y * (1 / 7 - y * (1 / 8 - y / 9)))))
    series = -y * y * (0.5 - y * tail)
    return np.where(np.abs(x) < _SMALL, series, np.log1p(x) - x)


def log1p_complex(x: ComplexArray) -> ComplexArray:
    """Return log(1 + x) of complex x, with full relative accuracy even near x = 0.

    numpy's own loses digits there.
    """
    near = np.abs(x) < 0.5
    small = np.where(near, x, 0.0)
    real = 0.5 * np.log1p(small.real * (2.0 + small.real) + small.imag**2)
    real = np.where(near, real, np.log(np.abs(1.0 + np.where(near, 0.0, x))))
    return np.asarray(real + 1j * np.arctan2(x.imag, 1.0 + x.real))


def lattice_points(first: int, count: int, spacing: float, offset: float = 0.0) -> Array:
    """Return `count` equally spaced numbers (first + offset + k)·spacing, k = 0, 1, ….

    The next one is (first + 1 + offset)·spacing.
    """
    points: Array = (np.arange(first, first + count, dtype=float) + offset) * spacing
    return points


def log_normal_tail(x: Array) -> Array:
    """Return log P(Z > x) for a standard normal Z."""
    return special.log_ndtr(-x)


def _stirling_error(n: Array) -> Array:
    """Return the error of Stirling's formula, log n! − log(√(2πn) (n/e)^n)."""
    large = np.maximum(n, 16.0)
    inverse_square = 1.0 / (large * large)
    series = (
        1 / 12
        - inverse_square
        * (
            1 / 360
            - inverse_square * (1 / 1260 - inverse_square * (1 / 1680 - inverse_square / 1188))
        )
    ) / large
    small = np.clip(n, 1.0, 16.0)
    direct = special.gammaln(small + 1) - (small + 0.5) * np.log(small) + small - LOG_SQRT_TWO_PI
    return np.where(n < 16, direct, series)


def _deviance(x: Array, mean: Array | float) -> Array:
    """Return x·log(x/mean) + mean − x, the deviance of a Poisson count x, without cancellation.

    Near the mean the terms cancel; far below x, mean/x would be lost in 1 + (mean − x)/x.
    """
    ratio = mean / x
    far = ratio < 0.5
    if not np.any(far):
        return -x * log1p_minus((mean - x) / x)
    apart = mean - x - x * np.log(np.where(far, ratio, 1.0))
    return np.where(far, apart, -x * log1p_minus(np.where(far, 0.0, (mean - x) / x)))


def log_binomial_pmf(successes: Array, trials: int, probability: float) -> Array:
    """Return the log probability of each number of successes, with an error of about 1e-13.

    Loader's saddle-point form ("Fast and accurate computation of binomial probabilities", 2000):
    the difference of log-gamma functions would lose eight digits at ten million trials.

    Args:
        successes: integers from 0 to `trials`, as floats.
        trials: at least 1.
        probability: strictly between 0 and 1.
    """
    n = float(trials)
    inner = np.clip(successes, 1.0, n - 1.0) if trials > 1 else np.full_like(successes, 0.5)
    rest = n - inner
    log_pmf = (
        _stirling_error(np.asarray(n))
        - _stirling_error(inner)
        - _stirling_error(rest)
        - _deviance(inner, n * probability)
        - _deviance(rest, n * (1.0 - probability))
        - LOG_SQRT_TWO_PI
        - 0.5 * (np.log(inner) + np.log(rest) - math.log(n))
    )
    log_pmf = np.where(successes == 0, n * math.log1p(-probability), log_pmf)
    return np.where(successes == n, n * math.log(probability), log_pmf)


def binomial_window(trials: int, probability: float, log_tail: float) -> tuple[int, int]:
    """Return a range of counts outside which each binomial tail is at most e^`log_tail`.

    From Chernoff's bound P(X ≥ x) ≤ exp(−D(x)) with D the relative entropy. A search looks at 33
    counts at a time: numpy takes hardly longer for them than for one.

    Args:
        trials: number of trials.
        probability: strictly between 0 and 1.
        log_tail: negative.

    Returns:
        First and last count of the window, both within 0..trials.
    """
    means = np.array([[trials * probability], [trials - trials * probability]])

    def is_outside(counts: Array) -> BoolArray:
        """Return whether Chernoff's bound on the tail beyond each count is at most e^`log_tail`."""
        x = np.stack([counts, trials - counts])
        exponents = np.where(x > 0, _deviance(np.maximum(x, 1.0), means), means).sum(axis=0)
        outside: BoolArray = exponents >= -log_tail
        return outside

    def edge(inside: int, outside: int) -> int:
        """Return the count nearest to `inside` whose tail beyond is at most e^`log_tail`."""
        if not is_outside(np.array([float(outside)]))[0]:
            return outside
        while abs(outside - inside) > 1:
            counts = np.linspace(inside, outside, 33).round()
            found = is_outside(counts) & (counts != inside)
            first = int(np.argmax(found))
            inside, outside = int(counts[first - 1]), int(counts[first])
        return outside

    centre = round(trials * probability)
    return edge(centre, 0), edge(centre, trials)
