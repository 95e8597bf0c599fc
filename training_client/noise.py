"""Gaussian noise whose seed nobody chose."""

from __future__ import annotations

import secrets

import torch


def fresh_generator(device: torch.device) -> torch.Generator:
    """A generator on `device`, seeded by the operating system's entropy."""
    return torch.Generator(device=device).manual_seed(secrets.randbits(63))


def gaussian_like(
    tensor: torch.Tensor, deviation: float, generator: torch.Generator
) -> torch.Tensor:
    """N(0, deviation²) of the shape, type and device of `tensor`."""
    noise = torch.empty_like(tensor)
    return noise.normal_(0.0, deviation, generator=generator)
