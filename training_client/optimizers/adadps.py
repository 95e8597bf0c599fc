"""AdaDPS and its baselines with public data (papers/004, Algorithm 1, §6.1.1 and Appendix C)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.clipping import Block, Transform, joined
from training_client.elements import inverse_roots
from training_client.optimizers.base import PrivateOptimizer, require_alike
from training_client.optimizers.source import Gradients, Source, Step
from training_client.private_sum import Part

Statistic = Literal["rmsprop", "adam", "adagrad"]
_LEAST: Final = 1e-18  # of side information, and one over the largest


class Statistics:
    """A running statistic of public gradients: the A that gradients are divided by.

    Args:
        zeros: a vector, for the squares.
        statistic: RMSProp's and Adam's moving mean of squares (Adam's with its bias corrected), or
            Adagrad's sum.
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
        """What it keeps."""
        return {"squares": self.squares, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave.

        Raises:
            DataError: it was of another model.
        """
        require_alike("squares", state.get("squares"), self.squares)
        self.squares = state["squares"].to(self.squares.device, copy=True)
        self.steps = state["steps"]

    def take(self, block: Block, square: torch.Tensor) -> None:
        """A block of one more gradient's square; `steps` counts it when all blocks are taken."""
        total = block.of(self.squares)
        if self._statistic == "adagrad":
            total.add_(square)
        else:
            total.mul_(self._decay).add_(square, alpha=1 - self._decay)

    def inverse(self, block: Block, steps: int) -> torch.Tensor:
        """1/A of a block after so many steps, A = √E[g²] + ε; all ones after none."""
        if steps == 0:
            return torch.ones_like(block.of(self.squares))
        share = 1 - self._decay**steps if self._statistic == "adam" else 1.0
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
        statistics = rest.pop("statistics", {})
        super().load_state_dict(rest)
        self.statistics.load_state_dict(statistics)


class AdaDps(_WithStatistics):
    """Divide every example's gradient by A, then clip, add noise and descend.

    A is a statistic of public gradients, or side information that is fixed and no secret, such as
    how often each token occurs.

    Args:
        model: the model to train.
        allowance: allows each step; the clip norm of its plan is C, of ∇/A.
        learning_rate: η > 0.
        momentum: of the noisy mean.
        statistic: of the gradients of `source`, which should be public.
        side_information: A itself, a tensor per parameter, instead of a statistic: numbers from
            1e-18 to 1e18, so that no sum of what is divided by it passes all numbers.
        decay: see `Statistics`.
        epsilon: see `Statistics`.
        options: see `PrivateOptimizer`.
    """

    kept: ClassVar[tuple[str, ...]] = ("velocities",)

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        *,
        learning_rate: float,
        momentum: float = 0.0,
        statistic: Statistic = "rmsprop",
        side_information: Sequence[torch.Tensor] | None = None,
        decay: float = 0.9,
        epsilon: float = 1e-3,
        **options: Any,
    ) -> None:
        super().__init__(model, allowance, **options)
        shapes = [each.shape for each in side_information or self.parameters]
        if shapes != [each.shape for each in self.parameters]:
            raise ValueError("expected side information shaped like the parameters")
        for each in side_information or ():
            if not bool(((each >= _LEAST) & (each <= 1 / _LEAST)).all()):
                raise ValueError(f"expected side information from {_LEAST:g} to {1 / _LEAST:g}")
        self.learning_rate, self.momentum = learning_rate, momentum
        self.side_information = joined(side_information) if side_information else None
        self.statistics = Statistics(self.zeros(), statistic, decay, epsilon)
        self.velocities = self.zeros() if momentum else None

    def transform(self) -> Transform:
        """D = 1/A."""
        return Transform(self.plan.clip_norm, partial(self._scale, self.statistics.steps))

    def _scale(self, steps: int, block: Block) -> torch.Tensor:
        if self.side_information is not None:
            return block.of(self.side_information).reciprocal()
        return self.statistics.inverse(block, steps)

    def update(self, step: Step) -> None:
        """A step with momentum along what was divided by A before it was clipped."""
        if self.side_information is not None:
            step.released.each(self._descend)
            return
        step.released.each(partial(self._take, self.source.gradients(step)))
        self.statistics.steps += 1

    def _take(self, known: Gradients, part: Part) -> None:
        self.statistics.take(part.block, known.moments(part)[1])
        self._descend(part)

    def _descend(self, part: Part) -> None:
        mean = part.mean
        if self.velocities is not None:
            mean = part.block.of(self.velocities).mul_(self.momentum).add_(mean)
        self.descend(part.block, mean, self.learning_rate)


class PublicPreconditioner(_WithStatistics):
    """Clip and add noise first, then divide by A: DP-R-Pub, and DP-Adam-Pub with momentum.

    Args:
        model: the model to train.
        allowance: allows each step, and says by its plan what a step does and costs.
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
        allowance: Allowance,
        source: Source,
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
        self.statistics = Statistics(self.zeros(), statistic, decay, epsilon)
        self.firsts = self.zeros() if first else None

    def update(self, step: Step) -> None:
        """A step along the (mean of the) noisy gradient over A."""
        step.released.each(partial(self._take, self.source.gradients(step)))
        self.statistics.steps += 1

    def _take(self, known: Gradients, part: Part) -> None:
        block, mean, steps = part.block, part.mean, self.statistics.steps + 1
        self.statistics.take(block, known.moments(part)[1])
        if self.firsts is not None:
            mean = block.of(self.firsts).mul_(self.first).add_(mean, alpha=1 - self.first)
        rate = self.learning_rate / (1 - self.first**steps)
        self.descend(block, self.statistics.inverse(block, steps).mul_(mean), rate)
