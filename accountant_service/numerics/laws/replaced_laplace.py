"""A Poisson-sampled Laplace release of two datasets that differ in one replaced record.

Let z be the output in units of the clip norm, β the clip norm over the noise's scale, q the sample
rate and N(c) the Laplace law around c. The record contributes +1 in one dataset, −1 in the other:

    P = (1−q)·N(0) + q·N(1)  against  Q = (1−q)·N(0) + q·N(−1).

This pair dominates every other replacement, and two datasets attain it (docs/accountants/pld.md).
For 0 ≤ z ≤ 1 the ratio of Q to N(0) is κ = 1 − q + q·e^{−β}, that of P 1 − q + q·e^{β(2z−1)}, and
beyond 1 neither changes. So the privacy loss increases from 0 at z = 0 to its greatest value at
z = 1, is odd in z, and has the inverse β(2z − 1) = log(e^{−β} + κ·(e^L − 1)/q).
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
class ReplacedLaplacePair:
    """A Poisson-sampled Laplace release for datasets that differ in one replaced record.

    Attributes:
        inverse_scale: β, the clip norm divided by the scale of the noise.
        sampled: q in (0, 1), the probability that the record is in the sample.
    """

    is_symmetric: ClassVar[bool] = True
    infinite_masses: ClassVar[tuple[float, float]] = (0.0, 0.0)
    inverse_scale: float
    sampled: float

    @property
    def largest_loss(self) -> float:
        """The largest privacy loss, which is attained at all outputs z ≥ 1."""
        rise = 2 * self.sampled * math.sinh(self.inverse_scale)
        return math.log1p(rise / self._least_ratio)

    @property
    def _least_ratio(self) -> float:
        """The least density ratio of outputs with the replacing record to outputs without it.

        All outputs z ≥ 0 have this ratio.
        """
        return 1 - self.sampled + self.sampled * math.exp(-self.inverse_scale)

    def masses(self, edges: Array) -> IntervalMasses:
        """Return each privacy-loss interval's probability under both output distributions."""
        most, beta, q = self.largest_loss, self.inverse_scale, self.sampled
        low, high = edges[:-1], edges[1:]
        position = self._scaled_output(np.clip(edges, -most, most))
        start, end = position[:-1], position[1:]
        bottom, top = (low < -most) & (high >= -most), (low < most) & (high >= most)
        absent, absent_rounding = _laplace_masses(start, end, 0.0, beta)
        plus, plus_rounding = _laplace_masses(start, end, beta, beta)
        minus, minus_rounding = _laplace_masses(start, end, -beta, beta)
        near, far, farther = 0.5, 0.5 * math.exp(-beta), 0.5 * math.exp(-2 * beta)
        absent = absent + far * (bottom.astype(float) + top)
        plus = plus + near * top + farther * bottom
        minus = minus + near * bottom + farther * top
        without_record, with_record = (1 - q) * absent + q * minus, (1 - q) * absent + q * plus
        error = (1 - q) * absent_rounding + 1e-300
        return IntervalMasses(
            without_record,
            with_record,
            error + q * minus_rounding + 8 * _EPS * without_record,
            error + q * plus_rounding + 8 * _EPS * with_record,
            self._edge_error(edges, position),
        )

    def _scaled_output(self, loss: Array) -> Array:
        """Return the output, divided by the noise scale, at each privacy loss."""
        beta = self.inverse_scale
        rise = self._least_ratio * np.expm1(np.abs(loss)) / self.sampled
        scaled = 0.5 * (beta + np.log(math.exp(-beta) + rise))
        return np.copysign(np.clip(scaled, 0.0, beta), loss)

    def _loss(self, scaled: Array) -> Array:
        """Return the privacy loss at each output, divided by the noise scale, within ±β."""
        size = np.abs(scaled)
        rise = np.exp(2 * size - self.inverse_scale) * -np.expm1(-2 * size)
        loss: Array = np.log1p(self.sampled * rise / self._least_ratio)
        return np.copysign(loss, scaled)

    def _edge_error(self, edges: Array, scaled: Array) -> Array:
        """Return upper bounds on the distances of the edges from the losses at these outputs.

        The loss of an output, and the greatest of all, are off by a few eps of (1 + β) times
        themselves.
        """
        inside = np.clip(edges, -self.largest_loss, self.largest_loss)
        rounding = 32 * _EPS * (1 + self.inverse_scale) * np.abs(inside)
        error: Array = np.abs(self._loss(scaled) - inside) + rounding
        return error

    def limits(self, tail_deviations: float) -> tuple[float, float]:  # noqa: ARG002
        """Return the least and the greatest privacy loss."""
        return -self.largest_loss, self.largest_loss

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Return upper bounds on the loss's log-moments, from a discretised grid of losses."""
        most = self.largest_loss
        inner = np.linspace(-most, most, _MOMENT_CELLS + 1)
        edges = np.concatenate([[-most * (1 + 1e-6)], inner])
        return moments_of_cells(edges, self.masses(edges), orders, sample_rate)

    def count_nodes(self, tilt: float) -> float:  # noqa: ARG002
        """Return how many loss intervals a log-moment sums, which measures its cost."""
        return float(_MOMENT_CELLS)

    def total_variation(self) -> float:
        """Return the total variation distance of the output distributions P and Q."""
        return -self.sampled * math.expm1(-self.inverse_scale)


def _laplace_masses(start: Array, end: Array, centre: float, reach: float) -> tuple[Array, Array]:
    """Return P(start < X < end) for X ~ Laplace(`centre`, scale 1), and the rounding errors.

    Args:
        start: of each interval.
        end: of each interval.
        centre: of the law.
        reach: the largest modulus of a point. A point is off by a few eps of 1 + `reach`.
    """
    left, right = np.minimum(end, centre), np.maximum(start, centre)
    below = np.where(start < left, -np.expm1(start - left) * np.exp(left - centre), 0.0)
    above = np.where(right < end, -np.expm1(right - end) * np.exp(centre - right), 0.0)
    nearest = np.clip(centre, start, end)
    density = 0.5 * np.exp(-np.abs(nearest - centre))
    error = 16 * _EPS * (1 + reach) * density
    return 0.5 * (below + above), error
