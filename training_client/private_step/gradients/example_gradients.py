"""The per-example gradients of one parameter, in the form that its layer gives them.

The gradient of one example in the weight of a Linear layer is the outer product of its output
gradient g and its input a, so the squared norm of D∘(g aᵀ + b) is

    Σₒ g²ₒ·[D²(a²)]ₒ + 2·gᵀ(D²∘b)a + ‖D∘b‖²,

which is ‖g‖²·‖a‖² without D and b, and a weighted sum over examples is a matrix product. Neither
needs a per-example gradient in memory ("book-keeping", Bu et al. 2023, arXiv 2210.00038). Only
boxes and damping need each coordinate of each example's gradient. For every other layer the
per-example gradients are held in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from training_client.private_step.blocks import Piece
from training_client.private_step.gradients.gradient_factors import Factor, make_factor
from training_client.private_step.kernels.compiled import is_on_cpu
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.kernels.per_coordinate_sums import (
    clamp_in_place,
    clamped_sum,
    damped_squared_norms,
    damped_sum,
)
from training_client.private_step.kernels.row_sums import (
    add_row_dots,
    mapped_squared_norms,
    squared_norms,
)
from training_client.private_step.kernels.weighted_rows import add_weighted_rows
from training_client.private_step.rounding_bounds import (
    Scalar,
    has_excessive_underflow,
    negligible_share,
    norm_underflow,
    overflow_guard,
    rounding_error,
    shift_norm_upper_bound,
    squared_norm_upper_bounds,
    weighted_underflow,
)

MappedPieces = Iterable[tuple[Piece, AffineMap]]


class ExampleGradients(Protocol):
    """Interface of the per-example gradients of one parameter, in any representation.

    A piece is a range of the parameter's rows with an affine map D∘(∇ + b) of the gradient. Damping
    and boxes limit each coordinate; see `Transform`.

    Squared norms are upper bounds, in double precision: what rounding and underflow may have taken
    from them is added.
    """

    @property
    def element_count(self) -> int:
        """The number of elements of the tensors that store the per-example gradients."""
        ...

    def squared_norms(self, bound: float, /) -> torch.Tensor:
        """Return upper bounds on squared gradient norms per example; ∞ on excessive underflow."""
        ...

    def mapped_squared_norms(self, pieces: MappedPieces, bound: float) -> torch.Tensor:
        """Bound each example's squared norm after shift and scale; ∞ on excessive underflow.

        Args:
            pieces: all pieces of the parameter, each with its map.
            bound: the clipping bound. The norm is ∞ where the underflow of a weighted gradient is
                not negligible beside it, and otherwise so large that sums of weighted gradients do
                not overflow before D makes them small again.
        """
        ...

    def weighted_sum(
        self, rows: slice, weights: torch.Tensor, block: int, out: torch.Tensor
    ) -> None:
        """Write the weighted sum of the gradients, on some rows of the parameter, into `out`.

        Args:
            rows: the rows.
            weights: one per example.
            block: how many examples may be added up in single precision; 0 for none.
            out: receives the sum, contiguous, in double precision.
        """
        ...

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Return the sum of scaled gradients, each coordinate clamped to ±1, on `rows`."""
        ...

    def damped_squared_norms(self, pieces: MappedPieces, damping: float) -> torch.Tensor:
        """Return squared norms of per-example gradients after shift, scaling and soft clipping.

        The affine map gives v = D∘(∇ + b), and damping by c limits it to v/√(1 +
        (c·D∘∇)²).
        """
        ...

    def damped_sum(
        self, rows: slice, affine: AffineMap, damping: float, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of shifted, scaled, soft-clipped gradients on `rows`."""
        ...

    def select(self, kept: torch.Tensor) -> ExampleGradients:
        """Return the per-example gradients of those examples where `kept` is true."""
        ...

    def zero_others(self, kept: torch.Tensor) -> ExampleGradients:
        """Return the gradients with 0 for examples where `kept` is false; do not synchronize."""
        ...


@dataclass(frozen=True, slots=True)
class _SquaredMap:
    """An affine map's squared scale and shift, from which squared norms are computed.

    Attributes:
        squares: D².
        shifted: D²∘b; None without a shift.
        scale_norm: ‖D‖².
        shift_norm: an upper bound on ‖D∘b‖².
    """

    squares: torch.Tensor
    shifted: torch.Tensor | None
    scale_norm: Scalar
    shift_norm: Scalar

    @classmethod
    def from_map(cls, affine: AffineMap) -> _SquaredMap:
        """Return the squared scale and shift of an affine map, which must have a scale."""
        assert affine.scale is not None
        squares, shift = affine.scale.square(), affine.shift
        scale_norm = squared_norm(affine.scale)
        if shift is None:
            return cls(squares, None, scale_norm, 0.0)
        found = squares.new_zeros(1, dtype=torch.float64)
        add_row_dots(squares.reshape(1, -1), shift.reshape(1, -1), found, squared=True)
        shift_norm = shift_norm_upper_bound(
            as_scalar(found), scale_norm, squared_norm(shift), squares.dtype
        )
        return cls(squares, squares * shift, scale_norm, shift_norm)


@dataclass(slots=True)
class _NormTerms:
    """The terms whose sum is each example's squared gradient norm after an affine map.

    Attributes:
        input_squares: ‖a‖², for each example.
        square: Σₒ g²ₒ·[D²(a²)]ₒ over ‖a‖², for each example.
        linear: gᵀ(D²∘b)a, for each example.
        scale_norm: ‖D‖².
        shift_norm: an upper bound on ‖D∘b‖².
    """

    input_squares: torch.Tensor
    square: torch.Tensor
    linear: torch.Tensor
    scale_norm: Scalar = 0.0
    shift_norm: Scalar = 0.0


@dataclass(frozen=True)
class OuterProducts:
    """Per-example gradients of a Linear weight, stored as output gradients and inputs.

    gᵢ is the gradient of the layer's output, and aᵢ its input.

    Attributes:
        gradients: g, the gradients of the layer's outputs, one row per example.
        inputs: a, one row per example.
        sparse: whether most input values are declared to be 0.
    """

    gradients: torch.Tensor
    inputs: torch.Tensor
    sparse: bool = False

    @property
    def element_count(self) -> int:
        """The number of elements of both stored factors."""
        return self.gradients.numel() + self.inputs.numel()

    def squared_norms(self, bound: float) -> torch.Tensor:
        """Return upper bounds on squared gradient norms per example; ∞ on excessive underflow."""
        gradient_squares = squared_norm_upper_bounds(self.gradients)
        input_squares = squared_norm_upper_bounds(self.inputs, self._input_factor.squared_norms())
        return self._exclude_underflowing(
            gradient_squares * input_squares,
            torch.maximum(gradient_squares, input_squares),
            1.0,
            bound,
        )

    def mapped_squared_norms(self, pieces: MappedPieces, bound: float) -> torch.Tensor:
        """Bound each example's squared norm after shift and scale; ∞ on excessive underflow."""
        terms, dtype = self._norm_terms(pieces), self.inputs.dtype
        gradient_squares = squared_norm_upper_bounds(self.gradients)
        input_squares = squared_norm_upper_bounds(self.inputs, terms.input_squares)
        positive = terms.square.mul_(input_squares).add_(terms.shift_norm)
        linear = terms.linear.mul_(2)
        found = (positive + linear).clamp_min_(0.0)
        sizes = positive.add_(linear.abs_())
        found.add_(sizes, alpha=rounding_error(dtype, self.inputs.shape[1]))
        found += norm_underflow(
            gradient_squares, input_squares, terms.scale_norm, self._gradient_size, dtype
        )
        found.addcmul_(gradient_squares, input_squares, value=overflow_guard(bound, dtype))
        return self._exclude_underflowing(
            found, torch.maximum(gradient_squares, input_squares), terms.scale_norm, bound
        )

    @property
    def _gradient_size(self) -> int:
        """The number of coordinates of one example's gradient."""
        return self.inputs.shape[1] * self.gradients.shape[1]

    def _exclude_underflowing(
        self, norms: torch.Tensor, largest: torch.Tensor, scale_norm: Scalar, bound: float
    ) -> torch.Tensor:
        """Set squared norms to ∞ for examples whose clipped gradient would underflow."""
        excluded = has_excessive_underflow(
            largest, scale_norm, bound, self._gradient_size, self.inputs.dtype
        )
        return norms.masked_fill_(excluded, torch.inf)

    def _norm_terms(self, pieces: MappedPieces) -> _NormTerms:
        """Return the terms of the squared norms after the affine maps, summed over all rows."""
        unit, input_squares = self._input_factor.normalized_squares()
        terms = _NormTerms(
            input_squares, torch.zeros_like(input_squares), torch.zeros_like(input_squares)
        )
        for piece, affine in pieces:
            self._add_terms(piece.rows.start, _SquaredMap.from_map(affine), unit, terms)
        return terms

    def _add_terms(self, start: int, squared: _SquaredMap, unit: Factor, terms: _NormTerms) -> None:
        """Add to `terms` what one piece of the weight contributes to the squared norms.

        `start` is the piece's first row, and `unit` holds the squares of a/‖a‖, a the layer's
        input.
        """
        terms.scale_norm += squared.scale_norm
        terms.shift_norm += squared.shift_norm
        for part, columns, found in unit.products(squared.squares.T):
            square = terms.square[part]
            add_row_dots(found, self.gradients[part], square, start + columns.start, squared=True)
            del found  # frees its memory before the next is made
        if squared.shifted is None:
            return
        for part, columns, found in self._input_factor.products(squared.shifted.T):
            add_row_dots(found, self.gradients[part], terms.linear[part], start + columns.start)
            del found

    @cached_property
    def _input_factor(self) -> Factor:
        """The layer's inputs as a dense or sparse matrix, one row per example."""
        return make_factor(self.inputs, self.gradients.shape[1], sparse=self.sparse)

    def weighted_sum(
        self, rows: slice, weights: torch.Tensor, block: int, out: torch.Tensor
    ) -> None:
        """Write the weighted sum of the gradients, on some rows of the parameter, into `out`.

        It takes one matrix product for each block.
        """
        self._input_factor.weighted_product(self.gradients[:, rows], weights, block, out)

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Return the sum of scaled gradients, each coordinate clamped to ±1, on `rows`."""
        return clamped_sum(self.gradients[:, rows], self.inputs, scale)

    def damped_squared_norms(self, pieces: MappedPieces, damping: float) -> torch.Tensor:
        """Return squared norms of per-example gradients after shift, scaling and soft clipping."""
        found = self.gradients.new_zeros(len(self.gradients), dtype=torch.float64)
        for piece, affine in pieces:
            gradients = self.gradients[:, piece.rows]
            found += damped_squared_norms(gradients, self.inputs, affine, damping)
        return found

    def damped_sum(
        self, rows: slice, affine: AffineMap, damping: float, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of shifted, scaled, soft-clipped gradients on `rows`."""
        return damped_sum(self.gradients[:, rows], self.inputs, affine, damping, weights)

    def select(self, kept: torch.Tensor) -> OuterProducts:
        """Return the per-example gradients of those examples where `kept` is true."""
        return OuterProducts(self.gradients[kept], self.inputs[kept], self.sparse)

    def zero_others(self, kept: torch.Tensor) -> OuterProducts:
        """Return the gradients with 0 for examples where `kept` is false."""
        return OuterProducts(
            zero_rows(self.gradients, kept), zero_rows(self.inputs, kept), self.sparse
        )


@dataclass(frozen=True, slots=True)
class MaterializedGradients:
    """Per-example gradients of a parameter, stored in full: one tensor per example.

    Attributes:
        gradients: one per example, shaped like the parameter.
    """

    gradients: torch.Tensor

    def __post_init__(self) -> None:
        if self.gradients.dim() == 1:  # of a parameter that is a single number, and has one row
            object.__setattr__(self, "gradients", self.gradients[:, None])

    @property
    def element_count(self) -> int:
        """The number of elements of all examples' gradients."""
        return self.gradients.numel()

    def squared_norms(self, _: float) -> torch.Tensor:
        """Return each example's squared gradient norm, in double precision."""
        return squared_norms(self.gradients.flatten(1))

    def mapped_squared_norms(self, pieces: MappedPieces, bound: float) -> torch.Tensor:
        """Bound each example's squared norm after shift and scale; ∞ on excessive underflow."""
        dtype = self.gradients.dtype
        found = squared_norms(self.gradients.flatten(1)).mul_(overflow_guard(bound, dtype))
        scale_norm: Scalar = 0.0
        shift_norm: Scalar = 0.0
        for piece, affine in pieces:
            assert affine.scale is not None
            rows, scale = self.gradients[:, piece.rows].flatten(1), affine.scale.reshape(1, -1)
            shift = None if affine.shift is None else affine.shift.reshape(1, -1)
            found += mapped_squared_norms(rows, scale, shift)
            scale_norm += squared_norm(scale)
            if shift is not None:
                shift_norm += as_scalar(mapped_squared_norms(shift, scale))
        # rounding is relative to the terms before they cancel: ‖D∘∇‖² ≤ 2‖D∘(∇ + b)‖² + 2‖D∘b‖²
        found.mul_(1 + 2 * rounding_error(dtype)).add_(3 * rounding_error(dtype) * shift_norm)
        lost = weighted_underflow(self.gradients[0].numel(), scale_norm, dtype)
        excluded = torch.as_tensor(lost > negligible_share(dtype) * bound, device=found.device)
        return found.masked_fill_(excluded, torch.inf)

    def weighted_sum(
        self, rows: slice, weights: torch.Tensor, block: int, out: torch.Tensor
    ) -> None:
        """Write the weighted sum of the gradients, on some rows of the parameter, into `out`."""
        held = self.gradients[:, rows].flatten(1)
        add_weighted_rows(held, weights, block, out.zero_().view(-1))

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Return the sum of scaled gradients, each coordinate clamped to ±1, on `rows`."""
        return clamp_in_place(self.gradients[:, rows] * scale).sum(0, dtype=torch.float64)

    def damped_squared_norms(self, pieces: MappedPieces, damping: float) -> torch.Tensor:
        """Return squared norms of per-example gradients after shift, scaling and soft clipping."""
        found = self.gradients.new_zeros(len(self.gradients), dtype=torch.float64)
        for piece, affine in pieces:
            factors = self._as_outer_products(piece.rows)
            found += damped_squared_norms(*factors, affine.as_row(), damping)
        return found

    def damped_sum(
        self, rows: slice, affine: AffineMap, damping: float, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of shifted, scaled, soft-clipped gradients on `rows`."""
        return damped_sum(*self._as_outer_products(rows), affine.as_row(), damping, weights)

    def _as_outer_products(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a column of ones and the gradients, whose outer products are the gradients."""
        return self.gradients.new_ones(len(self.gradients), 1), self.gradients[:, rows].flatten(1)

    def select(self, kept: torch.Tensor) -> MaterializedGradients:
        """Return the per-example gradients of those examples where `kept` is true."""
        return MaterializedGradients(self.gradients[kept])

    def zero_others(self, kept: torch.Tensor) -> MaterializedGradients:
        """Return the gradients with 0 for examples where `kept` is false."""
        return MaterializedGradients(zero_rows(self.gradients, kept))


def zero_rows(rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return a tensor with one row per example, with 0 in rows where `kept` is false."""
    return rows.masked_fill(~kept.view(-1, *[1] * (rows.dim() - 1)), 0.0)


def as_scalar(tensor: torch.Tensor) -> Scalar:
    """Convert a one-element tensor to a float; on a GPU keep it, to avoid synchronization."""
    return float(tensor) if is_on_cpu(tensor) else tensor


def squared_norm(tensor: torch.Tensor) -> Scalar:
    """Return the squared norm over all elements of a tensor, in double precision."""
    return as_scalar(squared_norms(tensor.reshape(1, -1)))
