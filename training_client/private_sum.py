"""The only code that sees private data and lets anything out: a clipped sum with noise.

Everything after it is post-processing, everything before it must be known without the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from training_client.clipping import Clipper, Loss, Transform
from training_client.errors import DataError
from training_client.noise import fresh_generator, gaussian_like
from training_client.plan import Plan


@dataclass(frozen=True, slots=True)
class Release:
    """What a step lets out.

    Attributes:
        means: the noisy sum of what was clipped over the expected batch size, a tensor per
            parameter.
        deviation: of the noise on each coordinate of them.
        mean_loss: of the batch, without noise: for the data owner's eyes only.
    """

    means: list[torch.Tensor]
    deviation: float
    mean_loss: float


class PrivateSum:
    """Releases noisy means of clipped gradients, as a plan says.

    Attributes:
        plan: what each release does and costs.
        clipper: sums what is clipped.

    Args:
        model: whose gradients.
        plan: what each release does and costs.
        generator: of the noise, on the model's device; seeded by the operating system by default.
        physical_batch_size: at most so many examples are in memory at a time; all by default.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        generator: torch.Generator | None = None,
        physical_batch_size: int | None = None,
    ) -> None:
        self.plan = plan
        self.clipper = Clipper(model)
        self._device = self.clipper.parameters[0].device
        self._generator = generator or fresh_generator(self._device)
        self._physical_batch_size = physical_batch_size

    def release(
        self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, transform: Transform
    ) -> Release:
        """Of one Poisson batch (which may be empty: the noise is added all the same).

        Raises:
            DataError: the examples are on another device than the model.
        """
        if examples.device != self._device:
            raise DataError(f"the examples are on {examples.device}, the model on {self._device}")
        sums, mean_loss = self.summed(examples, targets, loss, transform)
        deviation = self.plan.noise_multiplier * transform.bound
        size = self.plan.expected_batch_size
        with torch.no_grad():
            for block in self.clipper.blocks:
                total = block.of(sums)
                total += gaussian_like(total, deviation, self._generator)
                total /= size
        return Release(sums, deviation / size, mean_loss)

    def summed(
        self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, transform: Transform
    ) -> tuple[list[torch.Tensor], float]:
        """The clipped sum over a batch of any size, a physical batch at a time: without noise."""
        rows = self._physical_batch_size or max(len(examples), 1)
        sums, losses = None, 0.0
        for at in range(0, max(len(examples), 1), rows):
            part = slice(at, at + rows)
            found, mean = self.clipper.sum_clipped(examples[part], targets[part], loss, transform)
            losses += mean * len(examples[part])
            if sums is None:
                sums = found
            else:
                for total, each in zip(sums, found, strict=True):
                    total += each
        assert sums is not None
        return sums, losses / max(len(examples), 1)
