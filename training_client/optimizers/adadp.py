"""AdaDP and its two halves, AdaL and AdaN (papers/000, Algorithm 1 and §IV-E)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.clipping import Block, Transform
from training_client.elements import inverse_roots, over_root, sums_of_roots
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.source import Gradients, Released, Step
from training_client.private_sum import Part

_FLOOR: Final = 1e-3  # of the root mean square half axis: no coordinate is cut off for good
_DEVIATIONS: Final = 2.0  # of what noise leaves in E′[g²]: less than that is not known


class AdaDp(PrivateOptimizer):
    """Noise where gradients have been large, and a step that is divided by their size.

    Once the deviation √E′[g²] varies enough over the coordinates (its variance exceeds G), an
    example's gradient is kept within half axes sᵢ = β·√E′[g²]ᵢ and the noise deviates by σ√m·sᵢ
    (Lemma 1 with equality; see `clipping.transform`). Before, it is clipped to C as in DP-SGD.

    Algorithm 1 prints E′ as a mean of raw gradients: see `source`. From noisy ones the noise's
    variance is taken off; E′ then still deviates from E[g²] by √R, where the square of a normal
    variable of variance v has variance 2v²:

        R = γ′²R₋ + (1 − γ′)²·2v²,    with v the noise's variance, averaged over coordinates.

    Half axes would otherwise feed on their own noise, so E′ counts for 2√R at least, and they take
    the ball's place only while ‖s‖₂ ≤ C, which is while they add no more noise than it does. Public
    and raw state has no noise, R = 0, and neither rule.

    It prints a box, |∇ᵢ| ≤ sᵢ; the ellipsoid around that box costs the same, leaves alone what the
    box leaves alone, and keeps the direction of what it scales.

    Args:
        model: the model to train.
        allowance: allows each step; the clip norm of its plan is C.
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

    kept: ClassVar[tuple[str, ...]] = ("noisy_squares", "prior_squares", "uncertainty")

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
        adaptive_noise: bool = True,
        adaptive_rate: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, **options)
        if not (beta > 0 and threshold >= 0 and epsilon > 0):
            raise ValueError("expected beta > 0, threshold ≥ 0 and epsilon > 0")
        self.learning_rate, self.beta, self.threshold = learning_rate, beta, threshold
        self.rate, self.memory, self.epsilon, self.box = rate, memory, epsilon, box
        self.adaptive_noise, self.adaptive_rate = adaptive_noise, adaptive_rate
        self.noisy_squares = self.zeros()  # E[g̃²]
        self.prior_squares = self.zeros()  # E′[g²]
        self.uncertainty = 0.0  # R
        self.half_axes: float | None = None  # ‖s‖₂ of the step at hand; None in the ball

    def transform(self) -> Transform:
        """An ellipsoid or a box, once enough is known; C before that."""
        self.half_axes = None
        if not self.adaptive_noise:
            return super().transform()
        least = _DEVIATIONS * math.sqrt(self.uncertainty)
        mean, mean_square = self._root_moments(least)
        length = self.beta * math.sqrt(mean_square * self.size)
        longest = self.plan.clip_norm if self.uncertainty > 0 else math.inf
        known = math.isfinite(length) and length <= longest
        if not known or mean_square - mean**2 <= self.threshold:
            return super().transform()
        self.half_axes = length
        least = max(least, _FLOOR**2 * mean_square)

        def scale(block: Block) -> torch.Tensor:
            return inverse_roots(block.of(self.prior_squares), 1 / self.beta, least=least)

        return Transform(math.sqrt(self.size), scale, box=self.box)

    def _root_moments(self, least: float) -> tuple[float, float]:
        """Mean and mean square of √E′[g²] over all coordinates."""
        root, square = sums_of_roots(self.prior_squares, least)
        return root / self.size, square / self.size

    def update(self, step: Step) -> None:
        """Lines 21 to 26."""
        known = self.source.gradients(step) if self.adaptive_noise else Released()
        step.released.each(partial(self._take, known))
        if self.adaptive_noise and isinstance(known, Released):
            self._doubt(step.released.deviation**2)

    def _take(self, known: Gradients, part: Part) -> None:
        """A part into E′ and E, and its step."""
        gradient, square = part.moments()
        if self.adaptive_noise:
            square = square if isinstance(known, Released) else known.moments(part)[1]
            prior = part.block.of(self.prior_squares)
            prior.mul_(self.memory).add_(square, alpha=1 - self.memory)
        if self.adaptive_rate:
            noisy = part.block.of(self.noisy_squares)
            gradient = over_root(gradient, noisy, rate=self.rate, epsilon=self.epsilon)
        self.descend(part.block, gradient, self.learning_rate)

    def _doubt(self, variance: float) -> None:
        """R, from the variance of the noise on each coordinate of what was released."""
        if self.half_axes is not None:
            variance *= self.half_axes**2 / self.size
        fresh = 2 * ((1 - self.memory) * variance) ** 2
        self.uncertainty = self.memory**2 * self.uncertainty + fresh
