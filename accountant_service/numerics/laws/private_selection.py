"""The Rényi curve of the best of a random number of runs (Papernot & Steinke 2022).

A mechanism with the Rényi curve D_α is run K times, and the output of the best run is released.
With K ≥ 1 from the truncated negative binomial distribution of shape η and parameter γ (η = 1:
geometric, η = 0: logarithmic), for all orders α > 1 and β ≥ 1 (arXiv 2110.03620v2, Theorem 2),

    D′_α ≤ D_α + (1+η)·(1 − 1/β)·D_β + (1+η)·log(1/γ)/β + log E[K]/(α − 1).

With K from a Poisson distribution of mean m, for each ε̂ with e^ε̂ ≤ 1 + 1/(α − 1) at which the
mechanism is (ε̂, δ̂)-DP (Theorem 6),

    D′_α ≤ D_α + m·δ̂ + log m/(α − 1).

D of a composition of dominating pairs is the sum of theirs; the larger of both directions counts.
D′ increases with α, so a larger order's value bounds it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from accountant_service.numerics.floats import rounding, search
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import DIRECTIONS, ReleaseLaw

_ORDERS: Final = 1 + np.geomspace(0.02, 1000.0, 160)
_SHAPE_NEGLIGIBLE: Final = 1e-12  # of η times log(1/γ)
_NODES_MAX: Final = 1 << 17  # of a moment, for all releases: larger orders are left out


@dataclass(frozen=True, slots=True)
class Repeats:
    """The distribution of how many times a private selection runs its mechanism.

    Attributes:
        distribution: `geometric`, `logarithmic`, `negative_binomial` or `poisson`.
        mean: E[K] > 1.
        shape: η of the negative binomial distribution; 1 for geometric, 0 for logarithmic.
    """

    distribution: str
    mean: float
    shape: float

    def log_inverse_gamma(self) -> float:
        """Return log(1/γ), rounded up, for the parameter γ that gives the distribution its mean.

        E[K] = η(1 − γ)/(γ(1 − γ^η)), and (1/γ − 1)/log(1/γ) for η = 0, increases with 1/γ.
        """

        def excess(log_inverse: float) -> float:
            """Return by how much the mean number of runs exceeds the required mean."""
            return self._mean(log_inverse) - self.mean

        high = 1.0
        while excess(high) < 0:
            high *= 2
        found = search.find_boundary(
            lambda x: -excess(x), feasible=high, infeasible=1e-12, relative_width=1e-12
        )
        return rounding.up(found)

    def _mean(self, log_inverse: float) -> float:
        """Return the mean number of runs for the parameter γ, given log(1/γ)."""
        ratio = math.expm1(min(log_inverse, 700.0))  # (1 − γ)/γ
        if self.shape * log_inverse < _SHAPE_NEGLIGIBLE:  # the limit, from below
            return ratio / log_inverse
        return self.shape * ratio / -math.expm1(-self.shape * log_inverse)


@lru_cache(maxsize=16)
def selected_curve(
    repeats: Repeats, laws: tuple[tuple[ReleaseLaw, int], ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return Rényi orders, and upper bounds on the private selection's divergence at each.

    Args:
        repeats: the distribution of the number of runs.
        laws: the dominating pairs of one run with their counts, none with infinite losses.
    """
    orders = _affordable_orders(laws)
    moments = _log_moments(laws, orders - 1)
    divergences = moments / (orders - 1)
    selected = divergences + math.log(repeats.mean) / (orders - 1)
    if repeats.distribution == "poisson":
        selected = selected + repeats.mean * _deltas(orders, moments, np.log1p(1 / (orders - 1)))
    else:
        cost = (1 - 1 / orders) * divergences + repeats.log_inverse_gamma() / orders
        selected = selected + (1 + repeats.shape) * float(cost.min())
    least = np.minimum.accumulate(rounding.up_each(selected)[::-1])[::-1]
    return tuple(orders.tolist()), tuple(least.tolist())


def _affordable_orders(laws: tuple[tuple[ReleaseLaw, int], ...]) -> Array:
    """Return the Rényi orders whose moments can be computed within the work limit."""
    kept = [
        order
        for order in _ORDERS.tolist()
        if sum(law.count_nodes(order - 1) for law, _ in laws) <= _NODES_MAX
    ]
    return np.array(kept or _ORDERS[:8].tolist())


def _log_moments(laws: tuple[tuple[ReleaseLaw, int], ...], tilts: Array) -> Array:
    """Return upper bounds on log-moments: the larger of those for removing and adding a record."""
    sums = [
        sum((count * law.log_moments(each, tilts) for law, count in laws), np.zeros_like(tilts))
        for each in DIRECTIONS
    ]
    return np.maximum(*sums)


def _deltas(orders: Array, moments: Array, epsilons: Array) -> Array:
    """Return upper bounds on δ at each ε, each from the Rényi order that gives the least."""
    constant = orders * np.log1p(-1 / orders) - np.log(orders - 1)
    logs = (moments + constant)[:, None] - np.multiply.outer(orders - 1, epsilons)
    deltas: Array = np.exp(np.minimum(logs.min(axis=0), 0.0))
    return rounding.up_each(deltas)
