"""Sources of the gradients that update optimizer state: noisy, public or raw.

State that sets later clips or noise decides whether the guarantee holds. Made of noisy gradients it
is post-processing; made of public data it is public; made of raw gradients, as in papers/000 and
papers/001, it leaks, and no theorem covers the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final, Protocol

import torch

from training_client.errors import DataError, NoGuaranteeError
from training_client.private_step import AffineMap, Block, BlockwiseSum, Clipper
from training_client.private_step.batches import (
    Examples,
    TargetLoss,
    Targets,
    by_row,
    count_examples,
    device_of,
    select_examples,
    tensors_of,
)
from training_client.private_step.private_sum import NoisyBlock, NoisyMean
from training_client.private_step.processes.step_processes import OneProcess, StepProcesses

PUBLIC_BATCH_SIZE: Final = 64  # the mini-batches of papers/004, Appendix B
NO_EXAMPLE_SQUARES: Final = (
    "the mean of per-example squares cannot be made of noisy mean gradients, and a release of its "
    "own would be noise almost alone (docs/optimizers.md): use state public, or raw without a claim"
)


class GradientEstimate(Protocol):
    """Interface of an estimate of a step's mean gradient and its square, read block by block."""

    def moments(self, noisy: NoisyBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Return estimates of mean gradient and its elementwise square on a block of coordinates.

        The variance of the noise is subtracted from the square.

        Neither may be changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExactEstimate:
    """An estimate from a batch's exact mean gradient, without clipping or noise.

    Attributes:
        mean: the mean gradient, as a blockwise sum.
    """

    mean: BlockwiseSum

    def moments(self, noisy: NoisyBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the exact mean gradient and its elementwise square on the block of `noisy`."""
        return self.write_moments(noisy.block, torch.empty_like(noisy.mean))

    def write_moments(self, block: Block, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the mean gradient on a block into `mean`; return it and its elementwise square."""
        self.mean.write_block(block, AffineMap(None), mean)
        return mean, mean * mean


@dataclass(frozen=True, slots=True)
class ExampleSquares:
    """An estimate whose square is the mean of squared per-example gradients.

    Attributes:
        squares: a vector of all coordinates.
    """

    squares: torch.Tensor

    def moments(self, noisy: NoisyBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noisy mean and mean squared per-example gradient on a block of coordinates."""
        return noisy.gradient_moments()[0], noisy.block.view_in(self.squares)


class NoisyEstimate:
    """The noisy mean that a step releases, used as an estimate of the mean gradient."""

    def moments(self, noisy: NoisyBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noisy mean, and its square minus the noise variance, which may be negative.

        The affine map before clipping is undone in both.
        """
        return noisy.gradient_moments()


@dataclass(frozen=True, slots=True)
class StepContext:
    """One step's noisy mean and private batch, from which optimizer state may be updated.

    The affine map of a block may depend on the optimizer's state there, so that state must change
    only after the block was read from `noisy_mean`.

    Attributes:
        noisy_mean: the noisy mean; it can be read once.
        clipper: of the model, at the parameters before the update.
        examples, targets: the private batch, as a step was called with it.
        loss: one value per example.
        expected_batch_size: what the sum was divided by.
        processes: the processes that make the step; all must update their state alike.
    """

    noisy_mean: NoisyMean
    clipper: Clipper
    examples: Examples
    targets: Targets
    loss: TargetLoss
    expected_batch_size: float
    processes: StepProcesses = field(default_factory=OneProcess)


class StateSource(Protocol):
    """Interface of the sources of gradients for an optimizer's running averages.

    Attributes:
        state: its name.
        proven: whether a run with it keeps its guarantee.
    """

    state: ClassVar[str]
    proven: ClassVar[bool]

    def gradients(self, step: StepContext, /) -> GradientEstimate:
        """Return the gradient estimate from which the state is updated in this step."""
        ...

    def example_squares(self, step: StepContext, /) -> GradientEstimate:
        """Return the mean of squared per-example gradients, for the state's running squares."""
        ...


class NoisySource:
    """Updates state from the released noisy means, at no further privacy cost."""

    state: ClassVar[str] = "privatised"
    proven: ClassVar[bool] = True

    def gradients(self, _: StepContext, /) -> GradientEstimate:
        """Return the step's noisy mean as its estimate of the gradient."""
        return NoisyEstimate()

    def example_squares(self, _: StepContext, /) -> GradientEstimate:
        """Raise: a noisy mean gradient does not determine per-example squares.

        Raises:
            NoGuaranteeError: always.
        """
        raise NoGuaranteeError(NO_EXAMPLE_SQUARES)


class PublicSource:
    """Updates state from gradients on public data, on a random public batch in each step.

    Args:
        examples: public, on the model's device; a tensor, or a dictionary of tensors.
        targets: theirs; of the same form as those of a private batch.
        batch_size: public examples per step; all if there are fewer.

    Raises:
        DataError: a value is NaN or infinite.
    """

    state: ClassVar[str] = "public"
    proven: ClassVar[bool] = True

    def __init__(
        self, examples: Examples, targets: Targets, batch_size: int = PUBLIC_BATCH_SIZE
    ) -> None:
        if count_examples(examples) == 0:
            raise ValueError("public state needs public examples, got none")
        if not all(
            bool(each.isfinite().all()) for each in (*tensors_of(examples), *tensors_of(targets))
        ):
            raise DataError("the public examples contain NaN or infinite values: remove them")
        self._examples, self._targets, self._batch_size = examples, targets, batch_size

    def gradients(self, step: StepContext) -> GradientEstimate:
        """Return the mean gradient of a random public batch, without noise.

        Raises:
            DataError: its loss is not finite; the state would keep that for good.
        """
        return self.draw_gradients(step.clipper, step.loss, step.processes)

    def draw_gradients(
        self, clipper: Clipper, loss: TargetLoss, processes: StepProcesses
    ) -> ExactEstimate:
        """Return the mean gradient of a random public batch, also before a step has a batch.

        Args:
            clipper: of the model, at its parameters now.
            loss: one value per example.
            processes: the processes that make the step.

        Raises:
            DataError: its loss is not finite; the state would keep that for good.
        """
        examples, targets = self._draw(processes)
        rows, loss_by_row = by_row(targets, loss)
        found = clipper.sum_unclipped(examples, rows, loss_by_row, len(rows))
        return _make_exact_estimate(found, "public")

    def example_squares(self, step: StepContext) -> GradientEstimate:
        """Return a public batch's mean of squared per-example gradients, without noise.

        Raises:
            DataError: its loss is not finite; the state would keep that for good.
        """
        examples, targets = self._draw(step.processes)
        rows, loss = by_row(targets, step.loss)
        return _make_example_squares(
            *step.clipper.mean_of_squares(examples, rows, loss, len(rows)), "public"
        )

    def _draw(self, processes: StepProcesses) -> tuple[Examples, Targets]:
        """Return a random public batch, the same in all processes."""
        count, device = count_examples(self._targets), device_of(self._examples)
        order = torch.randperm(count, device=device)
        rows = processes.from_rank_zero(order)[: self._batch_size]
        return select_examples(self._examples, rows), select_examples(self._targets, rows)


class RawSource:
    """Updates state from private gradients without noise: no guarantee holds.

    The papers do so.
    """

    state: ClassVar[str] = "raw"
    proven: ClassVar[bool] = False

    def gradients(self, step: StepContext) -> GradientEstimate:
        """Return the private batch's mean gradient, unclipped and without noise: NOT private.

        Raises:
            DataError: its loss is not finite; the state would keep that for good.
        """
        rows, loss = by_row(step.targets, step.loss)
        found = step.clipper.sum_unclipped(step.examples, rows, loss, step.expected_batch_size)
        return _make_exact_estimate(found, "private")

    def example_squares(self, step: StepContext) -> GradientEstimate:
        """Return the private batch's mean of per-example squares, without noise: NOT private.

        Raises:
            DataError: its loss is not finite; the state would keep that for good.
        """
        rows, loss = by_row(step.targets, step.loss)
        return _make_example_squares(
            *step.clipper.mean_of_squares(step.examples, rows, loss, step.expected_batch_size),
            "private",
        )


def _make_exact_estimate(mean: BlockwiseSum, kind: str) -> ExactEstimate:
    """Wrap a mean gradient as an exact estimate; raise if its mean loss is not finite."""
    _require_finite(float(mean.mean_loss), kind)
    return ExactEstimate(mean)


def _make_example_squares(squares: torch.Tensor, mean_loss: float, kind: str) -> GradientEstimate:
    """Return the mean of per-example squares as an estimate; raise if the loss is not finite."""
    _require_finite(mean_loss, kind)
    return ExampleSquares(squares)


def _require_finite(mean_loss: float, kind: str) -> None:
    """Raise if the mean loss is not finite; `kind` (public or private) is for the message."""
    if not math.isfinite(mean_loss):
        raise DataError(
            f"the loss of the {kind} examples has become {mean_loss}: lower the learning rate"
        )
