"""From Rényi moments to (ε, δ), both ways.

Everything takes log-moments m(α) = (α − 1)·D_α, the quantity that composes by addition.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from accountant_service.numerics.floats.special_functions import Array

CLASSICAL: Final = "Mironov 2017 (arXiv 1702.07476v3), Proposition 3"
TIGHTEST: Final = (
    "Canonne, Kamath & Steinke 2020 (arXiv 2004.00010v7), Proposition 12; "
    "the same formula as Balle et al. 2020 (arXiv 1905.09982v2), Theorem 21"
)


def classical_epsilons(orders: Array, log_moments: Array, delta: float) -> Array:
    """Return, for each order, ε at δ by the classical Rényi conversion (Mironov 2017).

    It is (m(α) + log(1/δ))/(α − 1) for the log-moment m(α).
    """
    return (log_moments - math.log(delta)) / (orders - 1)


def classical_log_deltas(orders: Array, log_moments: Array, epsilon: float) -> Array:
    """Return, for each order, log δ at ε by the classical Rényi conversion (Mironov 2017).

    It is m(α) − (α − 1)·ε for the log-moment m(α).
    """
    return log_moments - (orders - 1) * epsilon


def _tight_conversion_gain(orders: Array) -> Array:
    """Return, per order, how much lower log δ is by the tight conversion than the classical.

    It is log α − (α − 1)·log(1 − 1/α) > 0.
    """
    return np.log(orders) - (orders - 1) * np.log1p(-1 / orders)


def tight_epsilons(orders: Array, log_moments: Array, delta: float) -> Array:
    """Return ε at δ by the tightest known Rényi conversion, for each order.

    ε(α) = (m(α) + log(1/δ) − log α + (α − 1)·log(1 − 1/α))/(α − 1), never above the classical one.

    Of the conversions in use it is the least for every order: Mironov's lacks the gain, and
    Balle's Theorem 21 is the same expression.
    """
    return (log_moments - math.log(delta) - _tight_conversion_gain(orders)) / (orders - 1)


def tight_log_deltas(orders: Array, log_moments: Array, epsilon: float) -> Array:
    """Return log δ at ε by the tightest known Rényi conversion, for each order."""
    return log_moments - (orders - 1) * epsilon - _tight_conversion_gain(orders)


def has_zero_epsilon(orders: Array, log_moments: Array, delta: float) -> bool:
    """Return whether the log-moments prove that the mechanism is (0, δ)-DP.

    By Bretagnolle–Huber the total variation is at most √(1 − e^{−KL}), and KL ≤ D_α for α > 1.
    """
    divergence = float(np.min(log_moments / (orders - 1))) * (1 + 1e-9) + 1e-15
    return delta * delta + math.expm1(-divergence) > 0
