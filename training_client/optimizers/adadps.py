"""AdaDPS and its baselines with public data (papers/004, Algorithm 1, §6.1.1 and Appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.optimizers.base import PrivateOptimizer, require_same_kind
from training_client.optimizers.state_source import (
    GradientEstimate,
    PublicSource,
    StateSource,
    StepContext,
)
from training_client.private_step import Block, Transform, flatten_tensors
from training_client.private_step.batches import TargetLoss
from training_client.private_step.kernels.elementwise import inverse_square_roots
from training_client.private_step.private_sum import NoisyBlock

Statistic = Literal["rmsprop", "adam", "adagrad"]
_SIDE_INFORMATION_MIN: Final = 1e-18  # and 1/_SIDE_INFORMATION_MIN is the largest


class SquareStatistic:
    """A running mean or sum of squared gradients, which gives a preconditioner.

    Args:
        zeros: a vector of zeros, for the squares.
        statistic: the moving mean of squares of RMSProp or Adam (Adam's with its bias corrected),
            or Adagrad's sum of squares.
        decay: β of the moving mean.
        epsilon: added to the root.
    """

    def __init__(
        self, zeros: torch.Tensor, statistic: Statistic, decay: float, epsilon: float
    ) -> None:
        self._statistic, self._decay, self._epsilon = statistic, decay, epsilon
        self.squares = zeros
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the running squares and the number of steps, for a checkpoint."""
        return {"squares": self.squares, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            DataError: the checkpoint is of another model.
        """
        require_same_kind("squares", state.get("squares"), self.squares)
        self.squares = state["squares"].to(self.squares.device, copy=True)
        self.steps = state["steps"]

    def update_block(self, block: Block, square: torch.Tensor) -> None:
        """Add one more squared gradient, on a block of coordinates, to the running squares.

        The caller increases `steps` after all blocks.
        """
        total = block.view_in(self.squares)
        if self._statistic == "adagrad":
            total.add_(square)
        else:
            total.mul_(self._decay).add_(square, alpha=1 - self._decay)

    def inverse(self, block: Block, steps: int) -> torch.Tensor:
        """Return the inverse preconditioner on a block of coordinates; ones before any update."""
        if steps == 0:
            return torch.ones_like(block.view_in(self.squares))
        bias = 1 - self._decay**steps if self._statistic == "adam" else 1.0
        root = bias**0.5
        return inverse_square_roots(block.view_in(self.squares), root, self._epsilon * root)


class _StatisticOptimizer(PrivateOptimizer):
    """Base of optimizers whose state includes running squares of gradients."""

    statistics: SquareStatistic

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, including the running squares, for a checkpoint."""
        return super().state_dict() | {"statistics": self.statistics.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            DataError: another optimizer or model returned it.
        """
        rest = dict(state)
        statistics = rest.pop("statistics", {})
        super().load_state_dict(rest)
        self.statistics.load_state_dict(statistics)


class AdaDps(_StatisticOptimizer):
    """AdaDPS: scales each example's gradient by a preconditioner, then clips and adds noise.

    A is a statistic of public gradients, or fixed side information that is not secret, such as how
    often each token occurs.

    With Adam's first moment m of the same gradients, an example's gradient g becomes
    (β₁m + (1 − β₁)g)/((1 − β₁ᵏ⁺¹)A), where k is the number of gradients in m and A. By default
    these are those of earlier steps, and A is 1 at the first. With `current_statistic` they include
    this step's public gradient, as in Algorithm 1; it is computed before the private batch is used.

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; the clip norm of its plan is C, for ∇/A.
        learning_rate: η > 0.
        momentum: of the noisy mean.
        statistic: which statistic of the gradients of `source`, which should be public.
        first: β₁ of the first moment m, in [0, 1); 0 leaves it out. The paper's Adam has it.
        current_statistic: include this step's public gradient in A and m; it needs public state.
        side_information: A itself, one tensor per parameter, instead of a statistic: values from
            1e-18 to 1e18, so that sums of gradients divided by it do not overflow.
        decay: see `SquareStatistic`.
        epsilon: see `SquareStatistic`.
        options: see `PrivateOptimizer`.

    Raises:
        ValueError: `first` is not in [0, 1), or it or `current_statistic` is given with side
            information, or the side information is not of the parameters' shapes or out of range,
            or `current_statistic` is given without public state.
    """

    state_attributes: ClassVar[tuple[str, ...]] = ("velocities", "firsts")

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        statistic: Statistic = "rmsprop",
        first: float = 0.0,
        current_statistic: bool = False,
        side_information: Sequence[torch.Tensor] | None = None,
        decay: float = 0.9,
        epsilon: float = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, **options)
        if not 0 <= first < 1:
            raise ValueError(f"expected first in [0, 1), got {first}")
        if first and side_information:
            raise ValueError("first is of the statistic's gradients: side information has none")
        if current_statistic and (side_information or not isinstance(self.source, PublicSource)):
            raise ValueError(
                "current_statistic is of this step's public gradient: it needs state public, and "
                "no side information"
            )
        given, expected = _shapes(side_information or self.parameters), _shapes(self.parameters)
        if given != expected:
            raise ValueError(
                f"expected side information shaped like the parameters, {expected}, got {given}"
            )
        for each in side_information or ():
            if not bool(
                ((each >= _SIDE_INFORMATION_MIN) & (each <= 1 / _SIDE_INFORMATION_MIN)).all()
            ):
                raise ValueError(
                    f"expected side information from {_SIDE_INFORMATION_MIN:g} to "
                    f"{1 / _SIDE_INFORMATION_MIN:g}, got {float(each.min()):g} to "
                    f"{float(each.max()):g}"
                )
        self.learning_rate, self.momentum = learning_rate, momentum
        self.side_information = flatten_tensors(side_information) if side_information else None
        self.statistics = SquareStatistic(self.zeros(), statistic, decay, epsilon)
        self.velocities = self.zeros() if momentum else None
        self.first = first
        self.firsts = self.zeros() if first else None
        self.current_statistic = current_statistic

    def prepare(self, loss: TargetLoss) -> None:
        """With `current_statistic`, update A and m from a public batch before the private one."""
        if not (self.current_statistic and isinstance(self.source, PublicSource)):
            return
        found = self.source.draw_gradients(
            self.private_sum.clipper, loss, self.private_sum.processes
        )
        with torch.no_grad():
            for block in self.blocks:
                like = torch.empty_like(block.view_in(self.statistics.squares))
                self._update_moments(block, *found.write_moments(block, like))
        self.statistics.steps += 1

    def transform(self) -> Transform:
        """Return the next step's clipping: shift by m and scale by 1/A, then clip."""
        steps = self.statistics.steps
        shift = self._shift if self.firsts is not None and steps else None
        return Transform(self.clip_norm, partial(self._scale, steps), shift)

    def _shift(self, block: Block) -> torch.Tensor:
        """Return what is added to gradients on a block of coordinates: m's part of the moment."""
        assert self.firsts is not None
        return block.view_in(self.firsts) * (self.first / (1 - self.first))

    def _scale(self, steps: int, block: Block) -> torch.Tensor:
        """Return the factors for gradients (1/preconditioner) on a block of coordinates."""
        if self.side_information is not None:
            return block.view_in(self.side_information).reciprocal()
        inverse = self.statistics.inverse(block, steps)
        own = (1 - self.first) / (1 - self.first ** (steps + 1))
        return inverse.mul_(own) if self.first else inverse

    def update(self, step: StepContext) -> None:
        """Update the parameters by the noisy mean of scaled gradients, and the running squares."""
        if self.side_information is not None or self.current_statistic:
            step.noisy_mean.for_each_block(self._descend_with_momentum)
            return
        step.noisy_mean.for_each_block(partial(self._update_block, self.source.gradients(step)))
        self.statistics.steps += 1

    def _update_block(self, estimate: GradientEstimate, noisy: NoisyBlock) -> None:
        """Update the moments and the parameters on one block of coordinates."""
        self._update_moments(noisy.block, *estimate.moments(noisy))
        self._descend_with_momentum(noisy)

    def _update_moments(self, block: Block, mean: torch.Tensor, square: torch.Tensor) -> None:
        """Add one more gradient to the running squares and the first moment on a block."""
        self.statistics.update_block(block, square)
        if self.firsts is not None:
            block.view_in(self.firsts).mul_(self.first).add_(mean, alpha=1 - self.first)

    def _descend_with_momentum(self, noisy: NoisyBlock) -> None:
        """Update the momentum, and subtract it from the parameters, on one block."""
        mean = noisy.mean
        if self.velocities is not None:
            mean = noisy.block.view_in(self.velocities).mul_(self.momentum).add_(mean)
        self.descend(noisy.block, mean, self.learning_rate)


class PublicPreconditioner(_StatisticOptimizer):
    """DP-R-Pub and DP-Adam-Pub: clip, add noise, then divide by a public preconditioner.

    Args:
        model: the model to train.
        allowance: the budget that covers the steps; its plan says what a step does and costs.
        source: source of the public gradients.
        learning_rate: η > 0.
        first: β₁ of the moving mean of noisy gradients, its bias corrected; 0 is DP-R-Pub.
        decay: see `SquareStatistic`.
        epsilon: see `SquareStatistic`.
        options: see `PrivateOptimizer`.
    """

    state_attributes: ClassVar[tuple[str, ...]] = ("firsts",)

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        source: StateSource,
        *,
        learning_rate: float,
        first: float = 0.0,
        decay: float = 0.9,
        epsilon: float = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, source=source, **options)
        self.learning_rate, self.first = learning_rate, first
        statistic: Statistic = "adam" if first else "rmsprop"
        self.statistics = SquareStatistic(self.zeros(), statistic, decay, epsilon)
        self.firsts = self.zeros() if first else None

    def update(self, step: StepContext) -> None:
        """Update parameters by the noisy mean or its average, divided by the preconditioner."""
        step.noisy_mean.for_each_block(partial(self._update_block, self.source.gradients(step)))
        self.statistics.steps += 1

    def _update_block(self, estimate: GradientEstimate, noisy: NoisyBlock) -> None:
        """Update the running squares and the parameters on one block of coordinates."""
        block, mean, steps = noisy.block, noisy.mean, self.statistics.steps + 1
        self.statistics.update_block(block, estimate.moments(noisy)[1])
        if self.firsts is not None:
            mean = block.view_in(self.firsts).mul_(self.first).add_(mean, alpha=1 - self.first)
        rate = self.learning_rate / (1 - self.first**steps)
        self.descend(block, self.statistics.inverse(block, steps).mul_(mean), rate)


def _shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Return the tensors' shapes."""
    return [tuple(each.shape) for each in tensors]
