"""A release on a Poisson sample, for datasets that differ in a record that is changed in place.

Under replace-one and zero-out, the sample without the changed record is no neighbour of the sample
with it: nothing may be known about a release on it. The attacker is told whether the record was
sampled, which has the same probability q in both datasets:

    with probability q the pair (P, Q) of the release, else one outcome, the same for both.

The pair dominates the release, because the hidden case is a function of it. It cannot be improved
for a release of which only (P, Q) is known: on a sample without the record it may say so. It is
attained, or approached, by a release that says so: noise on a number can be added to one that also
depends on the sample's size, times a large factor. One randomized response cannot say so, as its
output is a category; many can, one of each person in the sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import BasePair, IntervalMasses

_EPS: Final = float(np.finfo(float).eps)


@dataclass(frozen=True, slots=True)
class RevealedSamplePair:
    """A dominating pair where outputs reveal whether the record was in the Poisson sample.

    Attributes:
        pair: of the release on a sample with the record.
        sampled: q, the probability that the record is in the sample.
    """

    pair: BasePair
    sampled: float

    @property
    def is_symmetric(self) -> bool:
        """Return whether the pair without sampling is its own mirror image."""
        return self.pair.is_symmetric

    @property
    def infinite_masses(self) -> tuple[float, float]:
        """Probabilities of infinite losses: the sample rate times those without sampling."""
        without_record, with_record = self.pair.infinite_masses
        return self.sampled * without_record, self.sampled * with_record

    def masses(self, edges: Array) -> IntervalMasses:
        """Return the probability of each interval of losses, without and with the record."""
        inner, q = self.pair.masses(edges), self.sampled
        missed = np.zeros(len(edges) - 1)
        at = int(np.searchsorted(edges, 0.0, side="left")) - 1  # of the interval that holds 0
        if 0 <= at < len(missed):
            missed[at] = 1 - q
        without_record = q * inner.without_record + missed
        with_record = q * inner.with_record + missed
        return IntervalMasses(
            without_record,
            with_record,
            q * inner.without_record_rounding + 4 * _EPS * without_record,
            q * inner.with_record_rounding + 4 * _EPS * with_record,
            inner.edge_error,
        )

    def limits(self, tail_deviations: float) -> tuple[float, float]:
        """Return limits of the log-likelihood ratio; `tail_deviations` sets the mass outside."""
        low, high = self.pair.limits(tail_deviations)
        return min(low, -1e-6), max(high, 1e-6)

    def log_moments(self, orders: Array, sample_rate: float) -> Array:
        """Return upper bounds on log E[e^{a·loss}] of outputs without the record, per order a.

        Raises:
            ValueError: the release is sampled once more; this pair is for one sample.
        """
        if sample_rate != 1.0:
            raise ValueError("a revealed sample is not sampled again")
        inner = self.pair.log_moments(orders, 1.0)
        upper: Array = np.logaddexp(math.log(self.sampled) + inner, math.log1p(-self.sampled))
        return upper + 4 * _EPS * (1 + np.abs(inner))

    def count_nodes(self, tilt: float) -> float:
        """Return how many points a log-moment at this `tilt` sums, which measures its cost."""
        return self.pair.count_nodes(tilt)

    def total_variation(self) -> float:
        """Return the sample rate times the total variation distance without sampling."""
        return self.sampled * self.pair.total_variation()
