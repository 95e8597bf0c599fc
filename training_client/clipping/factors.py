"""What examples' gradients are made of, multiplied by other matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from training_client.clipping.products import parts_of, product, weighted_product
from training_client.clipping.rows import squared_norms, unit_squares
from training_client.clipping.sparse import Sparse

_SIDE: Final = 128  # examples, and numbers of each: of fewer zeros are not left out
_COLUMNS: Final = 16  # nor for fewer of these
_FILLED: Final = 0.25  # nor if more is not 0: a dense product takes less time


class Factor(Protocol):
    """A matrix with one row an example, that others are multiplied by."""

    def squared_norms(self) -> torch.Tensor:
        """‖·‖² of each row, in double precision."""
        ...

    def unit_squares(self) -> tuple[Factor, torch.Tensor]:
        """See `rows.unit_squares`."""
        ...

    def products(self, right: torch.Tensor, /) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """The product by another matrix, a part at a time, which stays in the cache.

        Yields:
            Some rows, some columns, and the product there.
        """
        ...

    def add_up(self, left: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, /) -> None:
        """leftᵀ @ diag(w) @ this, which adds up over the examples.

        Args:
            left: one row an example.
            weights: w, a number an example.
            out: takes it.
        """
        ...


def factor_of(rows: torch.Tensor, columns: int) -> Factor:
    """The matrix, without its zeros if that takes less time.

    Args:
        rows: one an example.
        columns: of what it is to be multiplied by.
    """
    if not rows.is_cpu or rows.dtype != torch.float32:
        return Dense(rows)
    if columns < _COLUMNS or min(rows.shape) < _SIDE:
        return Dense(rows)
    return Sparse.of(rows, _FILLED) or Dense(rows)


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix with all its numbers.

    Attributes:
        rows: one an example.
    """

    rows: torch.Tensor

    def squared_norms(self) -> torch.Tensor:
        """See `Factor`."""
        return squared_norms(self.rows)

    def unit_squares(self) -> tuple[Dense, torch.Tensor]:
        """See `Factor`."""
        unit, norms = unit_squares(self.rows)
        return Dense(unit), norms

    def products(self, right: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """See `Factor`."""
        for rows in parts_of(self.rows, right):
            yield rows, slice(0, right.shape[1]), product(self.rows[rows], right)

    def add_up(self, left: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `Factor`."""
        weighted_product(left, self.rows, weights, out)
