"""Where the gradients come from that an optimizer's state is made of.

A state that sets later clips or noise decides whether the guarantee is true. Made of noisy
gradients it is post-processing; made of public data it is public; made of the raw gradients, as
papers/000 and papers/001 print it, it leaks, and no theorem covers the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import torch

from training_client.clipping import Affine, Clipper, Loss, Sum
from training_client.errors import DataError
from training_client.private_sum import Part, Release

PUBLIC_BATCH_SIZE: Final = 64  # the mini-batches of papers/004, Appendix B


class Gradients(Protocol):
    """Mean gradients as far as they are known, a block at a time."""

    def moments(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean gradient where a part is, and its square without the noise's share.

        Neither is to be changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Mean gradients without clip and noise."""

    means: Sum

    def moments(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Gradients`."""
        mean = torch.empty_like(part.mean)
        self.means.on(part.block, Affine(None), mean)
        return mean, mean * mean


class Released:
    """Mean gradients by what a step lets out."""

    def moments(self, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Gradients`: the square may fall below 0."""
        return part.moments()


@dataclass(frozen=True, slots=True)
class Step:
    """What a step lets out, and what it is made of, before its update.

    The map of a block may be made of the optimizer's state there, which changes only after the
    part of that block was taken.

    Attributes:
        released: parts of means, each once.
        clipper: of the model, at the parameters that the step is summed at.
        examples, targets: the private batch.
        loss: one value an example.
        size: the expected batch size.
    """

    released: Release
    clipper: Clipper
    examples: torch.Tensor
    targets: torch.Tensor
    loss: Loss
    size: float


class Source(Protocol):
    """Gives the gradients that state is made of.

    Attributes:
        state: its name.
        proven: whether a run's guarantee stands.
    """

    state: ClassVar[str]
    proven: ClassVar[bool]

    def gradients(self, step: Step, /) -> Gradients:
        """Of one step."""
        ...


class Noisy:
    """State is made of what the steps release: post-processing."""

    state: ClassVar[str] = "privatised"
    proven: ClassVar[bool] = True

    def gradients(self, _: Step, /) -> Gradients:
        """See `Source`."""
        return Released()


class Public:
    """State is made of public data, of which each step takes a random batch.

    Args:
        examples, targets: public, on the model's device.
        batch_size: of them, a step; all if there are fewer.

    Raises:
        DataError: they are not all finite numbers.
    """

    state: ClassVar[str] = "public"
    proven: ClassVar[bool] = True

    def __init__(
        self, examples: torch.Tensor, targets: torch.Tensor, batch_size: int = PUBLIC_BATCH_SIZE
    ) -> None:
        if len(examples) == 0:
            raise ValueError("public state needs public examples")
        if not (bool(examples.isfinite().all()) and bool(targets.isfinite().all())):
            raise DataError("the public examples are not all finite numbers")
        self._examples, self._targets, self._batch_size = examples, targets, batch_size

    def gradients(self, step: Step) -> Gradients:
        """See `Source`: of a public batch, without noise.

        Raises:
            DataError: its loss is no number, which would stay in the state for good.
        """
        rows = torch.randperm(len(self._examples), device=self._examples.device)[: self._batch_size]
        examples, targets = self._examples[rows], self._targets[rows]
        return _finite(step.clipper.add_up(examples, targets, step.loss, len(rows)), "public")


class Raw:
    """State is made of the private gradients themselves, as printed: no guarantee holds."""

    state: ClassVar[str] = "raw"
    proven: ClassVar[bool] = False

    def gradients(self, step: Step) -> Gradients:
        """See `Source`: of the private batch, without clipping and noise.

        Raises:
            DataError: its loss is no number, which would stay in the state for good.
        """
        found = step.clipper.add_up(step.examples, step.targets, step.loss, step.size)
        return _finite(found, "private")


def _finite(found: Sum, kind: str) -> Gradients:
    """What is known exactly, if it is anything."""
    if not math.isfinite(found.mean_loss):
        raise DataError(
            f"the loss of the {kind} examples has become {found.mean_loss}: lower the learning rate"
        )
    return Exact(found)
