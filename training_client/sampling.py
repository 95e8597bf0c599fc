"""Poisson sampling: every record enters every batch on its own, with the same probability."""

from __future__ import annotations

import torch

from training_client.noise import fresh_generator


class PoissonSampler:
    """Draws batches of indices; their size varies, and may be zero.

    Args:
        dataset_size: N.
        sample_rate: q in (0, 1].
        generator: on the CPU; seeded by the operating system unless given.
    """

    def __init__(
        self, dataset_size: int, sample_rate: float, generator: torch.Generator | None = None
    ) -> None:
        self._size = dataset_size
        self._rate = sample_rate
        self._generator = generator or fresh_generator(torch.device("cpu"))

    def draw(self) -> torch.Tensor:
        """The indices of one batch, ascending."""
        # double precision: a float32 uniform takes 2^24 values and would shift small rates
        draws = torch.rand(self._size, generator=self._generator, dtype=torch.float64)
        return torch.nonzero(draws < self._rate).flatten()
