"""The sum of clipped gradients, computed one block at a time rather than as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from training_client.private_step.blocks import Block, Piece, rows_of
from training_client.private_step.gradients.example_gradients import ExampleGradients
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.kernels.matmul import full_precision
from training_client.private_step.rounding_bounds import Scalar

_MEMORY_RATIO: Final = 4  # of factors to sum, from which on a sum is computed early


class BlockwiseSum(Protocol):
    """Interface of a batch's gradient sum, computed one block of coordinates at a time.

    Of private data it is clipped but has no noise, so only `PrivateSum` may read it.
    """

    @property
    def mean_loss(self) -> Scalar:
        """The mean loss of the batch."""
        ...

    @property
    def unclipped(self) -> Scalar:
        """The number of examples whose gradient was not clipped, if counted; else 0."""
        ...

    def write_block(self, block: Block, affine: AffineMap, out: torch.Tensor) -> None:
        """Write one block of the sum into `out`, with `affine` applied to each gradient.

        `out` is in double precision; another precision rounds the sum.
        """
        ...


@dataclass(frozen=True, slots=True)
class ClippedSum:
    """A batch's sum of clipped gradients; each block of coordinates is computed when it is read.

    It is Σᵢ wᵢ·D∘(∇ᵢ + b); in a box Σᵢ clamp(D∘∇ᵢ, ±1); with damping Σᵢ wᵢuᵢ (see `transform`).

    Attributes:
        gradients: per-example gradients of the examples that count, or their sum Σᵢ wᵢ∇ᵢ, for each
            parameter; empty for an empty batch.
        weights: w, one per example that counts; None for a box and for an empty batch.
        mean_loss: the batch's mean loss, without noise: for the data owner's eyes only.
        damping: c, for damped u; 0 for u = D∘(∇ᵢ + b).
        unclipped: the number of examples that were not clipped, without noise; 0 if not counted.
        summed_in_single: how many examples may be added up in single precision; 0 for none.
    """

    gradients: Sequence[ExampleGradients | torch.Tensor]
    weights: torch.Tensor | None
    mean_loss: Scalar
    damping: float = 0.0
    unclipped: Scalar = 0
    summed_in_single: int = 0

    @classmethod
    def with_small_sums(
        cls,
        gradients: Sequence[ExampleGradients],
        weights: torch.Tensor,
        mean_loss: Scalar,
        parameters: Sequence[torch.Tensor],
        unclipped: Scalar = 0,
        summed_in_single: int = 0,
    ) -> ClippedSum:
        """Build a clipped sum; sum a parameter's gradients immediately where that saves memory.

        Args:
            gradients: per-example gradients of the examples that count, for each parameter.
            weights: one weight per example.
            mean_loss: the batch's mean loss.
            parameters: the trained parameters.
            unclipped: the number of examples that were not clipped.
            summed_in_single: see the class.
        """
        with full_precision(weights.device):
            pairs = zip(gradients, parameters, strict=True)
            found = [
                _sum_if_smaller(each, weights, summed_in_single, parameter)
                for each, parameter in pairs
            ]
        return cls(
            found, weights, mean_loss, unclipped=unclipped, summed_in_single=summed_in_single
        )

    def write_block(self, block: Block, affine: AffineMap, out: torch.Tensor) -> None:
        """Write one block of coordinates of the clipped sum into `out`.

        Args:
            block: the block.
            affine: D and b on the block; the same that the weights were computed with.
            out: receives as many values as the block has coordinates.
        """
        if out.dtype != torch.float64:
            total = torch.empty_like(out, dtype=torch.float64)
            self.write_block(block, affine, total)
            out.copy_(total)
            return
        if not self.gradients:
            out.zero_()
            return
        with full_precision(out.device):
            for piece in block.pieces:
                self._write_piece(piece, affine, piece.view_in(out))
            if self.weights is not None and not self.damping:
                affine.map_sum(out, self.weights)

    def _write_piece(self, piece: Piece, affine: AffineMap, out: torch.Tensor) -> None:
        """Write one piece (rows of one parameter) of the clipped sum into `out`."""
        gradients = self.gradients[piece.index]
        if isinstance(gradients, torch.Tensor):
            out.copy_(gradients[piece.rows])
        elif self.weights is None:
            assert affine.scale is not None
            out.copy_(gradients.clamped_sum(piece.rows, piece.view_in(affine.scale)))
        elif self.damping:
            of_piece = (piece.rows, affine.for_piece(piece), self.damping, self.weights)
            out.copy_(gradients.damped_sum(*of_piece).view_as(out))
        else:
            gradients.weighted_sum(piece.rows, self.weights, self.summed_in_single, out)


def _sum_if_smaller(
    gradients: ExampleGradients,
    weights: torch.Tensor,
    summed_in_single: int,
    parameter: torch.Tensor,
) -> ExampleGradients | torch.Tensor:
    """Return the weighted gradient sum if it needs far less memory, else the gradients."""
    if _MEMORY_RATIO * parameter.numel() > gradients.element_count:
        return gradients
    total = torch.empty_like(
        rows_of(parameter), dtype=torch.float64, memory_format=torch.contiguous_format
    )
    gradients.weighted_sum(slice(0, len(total)), weights, summed_in_single, total)
    return total


@dataclass(frozen=True, slots=True)
class AccumulatedSum:
    """A gradient sum over several physical batches, stored as a flat vector of all coordinates.

    Attributes:
        sums: the vector, in double precision; already mapped.
        mean_loss: the mean loss of all physical batches.
        unclipped: the number of examples that were not clipped; 0 if not counted.
    """

    sums: torch.Tensor
    mean_loss: Scalar
    unclipped: Scalar = 0

    def write_block(self, block: Block, _: AffineMap, out: torch.Tensor) -> None:
        """Write one block of coordinates of the sum into `out`."""
        out.copy_(block.view_in(self.sums))
