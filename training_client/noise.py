"""Gaussian noise whose seed nobody chose."""

from __future__ import annotations

import os
import secrets
import weakref
from typing import Any, Final

import torch

from training_client.clipping.allowances import least_factor
from training_client.errors import DataError

_WORDS: Final = 624
_HEADER: Final = 24  # bytes before them: the seed, two counters and a flag


class FreshGenerator(torch.Generator):
    """A generator whose seed nobody chose: the operating system's entropy.

    Two that draw the same would add the same noise to two sums, whose difference had none. So a
    copy of it, pickled or not, is seeded anew, and so is it itself in a forked process.

    On a CPU a seed has 32 bits, which can be tried one by one: all 624 words of the Mersenne
    Twister's state are drawn instead. It is no cryptographic generator all the same.

    Args:
        device: on which numbers are drawn.
    """

    def __init__(self, device: torch.device) -> None:  # noqa: ARG002 — the base takes it first
        self.reseed()
        _ALL.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """For a copy: another one."""
        return FreshGenerator, (self.device,)

    def reseed(self) -> None:
        """Forget what was drawn."""
        self.manual_seed(secrets.randbits(63))
        if self.device.type == "cpu":
            self.set_state(_with_words(self.get_state(), secrets.token_bytes(4 * _WORDS)))


def _with_words(state: torch.Tensor, words: bytes) -> torch.Tensor:
    """A freshly seeded state with other words: each fills the lower half of 64 bits."""
    found = state.clone()
    table = found[_HEADER : _HEADER + 8 * _WORDS].view(torch.int64)
    table.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint32).to(torch.int64))
    return found


def gaussian_like(
    tensor: torch.Tensor, deviation: float, generator: torch.Generator
) -> torch.Tensor:
    """N(0, deviation²) of the shape, type and device of `tensor`.

    Raises:
        DataError: so small that its numbers may be taken for 0.
    """
    if not deviation >= least_factor(tensor.dtype):
        raise DataError(
            f"noise of deviation {deviation:g} is next to nothing for {tensor.dtype}: clip to a "
            "larger norm, or take smaller lots"
        )
    noise = torch.empty_like(tensor)
    return noise.normal_(0.0, deviation, generator=generator)


def _reseed_all() -> None:
    for generator in _ALL:
        if generator.device.type == "cpu":  # nothing else can be used in a forked process
            generator.reseed()


_ALL: Final = weakref.WeakSet[FreshGenerator]()
if hasattr(os, "register_at_fork"):  # a system without it has no forks
    os.register_at_fork(after_in_child=_reseed_all)
