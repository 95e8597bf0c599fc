"""Private sums without noise, and noise alone, for audits and tests of the training engine.

Nothing that this module returns may be released. A clipped sum without noise is a function of
private records that no privacy guarantee covers. Only people who may see the records may compare it
with what it should be.
"""

from __future__ import annotations

import math
import os
from typing import Final

import torch
from torch import nn

from training_client.private_step import Clipper, Transform
from training_client.private_step.batches import Examples, TargetLoss, Targets, by_row
from training_client.private_step.blocks import unflatten_vector
from training_client.private_step.keystream import KEY_BYTES
from training_client.private_step.layers.layer_uses import EnginePath
from training_client.private_step.rounded_gaussian import NoiseGrid
from training_client.private_step.rounding_bounds import safe_bound_range

_SCALE_MAX: Final = float(1 << 40)


def draw_noise(count: int, scale: float) -> torch.Tensor:
    """Return the whole numbers that a step adds to its sum, in steps of its grid, as int64.

    Each is N with P(N = k) = Φ((k + ½)/s) − Φ((k − ½)/s), from a key of the operating system.

    Args:
        count: how many.
        scale: s > 0, at most 2**40.

    Raises:
        ValueError: the scale is out of range.
    """
    if not 0 < scale <= _SCALE_MAX:
        raise ValueError(f"expected a scale above 0 and at most 2**40, got {scale}")
    empty = torch.empty(count, dtype=torch.float64)
    return NoiseGrid(1.0, scale).draw_like(empty, os.urandom(KEY_BYTES)).long()


@torch.no_grad()
def clipped_sum(
    model: nn.Module,
    inputs: Examples,
    targets: Targets,
    loss: TargetLoss,
    clip_norm: float,
    *,
    path: EnginePath | None = None,
    physical_batch_size: int | None = None,
    sparse_inputs: bool = False,
) -> list[torch.Tensor]:
    """Return the sum of clipped per-example gradients without noise, for tests; never release it.

    Each example's gradient ∇, over all trained parameters, is multiplied by min(1, C/‖∇‖). The sum
    is computed as in a private step, before noise and before the division by the batch size. So
    adding or removing one example changes it by at most C in ℓ2 norm, up to the rounding of sums
    over the batch.

    Args:
        model: the model; its mode and parameters are left unchanged.
        inputs: a tensor, which becomes `model(inputs)`, or a dictionary of tensors, which becomes
            `model(**inputs)`; one example per row of the first dimension.
        targets: a tensor, or a dictionary of tensors, with one row per example.
        loss: `loss(outputs, targets)` returns one value per example.
        clip_norm: C > 0; `math.inf` for no clipping.
        path: the path of the engine to force; by default each layer takes the cheapest. "gram" and
            "product" choose how the norms of linear maps are computed, "held" forms every example's
            gradient in memory, and "replay" runs each layer again for each example, other than
            recurrent ones.
        physical_batch_size: examples per forward pass; all by default.
        sparse_inputs: declare that most input values are 0. Linear layers that read the inputs then
            skip zeros, unless a path is forced.

    Returns:
        One tensor per trained parameter, in the order of `model.parameters()`.

    Raises:
        UnsupportedModelError: a layer cannot be clipped, or the model or the loss mixes examples.
        DataError: inputs and targets have different numbers of examples.
        ValueError: the clip norm is not positive, or so small or large that sums would underflow or
            overflow; or the path is unknown.
    """
    clipper = Clipper(model, physical_batch_size, sparse_inputs=sparse_inputs, path=path)
    dtype = clipper.parameters[0].dtype
    bound = safe_bound_range(dtype, clipper.size)[1] if clip_norm == math.inf else clip_norm
    transform = Transform(bound)
    total = clipper.clip(inputs, *by_row(targets, loss), transform)
    sums = clipper.zeros()
    for block in clipper.blocks:
        total.write_block(block, transform.for_block(block), block.view_in(sums))
    return unflatten_vector(sums, clipper.parameters)
