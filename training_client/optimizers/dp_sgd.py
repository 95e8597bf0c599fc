"""DP-SGD (Abadi et al. 2016, Algorithm 1; papers/002)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from training_client.optimizers.base import PrivateOptimizer
from training_client.plan import Plan


class DpSgd(PrivateOptimizer):
    """θ ← θ − η·v with v ← m·v + g̃ of the noisy mean gradient g̃; m = 0 is the paper's algorithm.

    Args:
        model: the model to train.
        plan: what each step does and costs.
        learning_rate: η > 0.
        momentum: m in [0, 1).
        generator: of the noise.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(model, plan, generator)
        self.learning_rate = learning_rate
        self.momentum = momentum
        self._velocities = [torch.zeros_like(p) for p in self.parameters]

    def update(self, gradients: Sequence[torch.Tensor]) -> None:
        """One descent step with momentum."""
        for parameter, velocity, gradient in zip(
            self.parameters, self._velocities, gradients, strict=True
        ):
            velocity.mul_(self.momentum).add_(gradient)
            parameter.sub_(velocity, alpha=self.learning_rate)
