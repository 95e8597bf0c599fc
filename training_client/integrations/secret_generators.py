"""Random generators whose state nobody knows, for Opacus' noise and batches.

A guarantee holds against those who know neither the noise nor the batches. Opacus draws both from
PyTorch's default generators unless it is given others. Programs seed these, and frameworks do so by
themselves: anyone who knows the seed can compute the noise and the batches. Ranks that are seeded
alike also draw batches that depend on each other.

Importing this module makes Opacus draw noise from generators that the operating system seeds, one
for each device (see `patches`); `batch_counting` does so for batches. A generator that the program
made is refused. Initial weights and dropout still come from PyTorch's default generators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from opacus.optimizers import DPOptimizer

from training_client.errors import NoGuaranteeError
from training_client.integrations.patches import replace_noise_draws
from training_client.private_step.noise import FreshGenerator

_OF_DEVICES: Final = dict[torch.device, FreshGenerator]()


def find_generator(given: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return the given random generator, or else the process's secret one for the device."""
    if given is not None:
        return given
    if device not in _OF_DEVICES:
        _OF_DEVICES[device] = FreshGenerator(device)
    return _OF_DEVICES[device]


def require_secret_generators(optimizer: DPOptimizer, sampler: Any) -> None:
    """Raise if noise or batches come from a generator whose seed others may know.

    A `FreshGenerator` is accepted, and so is the generator that `secure_mode` gave to both.

    Args:
        optimizer: an optimizer of Opacus.
        sampler: a sampler from `opacus_checks.find_sampler`.

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


def _draw_secretly(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap Opacus' noise function to use a secret generator by default."""

    def draw_noise(
        std: float,
        reference: torch.Tensor,
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ) -> torch.Tensor:
        """Draw noise as Opacus does, from a secret generator if none is given."""
        generator = find_generator(generator, reference.device)
        return draw(std, reference, generator=generator, secure_mode=secure_mode)

    return draw_noise


replace_noise_draws(_draw_secretly)
