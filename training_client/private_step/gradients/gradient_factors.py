"""Factors of per-example gradients: matrices with one row per example, dense or sparse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from training_client.private_step.kernels.matmul import (
    cache_sized_slices,
    multiply,
    weighted_product,
)
from training_client.private_step.kernels.row_sums import normalized_squares, squared_norms
from training_client.private_step.kernels.sparse import SparseFactor

_SPARSE_WIDTH_MIN: Final = 128  # values per example, below which zeros are not skipped
_SPARSE_COLUMNS_MIN: Final = 16  # columns of the other matrix, likewise


class Factor(Protocol):
    """Interface of a factor of per-example gradients: a matrix with one row per example."""

    def squared_norms(self) -> torch.Tensor:
        """Return each row's squared norm, in double precision."""
        ...

    def normalized_squares(self) -> tuple[Factor, torch.Tensor]:
        """Scale each row to norm 1 and square its entries; also return the rows' squared norms."""
        ...

    def products(self, right: torch.Tensor, /) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield self @ right in cache-sized blocks, each with its row and column slices.

        Yields:
            A slice of rows, a slice of columns, and the product there.
        """
        ...

    def weighted_product(
        self, left: torch.Tensor, weights: torch.Tensor, block: int, out: torch.Tensor, /
    ) -> None:
        """Write the weighted sum of outer products Σ wᵢ·leftᵢ·selfᵢᵀ over rows i into `out`.

        Args:
            left: one row per example.
            weights: w, one per example.
            block: how many examples may be added up in single precision; 0 for none.
            out: receives the product, in double precision.
        """
        ...


def make_factor(rows: torch.Tensor, columns: int, *, sparse: bool) -> Factor:
    """Wrap a matrix as sparse if it is declared sparse and large enough, otherwise as dense.

    The choice depends neither on the examples nor on their number: the two kinds add up in another
    order, and one record must not change how the others are rounded.

    Args:
        rows: the matrix, one row per example.
        columns: the number of columns of the matrices that it is multiplied by.
        sparse: whether most values are declared to be 0.
    """
    large = columns >= _SPARSE_COLUMNS_MIN and rows.shape[1] >= _SPARSE_WIDTH_MIN
    if sparse and large and rows.is_cpu and rows.dtype == torch.float32:
        return SparseFactor.from_dense(rows)
    return DenseFactor(rows)


@dataclass(frozen=True, slots=True)
class DenseFactor:
    """A matrix with one row per example, stored densely.

    Attributes:
        rows: the matrix, one row per example.
    """

    rows: torch.Tensor

    def squared_norms(self) -> torch.Tensor:
        """Return each row's squared norm, in double precision."""
        return squared_norms(self.rows)

    def normalized_squares(self) -> tuple[DenseFactor, torch.Tensor]:
        """Scale each row to norm 1 and square its entries; also return the rows' squared norms."""
        unit, norms = normalized_squares(self.rows)
        return DenseFactor(unit), norms

    def products(self, right: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield self @ right for some rows at a time, with the row and column slices."""
        for rows in cache_sized_slices(self.rows, right):
            yield rows, slice(0, right.shape[1]), multiply(self.rows[rows], right)

    def weighted_product(
        self, left: torch.Tensor, weights: torch.Tensor, block: int, out: torch.Tensor
    ) -> None:
        """Write the weighted sum of outer products Σ wᵢ·leftᵢ·selfᵢᵀ over rows i into `out`."""
        weighted_product(left, self.rows, weights, block, out)
