"""One object that both runs the private step and says what it costs, so that they cannot differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Mechanism = Mapping[str, Any]  # as the accounting service reads it


@dataclass(frozen=True, slots=True)
class Plan:
    """A Poisson-sampled Gaussian step, as it is run and as it is charged.

    Attributes:
        dataset_size: N, records in the training set.
        sample_rate: q, the probability of each record to be in a step's batch.
        clip_norm: C, the ℓ2 norm that each example's gradient is clipped to.
        noise_multiplier: σ; the noise added to the sum of clipped gradients deviates by σC.
    """

    dataset_size: int
    sample_rate: float
    clip_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        """Refuse what would train without privacy."""
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
        """qN: what sums are divided by. The size of the batch drawn is itself private."""
        return self.sample_rate * self.dataset_size

    @property
    def noise_deviation(self) -> float:
        """σC, of the noise on each coordinate of the sum."""
        return self.noise_multiplier * self.clip_norm

    def mechanism(self, steps: int) -> dict[str, Any]:
        """What `steps` steps of this plan release, as the accounting service reads it."""
        return {
            "kind": "dp_sgd",
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": steps,
            "sampling": "poisson",
        }


def composition(before: tuple[Mechanism, ...], last: Mechanism) -> Mechanism:
    """Releases one after another, as one mechanism.

    Args:
        before: what was released earlier; the answer is `last` itself if nothing was.
        last: what is released at the end.
    """
    return {"kind": "composed", "mechanisms": [*before, last]} if before else last
