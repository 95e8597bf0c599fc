"""Every example's gradient of one parameter, in the form that its layer gives it.

The gradient of one example in the weight of a Linear layer is the outer product of its output
gradient g and its input a, so the squared norm of D∘(g aᵀ) + c is

    Σₒ g²ₒ·[D²(a²)]ₒ + 2·gᵀ(D∘c)a + ‖c‖²,

which is ‖g‖²·‖a‖² without D and c, and a weighted sum over examples is one matrix product. Neither
needs a per-example gradient in memory ("book-keeping", Bu et al. 2023, arXiv 2210.00038). Only a
box is elementwise. Of every other layer the per-example gradients are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch

from training_client.clipping.blocks import Block
from training_client.clipping.box import clamped, clamped_products
from training_client.clipping.rows import (
    affine_squared_norms,
    dots,
    dots_of_squares,
    squared_norms,
    unit_squares,
)
from training_client.clipping.transform import Transform

_ROUNDINGS: Final = 64  # of a sum that is not a matrix product, and of its terms
_EXAMPLES: Final = 1024  # at a time, where more would leave the cache


class Squares(NamedTuple):
    """Squared norms of u, one for each example, in double precision.

    Attributes:
        found: as computed.
        lost: what rounding may have taken from them, at most.
    """

    found: torch.Tensor
    lost: torch.Tensor


class ExampleGradients(Protocol):
    """Of one parameter, every example's."""

    def squares(self, blocks: Sequence[Block], transform: Transform) -> Squares:
        """Of u = D∘∇ + c, over all blocks of the parameter."""
        ...

    def weighted_sum(self, block: Block, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Σ wᵢ∇ᵢ on a block, into a tensor of its shape."""
        ...

    def clamped_sum(self, block: Block, scale: torch.Tensor) -> torch.Tensor:
        """Σ clamp(D∘∇ᵢ, ±1) on a block; what is no number counts as 0."""
        ...

    def only(self, kept: torch.Tensor) -> ExampleGradients:
        """Those of some examples."""
        ...


@dataclass(frozen=True, slots=True)
class OuterProducts:
    """∇ᵢ = gᵢaᵢᵀ, of the weight of a Linear layer.

    Attributes:
        gradients: g, of the layer's outputs, one row an example.
        inputs: a, one row an example.
    """

    gradients: torch.Tensor
    inputs: torch.Tensor

    def squares(self, blocks: Sequence[Block], transform: Transform) -> Squares:
        """See `ExampleGradients`."""
        if transform.scale is None:
            heights, widths = _at_most(self.gradients), _at_most(self.inputs)
            found = _bounded(heights, widths, heights * widths, self.inputs.dtype)
            return Squares(found, torch.zeros_like(found))
        squared, widths = unit_squares(self.inputs)
        square = torch.zeros_like(widths)
        linear, constant = torch.zeros_like(square), torch.zeros_like(square[0])
        factors = torch.zeros_like(constant)
        for block in blocks:
            scale, shift = transform.at(block)
            assert scale is not None
            if shift is not None:
                constant += squared_norms(shift).sum()
                shift = scale * shift
            largest = scale.amax()
            weights = (scale / largest).square_()  # as `squared`, at most 1
            factor = largest.double() ** 2
            factors += factor
            for part in _parts(self.inputs):
                gradients, start = self.gradients[part], block.rows.start
                if shift is not None:
                    linear[part] += dots(self.inputs[part] @ shift.T, gradients, start)
                found = dots_of_squares(squared[part] @ weights.T, gradients, start)
                square[part] += found.mul_(factor)
        square, linear = square.mul_(widths), linear.mul_(2)
        # a product of n terms lacks n roundings of what they add up to at most, in any order
        parts = square + linear.abs() + constant
        lost = parts.mul_(_roundings(squared, squared.shape[1]))
        heights, widths = _at_most(self.gradients), _at_most(self.inputs, widths)
        lost += self._underflow(heights, widths, factors)
        found = square.add_(linear).add_(constant).clamp_min_(0.0)
        return Squares(_bounded(heights, widths, found, squared.dtype), lost)

    def _underflow(
        self, heights: torch.Tensor, widths: torch.Tensor, factors: torch.Tensor
    ) -> torch.Tensor:
        """What is lost of squared norms by numbers that are taken for 0, at most.

        It is the smallest number at a time: of a square, a weight or a product of them, which is
        then multiplied by ‖g‖²‖a‖² and a factor; and of a shift or its product, by ‖g‖ and ‖a‖.

        Args:
            heights: ‖g‖².
            widths: ‖a‖².
            factors: what squares of scales were divided by, added up.
        """
        numbers = self.inputs.shape[1] * self.gradients.shape[1]
        square = (heights * widths).mul_(4 * float(torch.finfo(self.inputs.dtype).tiny))
        square += (heights + widths).mul_(_least_square(self.inputs.dtype))
        linear = (
            (heights * (1 + widths)).sqrt_().mul_(4 * float(torch.finfo(self.inputs.dtype).tiny))
        )
        return square.mul_(factors).add_(linear).mul_(numbers)

    def weighted_sum(self, block: Block, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        gradients, inputs = self.gradients[:, block.rows], self.inputs
        if gradients.shape[1] < inputs.shape[1]:
            gradients = gradients * weights[:, None]
        else:
            inputs = inputs * weights[:, None]
        torch.mm(gradients.T, inputs, out=out)

    def clamped_sum(self, block: Block, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped_products(self.gradients[:, block.rows], self.inputs, scale)

    def only(self, kept: torch.Tensor | slice) -> OuterProducts:
        """See `ExampleGradients`."""
        return OuterProducts(self.gradients[kept], self.inputs[kept])


@dataclass(frozen=True, slots=True)
class HeldGradients:
    """∇ᵢ itself.

    Attributes:
        gradients: one for each example, shaped like the parameter.
    """

    gradients: torch.Tensor

    def squares(self, blocks: Sequence[Block], transform: Transform) -> Squares:
        """See `ExampleGradients`."""
        if transform.scale is None:
            found = squared_norms(self.gradients.flatten(1))
            return Squares(found, torch.zeros_like(found))
        found = self.gradients.new_zeros(len(self.gradients), dtype=torch.float64)
        lost = torch.zeros_like(found)
        for block in blocks:
            scale, shift = transform.at(block)
            assert scale is not None
            rows = self.gradients[:, block.rows].flatten(1)
            flat, none = scale.flatten(), torch.zeros_like(scale).flatten()
            if shift is None:
                found += affine_squared_norms(rows, flat, none)
            else:  # what cancels is rounded by the size of its parts
                found += affine_squared_norms(rows, flat, shift.flatten())
                lost += affine_squared_norms(rows, flat, none) + squared_norms(shift.reshape(1, -1))
        return Squares(found, lost.mul_(_roundings(self.gradients)))

    def weighted_sum(self, block: Block, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        torch.mv(self.gradients[:, block.rows].flatten(1).T, weights, out=out.view(-1))

    def clamped_sum(self, block: Block, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped(self.gradients[:, block.rows] * scale).sum(0)

    def only(self, kept: torch.Tensor) -> HeldGradients:
        """See `ExampleGradients`."""
        return HeldGradients(self.gradients[kept])


def _bounded(
    heights: torch.Tensor, widths: torch.Tensor, squares: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    """Infinite where a factor is so large that the other, weighted, would lose digits.

    `heights` and `widths` are squared norms of the factors.
    """
    largest = float(torch.finfo(kind).max) / 256
    return squares.masked_fill((heights >= largest) | (widths >= largest), torch.inf)


def _parts(examples: torch.Tensor) -> list[slice]:
    """A few examples at a time, so that what is made of them stays in the cache."""
    rows = _EXAMPLES if examples.device.type == "cpu" else len(examples)
    return [slice(start, start + rows) for start in range(0, len(examples), rows)]


def _at_most(rows: torch.Tensor, norms: torch.Tensor | None = None) -> torch.Tensor:
    """‖·‖² of each row, and what entries or squares that are taken for 0 may have added to it."""
    norms = squared_norms(rows) if norms is None else norms
    return norms + rows.shape[1] * _least_square(rows.dtype)


def _least_square(kind: torch.dtype) -> float:
    """At most this is the square of an entry whose square, or which itself, is taken for 0."""
    return max(float(torch.finfo(kind).tiny) ** 2, 2 * float(torch.finfo(torch.float64).tiny))


def _roundings(tensor: torch.Tensor, terms: int = 0) -> float:
    """What a sum of so many terms may lack, over what they add up to."""
    return (terms + _ROUNDINGS) * float(torch.finfo(tensor.dtype).eps)
