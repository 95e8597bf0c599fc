"""Small models, batches of examples, and the sums of their clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from training_client.budget import NoBudget
from training_client.plan import Plan
from training_client.private_step import Clipper, Loss, Transform
from training_client.private_step.blocks import unflatten_vector


def batch(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a batch of random examples and labels."""
    generator = torch.Generator().manual_seed(1)
    examples = 3 * torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return examples, torch.randint(0, 4, (size,), generator=generator)


def unbudgeted(plan: Plan) -> NoBudget:
    """Return a budget without a claim for more steps than any test makes."""
    return NoBudget(plan, 10**9, "it is a test")


def model(*, bias: bool = True) -> nn.Module:
    """Build a small model with two Linear layers and fixed random weights."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9, bias=bias), nn.Tanh(), nn.Linear(9, 4)).double()


def sum_clipped(
    clipper: Clipper, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, by: Transform
) -> tuple[list[torch.Tensor], float]:
    """Return the clipped sum of a batch, computed block by block, and the mean loss."""
    found = clipper.clip(examples, targets, loss, by)
    sums = clipper.zeros()
    for block in clipper.blocks:
        with torch.no_grad():
            found.write_block(block, by.for_block(block), block.view_in(sums))
    return unflatten_vector(sums, clipper.parameters), found.mean_loss


class Uses(nn.Module):
    """A model that applies its layers by a function."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor], **layers: nn.Module):
        super().__init__()
        self.use = use
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return self.use(self, examples)


class Scaled(nn.Module):
    """A layer with a parameter of its own, which a function applies."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.use = nn.Parameter(torch.ones(6, dtype=torch.float64)), use

    def forward(self, examples: torch.Tensor) -> torch.Tensor:
        return self.use(self, examples)


def clipped_norm(layer: nn.Module, inputs: torch.Tensor, of: torch.Tensor, by: Transform) -> float:
    """Return the norm of what one example with a given output gradient adds to the sum."""
    sums, _ = sum_clipped(
        Clipper(layer),
        inputs,
        of,
        lambda predictions, gradient: (predictions * gradient).sum(1),
        by,
    )
    return math.sqrt(sum(float(each.double().square().sum()) for each in sums))
