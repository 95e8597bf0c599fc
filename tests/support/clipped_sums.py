"""The definition of clipped sums: one model pass per example, then one weight per example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests.support.layer_models import Examples, call, select
from training_client.lab.models import cross_entropy
from training_client.private_step import Block, Clipper, Loss, Transform
from training_client.private_step.rounding_bounds import weight_rounding

Tensors = Sequence[torch.Tensor]
SHAPES = ("ball", "ellipsoid", "box", "affine", "damped", "damped and shifted")


def per_example(
    net: nn.Module, examples: Examples, labels: torch.Tensor, loss: Loss = cross_entropy
) -> list[torch.Tensor]:
    """Return each example's gradient of every trained parameter, one model pass per example."""
    trained = [p for p in net.parameters() if p.requires_grad]
    found: list[list[torch.Tensor]] = [[] for _ in trained]
    for at in range(len(labels)):
        one = slice(at, at + 1)
        total = loss(call(net, select(examples, one)), labels[one]).sum()
        for each, gradient in zip(
            found,
            torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True),
            strict=True,
        ):
            each.append(gradient)
    return [
        torch.stack(each) if each else p.new_zeros(0, *p.shape)
        for each, p in zip(found, trained, strict=True)
    ]


def gradient_rows(
    net: nn.Module, examples: Examples, labels: torch.Tensor, loss: Loss = cross_entropy
) -> torch.Tensor:
    """Return each example's gradient as a row."""
    return torch.cat([each.flatten(1) for each in per_example(net, examples, labels, loss)], 1)


def clip_rows(
    gradients: torch.Tensor, transform: Transform, blocks: Sequence[Block]
) -> torch.Tensor:
    """Return clipped gradients by the definition of a transform; each row is one example's."""
    rows = []
    for block in blocks:
        affine, gradient = transform.for_block(block), gradients[:, block.coordinates]
        u = gradient if affine.shift is None else gradient + affine.shift
        u = u if affine.scale is None else u * affine.scale
        if transform.damping:
            assert affine.scale is not None
            u = u / (1 + (transform.damping * affine.scale * gradient) ** 2).sqrt()
        rows.append(u.flatten(1))
    u = torch.cat(rows, 1)
    if transform.box:
        return u.clamp(-1, 1)
    limit = transform.bound * (1 - weight_rounding(u.dtype))
    return u * (limit / (u.norm(dim=1, keepdim=True) + transform.stability)).clamp_max(1.0)


def clipped_rows(net: nn.Module, transform: Transform, *of: Any) -> torch.Tensor:
    """Return each example's clipped gradient as a row."""
    return clip_rows(gradient_rows(net, *of), transform, Clipper(net).blocks)


def random_like(net: nn.Module, seed: int) -> list[torch.Tensor]:
    """Draw random tensors with the shapes of the trained parameters."""
    generator = torch.Generator().manual_seed(seed)
    trained = [p for p in net.parameters() if p.requires_grad]
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in trained]


def build_transform(shape: str, net: nn.Module) -> Transform:
    """Build a random transform of a shape, such as ball, box or affine, for a model."""
    positive = [each.abs() + 0.05 for each in random_like(net, 3)]
    if shape == "ball":
        return Transform(0.7)
    if shape == "affine":
        return Transform.fixed(0.7, positive, random_like(net, 4))
    if shape.startswith("damped"):
        shifts = random_like(net, 4) if "shifted" in shape else None
        return Transform.fixed(0.7, positive, shifts, damping=5)
    return ellipsoid([0.1 * each for each in positive], box=shape == "box")


def ellipsoid(half_axes: Tensors, *, box: bool = False) -> Transform:
    """Return the transform that clips to an ellipsoid with these half axes, or to its box."""
    size = sum(each.numel() for each in half_axes)
    return Transform.fixed(math.sqrt(size), [1 / each for each in half_axes], box=box)


def norm_of(tensors: Tensors) -> float:
    """Return the norm of all tensors together."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))
