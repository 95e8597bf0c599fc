"""The worst pair of a mechanism with the bounded range ε, such as the exponential mechanism.

For two neighbours the privacy loss of an ε-bounded-range mechanism lies in an interval [t − ε, t]
with some t in [0, ε] (Dong, Durfee & Rogers 2020, arXiv 1909.13830v2). The worst pair with this
range has the two losses t and t − ε. With p = (1 − e^{t−ε})/(1 − e^{−ε}), the P-mass of t,

    δ_t(x) = p·(1 − e^{x−t})    for 0 ≤ x ≤ t.

The worst t depends on x: it is (x + ε)/2. As a function of y = e^x the maximum

    H(x) = (1 − e^{(x−ε)/2})²/(1 − e^{−ε})    for |x| ≤ ε

is convex and has the slope −1 at y = e^{−ε} and 0 at y = e^ε, so it is the profile of a pair: of
the one with the densities c·e^{Λ/2} and c·e^{−Λ/2} on [−ε, ε], c = 1/(4·sinh(ε/2)). It dominates
each pair of a bounded-range mechanism, and so adaptive compositions of them. At a single x it is
attained by one release; a composition attains it nowhere, as one t cannot be the worst for all x.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import IntervalMasses, moments_of_cells

_EPS: Final = float(np.finfo(float).eps)
_MOMENT_CELLS: Final = 1024


@dataclass(frozen=True, slots=True)
class BoundedRangePair:
    """The dominating pair of an ε-bounded-range mechanism, such as the exponential mechanism."""

    is_symmetric: ClassVar[bool] = True
    infinite_masses: ClassVar[tuple[float, float]] = (0.0, 0.0)
    epsilon: float

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each log-likelihood-ratio interval's probability, without and with the record."""
        start, end = (
            np.clip(each, -self.epsilon, self.epsilon) for each in (edges[:-1], edges[1:])
        )
        # ∫ c·e^{Λ/2} = 2c·e^{start/2}·(e^{(end − start)/2} − 1), and 4c·sinh(ε/2) = 1
        scale = -math.expm1(-self.epsilon)
        width = -np.expm1(-0.5 * (end - start)) / scale
        without_record = width * np.exp(-0.5 * (start + self.epsilon))
        with_record = width * np.exp(0.5 * (end - self.epsilon))
        return IntervalMasses.with_relative_error(16 * _EPS, without_record, with_record)

    def limits(self, tail_deviations: float) -> tuple[float, float]:  # noqa: ARG002
        """Return the least and the greatest log-likelihood ratio: −ε and ε."""
        return -self.epsilon, self.epsilon

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Return upper bounds on log E[e^{a·loss}] of outputs without the record, per order a."""
        edges = np.linspace(-self.epsilon, self.epsilon, _MOMENT_CELLS + 1)
        return moments_of_cells(edges, self.masses(edges), orders, sample_rate)

    def count_nodes(self, tilt: float) -> float:  # noqa: ARG002
        """Return how many loss intervals a log-moment sums, which measures its cost."""
        return float(_MOMENT_CELLS)

    def total_variation(self) -> float:
        """Return the total variation distance of the two distributions, tanh(ε/4)."""
        return math.tanh(self.epsilon / 4)
