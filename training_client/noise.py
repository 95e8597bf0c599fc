"""Gaussian noise whose seed nobody chose."""

from __future__ import annotations

import secrets
from typing import Final

import torch

_WORDS: Final = 624
_HEADER: Final = 24  # bytes before them: the seed, two counters and a flag


def fresh_generator(device: torch.device) -> torch.Generator:
    """A generator on `device`, seeded by the operating system's entropy.

    On a CPU a seed has 32 bits, which can be tried one by one: all 624 words of the Mersenne
    Twister's state are drawn instead. It is no cryptographic generator all the same.
    """
    generator = torch.Generator(device=device).manual_seed(secrets.randbits(63))
    if device.type == "cpu":
        generator.set_state(_with_words(generator.get_state(), secrets.token_bytes(4 * _WORDS)))
    return generator


def _with_words(state: torch.Tensor, words: bytes) -> torch.Tensor:
    """A freshly seeded state with other words: each fills the lower half of 64 bits."""
    found = state.clone()
    table = found[_HEADER : _HEADER + 8 * _WORDS].view(torch.int64)
    table.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint32).to(torch.int64))
    return found


def gaussian_like(
    tensor: torch.Tensor, deviation: float, generator: torch.Generator
) -> torch.Tensor:
    """N(0, deviation²) of the shape, type and device of `tensor`."""
    noise = torch.empty_like(tensor)
    return noise.normal_(0.0, deviation, generator=generator)
