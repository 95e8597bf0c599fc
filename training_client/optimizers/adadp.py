"""AdaDP and its two halves, AdaL and AdaN (papers/000, Algorithm 1 and §IV-E)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from training_client.clipping import Transform
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.source import Gradients
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
        self._transform = super().transform()

    def transform(self) -> Transform:
        """An ellipsoid or a box, once enough is known; C before that."""
        self._transform = super().transform()
        if self.adaptive_noise:
            axes = [self.beta * each.sqrt() for each in self.prior_squares]
            flat = torch.cat([each.flatten() for each in axes])
            if float((flat / self.beta).var()) > self.threshold:
                least = _FLOOR * float(flat.square().mean().sqrt())
                within = [each.clamp_min(least) for each in axes]
                self._transform = Transform.ellipsoid(within, box=self.box)
        return self._transform

    def update(self, means: Sequence[torch.Tensor], known: Gradients) -> None:
        """Lines 21 to 26."""
        gradients = self._transform.gradients_of(means)
        for parameter, gradient, noisy, prior, square in zip(
            self.parameters,
            gradients,
            self.noisy_squares,
            self.prior_squares,
            known.squares(),
            strict=True,
        ):
            noisy.mul_(1 - self.rate).add_(gradient.square(), alpha=self.rate)
            prior.mul_(self.memory).add_(square, alpha=1 - self.memory)
            step = gradient
            if self.adaptive_rate:
                step = gradient / (noisy + self.epsilon).sqrt()
            parameter.sub_(step, alpha=self.learning_rate)

    @property
    def noise_varies(self) -> bool:
        """Whether the last step's noise differed between coordinates."""
        return self._transform.scales is not None
