"""ADPPL: less noise for inputs that matter to the output (Gong et al., Neural Networks 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.state_source import StepContext
from training_client.private_step import Block, Transform, flatten_tensors
from training_client.private_step.private_sum import NoisyBlock

_SHARE_MAX = 1e6  # and 1/_SHARE_MAX is the smallest


class Adppl(PrivateOptimizer):
    """ADPPL: gives the gradients of relevant inputs less noise, and those of others more.

    A gradient is multiplied by each coordinate's share, clipped to C, and gets noise σC; the noisy
    mean is divided by the shares again. So the noise on coordinate i of the gradient is σC/shareᵢ,
    and a step costs what one of DP-SGD does. The shares must be known before the run: they are a
    release of their own (`training_client.lab.relevance`), which the budget names in `before`.

    The original was not at hand: this is rebuilt from the description in papers/001 (§5.1). It
    divides ε among coordinates; here the noise has their shape, at the proven cost of a step.

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; the clip norm of its plan is C, of the gradient
            times the shares.
        learning_rate: η > 0.
        shares: one tensor per trained parameter, of numbers from 1e-6 to 1e6.
        options: see `PrivateOptimizer`.

    Raises:
        ValueError: the shares are not of the parameters' shapes, or out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        *,
        learning_rate: float,
        shares: Sequence[torch.Tensor],
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, **options)
        self.learning_rate = learning_rate
        if [each.shape for each in shares] != [each.shape for each in self.parameters]:
            raise ValueError("the shares are not shaped like the trained parameters")
        if not all(
            bool(((each >= 1 / _SHARE_MAX) & (each <= _SHARE_MAX)).all()) for each in shares
        ):
            raise ValueError(f"expected shares from {1 / _SHARE_MAX:g} to {_SHARE_MAX:g}")
        self.shares = flatten_tensors(shares)

    def transform(self) -> Transform:
        """Return the next step's clipping: multiply by the shares, then clip."""

        def scale(block: Block) -> torch.Tensor:
            """Return the shares on a block of coordinates."""
            return block.view_in(self.shares)

        return Transform(self.clip_norm, scale)

    def update(self, step: StepContext) -> None:
        """Descend along the noisy mean gradient, with the shares divided out."""
        step.noisy_mean.for_each_block(self._update_block)

    def _update_block(self, noisy: NoisyBlock) -> None:
        """Update the parameters on one block of coordinates."""
        self.descend(noisy.block, noisy.gradient_moments()[0], self.learning_rate)
