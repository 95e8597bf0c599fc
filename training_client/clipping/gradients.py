"""Every example's gradient of one parameter, in the form that its layer gives it.

The gradient of one example in the weight of a Linear layer is the outer product of its output
gradient g and its input a, so the squared norm of D∘(g aᵀ + b) is

    Σₒ g²ₒ·[D²(a²)]ₒ + 2·gᵀ(D²∘b)a + ‖D∘b‖²,

which is ‖g‖²·‖a‖² without D and b, and a weighted sum over examples is one matrix product. Neither
needs a per-example gradient in memory ("book-keeping", Bu et al. 2023, arXiv 2210.00038). Only a
box is elementwise. Of every other layer the per-example gradients are held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from training_client.clipping.blocks import Piece
from training_client.clipping.box import clamped, clamped_products
from training_client.clipping.products import parts_of, product, weighted_product
from training_client.clipping.rows import (
    add_dots,
    add_dots_of_squares,
    affine_squared_norms,
    squared_norms,
    unit_squares,
)
from training_client.clipping.transform import Affine
from training_client.compiled import on_processor

_ROUNDINGS: Final = 64  # of a sum that is not a matrix product, and of its terms
NEGLIGIBLE: Final = 1e-7  # of the bound
EXAMPLES: Final = float(1 << 32)  # more than are ever summed


Parts = Iterable[tuple[Piece, Affine]]
Number = float | torch.Tensor  # a tensor of one on an accelerator


class ExampleGradients(Protocol):
    """Of one parameter, every example's."""

    def squares(self, bound: float, /) -> torch.Tensor:
        """‖∇‖² for each example, in double precision, or more; `bound` as in `affine_squares`."""
        ...

    def affine_squares(self, parts: Parts, bound: float) -> torch.Tensor:
        """‖D∘(∇ + b)‖² for each example, in double precision, with what rounding may have taken.

        Args:
            parts: all pieces of the parameter, and the map of each.
            bound: ∞ is found where what a weighted gradient loses is not negligible beside it; and
                what is found is so large that no sum of weighted gradients, which D may make small
                again, passes all numbers.
        """
        ...

    def weighted_sum(self, rows: slice, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Σ wᵢ∇ᵢ on rows of the parameter, into a tensor of their shape."""
        ...

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Σ clamp(D∘∇ᵢ, ±1) on rows of the parameter; what is no number counts as 0."""
        ...

    def only(self, kept: torch.Tensor) -> ExampleGradients:
        """Those of some examples."""
        ...


@dataclass(slots=True)
class _Summands:
    """What squared norms are made of, added up over pieces, in double precision.

    Attributes:
        square: Σₒ g²ₒ·[D²(a²)]ₒ over ‖a‖², for each example.
        linear: gᵀ(D²∘b)a, for each example; None without a shift.
        constant: ‖D∘b‖², and what it may lack where D², b² or a product is taken for 0.
        scales: ‖D‖².
    """

    square: torch.Tensor
    linear: torch.Tensor | None = None
    constant: Number = 0.0
    scales: Number = 0.0

    def take(self, affine: Affine) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add a piece's ‖D‖² and ‖D∘b‖².

        Returns:
            D² and, if there is a shift, D²∘b.
        """
        assert affine.scale is not None
        scales = _squared_norm(affine.scale)
        self.scales += scales
        weights = affine.scale.square()
        if affine.shift is None:
            return weights, None
        if self.linear is None:
            self.linear = torch.zeros_like(self.square)
        kind, constant = weights.dtype, self.square.new_zeros(1)
        add_dots_of_squares(weights.reshape(1, -1), affine.shift.reshape(1, -1), constant)
        self.constant += _number(constant) + scales * _least_square(kind)
        self.constant += _squared_norm(affine.shift) * float(torch.finfo(kind).tiny)
        return weights, weights * affine.shift


@dataclass(frozen=True, slots=True)
class OuterProducts:
    """∇ᵢ = gᵢaᵢᵀ, of the weight of a Linear layer.

    Attributes:
        gradients: g, of the layer's outputs, one row an example.
        inputs: a, one row an example.
    """

    gradients: torch.Tensor
    inputs: torch.Tensor

    def squares(self, bound: float) -> torch.Tensor:
        """See `ExampleGradients`."""
        heights, widths = _at_most(self.gradients), _at_most(self.inputs)
        lost = self._loses_digits(torch.maximum(heights, widths), 1.0, bound)
        return (heights * widths).masked_fill_(lost, torch.inf)

    def affine_squares(self, parts: Parts, bound: float) -> torch.Tensor:
        """See `ExampleGradients`."""
        squared, widths = unit_squares(self.inputs)
        summands = _Summands(torch.zeros_like(widths))
        for piece, affine in parts:
            self._add(piece.rows.start, affine, squared, summands)
        del squared
        heights, widths = _at_most(self.gradients), _at_most(self.inputs, widths)
        found = most = summands.square.mul_(widths)
        if summands.linear is not None:
            linear = summands.linear.mul_(2)
            found = (most + linear).add_(summands.constant).clamp_min_(0.0)
            most = most.add_(linear.abs_()).add_(summands.constant)
        # a product of n terms lacks n roundings of what they add up to at most, in any order
        rounding = _roundings(self.inputs, self.inputs.shape[1])
        found = torch.add(found, most, alpha=rounding)
        found += self._underflow(heights, widths, summands.scales)
        found.addcmul_(heights, widths, value=_share(bound, self.inputs.dtype))
        largest = torch.maximum(heights, widths)
        return found.masked_fill_(self._loses_digits(largest, summands.scales, bound), torch.inf)

    @property
    def _numbers(self) -> int:
        """How many an example's gradient has."""
        return self.inputs.shape[1] * self.gradients.shape[1]

    @property
    def _largest(self) -> float:
        """A squared norm of a factor at which the other, weighted, would lose digits."""
        return float(torch.finfo(self.inputs.dtype).max) / 256

    def _loses_digits(self, largest: torch.Tensor, scales: Number, bound: float) -> torch.Tensor:
        """Where one factor is so large that too much of the other, weighted, is lost.

        The other underflows, and is multiplied by the first, or by the 1 of a shift, and by D: what
        is lost has a norm of `_least_weighted` times √m + 1, whose square is at most 2m + 2.

        Args:
            largest: m, the squared norm of the larger factor.
            scales: ‖D‖²; without D the largest D² will do, which is 1.
            bound: of the whole.
        """
        lost = _least_weighted(self._numbers, scales, self.inputs.dtype) / bound / NEGLIGIBLE
        share = 2 * lost * lost
        return largest * (share + 1 / self._largest) >= 1 - share

    def _add(self, start: int, affine: Affine, squared: torch.Tensor, summands: _Summands) -> None:
        """The share of rows from `start` on in the summands; `squared` is (a/‖a‖)²."""
        weights, shift = summands.take(affine)
        for part in parts_of(squared, weights.T):
            gradients, square = self.gradients[part], summands.square[part]
            if shift is not None and summands.linear is not None:
                linear = summands.linear[part]
                add_dots(product(self.inputs[part], shift.T), gradients, linear, start)
            add_dots_of_squares(product(squared[part], weights.T), gradients, square, start)

    def _underflow(
        self, heights: torch.Tensor, widths: torch.Tensor, scales: Number
    ) -> torch.Tensor:
        """What is lost of squared norms by numbers that are taken for 0, at most.

        It is the smallest number t at a time, for each number of the gradient: of a weight D² or a
        product with it, which is then multiplied by ‖g‖²‖a‖²; of a square, by D²; of a product with
        a shift, by ‖g‖ and ‖a‖, where ‖g‖√(1 + ‖a‖²) ≤ (1 + ‖g‖²(1 + ‖a‖²))/2. (What 2·D²·g·a·b
        lacks with D² is at most what the squares of ga and of b lack.)

        Args:
            heights: ‖g‖².
            widths: ‖a‖².
            scales: ‖D‖².
        """
        numbers, kind = self._numbers, self.inputs.dtype
        least = 4 * numbers * float(torch.finfo(kind).tiny)
        of_squares = scales * (numbers * _least_square(kind))
        of_weighted = of_squares + 2 * numbers * float(torch.finfo(torch.float64).tiny)
        found = heights.mul(1.5 * least).add_(of_weighted).mul_(widths)
        return found.add_(heights * (of_squares + least / 2)).add_(least / 2)

    def weighted_sum(self, rows: slice, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        weighted_product(self.gradients[:, rows], self.inputs, weights, out)

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped_products(self.gradients[:, rows], self.inputs, scale)

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

    def squares(self, _: float) -> torch.Tensor:
        """See `ExampleGradients`; what is lost is negligible beside any bound that is allowed."""
        return squared_norms(self.gradients.flatten(1))

    def affine_squares(self, parts: Parts, bound: float) -> torch.Tensor:
        """See `ExampleGradients`."""
        found = squared_norms(self.gradients.flatten(1))
        found.mul_(_share(bound, self.gradients.dtype))
        scales: Number = 0.0
        constant: Number = 0.0
        for piece, affine in parts:
            assert affine.scale is not None
            rows, scale = self.gradients[:, piece.rows].flatten(1), affine.scale.reshape(1, -1)
            scales += _squared_norm(scale)
            shift = None if affine.shift is None else affine.shift.reshape(1, -1)
            found += affine_squared_norms(rows, scale, shift)
            if shift is not None:
                constant += _number(affine_squared_norms(shift, scale))
        # what cancels is rounded by the size of its parts: ‖D∘∇‖² ≤ 2‖D∘(∇ + b)‖² + 2‖D∘b‖²
        rounding = _roundings(self.gradients)
        found.mul_(1 + 2 * rounding).add_(3 * rounding * constant)
        least = _least_weighted(self.gradients[0].numel(), scales, self.gradients.dtype)
        lost = torch.as_tensor(least > NEGLIGIBLE * bound, device=found.device)
        return found.masked_fill_(lost, torch.inf)

    def weighted_sum(self, rows: slice, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        torch.mv(self.gradients[:, rows].flatten(1).T, weights, out=out.view(-1))

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped(self.gradients[:, rows] * scale).sum(0)

    def only(self, kept: torch.Tensor) -> HeldGradients:
        """See `ExampleGradients`."""
        return HeldGradients(self.gradients[kept])


def _share(bound: float, kind: torch.dtype) -> float:
    """(B/m)² for the most m that a weighted gradient may be: with ‖∇‖²(B/m)² found, w‖∇‖ ≤ m.

    In double precision it is no number, and the smallest does as well for B up to 1e140.
    """
    share = (bound / float(torch.finfo(kind).max) * EXAMPLES) ** 2
    return float(max(share, float(torch.finfo(torch.float64).tiny)))


def _number(tensor: torch.Tensor) -> Number:
    """A tensor of one number; itself on an accelerator, which would have to be waited for."""
    return float(tensor) if on_processor(tensor) else tensor


def _squared_norm(tensor: torch.Tensor) -> Number:
    """‖·‖² of all its numbers, in double precision."""
    return _number(squared_norms(tensor.reshape(1, -1)))


def _least_weighted(numbers: int, scales: Number, kind: torch.dtype) -> Number:
    """The norm of what a weighted gradient lacks in u, or has too much, where it underflows.

    The smallest numbers are rounded to 0 or up, D multiplies what that leaves, and what a shift
    cancels is no longer cancelled: the shift is weighted by itself.

    Args:
        numbers: of the gradient.
        scales: ‖D‖².
        kind: of the numbers.
    """
    length: Number = scales**0.5
    return length * (float(torch.finfo(kind).tiny) * math.sqrt(numbers))


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
