"""The pairs of mechanisms with discrete outcomes.

*Randomized response.* With probability f the answer is drawn uniformly from k categories, else it
is true. For two true answers a and b the laws differ at a and b only, with the losses ±log of
(1 − f + f/k)/(f/k). All pairs of answers have the same profile, so it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from accountant_service.numerics.laws.atomic_pair import AtomicPair, Atoms

_EPS: Final = float(np.finfo(float).eps)


@dataclass(frozen=True)
class RandomizedResponsePair(AtomicPair):
    """k categories of which one is drawn uniformly with probability f, else the true one."""

    categories: int
    flip_probability: float

    def list_atoms(self) -> Atoms:
        """Return the outcomes: the answer of N₀, all other answers, the answer of N₁."""
        k, f = self.categories, self.flip_probability
        likely, unlikely = math.log1p(-f * (1 - 1 / k)), math.log(f / k)
        other = math.log(f * (1 - 2 / k)) if k > 2 else -math.inf
        log_without = np.array([likely, other, unlikely])
        ratio = likely - unlikely
        log_ratios = np.array([-ratio, 0.0, ratio])
        kept = log_without > -np.inf
        error = 16 * _EPS * (4 + ratio)
        return Atoms(log_ratios[kept], log_without[kept], log_without[::-1][kept], error)
