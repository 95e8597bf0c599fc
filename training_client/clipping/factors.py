"""What examples' gradients are made of, multiplied by other matrices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from training_client.clipping.products import parts_of, product, weighted_product
from training_client.clipping.rows import squared_norms, unit_squares
from training_client.clipping.sparse import Sparse

_NUMBERS: Final = 128  # of an example: of fewer zeros are not left out
_COLUMNS: Final = 16  # nor for fewer of these


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


def factor_of(rows: torch.Tensor, columns: int, *, sparse: bool) -> Factor:
    """The matrix, without its zeros if they are many and that takes less time.

    What decides is known without the examples, even how many there are: the two add up in another
    order, and one record must not change how all others are rounded.

    Args:
        rows: one an example.
        columns: of what it is to be multiplied by.
        sparse: whether most numbers are said to be 0.
    """
    large = columns >= _COLUMNS and rows.shape[1] >= _NUMBERS
    if sparse and large and rows.is_cpu and rows.dtype == torch.float32:
        return Sparse.of(rows)
    return Dense(rows)


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
