"""The plan of a DP-SGD step: one object runs the step and states its privacy cost.

Training and accounting read the same numbers, so that they cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Mechanism = Mapping[str, Any]  # JSON, as the accounting service reads it


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of a Poisson-sampled Gaussian step, as it is run and as it is charged.

    Attributes:
        dataset_size: N, the number of records in the training set.
        sample_rate: q, the probability of each record to be in a step's batch.
        clip_norm: C, the ℓ2 norm that each example's gradient is clipped to.
        noise_multiplier: σ; the noise added to the sum of clipped gradients has standard
            deviation σC.

    Raises:
        ValueError: a parameter is not positive and finite, or the sample rate exceeds 1.
    """

    dataset_size: int
    sample_rate: float
    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        """Reject parameters that give no privacy guarantee."""
        for name, value in (
            ("dataset_size", self.dataset_size),
            ("sample_rate", self.sample_rate),
            ("clip_norm", self.clip_norm),
            ("noise_multiplier", self.noise_multiplier),
        ):
            if not 0 < value < math.inf:
                raise ValueError(f"expected a finite {name} > 0, got {value}")
        if self.sample_rate > 1:
            raise ValueError(f"expected sample_rate ≤ 1, got {self.sample_rate}")

    @property
    def expected_batch_size(self) -> float:
        """The expected batch size qN, which sums are divided by.

        The size of the batch drawn is itself private.
        """
        return self.sample_rate * self.dataset_size

    @property
    def noise_deviation(self) -> float:
        """The standard deviation σC of the noise on each coordinate of the sum."""
        return self.noise_multiplier * self.clip_norm

    def mechanism(self, steps: int) -> dict[str, Any]:
        """Return the mechanism of `steps` steps, as JSON for the accounting service."""
        return {
            "kind": "dp_sgd",
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": steps,
            "sampling": "poisson",
        }


def compose(before: tuple[Mechanism, ...], last: Mechanism) -> Mechanism:
    """Return the composition of several releases as one mechanism.

    Args:
        before: the earlier releases; without any, `last` itself is returned.
        last: the final release.
    """
    return {"kind": "composed", "mechanisms": [*before, last]} if before else last
