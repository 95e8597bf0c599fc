"""Truncated Laplace noise on one number: a pair with outcomes that reveal everything.

The noise has the density c·e^{−|x|/b} on [−A, A]. The pair is the noise shifted by Δ against the
noise. On the common part [Δ − A, A] the loss is (|x| − |x − Δ|)/b: −Δ/b up to 0, then 2x/b − Δ/b,
and Δ/b from Δ on. Beyond it lies, on either side, the mass of infinite loss. As the density is
log-concave and symmetric, the pair dominates all smaller differences (see `discrete_pairs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import IntervalMasses, moments_of_cells

_EPS: Final = float(np.finfo(float).eps)
_UNDERFLOW: Final = 1e-300
_MOMENT_CELLS: Final = 1024


@dataclass(frozen=True, slots=True)
class TruncatedLaplacePair:
    """Laplace noise of scale b on [−A, A], added to a query of sensitivity Δ ≤ A."""

    is_symmetric: ClassVar[bool] = True
    scale: float
    bound: float
    sensitivity: float

    @property
    def infinite_masses(self) -> tuple[float, float]:
        """The probabilities of outputs possible only without the record, and only with it."""
        start = math.exp(-(self.bound - self.sensitivity) / self.scale)
        mass = -0.5 * start * math.expm1(-self.sensitivity / self.scale) / self._kept_mass
        return mass, mass

    @property
    def _kept_mass(self) -> float:
        """The probability that untruncated Laplace noise is within ±A."""
        return -math.expm1(-self.bound / self.scale)

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each log-likelihood-ratio interval's probability, without and with the record."""
        most, low, high = self.sensitivity / self.scale, edges[:-1], edges[1:]
        start, end = np.clip(low, -most, most), np.clip(high, -most, most)
        within = -0.5 * np.expm1(-0.5 * (end - start)) / self._kept_mass
        atom = -0.5 * math.expm1(-(self.bound - self.sensitivity) / self.scale) / self._kept_mass
        bottom, top = (low < -most) & (high >= -most), (low < most) & (high >= most)
        far = math.exp(-most)
        without_record = within * np.exp(-0.5 * (start + most)) + atom * (bottom + far * top)
        with_record = within * np.exp(-0.5 * (most - end)) + atom * (top + far * bottom)
        only_without, only_with = self.infinite_masses
        without_record[np.searchsorted(edges, -math.inf, side="right") - 1] += only_without
        with_record[-1] += only_with
        return IntervalMasses.with_relative_error(16 * _EPS, without_record, with_record)

    def limits(self, tail_deviations: float) -> tuple[float, float]:  # noqa: ARG002
        """Return the least and the greatest finite log-likelihood ratio."""
        most = self.sensitivity / self.scale
        return -most, most

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Return upper bounds on log E[e^{a·loss}] over finite losses, per order a."""
        most = self.sensitivity / self.scale
        inner = np.linspace(-most, most, _MOMENT_CELLS + 1)
        edges = np.concatenate([[-most * (1 + 1e-6)], inner])
        moments = moments_of_cells(edges, self._finite_masses(edges), orders, sample_rate)
        if sample_rate == 1.0:
            return moments
        lost = orders * math.log1p(-sample_rate) + math.log(self.infinite_masses[0] + _UNDERFLOW)
        both: Array = np.logaddexp(moments, lost)
        return both

    def _finite_masses(self, edges: Array) -> IntervalMasses:
        """Return the probability of each interval of finite losses, without and with the record."""
        masses = self.masses(np.concatenate([[-np.inf], edges, [np.inf]]))
        names = ("without_record", "with_record", "without_record_rounding", "with_record_rounding")
        return IntervalMasses(*(getattr(masses, each)[1:-1] for each in names))

    def count_nodes(self, tilt: float) -> float:  # noqa: ARG002
        """Return how many loss intervals a log-moment sums, which measures its cost."""
        return float(_MOMENT_CELLS)

    def total_variation(self) -> float:
        """Return the total variation distance of the noise and the noise shifted by Δ."""
        half = -math.expm1(-0.5 * self.sensitivity / self.scale)
        return min(1.0, half / self._kept_mass)
