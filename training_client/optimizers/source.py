"""Where the gradients come from that an optimizer's state is made of.

A state that sets later clips or noise decides whether the guarantee is true. Made of noisy
gradients it is post-processing; made of public data it is public; made of the raw gradients, as
papers/000 and papers/001 print it, it leaks, and no theorem covers the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import nn

from training_client.clipping import Block, Loss, Transform


class Gradients(Protocol):
    """Mean gradients as far as they are known, a block at a time."""

    def moments(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean gradient there, and its square without the noise's share; not to be changed."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Mean gradients without noise."""

    means: Sequence[torch.Tensor]

    def moments(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Gradients`."""
        mean = block.of(self.means)
        return mean, mean * mean


@dataclass(frozen=True, slots=True)
class Step:
    """What a step has released, and what it was made of, before its update.

    Its transform may read the optimizer's state: a block is asked for before its state changes.

    Attributes:
        released: the noisy mean of what was clipped, a tensor per parameter.
        transform: that made it of gradients.
        deviation: of the noise on each coordinate of it.
        model: at the parameters that the step was summed at.
        examples, targets: the private batch.
        loss: one value an example.
        size: the expected batch size.
    """

    released: Sequence[torch.Tensor]
    transform: Transform
    deviation: float
    model: nn.Module
    examples: torch.Tensor
    targets: torch.Tensor
    loss: Loss
    size: float

    def moments(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Gradients`: what the release amounts to; the square may fall below 0."""
        return self.transform.moments(block, block.of(self.released), self.deviation)


class Source(Protocol):
    """Gives the gradients that state is made of.

    Attributes:
        state: its name.
        proven: whether a run's guarantee stands.
    """

    state: ClassVar[str]
    proven: ClassVar[bool]

    def gradients(self, step: Step) -> Gradients:
        """Of one step."""
        ...


class Noisy:
    """State is made of what the steps release: post-processing."""

    state: ClassVar[str] = "privatised"
    proven: ClassVar[bool] = True

    def gradients(self, step: Step) -> Gradients:
        """See `Source`: a step is what it says of the gradients."""
        return step


class Public:
    """State is made of public data, of which each step takes a random batch.

    Args:
        examples, targets: public, on the model's device.
        batch_size: of them, a step; all if there are fewer.
    """

    state: ClassVar[str] = "public"
    proven: ClassVar[bool] = True

    def __init__(
        self, examples: torch.Tensor, targets: torch.Tensor, batch_size: int = 256
    ) -> None:
        if len(examples) == 0:
            raise ValueError("public state needs public examples")
        self._examples, self._targets, self._batch_size = examples, targets, batch_size

    def gradients(self, step: Step) -> Gradients:
        """See `Source`: of a public batch, without noise."""
        rows = torch.randperm(len(self._examples), device=self._examples.device)[: self._batch_size]
        examples, targets = self._examples[rows], self._targets[rows]
        return Exact(_summed(step.model, examples, targets, step.loss, len(rows)))


class Raw:
    """State is made of the private gradients themselves, as printed: no guarantee holds."""

    state: ClassVar[str] = "raw"
    proven: ClassVar[bool] = False

    def gradients(self, step: Step) -> Gradients:
        """See `Source`: of the private batch, without clipping and noise."""
        means = _summed(step.model, step.examples, step.targets, step.loss, step.size)
        return Exact(means)


@torch.enable_grad()
def _summed(
    model: nn.Module, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, size: float
) -> list[torch.Tensor]:
    """The ordinary gradient of the summed loss, over a size."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if len(examples) == 0:
        return [torch.zeros_like(p) for p in parameters]
    total = loss(model(examples), targets).sum() / size
    return list(torch.autograd.grad(total, parameters))
