"""A release that is one of several others, chosen at random, with the choice revealed.

The choice does not depend on the record. For each direction the loss has the mixture of the laws.
By joint convexity of H this pair dominates the release in which the choice is hidden.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from accountant_service.numerics.floats.special_functions import Array, log_sum_exp
from accountant_service.numerics.laws.dominating_pair import Direction, LossCells, ReleaseLaw


@dataclass(frozen=True, slots=True)
class MixedRelease:
    """A release chosen at random among several, with given weights; the choice is revealed."""

    parts: tuple[tuple[float, ReleaseLaw], ...]

    @property
    def is_symmetric(self) -> bool:
        """Return whether removing and adding a record cost the same for every possible release."""
        return all(part.is_symmetric for _, part in self.parts)

    def total_variation(self) -> float:
        """Return the weighted mean of the possible releases' total variation distances."""
        return math.fsum(weight * part.total_variation() for weight, part in self.parts)

    def infinite_mass(self, direction: Direction) -> float:
        """Return the weighted mean of the possible releases' probabilities of infinite loss."""
        return math.fsum(weight * part.infinite_mass(direction) for weight, part in self.parts)

    def log_moments(self, direction: Direction, tilts: Array) -> Array:
        """Return upper bounds on the log-moments log E[e^{s·loss}], for each s > 0 in `tilts`."""
        logs = [
            math.log(weight) + part.log_moments(direction, tilts) for weight, part in self.parts
        ]
        upper: Array = np.maximum(log_sum_exp(np.stack(logs), axis=0) + 1e-15, 0.0)
        return upper

    def count_nodes(self, tilt: float) -> float:
        """Return how many terms a log-moment at this `tilt` sums, which measures its cost."""
        return math.fsum(part.count_nodes(tilt) for _, part in self.parts)

    def loss_limits(self, direction: Direction, tail_deviations: float) -> tuple[float, float]:
        """Return the least and greatest loss to cover; `tail_deviations` sets the mass left out."""
        limits = [part.loss_limits(direction, tail_deviations) for _, part in self.parts]
        return min(low for low, _ in limits), max(high for _, high in limits)

    def cells(
        self, direction: Direction, first: int, count: int, spacing: float, offset: float = 0.0
    ) -> LossCells:
        """Return the probabilities of loss intervals: weighted means over the possible releases."""
        cut = [
            (weight, part.cells(direction, first, count, spacing, offset))
            for weight, part in self.parts
        ]
        sums = {
            field.name: sum(weight * getattr(each, field.name) for weight, each in cut)
            for field in fields(LossCells)
            if field.name not in ("first", "shrink", "edge_error")
        }
        edge_error = np.maximum.reduce([each.edge_error for _, each in cut])
        return LossCells(first=first, shrink=cut[0][1].shrink, edge_error=edge_error, **sums)
