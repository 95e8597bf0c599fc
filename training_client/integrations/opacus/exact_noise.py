"""Exact noise for Opacus' optimizers, in place of PyTorch's floating-point noise.

Importing this module makes `DPOptimizer` round its clipped sum to a grid and add whole numbers with
the law of a rounded Gaussian, as the engine of this package does (`private_step.rounded_gaussian`).
The grid's noise pays for the rounding in all coordinates of the step: the parameters together are
one release. Keys come from the operating system, whatever the program seeds.

In distributed training the ranks add up whole numbers, and rank 0 alone draws noise: neither the
order of summation nor the number of ranks changes the law of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer
from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed

from training_client.errors import NoGuaranteeError
from training_client.integrations.patches import replace_noise
from training_client.private_step.noise import draw_key
from training_client.private_step.rounded_gaussian import NoiseGrid

AddNoise = Callable[[Any], None]
_RECORDS_MIN: Final = 1 << 20  # that the grid has room for; up to here more cost nothing
_SHARES: Final = WeakKeyDictionary[DPOptimizer, tuple[NoiseGrid, list[torch.Tensor]]]()


def require_exact_noise(optimizer: DPOptimizer) -> None:
    """Raise if an optimizer adds its noise in a way that this module cannot replace.

    Raises:
        NoGuaranteeError: it adds noise while gradients are computed.
    """
    if isinstance(optimizer, DistributedPerLayerOptimizer):
        raise NoGuaranteeError(
            "DistributedPerLayerOptimizer adds floating-point noise while gradients are computed, "
            'and its ranks add up floating-point numbers: use clipping="flat"'
        )


def grid_of(optimizer: DPOptimizer) -> NoiseGrid:
    """Return the grid of a step: it keeps the optimizer's noise multiplier."""
    norms = getattr(optimizer, "max_grad_norms", [])  # Opacus rounds what they amount to
    bound = max(float(optimizer.max_grad_norm), math.nextafter(math.hypot(*norms), math.inf))
    coordinates = sum(each.numel() for each in optimizer.params)
    records = max(_RECORDS_MIN, optimizer.expected_batch_size or 0)
    return NoiseGrid.for_sum(float(optimizer.noise_multiplier), bound, coordinates, records)


def _with_exact_noise(add_original: AddNoise) -> AddNoise:
    """Replace `DPOptimizer.add_noise`."""

    def add_noise(optimizer: DPOptimizer) -> None:
        """Set each gradient to the rounded sum with exact noise."""
        if not _has_noise(optimizer):
            add_original(optimizer)
            return
        grid = grid_of(optimizer)
        for parameter, total in _unprocessed_sums(optimizer):
            grid.add_noise(total, 1.0, _draw_key(optimizer))
            parameter.grad = total.view_as(parameter)

    return add_noise


def _with_noise_on_rank_zero(add_original: AddNoise) -> AddNoise:
    """Replace `DistributedDPOptimizer.add_noise`."""

    def add_noise(optimizer: Any) -> None:
        """Keep each sum in steps of the grid; rank 0 adds the noise of all ranks."""
        if not _has_noise(optimizer):
            add_original(optimizer)
            return
        grid, shares = grid_of(optimizer), list[torch.Tensor]()
        for parameter, total in _unprocessed_sums(optimizer):
            steps = grid.round(total, optimizer.world_size)
            if optimizer.rank == 0:
                steps += grid.draw_like(steps, _draw_key(optimizer))
            shares.append(steps)
            parameter.grad = total.copy_(steps * grid.step).view_as(parameter)
        _SHARES[optimizer] = grid, shares

    return add_noise


def _with_whole_numbers(reduce_original: AddNoise) -> AddNoise:
    """Replace `DistributedDPOptimizer.reduce_gradients`."""

    def reduce_gradients(optimizer: Any) -> None:
        """Set each gradient to the mean of all ranks, whose whole numbers are added up."""
        if optimizer not in _SHARES:
            reduce_original(optimizer)
            return
        grid, shares = _SHARES.pop(optimizer)
        for parameter, steps in zip(optimizer.params, shares, strict=True):
            torch.distributed.all_reduce(steps)
            parameter.grad.copy_(steps.mul_(grid.step).view_as(parameter))
        optimizer.scale_grad()
        if optimizer.loss_reduction == "mean":
            for parameter in optimizer.params:
                parameter.grad /= optimizer.world_size

    return reduce_gradients


def _has_noise(optimizer: DPOptimizer) -> bool:
    """Return whether the noise is a number; else no step is made that a budget pays for."""
    return all(
        0 < float(each) < math.inf for each in (optimizer.noise_multiplier, optimizer.max_grad_norm)
    )


def _unprocessed_sums(optimizer: DPOptimizer) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each parameter with a copy of its clipped sum, which is used once as Opacus says."""
    for parameter in optimizer.params:
        _check_processed_flag(parameter.summed_grad)
        yield parameter, parameter.summed_grad.detach().clone(memory_format=torch.contiguous_format)
        _mark_as_processed(parameter.summed_grad)


def _draw_key(optimizer: DPOptimizer) -> bytes:
    """Return a key of noise; the generator of `secure_mode` is as good as the system's."""
    return draw_key(None if optimizer.secure_mode else optimizer.generator)


replace_noise(_with_exact_noise, _with_noise_on_rank_zero, _with_whole_numbers)
