"""DpOpt: noise shaped by what each coordinate's noise costs (Xiang et al., INFOCOM 2019)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.state_source import GradientEstimate, StepContext
from training_client.private_step import Block, Transform
from training_client.private_step.private_sum import NoisyBlock

_LEAST: Final = 1e-3  # of the root mean square: no coordinate is cut off or without weight


def cheapest_noise(sensitivities: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return noise scales σᵢ, up to a factor, that minimise Σ wᵢσᵢ at a given Σ Δᵢ²/σᵢ².

    Where the derivatives vanish, wᵢ = 2λΔᵢ²/σᵢ³ with one λ: so σᵢ ∝ (Δᵢ²/wᵢ)^(1/3). Sum and
    constraint are convex, so this is the minimum that a projected gradient method approaches.

    Args:
        sensitivities: Δ > 0.
        weights: w > 0.
    """
    return (sensitivities.square() / weights).pow(1 / 3)


class DpOpt(PrivateOptimizer):
    """DpOpt: gives each coordinate the noise that changes the loss least, at the same cost.

    A gradient whose coordinates are within Δ may get noise σᵢ on each coordinate if
    Σ Δᵢ²/σᵢ² ≤ 1/σ² (papers/000, Lemma 1; the seed's own constraint lacks a term, as a footnote
    of papers/000 says). To first order the noise changes the loss by Σ |∂ℓ/∂θᵢ|·σᵢ·√(2/π) at most,
    in expectation. Δ is C times the direction of √E[g²], and |∂ℓ/∂θᵢ| is |E[g]ᵢ|.

    The original was not at hand: this is rebuilt from papers/000 and its abstract. It solves a
    problem with as many variables as parameters in each step; here the minimum is a formula.
    Instead of the box |∇ᵢ| ≤ Δᵢ a gradient is kept in the ellipsoid around it with the noise's half
    axes, which costs the same.

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; the clip norm of its plan is C = ‖Δ‖₂.
        learning_rate: η > 0.
        memory: the weight of old values in E[g] and E[g²], in [0, 1).
        options: see `PrivateOptimizer`.

    Raises:
        ValueError: `memory` is out of range.
    """

    state_attributes: ClassVar[tuple[str, ...]] = ("firsts", "squares")

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        *,
        learning_rate: float,
        memory: float = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, **options)
        if not 0 <= memory < 1:
            raise ValueError(f"expected memory in [0, 1), got {memory}")
        self.learning_rate, self.memory = learning_rate, memory
        self.firsts, self.squares = self.zeros(), self.zeros()  # E[g], E[g²]

    def transform(self) -> Transform:
        """Return the next step's clipping: to a ball without state, later to the noise's shape."""
        firsts, squares = self.firsts.double(), self.squares.double().clamp_min(0)
        # one wait for an accelerator
        mean_square, mean_weight = torch.stack([squares.mean(), firsts.square().mean()]).tolist()
        if not (0 < mean_square < float("inf") and 0 < mean_weight < float("inf")):
            return super().transform()
        deltas = squares.clamp_min(_LEAST**2 * mean_square).sqrt()
        weights = firsts.abs() + _LEAST * mean_weight**0.5
        noise = cheapest_noise(deltas, weights)
        inverse = (deltas.norm() / (deltas / noise).norm() / noise).to(self.squares.dtype)

        def scale(block: Block) -> torch.Tensor:
            """Return the factors 1/σᵢ on a block, such that Δ is mapped to length C."""
            return block.view_in(inverse)

        return Transform(self.clip_norm, scale)

    def update(self, step: StepContext) -> None:
        """Update the moments, and descend along the noisy mean gradient."""
        step.noisy_mean.for_each_block(partial(self._update_block, self.source.gradients(step)))

    def _update_block(self, estimate: GradientEstimate, noisy: NoisyBlock) -> None:
        """Update the moments and the parameters on one block of coordinates."""
        mean, square = estimate.moments(noisy)
        gradient = noisy.gradient_moments()[0]
        noisy.block.view_in(self.firsts).lerp_(mean, 1 - self.memory)
        noisy.block.view_in(self.squares).lerp_(square, 1 - self.memory)
        self.descend(noisy.block, gradient, self.learning_rate)
