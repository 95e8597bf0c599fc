"""PIAdam, PIRMSprop and PIAdagrad (papers/001, Algorithms 1 and 2, Table 1)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.clipping import Block, Transform
from training_client.elements import inverse_roots
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.source import Gradients, Noisy, Step
from training_client.private_sum import Part

Rule = Literal["adam", "rmsprop", "adagrad"]


class PiGdo(PrivateOptimizer):
    """An example's gradient goes through an adaptive rule, then is clipped; plain descent after it.

    Table 1 makes of an example's gradient g the step f/√s, with

        Adagrad:   f = g,                                   s = s₋ + g²
        RMSprop:   f = g,                                   s = β₂s₋ + (1 − β₂)g²
        Adam:      f = (β₁f₋ + (1 − β₁)g)/(1 − β₁ᵗ),        s = (β₂s₋ + (1 − β₂)g²)/(1 − β₂ᵗ).

    Here s and f₋ are those before the step (with their bias corrected in Adam), so that f/√s is
    affine in g: D∘(g + b), which `clipping` sums without any example's gradient. They are made of
    mean gradients, noisy ones unless `source` says otherwise; the paper prints raw ones.

    With `own_squares` s has the example's own g² in it, as printed: D is damped by it. Then what is
    released no longer tells the mean gradient, and state has to come from elsewhere.

    Args:
        model: the model to train.
        allowance: allows each step; the clip norm of its plan is C.
        rule: the row of Table 1.
        learning_rate: η > 0.
        betas: β₁ and β₂.
        epsilon: added to √s₋; before anything is known of a coordinate it is all of it.
        own_squares: as printed; every example's gradient is gone through, number by number.
        options: see `PrivateOptimizer`.

    Raises:
        ValueError: state of noisy gradients is asked for with own squares.
    """

    kept: ClassVar[tuple[str, ...]] = ("steps", "firsts", "squares")

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
        if own_squares and isinstance(self.source, Noisy):
            raise ValueError(
                "with own squares what is released does not tell the mean gradient that state is "
                "made of: take public state, or raw"
            )
        self.rule: Rule = rule
        self.own_squares = own_squares
        self.learning_rate, self.betas, self.epsilon = learning_rate, betas, epsilon
        self.steps = 0
        self.firsts = self.zeros() if rule == "adam" else None  # f
        self.squares = self.zeros()  # s

    def transform(self) -> Transform:
        """D = k/(√(p·s₋) + ε); for Adam b = β₁/(1 − β₁)·f₋, so that k·b is f₋'s part of f.

        With own squares f/√((√(p·s₋) + ε)² + r·g²) = D∘(g + b)/√(1 + (c·D∘g)²) has c = √r/k.
        """
        firsts = self.firsts
        first, factor = self.betas[0], self._factor()
        part, own = self._own() if self.own_squares else (self._part(), 0.0)
        root = part**0.5

        def scale(block: Block) -> torch.Tensor:
            return inverse_roots(block.of(self.squares), factor / root, self.epsilon / root)

        def shift(block: Block) -> torch.Tensor:
            assert firsts is not None
            return block.of(firsts) * (first / (1 - first))

        shifted = shift if firsts is not None and self.steps > 0 else None
        return Transform(self.plan.clip_norm, scale, shifted, damping=own**0.5 / factor)

    def _factor(self) -> float:
        """k, g's part of f."""
        first = self.betas[0]
        return (1 - first) / (1 - first ** (self.steps + 1)) if self.rule == "adam" else 1.0

    def _part(self) -> float:
        """p, of s₋ before the step."""
        seen = 1 - self.betas[1] ** max(self.steps, 1)
        return 1 / seen if self.rule == "adam" else 1.0

    def _own(self) -> tuple[float, float]:
        """p, and r, which is g²'s part, of s in the step."""
        second = self.betas[1]
        if self.rule == "adagrad":
            return 1.0, 1.0
        seen = 1 - second ** (self.steps + 1) if self.rule == "adam" else 1.0
        return second / seen, (1 - second) / seen

    def update(self, step: Step) -> None:
        """Descend along the noisy mean; take the step's gradients into f and s."""
        step.released.each(partial(self._take, self.source.gradients(step)))
        self.steps += 1

    def _take(self, known: Gradients, part: Part) -> None:
        """A part into f and s, and its step."""
        mean, square = known.moments(part)
        first, second = self.betas
        if self.firsts is not None:
            part.block.of(self.firsts).mul_(first).add_(mean, alpha=1 - first)
        squares = part.block.of(self.squares)
        if self.rule == "adagrad":
            squares.add_(square)
        else:
            squares.mul_(second).add_(square, alpha=1 - second)
        self.descend(part.block, part.mean, self.learning_rate)
