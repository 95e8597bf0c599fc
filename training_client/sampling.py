"""Poisson sampling: every record enters every batch on its own, with the same probability."""

from __future__ import annotations

from typing import Final

import torch

from training_client.errors import DataError
from training_client.noise import FreshGenerator
from training_client.plan import Plan

_SPACING: Final = 2.0**-53  # of uniform numbers in double precision


class PoissonSampler:
    """Draws batches of indices; their size varies, and may be zero.

    Attributes:
        dataset_size: N.
        sample_rate: q in (0, 1].

    Args:
        dataset_size: see above.
        sample_rate: see above.
        generator: on the CPU; seeded by the operating system unless given.
    """

    def __init__(
        self, dataset_size: int, sample_rate: float, generator: torch.Generator | None = None
    ) -> None:
        self.dataset_size, self.sample_rate = dataset_size, sample_rate
        self._generator = generator or FreshGenerator(torch.device("cpu"))

    @classmethod
    def of(cls, plan: Plan, records: int, given: PoissonSampler | None = None) -> PoissonSampler:
        """One that draws what a plan is charged for.

        Args:
            plan: its sample rate.
            records: that there are.
            given: that one, if it does.

        Raises:
            DataError: it does not.
        """
        found = given or cls(records, plan.sample_rate)
        if (found.dataset_size, found.sample_rate) != (records, plan.sample_rate):
            raise DataError(
                f"the sampler draws from {found.dataset_size} records at q = {found.sample_rate:g}:"
                f" there are {records}, and q = {plan.sample_rate:g} is what is charged"
            )
        return found

    def draw(self) -> torch.Tensor:
        """The indices of one batch, ascending."""
        # double precision: a float32 uniform takes 2^24 values and would shift small rates
        draws = torch.rand(self.dataset_size, generator=self._generator, dtype=torch.float64)
        # of 2^53 values so many are taken as q has room for: with `<` it were one more, and the
        # rate a little larger than the one that is charged
        return torch.nonzero(draws <= self.sample_rate - _SPACING).flatten()
