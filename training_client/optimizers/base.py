"""The private step: clip, sum, add noise, divide by the expected batch size, then update.

Everything private happens here, once, for every optimizer; what a subclass does comes after the
noise and is post-processing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from training_client.clipping import LinearClipper
from training_client.noise import fresh_generator, gaussian_like
from training_client.plan import Plan


class PrivateOptimizer(ABC):
    """Makes private steps on a model, as its plan says.

    Args:
        model: the model to train.
        plan: what each step does and costs.
        generator: of the noise, on the model's device; seeded by the operating system by default.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, generator: torch.Generator | None = None
    ) -> None:
        self.plan = plan
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._clipper = LinearClipper(model, plan.clip_norm)
        self._generator = generator or fresh_generator(self.parameters[0].device)

    def step(
        self,
        examples: torch.Tensor,
        targets: torch.Tensor,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> float:
        """One step on one Poisson batch (which may be empty: the noise is added all the same).

        Returns:
            The batch's mean loss, for the data owner's eyes only.
        """
        sums, mean_loss = self._clipper.sum_clipped(examples, targets, loss)
        with torch.no_grad():
            for total in sums:
                total += gaussian_like(total, self.plan.noise_deviation, self._generator)
                total /= self.plan.expected_batch_size
            self.update(sums)
        return mean_loss

    @abstractmethod
    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """Change the parameters, given the noisy mean gradient of each."""
