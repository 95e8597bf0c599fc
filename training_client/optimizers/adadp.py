"""AdaDP and its two halves, AdaL and AdaN (papers/000, Algorithm 1 and §IV-E)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

import torch
from torch import nn

from training_client.clipping import Block, Transform
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.source import Step
from training_client.plan import Plan

_FLOOR: Final = 1e-3  # of the root mean square half axis: no coordinate is cut off for good


class AdaDp(PrivateOptimizer):
    """Noise where gradients have been large, and a step that is divided by their size.

    Once the deviation √E′[g²] varies enough over the coordinates (its variance exceeds G), an
    example's gradient is kept within half axes sᵢ = β·√E′[g²]ᵢ and the noise deviates by σ√m·sᵢ
    (Lemma 1 with equality; see `clipping.transform`). Before, it is clipped to C as in DP-SGD.

    Algorithm 1 prints E′ as a mean of raw gradients: see `source`. From noisy ones the noise's
    variance is taken off. It prints a box, |∇ᵢ| ≤ sᵢ; the ellipsoid around that box costs the
    same, leaves alone what the box leaves alone, and keeps the direction of what it scales.

    Args:
        model: the model to train.
        plan: what each step does and costs; its clip norm is C.
        learning_rate: η > 0.
        beta: β > 0, the local clipping factor.
        threshold: G ≥ 0, the local clipping threshold.
        rate: γ, of E[g̃²] in the denominator of the step.
        memory: γ′, of E′[g²].
        epsilon: ε₀ > 0, under the root.
        box: clamp coordinates as printed, rather than scale to the ellipsoid.
        adaptive_noise: without it, AdaL.
        adaptive_rate: without it, AdaN.
        options: see `PrivateOptimizer`.
    """

    kept: ClassVar[tuple[str, ...]] = ("noisy_squares", "prior_squares")

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        learning_rate: float,
        beta: float = 1.5,
        threshold: float = 1e-6,
        rate: float = 0.1,
        memory: float = 0.9,
        epsilon: float = 1e-8,
        box: bool = False,
        adaptive_noise: bool = True,
        adaptive_rate: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, plan, **options)
        if not (beta > 0 and threshold >= 0 and epsilon > 0):
            raise ValueError("expected beta > 0, threshold ≥ 0 and epsilon > 0")
        self.learning_rate, self.beta, self.threshold = learning_rate, beta, threshold
        self.rate, self.memory, self.epsilon, self.box = rate, memory, epsilon, box
        self.adaptive_noise, self.adaptive_rate = adaptive_noise, adaptive_rate
        self.noisy_squares = [torch.zeros_like(p) for p in self.parameters]  # E[g̃²]
        self.prior_squares = [torch.zeros_like(p) for p in self.parameters]  # E′[g²]
        self.noise_varies = False

    def transform(self) -> Transform:
        """An ellipsoid or a box, once enough is known; C before that."""
        self.noise_varies = False
        if self.adaptive_noise:
            size = sum(each.numel() for each in self.prior_squares)
            mean = sum(float(b.of(self.prior_squares).sqrt().sum()) for b in self.blocks) / size
            mean_square = sum(float(each.sum()) for each in self.prior_squares) / size
            self.noise_varies = mean_square - mean**2 > self.threshold
        if not self.noise_varies:
            return super().transform()
        least = _FLOOR * math.sqrt(mean_square)

        def affine(block: Block) -> tuple[torch.Tensor, None]:
            root = block.of(self.prior_squares).sqrt()
            return root.clamp_min_(least).mul_(self.beta).reciprocal_(), None

        return Transform(math.sqrt(size), affine, box=self.box)

    def update(self, step: Step) -> None:
        """Lines 21 to 26."""
        known = self.source.gradients(step) if self.adaptive_noise else step
        for block in self.blocks:
            gradient, square = step.moments(block)
            if self.adaptive_noise:
                square = square if known is step else known.moments(block)[1]
                prior = block.of(self.prior_squares)
                prior.mul_(self.memory).add_(square, alpha=1 - self.memory)
            self._descend(block, gradient)

    def _descend(self, block: Block, gradient: torch.Tensor) -> None:
        parameter = block.of(self.parameters)
        if not self.adaptive_rate:
            parameter.sub_(gradient, alpha=self.learning_rate)
            return
        noisy = block.of(self.noisy_squares)
        noisy.mul_(1 - self.rate).addcmul_(gradient, gradient, value=self.rate)
        root = (noisy + self.epsilon).sqrt_()
        parameter.addcdiv_(gradient, root, value=-self.learning_rate)
