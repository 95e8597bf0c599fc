"""Random generators that the operating system seeds, and keys of noise and batches."""

from __future__ import annotations

import os
import secrets
import weakref
from typing import Any, Final

import torch

from training_client.private_step.keystream import KEY_BYTES

_STATE_WORDS: Final = 624  # of the Mersenne Twister
_HEADER_BYTES: Final = 24  # before the words: the seed, two counters and a flag


class FreshGenerator(torch.Generator):
    """A random generator seeded by the operating system; its copies get new seeds.

    Two generators in the same state would add the same noise to two sums, whose difference would
    have none. So a copy, pickled or not, is seeded anew, and so is the generator itself in a forked
    process.

    On a CPU PyTorch's seed has 32 bits, few enough to try them all: instead, all 624 words of the
    Mersenne Twister's state are drawn. It is still not a cryptographic generator. Noise and batches
    use none of its state: passed to them, it stands for keys of the operating system (`draw_key`).

    Args:
        device: the device that numbers are drawn on.
    """

    def __init__(self, device: torch.device) -> None:  # noqa: ARG002 — the base takes it first
        self.reseed()
        _GENERATORS.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle so that a copy is a new generator with a seed of its own."""
        return FreshGenerator, (self.device,)

    def reseed(self) -> None:
        """Replace the generator's state by fresh entropy of the operating system."""
        self.manual_seed(secrets.randbits(63))
        if self.device.type == "cpu":
            entropy = secrets.token_bytes(4 * _STATE_WORDS)
            self.set_state(_replace_state_words(self.get_state(), entropy))


def _replace_state_words(state: torch.Tensor, words: bytes) -> torch.Tensor:
    """Return a generator's state with its words replaced by given random 32-bit words."""
    found = state.clone()
    table = found[_HEADER_BYTES : _HEADER_BYTES + 8 * _STATE_WORDS].view(torch.int64)
    table.copy_(torch.frombuffer(bytearray(words), dtype=torch.uint32).to(torch.int64))
    return found


def draw_key(generator: torch.Generator | None) -> bytes:
    """Return a key for noise or a batch: from the operating system, or a program's own generator.

    No state of a `FreshGenerator` is used: a copy of it, a fork or a checkpoint could not draw the
    same again. Any other generator is for runs that are to be repeated, without a claim.
    """
    if generator is None or isinstance(generator, FreshGenerator):
        return os.urandom(KEY_BYTES)
    drawn = torch.randint(
        256, (KEY_BYTES,), dtype=torch.uint8, generator=generator, device=generator.device
    )
    return drawn.cpu().numpy().tobytes()


def _reseed_all() -> None:
    """Reseed every generator after a fork, so that parent and child draw different noise."""
    for generator in _GENERATORS:
        if generator.device.type == "cpu":  # nothing else can be used in a forked process
            generator.reseed()


_GENERATORS: Final = weakref.WeakSet[FreshGenerator]()
if hasattr(os, "register_at_fork"):  # systems without it have no forks
    os.register_at_fork(after_in_child=_reseed_all)
