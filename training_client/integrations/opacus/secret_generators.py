"""Refuses generators whose state others may know, for Opacus' noise and batches.

A guarantee holds against those who know neither the noise nor the batches. Opacus draws both from
PyTorch's default generators unless it is given others. Programs seed these, and frameworks do so by
themselves: anyone who knows the seed can compute the noise and the batches. Ranks that are seeded
alike also draw batches that depend on each other.

Once this package is imported, `exact_noise` and `batch_counting` draw both from AES-256 under keys
of the operating system. A generator that the program made is refused. Initial weights and dropout
still come from PyTorch's default generators.
"""

from __future__ import annotations

from typing import Any

from opacus.optimizers import DPOptimizer

from training_client.errors import NoGuaranteeError
from training_client.private_step.noise import FreshGenerator


def require_secret_generators(optimizer: DPOptimizer, sampler: Any) -> None:
    """Raise if noise or batches come from a generator whose seed others may know.

    A `FreshGenerator` is accepted, and so is the generator that `secure_mode` gave to both.

    Args:
        optimizer: an optimizer of Opacus.
        sampler: a sampler from `checks.find_sampler`.

    Raises:
        NoGuaranteeError: the program passed another generator.
    """
    secure = optimizer.generator if optimizer.secure_mode else None
    for purpose, generator, option in (
        ("noise comes", optimizer.generator, "noise_generator of make_private"),
        ("batches come", sampler.generator, "generator of the DataLoader"),
    ):
        if generator is not None and generator is not secure and not _is_fresh(generator):
            raise NoGuaranteeError(
                f"the {purpose} from a generator that the program made, and anyone who knows its "
                "seed can compute what it draws (torch.Generator() has the same seed in every "
                f"program): leave out the {option}, or pass FreshGenerator(device) of "
                "training_client.private_step.noise"
            )


def _is_fresh(generator: Any) -> bool:
    """Return whether a random generator was seeded by the operating system."""
    return isinstance(generator, FreshGenerator)
