"""Masses of a lognormal variable in cells, with bounds on their rounding errors.

A mass that is a difference of two tails is off by a few eps of the tails, which is much of a narrow
cell. There, with the middle c and half the width w of the cell in standard deviations, the mass is

    2w·φ(c)·(1 + He₂(c)·w²/3! + He₄(c)·w⁴/5! + He₆(c)·w⁶/7! + …),

because the n-th derivative of the normal density φ is ±Heₙ·φ. Its error is relative to the mass.
|He₈(c)| ≤ E(|c| + |N|)⁸ ≤ (|c| + 1.8)⁸ for a normal N, so that with (|c| + 2)·w ≤ 0.05 the rest of
the series is at most 0.05⁸·e^{0.05}/9! of the mass: less than an eps.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import normal_masses

_EPS: Final = float(np.finfo(float).eps)
_UNDERFLOW: Final = 1e-300  # more than any mass that is computed as zero
_NARROW: Final = 0.05
_DENSITY_MAX: Final = 1 / math.sqrt(2 * math.pi)


def cell_masses(mu: float, edges: Array) -> tuple[Array, Array, Array, Array]:
    """Return a lognormal's interval probabilities, untilted and tilted, with rounding errors.

    Args:
        mu: of X = exp(μz − μ²/2) with z standard normal; the tilted law has the density x.
        edges: of the cells, increasing and at least 0.

    Returns:
        The plain masses, their errors, the tilted masses, and their errors.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.log(edges) / mu + 0.5 * mu
        half = np.log1p(np.diff(edges) / edges[:-1]) / (2 * mu)
        middle = z[:-1] + half
    reach = np.maximum(np.abs(middle), np.abs(middle - mu)) + 2
    wide = np.flatnonzero(~(reach * half <= _NARROW))
    split = int(wide[-1]) + 1 if len(wide) else 0
    found = []
    for shift in (0.0, mu):
        far, far_error = normal_masses(z[: split + 1] - shift, mu)
        near, near_error = _narrow_masses(middle[split:] - shift, half[split:], mu)
        found += [np.concatenate([far, near]), np.concatenate([far_error, near_error])]
    plain, plain_error, tilted, tilted_error = found
    return plain, plain_error, tilted, tilted_error


def _narrow_masses(middle: Array, half: Array, mu: float) -> tuple[Array, Array]:
    """Return the normal probabilities of narrow intervals, and bounds on their rounding errors."""
    square, width = middle * middle, half * half
    sixth = _sixth_hermite(square)
    series = 1 + (square * (square - 6) + 3 + sixth * width / 42) * width * width / 120
    series += (square - 1) * width / 6
    mass = 2 * _DENSITY_MAX * half * np.exp(-0.5 * square) * series
    return mass, 16 * _EPS * mass * (1 + square + mu * (1 + np.abs(middle))) + _UNDERFLOW


def _sixth_hermite(square: Array) -> Array:
    """Return the sixth Hermite polynomial He₆(x), given x²."""
    value: Array = ((square - 15) * square + 45) * square - 15
    return value
