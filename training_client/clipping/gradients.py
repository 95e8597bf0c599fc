"""Every example's gradient of one parameter, in the form that its layer gives it.

The gradient of one example in the weight of a Linear layer is the outer product of its output
gradient g and its input a, so the squared norm of D∘(g aᵀ + b) is

    Σₒ g²ₒ·[D²(a²)]ₒ + 2·gᵀ(D²∘b)a + ‖D∘b‖²,

which is ‖g‖²·‖a‖² without D and b, and a weighted sum over examples is one matrix product. Neither
needs a per-example gradient in memory ("book-keeping", Bu et al. 2023, arXiv 2210.00038). Only a
box and what is damped are elementwise. Of every other layer the per-example gradients are held.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from training_client.clipping.allowances import (
    NEGLIGIBLE,
    Number,
    constant_at_most,
    loses_digits,
    rounding,
    share,
    squared_norms_at_most,
    underflow,
    weighted_underflow,
)
from training_client.clipping.blocks import Piece
from training_client.clipping.elementwise import (
    clamped,
    clamped_products,
    damped_squares,
    damped_sum,
)
from training_client.clipping.factors import Factor, factor_of
from training_client.clipping.rows import (
    add_dots,
    add_dots_of_squares,
    affine_squared_norms,
    squared_norms,
)
from training_client.clipping.transform import Affine
from training_client.compiled import on_processor

Parts = Iterable[tuple[Piece, Affine]]


class ExampleGradients(Protocol):
    """Of one parameter, every example's."""

    @property
    def numbers(self) -> int:
        """How many they are made of."""
        ...

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

    def damped_squares(self, parts: Parts, damping: float) -> torch.Tensor:
        """‖u‖² for each example, damped, in double precision; `parts` as in `affine_squares`."""
        ...

    def damped_sum(
        self, rows: slice, affine: Affine, damping: float, weights: torch.Tensor
    ) -> torch.Tensor:
        """Σ wᵢuᵢ, damped, on rows of the parameter."""
        ...

    def only(self, kept: torch.Tensor) -> ExampleGradients:
        """Those of some examples."""
        ...


@dataclass(frozen=True, slots=True)
class _Weights:
    """What squared norms need of the map of a piece.

    Attributes:
        squares: D².
        shifted: D²∘b; None without a shift.
        scales: ‖D‖².
        constant: ‖D∘b‖², or more.
    """

    squares: torch.Tensor
    shifted: torch.Tensor | None
    scales: Number
    constant: Number

    @classmethod
    def of(cls, affine: Affine) -> _Weights:
        """A map's."""
        assert affine.scale is not None
        squares, shift = affine.scale.square(), affine.shift
        scales = _squared_norm(affine.scale)
        if shift is None:
            return cls(squares, None, scales, 0.0)
        constant = squares.new_zeros(1, dtype=torch.float64)
        add_dots_of_squares(squares.reshape(1, -1), shift.reshape(1, -1), constant)
        more = constant_at_most(_number(constant), scales, _squared_norm(shift), squares.dtype)
        return cls(squares, squares * shift, scales, more)


@dataclass(slots=True)
class _Terms:
    """What squared norms are made of, added up over pieces, in double precision.

    Attributes:
        widths: ‖a‖², for each example.
        square: Σₒ g²ₒ·[D²(a²)]ₒ over ‖a‖², for each example.
        linear: gᵀ(D²∘b)a, for each example.
        scales: ‖D‖².
        constant: ‖D∘b‖², or more.
    """

    widths: torch.Tensor
    square: torch.Tensor
    linear: torch.Tensor
    scales: Number = 0.0
    constant: Number = 0.0


@dataclass(frozen=True)
class OuterProducts:
    """∇ᵢ = gᵢaᵢᵀ, of the weight of a Linear layer.

    Attributes:
        gradients: g, of the layer's outputs, one row an example.
        inputs: a, one row an example.
        sparse: whether most of their numbers are said to be 0.
    """

    gradients: torch.Tensor
    inputs: torch.Tensor
    sparse: bool = False

    @property
    def numbers(self) -> int:
        """See `ExampleGradients`."""
        return self.gradients.numel() + self.inputs.numel()

    def squares(self, bound: float) -> torch.Tensor:
        """See `ExampleGradients`."""
        heights = squared_norms_at_most(self.gradients)
        widths = squared_norms_at_most(self.inputs, self._factor.squared_norms())
        return self._kept(heights * widths, torch.maximum(heights, widths), 1.0, bound)

    def affine_squares(self, parts: Parts, bound: float) -> torch.Tensor:
        """See `ExampleGradients`."""
        terms, kind = self._terms(parts), self.inputs.dtype
        heights = squared_norms_at_most(self.gradients)
        widths = squared_norms_at_most(self.inputs, terms.widths)
        positive = terms.square.mul_(widths).add_(terms.constant)
        linear = terms.linear.mul_(2)
        found = (positive + linear).clamp_min_(0.0)
        sizes = positive.add_(linear.abs_())
        found.add_(sizes, alpha=rounding(kind, self.inputs.shape[1]))
        found += underflow(heights, widths, terms.scales, self._size, kind)
        found.addcmul_(heights, widths, value=share(bound, kind))
        return self._kept(found, torch.maximum(heights, widths), terms.scales, bound)

    @property
    def _size(self) -> int:
        """Of an example's gradient."""
        return self.inputs.shape[1] * self.gradients.shape[1]

    def _kept(
        self, found: torch.Tensor, largest: torch.Tensor, scales: Number, bound: float
    ) -> torch.Tensor:
        """Squared norms, and ∞ of examples that are to be left out."""
        lost = loses_digits(largest, scales, bound, self._size, self.inputs.dtype)
        return found.masked_fill_(lost, torch.inf)

    def _terms(self, parts: Parts) -> _Terms:
        """See there."""
        unit, widths = self._factor.unit_squares()
        terms = _Terms(widths, torch.zeros_like(widths), torch.zeros_like(widths))
        for piece, affine in parts:
            self._add(piece.rows.start, _Weights.of(affine), unit, terms)
        return terms

    def _add(self, start: int, weights: _Weights, unit: Factor, terms: _Terms) -> None:
        """What rows from `start` on add to the terms; `unit` is (a/‖a‖)²."""
        terms.scales += weights.scales
        terms.constant += weights.constant
        for part, columns, found in unit.products(weights.squares.T):
            square = terms.square[part]
            add_dots_of_squares(found, self.gradients[part], square, start + columns.start)
            del found  # before the next is made
        if weights.shifted is None:
            return
        for part, columns, found in self._factor.products(weights.shifted.T):
            add_dots(found, self.gradients[part], terms.linear[part], start + columns.start)
            del found

    @cached_property
    def _factor(self) -> Factor:
        return factor_of(self.inputs, self.gradients.shape[1], sparse=self.sparse)

    def weighted_sum(self, rows: slice, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        self._factor.add_up(self.gradients[:, rows], weights, out)

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped_products(self.gradients[:, rows], self.inputs, scale)

    def damped_squares(self, parts: Parts, damping: float) -> torch.Tensor:
        """See `ExampleGradients`."""
        found = self.gradients.new_zeros(len(self.gradients), dtype=torch.float64)
        for piece, affine in parts:
            found += damped_squares(self.gradients[:, piece.rows], self.inputs, affine, damping)
        return found

    def damped_sum(
        self, rows: slice, affine: Affine, damping: float, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `ExampleGradients`."""
        return damped_sum(self.gradients[:, rows], self.inputs, affine, damping, weights)

    def only(self, kept: torch.Tensor) -> OuterProducts:
        """See `ExampleGradients`."""
        return OuterProducts(self.gradients[kept], self.inputs[kept], self.sparse)


@dataclass(frozen=True, slots=True)
class HeldGradients:
    """∇ᵢ itself.

    Attributes:
        gradients: one for each example, shaped like the parameter.
    """

    gradients: torch.Tensor

    @property
    def numbers(self) -> int:
        """See `ExampleGradients`."""
        return self.gradients.numel()

    def squares(self, _: float) -> torch.Tensor:
        """See `ExampleGradients`; what is lost is negligible beside any bound that is allowed."""
        return squared_norms(self.gradients.flatten(1))

    def affine_squares(self, parts: Parts, bound: float) -> torch.Tensor:
        """See `ExampleGradients`."""
        kind = self.gradients.dtype
        found = squared_norms(self.gradients.flatten(1)).mul_(share(bound, kind))
        scales: Number = 0.0
        constant: Number = 0.0
        for piece, affine in parts:
            assert affine.scale is not None
            rows, scale = self.gradients[:, piece.rows].flatten(1), affine.scale.reshape(1, -1)
            shift = None if affine.shift is None else affine.shift.reshape(1, -1)
            found += affine_squared_norms(rows, scale, shift)
            scales += _squared_norm(scale)
            if shift is not None:
                constant += _number(affine_squared_norms(shift, scale))
        # what cancels is rounded by the size of its parts: ‖D∘∇‖² ≤ 2‖D∘(∇ + b)‖² + 2‖D∘b‖²
        found.mul_(1 + 2 * rounding(kind)).add_(3 * rounding(kind) * constant)
        lost = weighted_underflow(self.gradients[0].numel(), scales, kind) > NEGLIGIBLE * bound
        return found.masked_fill_(torch.as_tensor(lost, device=found.device), torch.inf)

    def weighted_sum(self, rows: slice, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `ExampleGradients`."""
        torch.mv(self.gradients[:, rows].flatten(1).T, weights, out=out.view(-1))

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """See `ExampleGradients`."""
        return clamped(self.gradients[:, rows] * scale).sum(0)

    def damped_squares(self, parts: Parts, damping: float) -> torch.Tensor:
        """See `ExampleGradients`."""
        found = self.gradients.new_zeros(len(self.gradients), dtype=torch.float64)
        for piece, affine in parts:
            found += damped_squares(*self._as_products(piece.rows), affine.in_a_row(), damping)
        return found

    def damped_sum(
        self, rows: slice, affine: Affine, damping: float, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `ExampleGradients`."""
        return damped_sum(*self._as_products(rows), affine.in_a_row(), damping, weights)

    def _as_products(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """1 and ∇, whose product ∇ is."""
        return self.gradients.new_ones(len(self.gradients), 1), self.gradients[:, rows].flatten(1)

    def only(self, kept: torch.Tensor) -> HeldGradients:
        """See `ExampleGradients`."""
        return HeldGradients(self.gradients[kept])


def _number(tensor: torch.Tensor) -> Number:
    """A tensor of one number; itself on an accelerator, which would have to be waited for."""
    return float(tensor) if on_processor(tensor) else tensor


def _squared_norm(tensor: torch.Tensor) -> Number:
    """‖·‖² of all its numbers, in double precision."""
    return _number(squared_norms(tensor.reshape(1, -1)))
