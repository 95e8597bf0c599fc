"""The only code that sees private data and lets anything out: a clipped sum with noise.

Everything after it is post-processing, everything before it must be known without the batch. So it
is here that an allowance is asked: there is no release without a step of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from training_client.budget import Allowance
from training_client.clipping import Affine, Block, Clipper, Loss, Sum, Transform
from training_client.clipping.blocks import split
from training_client.errors import DataError, NoGuaranteeError
from training_client.noise import FreshGenerator, gaussian_like
from training_client.plan import Plan
from training_client.processes import require_one_process


@dataclass(frozen=True, slots=True)
class Part:
    """What a step lets out of one block.

    Attributes:
        block: which.
        mean: the noisy sum of what was clipped over the expected batch size, of its numbers.
        affine: what gradients were mapped by before the clip.
        deviation: of the noise on each coordinate of the mean.
    """

    block: Block
    mean: torch.Tensor
    affine: Affine
    deviation: float

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the mean amounts to: the mean gradient, and its square, which may fall below 0."""
        return self.affine.moments(self.mean, self.deviation)


class Release:
    """What a step lets out, a block at a time: the noise is drawn when a block is taken.

    Attributes:
        mean_loss: of the batch, without noise: for the data owner's eyes only.
        deviation: of the noise on each coordinate of the means.

    Args:
        mean_loss: see above.
        deviation: see above.
        blocks: all of them.
        parameters: whose gradients they are.
        part: makes what is let out of a block, with its mean in the tensor given.
    """

    def __init__(
        self,
        mean_loss: float,
        deviation: float,
        blocks: Sequence[Block],
        parameters: Sequence[torch.Tensor],
        part: Callable[[Block, torch.Tensor], Part],
    ) -> None:
        self.mean_loss, self.deviation = mean_loss, deviation
        self._blocks: Sequence[Block] | None = blocks
        self._parameters, self._part = parameters, part

    def each(self, take: Callable[[Part], None]) -> None:
        """Give out block after block; of one nothing need be left when the next is made.

        Raises:
            RuntimeError: it was taken already.
        """
        for block in self._once():
            take(self._part(block, self._parameters[0].new_empty(block.size)))

    def whole(self) -> list[torch.Tensor]:
        """All means, a tensor per parameter.

        Raises:
            RuntimeError: it was taken already.
        """
        blocks = self._once()
        means = self._parameters[0].new_empty(sum(block.size for block in blocks))
        for block in blocks:
            self._part(block, block.of(means))
        return split(means, self._parameters)

    def _once(self) -> Sequence[Block]:
        blocks, self._blocks = self._blocks, None
        if blocks is None:
            raise RuntimeError("a step's release is taken once: what came again would be another")
        return blocks


class PrivateSum:
    """Releases noisy means of clipped gradients, one for each step of an allowance.

    Attributes:
        allowance: that covers the releases.
        clipper: sums what is clipped.
        steps: that count as made; those of an earlier run with the allowance are among them.

    Args:
        model: whose gradients.
        allowance: see above; its plan says what each release does and costs.
        generator: of the noise, on the model's device; seeded by the operating system by default.
        physical_batch_size: see `Clipper`.
        sparse_inputs: see `Clipper`.

    Raises:
        NoGuaranteeError: there is no allowance, or several processes train.
        UnsupportedModelError: a layer cannot be clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        allowance: Allowance,
        generator: torch.Generator | None = None,
        physical_batch_size: int | None = None,
        *,
        sparse_inputs: bool = False,
    ) -> None:
        require_one_process()
        if not hasattr(allowance, "take"):
            raise NoGuaranteeError(
                f"expected an allowance that covers the steps, got {type(allowance).__name__}: "
                "give a Budget or a LedgerBudget, or NoBudget(plan, steps, reason) for steps "
                "without a privacy claim"
            )
        self.allowance = allowance
        self.clipper = Clipper(model, physical_batch_size, sparse_inputs=sparse_inputs)
        self._device = self.clipper.parameters[0].device
        self._generator = generator or FreshGenerator(self._device)
        self.steps = allowance.made
        self._taken = False  # the last of them, and it has no release yet
        self._begun = False  # its batch was looked at

    @property
    def plan(self) -> Plan:
        """What each release does and costs."""
        return self.allowance.plan

    def take(self) -> None:
        """Take the next step from the allowance, for one release.

        To be called before the batch is drawn: what is drawn is then charged, whatever becomes of
        it. A release for which no step was taken takes one.

        Raises:
            BudgetExhaustedError: the allowance covers no further step.
            NoGuaranteeError: another run took the step, the step before has no release, or several
                processes train.
            ServiceError: no usable answer.
        """
        require_one_process()
        if self._taken:
            raise NoGuaranteeError(
                f"step {self.steps} was taken and not made: what stopped it may be a record of its "
                "batch, and no noise hides that. Begin a new run, with an optimizer of its own"
            )
        self.allowance.take(self.steps + 1)
        self.steps += 1
        self._taken, self._begun = True, False

    def release(
        self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, transform: Transform
    ) -> Release:
        """Of one Poisson batch (which may be empty: the noise is added all the same).

        Raises:
            BudgetExhaustedError, NoGuaranteeError, ServiceError: see `take`; nothing was computed.
            DataError: the examples are on another device than the model.
        """
        if examples.device != self._device:
            raise DataError(f"the examples are on {examples.device}, the model on {self._device}")
        if not self._taken or self._begun:
            self.take()
        self._begun = True
        total = self.summed(examples, targets, loss, transform)
        self._taken = False
        size = self.plan.expected_batch_size
        return Release(
            total.mean_loss,
            self.plan.noise_multiplier * transform.bound / size,
            self.clipper.blocks,
            self.clipper.parameters,
            partial(self._part, total, transform),
        )

    @torch.no_grad()
    def _part(self, total: Sum, transform: Transform, block: Block, mean: torch.Tensor) -> Part:
        affine, size = transform.at(block), self.plan.expected_batch_size
        deviation = self.plan.noise_multiplier * transform.bound / size
        total.on(block, affine, mean)
        torch.add(gaussian_like(mean, deviation, self._generator), mean, alpha=1 / size, out=mean)
        return Part(block, mean, affine, deviation)

    def summed(
        self, examples: torch.Tensor, targets: torch.Tensor, loss: Loss, transform: Transform
    ) -> Sum:
        """The clipped sum over a batch of any size, without noise: nobody else may look at it."""
        return self.clipper.clip(examples, targets, loss, transform)
