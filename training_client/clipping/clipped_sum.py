"""A sum of clipped gradients, made a block at a time: there is no tensor of all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from training_client.clipping.blocks import Block, Piece
from training_client.clipping.gradients import ExampleGradients
from training_client.clipping.products import full_precision
from training_client.clipping.transform import Affine

_FAR_LESS: Final = 4  # times


class Sum(Protocol):
    """A clipped sum without noise, which `PrivateSum` alone may look at; or of public data."""

    @property
    def mean_loss(self) -> float:
        """Of the batch."""
        ...

    def on(self, block: Block, affine: Affine, out: torch.Tensor) -> None:
        """Put the sum on a block, mapped so, into as many numbers as it has."""
        ...


@dataclass(frozen=True, slots=True)
class ClippedSum:
    """Σᵢ wᵢ·D∘(∇ᵢ + b) of a batch, or Σᵢ clamp(D∘∇ᵢ, ±1), or Σᵢ wᵢuᵢ, damped.

    Attributes:
        gradients: of the examples that count, by parameter, or their sum Σᵢ wᵢ∇ᵢ; none of an empty
            batch.
        weights: w, one for each of them; None in a box, and of an empty batch.
        mean_loss: of the batch; not private: for the progress bar of the data's owner only.
        damping: c, of the u that are added up; 0 if they are D∘(∇ᵢ + b).
    """

    gradients: Sequence[ExampleGradients | torch.Tensor]
    weights: torch.Tensor | None
    mean_loss: float
    damping: float = 0.0

    @classmethod
    def of(
        cls,
        gradients: Sequence[ExampleGradients],
        weights: torch.Tensor,
        mean_loss: float,
        parameters: Sequence[torch.Tensor],
    ) -> ClippedSum:
        """Of parameters whose sum takes far less memory than what it is made of, it is made now.

        Args:
            gradients: of the examples that count, by parameter.
            weights: one for each of them.
            mean_loss: of the batch.
            parameters: whose gradients.
        """
        with full_precision(weights.device):
            pairs = zip(gradients, parameters, strict=True)
            found = [_summed(each, weights, parameter) for each, parameter in pairs]
        return cls(found, weights, mean_loss)

    def on(self, block: Block, affine: Affine, out: torch.Tensor) -> None:
        """The sum on a block.

        Args:
            block: where.
            affine: D and b there; the same that weights were found with, where they bound.
            out: takes the sum, as many numbers as the block has.
        """
        if not self.gradients:
            out.zero_()
            return
        with full_precision(out.device):
            for piece in block.pieces:
                self._on_piece(piece, affine, piece.within(out))
            if self.weights is not None and not self.damping:
                affine.map_sum(out, self.weights)

    def _on_piece(self, piece: Piece, affine: Affine, out: torch.Tensor) -> None:
        """Σᵢ wᵢ∇ᵢ, not mapped yet, or the sum in a box, or the damped one."""
        gradients = self.gradients[piece.at]
        if isinstance(gradients, torch.Tensor):
            out.copy_(gradients[piece.rows])
        elif self.weights is None:
            assert affine.scale is not None
            out.copy_(gradients.clamped_sum(piece.rows, piece.within(affine.scale)))
        elif self.damping:
            of_piece = (piece.rows, affine.on(piece), self.damping, self.weights)
            out.copy_(gradients.damped_sum(*of_piece).view_as(out))
        else:
            gradients.weighted_sum(piece.rows, self.weights, out)


def _summed(
    gradients: ExampleGradients, weights: torch.Tensor, parameter: torch.Tensor
) -> ExampleGradients | torch.Tensor:
    if _FAR_LESS * parameter.numel() > gradients.numbers:
        return gradients
    total = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    gradients.weighted_sum(slice(0, len(parameter)), weights, total)
    return total


@dataclass(frozen=True, slots=True)
class Added:
    """The sum over several physical batches, a vector of all numbers."""

    sums: torch.Tensor
    mean_loss: float

    def on(self, block: Block, _: Affine, out: torch.Tensor) -> None:
        """See `Sum`: it is mapped already."""
        out.copy_(block.of(self.sums))
