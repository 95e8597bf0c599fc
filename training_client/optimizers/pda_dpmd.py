"""PDA-DPMD: mirror descent with a public loss (Amid et al. 2021, arXiv 2112.00193)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.state_source import GradientEstimate, StateSource, StepContext
from training_client.private_step.private_sum import NoisyBlock


class PdaDpMd(PrivateOptimizer):
    """PDA-DPMD in its first-order form: the step follows α·g̃ + (1 − α)·h.

    g̃ is the noisy mean of clipped private gradients, and h the mean gradient of a public batch.
    With the public loss as mirror map, mirror descent needs the minimum of a function in each step;
    the paper replaces it by this convex combination, with which papers/004 (§6.1.1) compares. At
    step t = 0, 1, … of K, α = cos(πt/2K): at first the private gradient alone counts, at the end
    the public one. g̃ is charged as in DP-SGD; mixing in h is post-processing with public data.

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; its plan says what a step does and costs.
        source: source of the public gradients.
        learning_rate: η > 0.
        horizon: K ≥ 1, the number of steps of the run; in later ones α stays 0.
        options: see `PrivateOptimizer`.

    Raises:
        ValueError: `horizon` is below 1.
    """

    state_attributes: ClassVar[tuple[str, ...]] = ("steps",)

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        source: StateSource,
        *,
        learning_rate: float,
        horizon: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, source=source, **options)
        if horizon < 1:
            raise ValueError(f"expected a horizon of at least one step, got {horizon}")
        self.learning_rate, self.horizon, self.steps = learning_rate, horizon, 0

    @property
    def private_share(self) -> float:
        """α of the next step."""
        return max(0.0, math.cos(math.pi * min(self.steps, self.horizon) / (2 * self.horizon)))

    def update(self, step: StepContext) -> None:
        """Descend along the combination of the noisy private and the public gradient."""
        step.noisy_mean.for_each_block(partial(self._update_block, self.source.gradients(step)))
        self.steps += 1

    def _update_block(self, estimate: GradientEstimate, noisy: NoisyBlock) -> None:
        """Update the parameters on one block of coordinates."""
        public, _ = estimate.moments(noisy)
        self.descend(
            noisy.block, torch.lerp(public, noisy.mean, self.private_share), self.learning_rate
        )
