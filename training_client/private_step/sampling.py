"""Poisson sampling: each record is in each batch independently, with the same probability."""

from __future__ import annotations

from typing import Final

import torch

from training_client.errors import DataError
from training_client.plan import Plan
from training_client.private_step.noise import FreshGenerator

_UNIFORM_SPACING: Final = 2.0**-53  # of uniform random numbers in double precision


class PoissonSampler:
    """Draws Poisson batches of indices; their size varies, and may be zero.

    Attributes:
        dataset_size: N, the number of records.
        sample_rate: q in (0, 1].

    Args:
        dataset_size: see above.
        sample_rate: see above.
        generator: on the CPU; seeded by the operating system by default.
    """

    def __init__(
        self, dataset_size: int, sample_rate: float, generator: torch.Generator | None = None
    ) -> None:
        self.dataset_size, self.sample_rate = dataset_size, sample_rate
        self._generator = generator or FreshGenerator(torch.device("cpu"))

    @classmethod
    def for_plan(
        cls, plan: Plan, records: int, sampler: PoissonSampler | None = None
    ) -> PoissonSampler:
        """Return a sampler of a dataset at the sample rate that a plan is charged for.

        Args:
            plan: the plan.
            records: the number of records.
            sampler: a sampler to use, if it fits the plan; a new one by default.

        Raises:
            DataError: the given sampler does not fit.
        """
        found = sampler or cls(records, plan.sample_rate)
        if (found.dataset_size, found.sample_rate) != (records, plan.sample_rate):
            raise DataError(
                f"the sampler draws from {found.dataset_size} records at sample rate "
                f"{found.sample_rate:g}, but there are {records} records and the plan is charged "
                f"for sample rate {plan.sample_rate:g}"
            )
        return found

    def draw(self) -> torch.Tensor:
        """Draw one batch: the indices of its records, ascending."""
        # double precision: a float32 uniform takes 2^24 values and would shift small rates
        draws = torch.rand(self.dataset_size, generator=self._generator, dtype=torch.float64)
        # accept ⌊q·2^53⌋ of the 2^53 values: `draws < q` would accept one more where q·2^53 is not
        # an integer, and sample at a slightly higher rate than is charged
        return torch.nonzero(draws <= self.sample_rate - _UNIFORM_SPACING).flatten()
