"""Counts the batches that samplers draw: each must have exactly one step.

A step is charged as one of a batch drawn for it alone. Several steps of one batch see the same
records and cost far more than is charged. A batch without a step reveals its records if they are
the reason; no further batch is drawn then.

Importing this module makes Opacus' Poisson samplers count (see `patches`). They then draw from
AES-256 under keys of the operating system, since batches must be secret (see `secret_generators`),
and no record more often than is charged. In distributed training a rank's empty batches are drawn
too: Opacus drops them, so that a step would be missing exactly if the one record of a batch were.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

from training_client.errors import NoGuaranteeError
from training_client.integrations.opacus.batch_draws import COUNTERS, count_draws, require_steps
from training_client.integrations.opacus.checks import find_sampler
from training_client.integrations.patches import replace_sampler_iteration
from training_client.private_step.noise import draw_key
from training_client.private_step.sampling import draw_rows


class BatchCounter:
    """Counts the batches that a loader draws and the batches that steps use.

    The count is kept in the sampler: loaders that split or prefetch its batches share it, and so do
    several optimizers. Workers draw batches before the loop uses them, so up to that many further
    steps of one batch go unnoticed.

    Args:
        loader: a loader that samples by Poisson, or balls in bins.
    """

    def __init__(self, loader: Any) -> None:
        self._sampler = find_sampler(loader)
        if not self._sampler.requires_steps:  # batches drawn before belong to no run
            self._sampler.unused = min(self._sampler.unused, self._sampler.prefetched)
            self._sampler.requires_steps = True

    @property
    def epoch(self) -> tuple[object, int]:
        """An identifier of the current epoch; constant if the sampler does not count epochs."""
        return self._sampler, getattr(self._sampler, "epochs", 0)

    def require_unused_batch(self) -> None:
        """Raise if every batch drawn so far was already used by a step.

        Raises:
            NoGuaranteeError: no batch is left for the step.
        """
        if self._sampler.unused < 1:
            raise NoGuaranteeError(
                "each batch that was drawn has had its step, and every step is charged as a step "
                "on a batch of its own: make one step of a batch, and take batches from the loader "
                "that make_private or BatchMemoryManager returns"
            )

    def use_batch(self) -> None:
        """Count a batch as used by a step, or as refused for a publicly known reason."""
        self._sampler.unused -= 1

    def require_ended_pass_used(self) -> None:
        """Raise if the loader has ended its pass and a batch of it had no step.

        The loop may still hold as many batches as workers prefetch, so these are not missed.

        Raises:
            NoGuaranteeError: a batch had no step, and no later one was drawn to notice it.
        """
        if not self._sampler.is_drawing:
            require_steps(self._sampler)

    def stop(self) -> None:
        """Allow batches without steps from now on, since the run is over."""
        self._sampler.requires_steps = False


def _draw_batches(sampler: Any) -> Iterator[list[int]]:
    """Draw Poisson batches as Opacus' sampler does, but from a secret keystream."""
    for _ in range(sampler.steps):
        yield _draw_rows(sampler, sampler.num_samples).tolist()


def _draw_rows(sampler: Any, records: int) -> torch.Tensor:
    """Draw each row with the sample rate's probability, never more; return those drawn."""
    return draw_rows(records, float(sampler.sample_rate), draw_key(sampler.generator))


def _draw_with_empty_batches(sampler: Any) -> Iterator[torch.Tensor]:
    """Draw one rank's Poisson batches as Opacus' sampler does, but keep empty batches."""
    order = torch.arange(sampler.total_size)
    if sampler.shuffle:
        shared = torch.Generator().manual_seed(sampler.shuffle_seed + sampler.epoch)
        order = torch.randperm(sampler.total_size, generator=shared)
    own = order[sampler.rank : sampler.total_size : sampler.num_replicas]
    for _ in range(sampler.num_batches):
        yield own[_draw_rows(sampler, len(own))]


for _sampler_class, _draw in (
    (UniformWithReplacementSampler, _draw_batches),
    (DistributedUniformWithReplacementSampler, _draw_with_empty_batches),
):
    replace_sampler_iteration(_sampler_class, count_draws(_draw), **COUNTERS)
