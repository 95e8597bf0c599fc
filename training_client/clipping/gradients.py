"""Every example's gradient of one parameter, in the form that its layer gives it.

The gradient of one example in the weight of a Linear layer is the outer product of its output
gradient g and its input a, so the squared norm of D∘(g aᵀ + b) is

    Σₒ g²ₒ·[D²(a²)]ₒ + 2·gᵀ(D²∘b)a + ‖D∘b‖²,

which is ‖g‖²·‖a‖² without D and b, and a weighted sum over examples is one matrix product. Neither
needs a per-example gradient in memory ("book-keeping", Bu et al. 2023, arXiv 2210.00038). Only a
box is elementwise. Of every other layer the per-example gradients are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self

import torch

from training_client.clipping.blocks import Block
from training_client.clipping.box import clamped, clamped_products
from training_client.clipping.products import parts, product, weighted_product
from training_client.clipping.rows import (
    affine_squared_norms,
    dots,
    dots_of_squares,
    squared_norms,
    unit_squares,
)
from training_client.clipping.transform import Transform

_ROUNDINGS: Final = 64  # of a sum that is not a matrix product, and of its terms
_NEGLIGIBLE: Final = 1e-7  # of the bound


class Squares(NamedTuple):
    """Squared norms of u, one for each example, in double precision.

    Attributes:
        found: as computed.
        lost: what rounding may have taken from them, at most.
    """

    found: torch.Tensor
    lost: torch.Tensor


@dataclass(slots=True)
class _Summands:
    """What squared norms are made of, added up over blocks, in double precision.

    Attributes:
        square: Σₒ g²ₒ·[D²(a²)]ₒ over ‖a‖², for each example.
        linear: gᵀ(D²∘b)a, for each example.
        constant: ‖D∘b‖², and what it may lack where D² or b² is taken for 0.
        scales: ‖D‖².
    """

    square: torch.Tensor
    linear: torch.Tensor
    constant: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, widths: torch.Tensor) -> Self:
        """As many as there are ‖a‖²."""
        each, one = torch.zeros_like(widths), torch.zeros_like(widths[:1])
        return cls(each, each.clone(), one, one.clone())

    def take_shift(self, weights: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Add a block's ‖D∘b‖².

        Args:
            weights: D².
            shift: b.

        Returns:
            D²∘b.
        """
        flat, least = shift.reshape(1, -1), float(torch.finfo(shift.dtype).tiny)
        self.constant += dots_of_squares(weights.reshape(1, -1), flat)
        self.constant += squared_norms(flat).mul_(least)
        return weights * shift


class ExampleGradients(Protocol):
    """Of one parameter, every example's."""

    def squares(self, blocks: Sequence[Block], transform: Transform) -> Squares:
        """Of u = D∘(∇ + b), over all blocks of the parameter."""
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
        summands = _Summands.zeros(widths)
        for block in blocks:
            self._add(block, transform, squared, summands)
        if transform.shift is not None:  # what b² lacks
            summands.constant += summands.scales * _least_square(squared.dtype)
        square, linear = summands.square.mul_(widths), summands.linear.mul_(2)
        # a product of n terms lacks n roundings of what they add up to at most, in any order
        lost = (square + linear.abs()).add_(summands.constant)
        lost.mul_(_roundings(squared, squared.shape[1]))
        heights, widths = _at_most(self.gradients), _at_most(self.inputs, widths)
        lost += self._underflow(heights, widths, summands)
        found = square.add_(linear).add_(summands.constant).clamp_min_(0.0)
        least = _least_weighted(self._numbers, summands.scales, squared.dtype)
        least = least * torch.maximum(heights, widths).sqrt_().add_(1.0)
        found.masked_fill_(least > _NEGLIGIBLE * transform.bound, torch.inf)
        return Squares(_bounded(heights, widths, found, squared.dtype), lost)

    @property
    def _numbers(self) -> int:
        """How many an example's gradient has."""
        return self.inputs.shape[1] * self.gradients.shape[1]

    def _add(
        self, block: Block, transform: Transform, squared: torch.Tensor, summands: _Summands
    ) -> None:
        """One block's share of the summands; `squared` is (a/‖a‖)²."""
        assert transform.scale is not None
        scale = transform.scale(block)
        summands.scales += squared_norms(scale.reshape(1, -1))
        weights = scale.square()
        del scale  # a block less while the products are made
        shift = None
        if transform.shift is not None:
            shift = summands.take_shift(weights, transform.shift(block))
        for part in parts(self.inputs):
            gradients, start = self.gradients[part], block.rows.start
            if shift is not None:
                summands.linear[part] += dots(product(self.inputs[part], shift.T), gradients, start)
            found = dots_of_squares(product(squared[part], weights.T), gradients, start)
            summands.square[part] += found

    def _underflow(
        self, heights: torch.Tensor, widths: torch.Tensor, summands: _Summands
    ) -> torch.Tensor:
        """What is lost of squared norms by numbers that are taken for 0, at most.

        It is the smallest number at a time: of a weight D² or a product with it, which is then
        multiplied by ‖g‖²‖a‖²; of a square, by D²; of a product with a shift, by ‖g‖ and ‖a‖. (What
        2·D²·g·a·b lacks with D² is at most what the squares of ga and of b lack.)

        Args:
            heights: ‖g‖².
            widths: ‖a‖².
            summands: of the squared norms.
        """
        least = 4 * float(torch.finfo(self.inputs.dtype).tiny)
        square = (heights * widths).mul_(least)
        square += (heights + widths).mul_(_least_square(self.inputs.dtype) * summands.scales)
        square += widths * (2 * float(torch.finfo(torch.float64).tiny))  # of D²(a/‖a‖)²g²
        linear = (heights * (1 + widths)).sqrt_().mul_(least)
        return square.add_(linear).mul_(self._numbers)

    def weighted_sum(self, block: Block, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        weighted_product(self.gradients[:, block.rows], self.inputs, weights, out)

    def clamped_sum(self, block: Block, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped_products(self.gradients[:, block.rows], self.inputs, scale)

    def only(self, kept: torch.Tensor) -> OuterProducts:
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
        lost, scales = torch.zeros_like(found), torch.zeros_like(found[:1])
        for block in blocks:
            affine = transform.at(block)
            assert affine.scale is not None
            rows, scale = self.gradients[:, block.rows].flatten(1), affine.scale.flatten()
            none = torch.zeros_like(scale)
            scales += squared_norms(scale.reshape(1, -1))
            if affine.shift is None:
                found += affine_squared_norms(rows, scale, none)
            else:  # what cancels is rounded by the size of its parts
                shift = affine.shift.reshape(1, -1)
                found += affine_squared_norms(rows, scale, shift[0])
                lost += affine_squared_norms(rows, scale, none)
                lost += affine_squared_norms(shift, scale, none)
        least = _least_weighted(self.gradients[0].numel(), scales, self.gradients.dtype)
        found.masked_fill_(least > _NEGLIGIBLE * transform.bound, torch.inf)
        return Squares(found, lost.mul_(_roundings(self.gradients)))

    def weighted_sum(self, block: Block, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        found = torch.mv(self.gradients[:, block.rows].flatten(1).T, weights)
        out.copy_(found.view(out.shape))  # which may lie in memory in another order

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


def _least_weighted(numbers: int, scales: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The norm of what a weighted gradient lacks in u, or has too much, where it underflows.

    The smallest numbers are rounded to 0 or up, D multiplies what that leaves, and what a shift
    cancels is no longer cancelled: the shift is weighted by itself.

    Args:
        numbers: of the gradient.
        scales: ‖D‖².
        kind: of the numbers.
    """
    return scales.sqrt().mul_(float(torch.finfo(kind).tiny) * numbers**0.5)


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
