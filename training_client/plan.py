"""The plan of a DP-SGD step: one object runs the step and states its privacy cost.

Training and accounting read the same numbers, so that they cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

Mechanism = Mapping[str, Any]  # JSON, as the accounting service reads it
POISSON: Final = "poisson"
BALLS_IN_BINS: Final = "balls_in_bins"
SAMPLINGS: Final = (POISSON, BALLS_IN_BINS)


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a sampled Gaussian step: sampling, clip norm, noise and dataset size.

    Attributes:
        dataset_size: N, the number of records in the training set.
        sample_rate: q, the probability of each record to be in a step's batch.
        clip_norm: C, the ℓ2 norm that each example's gradient is clipped to.
        noise_multiplier: σ; the noise added to the sum of clipped gradients has standard
            deviation σC.
        sampling: "poisson", or "balls_in_bins": in each epoch of 1/q steps, each record is in one
            batch, drawn uniformly.

    Raises:
        ValueError: a parameter is not positive and finite, the sample rate exceeds 1, the sampling
            is unknown, or the epochs of balls-in-bins sampling have no whole number of steps.
    """

    dataset_size: int
    sample_rate: float
    clip_norm: float
    noise_multiplier: float
    sampling: str = POISSON

    @classmethod
    def balls_in_bins(
        cls, dataset_size: int, bins: int, clip_norm: float, noise_multiplier: float
    ) -> Self:
        """Return the plan of balls-in-bins sampling with `bins` batches in an epoch."""
        return cls(dataset_size, 1 / bins, clip_norm, noise_multiplier, BALLS_IN_BINS)

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
        if self.sampling not in SAMPLINGS:
            raise ValueError(f"expected sampling {' or '.join(SAMPLINGS)}, got {self.sampling!r}")
        if self.sampling == BALLS_IN_BINS and self.sample_rate != 1 / self.steps_per_charge:
            raise ValueError(
                f"expected sample_rate = 1/b with a whole number b of batches in an epoch, got "
                f"{self.sample_rate}"
            )

    @property
    def steps_per_charge(self) -> int:
        """The number of steps that are charged together: 1, or an epoch for balls-in-bins sampling.

        It is 1, and with balls-in-bins sampling the b steps of an epoch: a record that is in one
        of its batches is in no other, so that the epoch as a whole is the mechanism.
        """
        return round(1 / self.sample_rate) if self.sampling == BALLS_IN_BINS else 1

    def charges(self, steps: int) -> int:
        """Return how many charges pay for `steps` steps; with balls-in-bins, one pays an epoch."""
        return -(-steps // self.steps_per_charge)

    def whole_charges(self, steps: int) -> int:
        """Return `steps` rounded up to a number that whole charges pay for."""
        return self.charges(steps) * self.steps_per_charge

    @property
    def expected_batch_size(self) -> float:
        """The expected batch size (sample rate · dataset size), by which sums are divided.

        The size of the batch drawn is itself private.
        """
        return self.sample_rate * self.dataset_size

    @property
    def noise_deviation(self) -> float:
        """The standard deviation σC of the noise on each coordinate of a gradient sum."""
        return self.noise_multiplier * self.clip_norm

    def mechanism(self, steps: int) -> dict[str, Any]:
        """Return the mechanism of `steps` steps, as JSON for the accounting service.

        An epoch of balls-in-bins sampling counts as a whole, also if it ends early.
        """
        return {
            "kind": "dp_sgd",
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": self.sample_rate,
            "steps": self.whole_charges(steps),
            "sampling": self.sampling,
        }


def compose(before: tuple[Mechanism, ...], last: Mechanism) -> Mechanism:
    """Return one mechanism that consists of several releases, `last` after those `before`.

    Args:
        before: the earlier releases; without any, `last` itself is returned.
        last: the final release.
    """
    return {"kind": "composed", "mechanisms": [*before, last]} if before else last
