"""PIAdam, PIRMSprop and PIAdagrad (papers/001, Algorithms 1 and 2, Table 1)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.state_source import GradientEstimate, NoisySource, StepContext
from training_client.private_step import Block, Transform
from training_client.private_step.kernels.elementwise import inverse_square_roots
from training_client.private_step.private_sum import NoisyBlock

Rule = Literal["adam", "rmsprop", "adagrad"]


class PiGdo(PrivateOptimizer):
    """PIGDO: applies Adam, RMSprop or Adagrad to each example's gradient, then clips and sums.

    The rule is Adam, RMSprop or Adagrad.

    In Table 1 of the paper the rules turn an example's gradient g into f/√s, with

        Adagrad:   f = g,                                   s = s₋ + g²
        RMSprop:   f = g,                                   s = β₂s₋ + (1 − β₂)g²
        Adam:      f = (β₁f₋ + (1 − β₁)g)/(1 − β₁ᵗ),        s = (β₂s₋ + (1 − β₂)g²)/(1 − β₂ᵗ).

    Here s and f₋ are those before the step (with their bias corrected in Adam), so that f/√s is
    affine in g: D∘(g + b), which `private_step` sums without computing each example's gradient.
    They are made of mean gradients: noisy ones unless `source` says otherwise, raw ones in the
    paper.

    With `own_squares` s includes the example's own g², as in the paper: D is damped by it. The mean
    gradient can then no longer be computed from the noisy mean, so the state needs another source.

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; the clip norm of its plan is C.
        rule: the row of Table 1.
        learning_rate: η > 0.
        betas: β₁ and β₂.
        epsilon: added to √s₋, which is 0 for a coordinate until its first gradient.
        own_squares: include the example's own g², as in the paper; every coordinate of every
            example's gradient is then computed.
        options: see `PrivateOptimizer`.

    Raises:
        ValueError: own squares with state made of noisy gradients.
    """

    state_attributes: ClassVar[tuple[str, ...]] = ("steps", "firsts", "squares")

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        rule: Rule,
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-3,
        own_squares: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, **options)
        if own_squares and isinstance(self.source, NoisySource):
            raise ValueError(
                "with own_squares the state cannot be made of noisy gradients, because the mean "
                "gradient cannot be computed from the noisy mean: use state public or raw"
            )
        self.rule: Rule = rule
        self.own_squares = own_squares
        self.learning_rate, self.betas, self.epsilon = learning_rate, betas, epsilon
        self.steps = 0
        self.firsts = self.zeros() if rule == "adam" else None  # f
        self.squares = self.zeros()  # s

    def transform(self) -> Transform:
        """Return the next step's clipping: apply the adaptive rule as shift and scale, then clip.

        D = k/(√(p·s₋) + ε), and for Adam b = β₁/(1 − β₁)·f₋, so that k·b is f₋'s part of f.

        With own squares f/√((√(p·s₋) + ε)² + r·g²) = D∘(g + b)/√(1 + (c·D∘g)²) has c = √r/k.
        """
        firsts = self.firsts
        first, factor = self.betas[0], self._gradient_factor()
        old, own = self._square_weights() if self.own_squares else (self._bias_correction(), 0.0)
        root = old**0.5

        def scale(block: Block) -> torch.Tensor:
            """Return the adaptive rule's scale on a block of coordinates, from the mean squares."""
            return inverse_square_roots(
                block.view_in(self.squares), factor / root, self.epsilon / root
            )

        def shift(block: Block) -> torch.Tensor:
            """Return the adaptive rule's shift on a block of coordinates, from the momentum."""
            assert firsts is not None
            return block.view_in(firsts) * (first / (1 - first))

        shifted = shift if firsts is not None and self.steps > 0 else None
        return Transform(self.clip_norm, scale, shifted, damping=own**0.5 / factor)

    def _gradient_factor(self) -> float:
        """Return the factor by which the adaptive rule multiplies a gradient; 1 except for Adam."""
        first = self.betas[0]
        return (1 - first) / (1 - first ** (self.steps + 1)) if self.rule == "adam" else 1.0

    def _bias_correction(self) -> float:
        """Return Adam's bias correction of the mean squares; 1 for other rules."""
        seen = 1 - self.betas[1] ** max(self.steps, 1)
        return 1 / seen if self.rule == "adam" else 1.0

    def _square_weights(self) -> tuple[float, float]:
        """Return the weights of the old mean squares and of the example's own squared gradient."""
        second = self.betas[1]
        if self.rule == "adagrad":
            return 1.0, 1.0
        seen = 1 - second ** (self.steps + 1) if self.rule == "adam" else 1.0
        return second / seen, (1 - second) / seen

    def update(self, step: StepContext) -> None:
        """Update the parameters by the noisy mean, and the momentum and mean squares."""
        step.noisy_mean.for_each_block(partial(self._update_block, self.source.gradients(step)))
        self.steps += 1

    def _update_block(self, estimate: GradientEstimate, noisy: NoisyBlock) -> None:
        """Update parameters, momentum and running mean squares on one block of coordinates."""
        mean, square = estimate.moments(noisy)
        first, second = self.betas
        if self.firsts is not None:
            noisy.block.view_in(self.firsts).mul_(first).add_(mean, alpha=1 - first)
        squares = noisy.block.view_in(self.squares)
        if self.rule == "adagrad":
            squares.add_(square)
        else:
            squares.mul_(second).add_(square, alpha=1 - second)
        self.descend(noisy.block, noisy.mean, self.learning_rate)
