"""AdaDPS and its baselines with public data (papers/004, Algorithm 1, §6.1.1 and Appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from training_client.clipping import Block, Transform
from training_client.elements import inverse_roots
from training_client.optimizers.base import PrivateOptimizer
from training_client.optimizers.source import Gradients, Source, Step
from training_client.plan import Plan

Statistic = Literal["rmsprop", "adam", "adagrad"]


class Statistics:
    """A running statistic of public gradients: the A that gradients are divided by.

    Args:
        like: the parameters.
        statistic: RMSProp's and Adam's moving mean of squares (Adam's with its bias corrected), or
            Adagrad's sum.
        decay: β of the moving mean.
        epsilon: added to the root.
    """

    def __init__(
        self, like: Sequence[torch.Tensor], statistic: Statistic, decay: float, epsilon: float
    ) -> None:
        self._statistic, self._decay, self._epsilon = statistic, decay, epsilon
        self.squares = [torch.zeros_like(each) for each in like]
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """What it keeps."""
        return {"squares": self.squares, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave."""
        self.squares, self.steps = state["squares"], state["steps"]

    def take(self, known: Gradients, blocks: Sequence[Block]) -> None:
        """One more gradient."""
        for block in blocks:
            total, (_, square) = block.of(self.squares), known.moments(block)
            if self._statistic == "adagrad":
                total.add_(square)
            else:
                total.mul_(self._decay).add_(square, alpha=1 - self._decay)
        self.steps += 1

    def inverse(self, block: Block) -> torch.Tensor:
        """1/A of a block, A = √E[g²] + ε; all ones before the first gradient."""
        if self.steps == 0:
            return torch.ones_like(block.of(self.squares))
        share = 1 - self._decay**self.steps if self._statistic == "adam" else 1.0
        whole = share**0.5
        return inverse_roots(block.of(self.squares), whole, self._epsilon * whole)


class _WithStatistics(PrivateOptimizer):
    """One that keeps a statistic."""

    statistics: Statistics

    def state_dict(self) -> dict[str, Any]:
        """See `PrivateOptimizer`: with the statistic."""
        return super().state_dict() | {"statistics": self.statistics.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PrivateOptimizer`."""
        rest = dict(state)
        self.statistics.load_state_dict(rest.pop("statistics", {}))
        super().load_state_dict(rest)


class AdaDps(_WithStatistics):
    """Divide every example's gradient by A, then clip, add noise and descend.

    A is a statistic of public gradients, or side information that is fixed and no secret, such as
    how often each token occurs.

    Args:
        model: the model to train.
        plan: what each step does and costs; its clip norm is C, of ∇/A.
        learning_rate: η > 0.
        momentum: of the noisy mean.
        statistic: of the gradients of `source`, which should be public.
        side_information: A itself, a tensor > 0 per parameter, instead of a statistic.
        decay: see `Statistics`.
        epsilon: see `Statistics`.
        options: see `PrivateOptimizer`.
    """

    kept: ClassVar[tuple[str, ...]] = ("velocities",)

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        statistic: Statistic = "rmsprop",
        side_information: Sequence[torch.Tensor] | None = None,
        decay: float = 0.9,
        epsilon: float = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(model, plan, **options)
        self.learning_rate, self.momentum = learning_rate, momentum
        self.side_information = side_information
        self.statistics = Statistics(self.parameters, statistic, decay, epsilon)
        moving = self.parameters if momentum else []
        self.velocities = [torch.zeros_like(p) for p in moving]

    def transform(self) -> Transform:
        """D = 1/A."""
        return Transform(self.plan.clip_norm, self._scale)

    def _scale(self, block: Block) -> torch.Tensor:
        if self.side_information is not None:
            return block.of(self.side_information).reciprocal()
        return self.statistics.inverse(block)

    def update(self, step: Step) -> None:
        """A step with momentum along what was divided by A before it was clipped."""
        if self.side_information is None:  # of this step's parameters: before they change
            self.statistics.take(self.source.gradients(step), self.blocks)
        for block in self.blocks:
            mean = block.of(step.released)
            if self.velocities:
                mean = block.of(self.velocities).mul_(self.momentum).add_(mean)
            block.of(self.parameters).sub_(mean, alpha=self.learning_rate)


class PublicPreconditioner(_WithStatistics):
    """Clip and add noise first, then divide by A: DP-R-Pub, and DP-Adam-Pub with momentum.

    Args:
        model: the model to train.
        plan: what each step does and costs.
        source: public gradients.
        learning_rate: η > 0.
        first: β₁, of a moving mean of noisy gradients with its bias corrected; 0 is DP-R-Pub.
        decay: see `Statistics`.
        epsilon: see `Statistics`.
        options: see `PrivateOptimizer`.
    """

    kept: ClassVar[tuple[str, ...]] = ("firsts",)

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        source: Source,
        *,
        learning_rate: float,
        first: float = 0.0,
        decay: float = 0.9,
        epsilon: float = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(model, plan, source=source, **options)
        self.learning_rate, self.first = learning_rate, first
        statistic: Statistic = "adam" if first else "rmsprop"
        self.statistics = Statistics(self.parameters, statistic, decay, epsilon)
        moving = self.parameters if first else []
        self.firsts = [torch.zeros_like(p) for p in moving]

    def update(self, step: Step) -> None:
        """A step along the (mean of the) noisy gradient over A."""
        self.statistics.take(self.source.gradients(step), self.blocks)
        rate = self.learning_rate / (1 - self.first**self.statistics.steps)
        for block in self.blocks:
            mean = block.of(step.released)
            if self.firsts:
                mean = block.of(self.firsts).mul_(self.first).add_(mean, alpha=1 - self.first)
            inverse = self.statistics.inverse(block)
            block.of(self.parameters).addcmul_(mean, inverse, value=-rate)
