"""Per-example gradients that are computed for a few examples at a time, when they are needed.

A subclass computes the gradients of a slice of examples and rows (`dense`). From them this file
computes norms, boxes and damping, so that no more than a few examples' gradients are in memory.

The gradients are sums over a sequence, computed by matrix products. Their rounding is relative to
the magnitudes of the terms, which may be far larger than the sum. With M the norm of an upper bound
on Σ|terms|, on every coordinate, and η the `sequence_rounding`, the true norm and what the weighted
sum over the batch makes of it are at most

    ‖computed ∇‖ + 2η·M.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch

from training_client.private_step.gradients.example_gradients import (
    ExampleGradients,
    MappedPieces,
    as_scalar,
    squared_norm,
)
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.kernels.per_coordinate_sums import (
    clamp_in_place,
    damped_squared_norms,
    damped_sum,
)
from training_client.private_step.kernels.row_sums import mapped_squared_norms, squared_norms
from training_client.private_step.kernels.weighted_rows import add_weighted_rows
from training_client.private_step.rounding_bounds import (
    Scalar,
    has_excessive_underflow,
    overflow_guard,
    rounding_error,
    sequence_rounding,
    sequence_underflow,
)

_CHUNK_SIZE: Final = 1 << 20  # coordinates of per-example gradients at a time on a CPU
_ACCELERATOR_CHUNK_SIZE: Final = 1 << 26


class ChunkedGradients(ABC):
    """Base of per-example gradients that are computed for only a few examples at a time."""

    @property
    @abstractmethod
    def element_count(self) -> int:
        """The number of elements of the tensors that store the per-example gradients."""

    @property
    @abstractmethod
    def terms(self) -> int:
        """The number of terms that are summed to one example's gradient."""

    @property
    def underflows(self) -> int:
        """The number of terms that underflow may take; more than `terms` if sums are added up."""
        return self.terms

    @abstractmethod
    def dense(self, examples: slice, rows: slice) -> torch.Tensor:
        """Compute some examples' gradients on `rows` of the parameter, one tensor per example."""

    @abstractmethod
    def magnitudes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two numbers per example, from which rounding and underflow errors are bounded.

        Returns:
            M², the squared norm of an upper bound on the sum of the terms' magnitudes; and an upper
            bound on the squared norm of the larger factor of every term, for underflow. Both are in
            double precision.
        """

    @abstractmethod
    def mapped_magnitudes(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Bound ‖Σ|tᵢ|·scale‖² per example, whose gradient on `rows` is the sum of terms tᵢ."""

    @abstractmethod
    def select(self, kept: torch.Tensor) -> ExampleGradients:
        """Return the per-example gradients of those examples where `kept` is true."""

    @abstractmethod
    def zero_others(self, kept: torch.Tensor) -> ExampleGradients:
        """Return the gradients with 0 for examples where `kept` is false; do not synchronize."""

    @property
    @abstractmethod
    def example_count(self) -> int:
        """The number of examples."""

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """The shape of the parameter."""

    @property
    @abstractmethod
    def sample(self) -> torch.Tensor:
        """One of the stored tensors, whose dtype and device are those of the gradients."""

    def squared_norms(self, bound: float) -> torch.Tensor:
        """Return upper bounds on squared gradient norms per example; ∞ on excessive underflow."""
        found = self._zeros()
        for part, each in self._chunks(slice(0, self.shape[0])):
            found[part] = squared_norms(each)
        return self._upper_bounds(found, 2, bound)

    def _upper_bounds(self, computed: torch.Tensor, products: int, bound: float) -> torch.Tensor:
        """Add error bounds to computed squared norms, so that the exact ones are not larger.

        Args:
            computed: the squared norms of the gradients.
            products: the number of matrix products that round: 2 if the norm's does, else 1.
            bound: the clipping bound.
        """
        magnitudes, largest = self.magnitudes()
        dtype, size = self.sample.dtype, self.shape.numel()
        lost = sequence_underflow(1.0, size, self.underflows, dtype)
        rounding = products * sequence_rounding(dtype, self.terms)
        found = computed.sqrt_().add_(magnitudes.sqrt(), alpha=rounding).add_(lost).square_()
        found.add_(magnitudes, alpha=overflow_guard(bound, dtype))
        excluded = has_excessive_underflow(largest, 1.0, bound, size, dtype, self.underflows)
        return found.masked_fill_(excluded, torch.inf)

    def mapped_squared_norms(self, pieces: MappedPieces, bound: float) -> torch.Tensor:
        """Bound each example's squared norm after shift and scale; ∞ on excessive underflow."""
        found, mapped = self._zeros(), self._zeros()
        scale_norm: Scalar = 0.0
        shift_norm: Scalar = 0.0
        for piece, affine in pieces:
            assert affine.scale is not None
            row = affine.as_row()
            assert row.scale is not None
            for part, each in self._chunks(piece.rows):
                found[part] += mapped_squared_norms(each, row.scale, row.shift)
            mapped += self.mapped_magnitudes(piece.rows, affine.scale)
            scale_norm += squared_norm(row.scale)
            if row.shift is not None:
                shift_norm += as_scalar(mapped_squared_norms(row.shift, row.scale))
        dtype, size = self.sample.dtype, self.shape.numel()
        # the weighted sum and the weighted shift are rounded before they cancel
        found.mul_(1 + 2 * rounding_error(dtype)).add_(3 * rounding_error(dtype) * shift_norm)
        lost = sequence_underflow(scale_norm, size, self.underflows, dtype)
        rounding = 2 * sequence_rounding(dtype, self.terms)
        found.sqrt_().add_(mapped.sqrt_(), alpha=rounding).add_(lost).square_()
        magnitudes, largest = self.magnitudes()
        found.add_(magnitudes, alpha=overflow_guard(bound, dtype))
        excluded = has_excessive_underflow(largest, scale_norm, bound, size, dtype, self.underflows)
        return found.masked_fill_(excluded, torch.inf)

    def weighted_sum(
        self, rows: slice, weights: torch.Tensor, block: int, out: torch.Tensor
    ) -> None:
        """Write the weighted sum of the gradients, on some rows of the parameter, into `out`.

        One product over all examples and positions would round terms that cancel within an example
        beside terms of others. So each example's gradient is computed, and then added.
        """
        total = out.zero_().view(-1)
        for part, each in self._chunks(rows):
            each = each.to(weights.dtype)  # in checks it may be computed under autocast
            add_weighted_rows(each, weights[part], block, total)

    def clamped_sum(self, rows: slice, scale: torch.Tensor) -> torch.Tensor:
        """Return the sum of scaled gradients, each coordinate clamped to ±1, on `rows`."""
        total, row = torch.zeros_like(scale, dtype=torch.float64), scale.reshape(1, -1)
        for _, each in self._chunks(rows):
            clamped = clamp_in_place(each.mul_(row))
            total += clamped.sum(0, dtype=torch.float64).view_as(total)
        return total

    def damped_squared_norms(self, pieces: MappedPieces, damping: float) -> torch.Tensor:
        """Return squared norms of per-example gradients after shift, scaling and soft clipping."""
        found = self._zeros()
        for piece, affine in pieces:
            for part, each in self._chunks(piece.rows):
                ones = each.new_ones(len(each), 1)
                found[part] += damped_squared_norms(ones, each, affine.as_row(), damping)
        return found

    def damped_sum(
        self, rows: slice, affine: AffineMap, damping: float, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of shifted, scaled, soft-clipped gradients on `rows`."""
        row = affine.as_row()
        assert row.scale is not None
        total = torch.zeros_like(row.scale, dtype=torch.float64)
        for part, each in self._chunks(rows):
            total += damped_sum(each.new_ones(len(each), 1), each, row, damping, weights[part])
        return total

    def _chunks(self, rows: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield a few examples at a time: their slice, and their gradients as a matrix."""
        size = max(1, (rows.stop - rows.start) * (self.shape.numel() // max(1, self.shape[0])))
        limit = _CHUNK_SIZE if self.sample.is_cpu else _ACCELERATOR_CHUNK_SIZE
        step = max(1, limit // size)
        for start in range(0, self.example_count, step):
            part = slice(start, min(start + step, self.example_count))
            yield part, self.dense(part, rows).flatten(1)

    def _zeros(self) -> torch.Tensor:
        """Return a vector of one zero per example, in double precision."""
        return self.sample.new_zeros(self.example_count, dtype=torch.float64)
