"""PIAdam, PIRMSprop and PIAdagrad (papers/001, Algorithms 1 and 2, Table 1)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from training_client.clipping import Block, Transform
from training_client.elements import inverse_roots
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.source import Gradients, Step
from training_client.plan import Plan
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

    Args:
        model: the model to train.
        plan: what each step does and costs; its clip norm is C.
        rule: the row of Table 1.
        learning_rate: η > 0.
        betas: β₁ and β₂.
        epsilon: added to √s; before anything is known of a coordinate it is all of it.
        options: see `PrivateOptimizer`.
    """

    kept: ClassVar[tuple[str, ...]] = ("steps", "firsts", "squares")

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rule: Rule,
        *,
        learning_rate: float,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(model, plan, **options)
        self.rule: Rule = rule
        self.learning_rate, self.betas, self.epsilon = learning_rate, betas, epsilon
        self.steps = 0
        self.firsts = self.zeros() if rule == "adam" else None  # f
        self.squares = self.zeros()  # s

    def transform(self) -> Transform:
        """D = k/(√s + ε); and b = β₁/(1 − β₁)·f₋ for Adam, so that k·b is f₋'s part of f."""
        firsts = self.firsts
        if firsts is None:
            return Transform(self.plan.clip_norm, self._inverse_root)
        first, second = self.betas
        share, seen = 1 - first ** (self.steps + 1), 1 - second ** max(self.steps, 1)

        def scale(block: Block) -> torch.Tensor:
            return self._inverse_root(block, seen, (1 - first) / share)

        def shift(block: Block) -> torch.Tensor:
            return block.of(firsts) * (first / (1 - first))

        return Transform(self.plan.clip_norm, scale, shift if self.steps > 0 else None)

    def _inverse_root(self, block: Block, share: float = 1.0, factor: float = 1.0) -> torch.Tensor:
        """factor/(√(s/share) + ε)."""
        whole = share**0.5
        return inverse_roots(block.of(self.squares), factor * whole, self.epsilon * whole)

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
