"""AdaDP and its two halves, AdaL and AdaN (papers/000, Algorithm 1 and §IV-E)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.state_source import (
    NO_EXAMPLE_SQUARES,
    GradientEstimate,
    NoisyEstimate,
    NoisySource,
    StepContext,
)
from training_client.private_step import Block, Transform
from training_client.private_step.kernels.elementwise import (
    inverse_square_roots,
    rmsprop_update,
    sum_square_roots,
)
from training_client.private_step.private_sum import NoisyBlock

_HALF_AXIS_MIN: Final = 1e-3  # of the root mean square half axis: no coordinate stays cut off
_NOISE_DEVIATIONS: Final = 2.0  # standard deviations of E′[g²] by noise; smaller values are unknown


class AdaDp(PrivateOptimizer):
    """AdaDP: adapts the noise and step size of each coordinate to its mean squared gradient.

    Once √E′[g²] varies enough over the coordinates (its variance exceeds G), an example's gradient
    is kept within half axes sᵢ = β·√E′[g²]ᵢ, and the noise on it has standard deviation σ√m·sᵢ
    (Lemma 1 with equality; see `private_step.transform`). Before, it is clipped to C as in DP-SGD.

    In Algorithm 1, E′ is a mean of raw gradients; here `source` decides. If it is made of noisy
    gradients, their noise variance is subtracted. What remains of the noise in E′ has standard
    deviation √R, where the square of a normal variable of variance v has variance 2v²:

        R = γ′²R₋ + (1 − γ′)²·2v²,    with v the noise's variance, averaged over coordinates.

    Without two more rules half axes would grow with their own noise: E′ is taken to be at least
    2√R, and half axes replace the ball only while ‖s‖₂ ≤ C, that is while they add no more noise
    than the ball. Public and raw state has no noise: R = 0, and neither rule applies.

    The paper has a box, |∇ᵢ| ≤ sᵢ. The ellipsoid around that box costs the same, leaves unchanged
    every gradient that the box does, and keeps the direction of those it scales.

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; the clip norm of its plan is C.
        learning_rate: η > 0.
        beta: β > 0, the local clipping factor.
        threshold: G ≥ 0, the local clipping threshold.
        rate: γ, the weight of new values in E[g̃²], the denominator of the step.
        memory: γ′, the weight of old values in E′[g²].
        epsilon: ε₀ > 0, added under the root.
        box: clamp coordinates as in the paper, rather than scale to the ellipsoid.
        example_squares: E′ is the mean of the squares of per-example gradients, rather than the
            square of their mean: (g_t)² in line 23 of Algorithm 1 may be read either way. It needs
            state public, or raw without a claim.
        adaptive_noise: use half axes; without it, AdaL.
        adaptive_rate: divide steps by √E[g̃²]; without it, AdaN.
        options: see `PrivateOptimizer`.
    """

    state_attributes: ClassVar[tuple[str, ...]] = ("noisy_squares", "prior_squares", "uncertainty")

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        *,
        learning_rate: float,
        beta: float = 1.5,
        threshold: float = 1e-6,
        rate: float = 0.1,
        memory: float = 0.9,
        epsilon: float = 1e-8,
        box: bool = False,
        example_squares: bool = False,
        adaptive_noise: bool = True,
        adaptive_rate: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, **options)
        if not (beta > 0 and threshold >= 0 and epsilon > 0):
            raise ValueError(
                f"expected beta > 0, threshold ≥ 0 and epsilon > 0, got {beta}, {threshold} and "
                f"{epsilon}"
            )
        if box and (self.automatic_clipping or self.plan.adaptive_clipping):
            raise ValueError(
                "a box clips coordinates, not examples: leave out box, or automatic_clipping and "
                "the plan's adaptive_clipping"
            )
        self.learning_rate, self.beta, self.threshold = learning_rate, beta, threshold
        self.rate, self.memory, self.epsilon, self.box = rate, memory, epsilon, box
        self.adaptive_noise, self.adaptive_rate = adaptive_noise, adaptive_rate
        if example_squares and not adaptive_noise:
            raise ValueError("example_squares is an option of half axes: AdaL has none")
        if example_squares and isinstance(self.source, NoisySource):
            raise ValueError(NO_EXAMPLE_SQUARES)
        self.example_squares = example_squares
        self.noisy_squares = self.zeros()  # E[g̃²]
        self.prior_squares = self.zeros()  # E′[g²]
        self.uncertainty = 0.0  # R
        self.half_axes: float | None = None  # ‖s‖₂ of the current step; None for a ball

    def transform(self) -> Transform:
        """Return the next step's clipping: to a ball at first, later to an ellipsoid or a box."""
        self.half_axes = None
        if not self.adaptive_noise:
            return super().transform()
        least = _NOISE_DEVIATIONS * math.sqrt(self.uncertainty)
        mean, mean_square = self._root_moments(least)
        length = self.beta * math.sqrt(mean_square * self.size)
        length_max = self.clip_norm if self.uncertainty > 0 else math.inf
        is_usable = math.isfinite(length) and length <= length_max
        if not is_usable or mean_square - mean**2 <= self.threshold:
            return super().transform()
        self.half_axes = length
        least = max(least, _HALF_AXIS_MIN**2 * mean_square)

        def scale(block: Block) -> torch.Tensor:
            """Return the inverse half axes of the ellipsoid or box on a block of coordinates."""
            return inverse_square_roots(
                block.view_in(self.prior_squares), 1 / self.beta, least=least
            )

        return Transform(math.sqrt(self.size), scale, box=self.box)

    def _root_moments(self, least: float) -> tuple[float, float]:
        """Return two means over all mean squares s: of √max(s, least) and of max(s, least)."""
        root, square = sum_square_roots(self.prior_squares, least)
        return root / self.size, square / self.size

    def update(self, step: StepContext) -> None:
        """Update the running mean squares of gradients, and then the parameters.

        This is Algorithm 1, lines 21 to 26.
        """
        estimate = self._estimate_gradients(step)
        step.noisy_mean.for_each_block(partial(self._update_block, estimate))
        if self.adaptive_noise and isinstance(estimate, NoisyEstimate):
            self._update_uncertainty(step.noisy_mean.noise_deviation**2)

    def _estimate_gradients(self, step: StepContext) -> GradientEstimate:
        """Return the gradient estimate that updates the running mean squares."""
        if not self.adaptive_noise:
            return NoisyEstimate()
        if self.example_squares:
            return self.source.example_squares(step)
        return self.source.gradients(step)

    def _update_block(self, estimate: GradientEstimate, noisy: NoisyBlock) -> None:
        """Update the running mean squares and the parameters on one block of coordinates."""
        gradient, square = noisy.gradient_moments()
        if self.adaptive_noise:
            is_noisy = isinstance(estimate, NoisyEstimate)
            square = square if is_noisy else estimate.moments(noisy)[1]
            prior = noisy.block.view_in(self.prior_squares)
            prior.mul_(self.memory).add_(square, alpha=1 - self.memory)
        if self.adaptive_rate:
            mean_square = noisy.block.view_in(self.noisy_squares)
            gradient = rmsprop_update(gradient, mean_square, rate=self.rate, epsilon=self.epsilon)
        self.descend(noisy.block, gradient, self.learning_rate)

    def _update_uncertainty(self, variance: float) -> None:
        """Update the variance that the steps' noise causes in the running mean squares.

        `variance` is that of the noise on a coordinate of this step's mean.
        """
        if self.half_axes is not None:
            variance *= self.half_axes**2 / self.size
        added = 2 * ((1 - self.memory) * variance) ** 2
        self.uncertainty = self.memory**2 * self.uncertainty + added
