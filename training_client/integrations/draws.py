"""The batches of Opacus' Poisson samplers, counted where they are drawn: each has one step.

A step is charged as one of a batch drawn for it alone. Several steps of one batch see the same
records, and are charged far too little. A batch whose step is left out tells of its records, if
they are why: then no further one is drawn.

When this module is imported Opacus' samplers count. And of several processes each gives its empty
batches too: Opacus leaves them out, and with them a step, if the one record that would be there is
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)

from training_client.errors import NoGuaranteeError
from training_client.integrations.ahead import drawn_ahead
from training_client.integrations.checks import held_to_rate, poisson_sampler

Draw = Callable[[Any], Iterator[Any]]


class Draws:
    """The batches of a loader, counted where they are drawn, from now on.

    The sampler itself counts: loaders that split its batches, or prefetch them, share it, and so
    do several optimizers. Batches that workers draw ahead have their steps later, so that many
    further steps of one batch are not noticed.

    Args:
        loader: that samples by Poisson.
    """

    def __init__(self, loader: Any) -> None:
        self._sampler = poisson_sampler(loader)
        held_to_rate(self._sampler)  # before it draws
        if not self._sampler.guarded:  # what was drawn before is of no run
            self._sampler.unused = min(self._sampler.unused, self._sampler.ahead)
            self._sampler.guarded = True

    def require_unused(self) -> None:
        """Refuse a step if each batch drawn so far has had its own.

        Raises:
            NoGuaranteeError: it has.
        """
        if self._sampler.unused < 1:
            raise NoGuaranteeError(
                "each batch that was drawn has had its step, and a step is charged as one of a "
                "batch drawn for it alone: make one step of a batch, and take batches from the "
                "loader that make_private returns, or that BatchMemoryManager makes of it"
            )

    def use(self) -> None:
        """Count a batch as dealt with: its step is made, or refused for what is no record's."""
        self._sampler.unused -= 1

    def end(self) -> None:
        """Let batches be drawn that no step is to be made of: the run is over."""
        self._sampler.guarded = False


def _counting(draw: Draw) -> Draw:
    """Return a sampler's `__iter__` that counts, and ends with an error if a step is left out."""

    def counting(sampler: Any) -> Iterator[Any]:
        if sampler.goes_on:  # the pass before was given up, with what was drawn ahead in it
            sampler.unused -= min(sampler.unused, sampler.ahead)
        sampler.goes_on, sampler.ahead = True, drawn_ahead()
        for batch in draw(sampler):
            _require_steps(sampler)
            sampler.unused += 1
            yield batch
        sampler.goes_on = False

    return counting


def _require_steps(sampler: Any) -> None:
    left_out = sampler.unused - sampler.ahead
    if sampler.guarded and left_out > 0:
        raise NoGuaranteeError(
            f"{left_out} batch(es) were drawn and had no step, perhaps for what is in them, and no "
            "noise hides that. Make a step of each batch, empty ones too: pass over none, for a "
            "loss that is not finite or an error, and end the run where that cannot be. Look at "
            "examples in the dataset, not in the loader, and resume with ignore_data_skip=True"
        )


def _with_empty_batches(sampler: Any) -> Iterator[torch.Tensor]:
    """Draw as Opacus does for a rank, whose empty batches it leaves out."""
    order = torch.arange(sampler.total_size)
    if sampler.shuffle:
        shared = torch.Generator().manual_seed(sampler.shuffle_seed + sampler.epoch)
        order = torch.randperm(sampler.total_size, generator=shared)
    own = order[sampler.rank : sampler.total_size : sampler.num_replicas]
    for _ in range(sampler.num_batches):
        yield own[torch.rand(len(own), generator=sampler.generator) < sampler.sample_rate]


for _kind, _draw in (
    (UniformWithReplacementSampler, UniformWithReplacementSampler.__iter__),
    (DistributedUniformWithReplacementSampler, _with_empty_batches),
):
    _kind.__iter__ = _counting(_draw)
    # batches drawn less those dealt with; drawn ahead of the loop; whether a pass goes on; whether
    # each must have its step
    _kind.unused, _kind.ahead, _kind.goes_on, _kind.guarded = 0, 0, False, False
