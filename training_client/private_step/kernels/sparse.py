"""Sparse matrices and their products, for inputs that are mostly 0: images, bags of words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch.nn.functional import embedding_bag

_COLUMNS_MAX: Final = 112  # of a result at a time, whose sums stay in a CPU's registers
_COLUMN_MULTIPLE: Final = 8
_INT32_SIZE_MAX: Final = 1 << 31  # elements of a matrix, beyond which indices need 64 bits


@dataclass(frozen=True)
class SparseFactor:
    """A matrix in compressed sparse row (CSR) format, in single precision on the CPU.

    It is a `gradient_factors.Factor`.

    Attributes:
        starts: the index of each row's first value, and the end of the last row.
        places: the column of each value.
        values: the values that are not 0, row after row.
        columns: the number of columns of the matrix.
    """

    starts: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor
    columns: int

    @classmethod
    def from_dense(cls, matrix: torch.Tensor) -> SparseFactor:
        """Convert a dense matrix to CSR format."""
        numbers = matrix.numpy()
        filled = numbers != 0
        found = np.flatnonzero(filled)  # for booleans seven times as fast as for numbers
        rows = np.arange(len(numbers) + 1) * filled.shape[1]
        begins = np.searchsorted(found, rows)
        columns = found - np.repeat(rows[:-1], np.diff(begins))
        values = torch.from_numpy(numbers.reshape(-1)[found])
        kind = np.int32 if filled.size < _INT32_SIZE_MAX else np.int64
        starts, places = (torch.from_numpy(each.astype(kind)) for each in (begins, columns))
        return cls(starts, places, values, filled.shape[1])

    def squared_norms(self) -> torch.Tensor:
        """Return each row's squared norm, in double precision."""
        return self._sum_rows(self.values.double().square_())

    def normalized_squares(self) -> tuple[SparseFactor, torch.Tensor]:
        """Scale each row to norm 1 and square its entries; also return the rows' squared norms."""
        squares = self.values.double().square_()
        norms = self._sum_rows(squares)
        inverse = norms.reciprocal().index_select(0, self._row_indices)
        least = float(torch.finfo(self.values.dtype).tiny)
        unit = squares.mul_(inverse).clamp_min_(least).to(self.values.dtype)
        return SparseFactor(self.starts, self.places, unit, self.columns), norms

    def products(self, right: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield self @ right for some columns at a time, with the row and column slices."""
        for columns in _column_slices(right.shape[1]):
            table = np.ascontiguousarray(
                right[:, columns].numpy()
            )  # three times as fast as PyTorch's
            yield slice(0, len(self.starts) - 1), columns, embedding_bag(
                self.places, torch.from_numpy(table), self.starts,
                mode="sum", per_sample_weights=self.values, include_last_offset=True,
            )  # fmt: skip

    def weighted_product(
        self, left: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the weighted sum of outer products Σ wᵢ·leftᵢ·selfᵢᵀ over rows i into `out`."""
        for _, columns, found in self._transposed.products(left * weights[:, None]):
            out.numpy()[columns] = found.numpy().T

    @cached_property
    def _transposed(self) -> SparseFactor:
        """The transposed matrix."""
        from scipy.sparse import csr_array  # slow to import, and rarely needed

        arrays = (each.numpy() for each in (self.values, self.places, self.starts))
        rows = len(self.starts) - 1
        transposed = csr_array(tuple(arrays), shape=(rows, self.columns)).tocsc()
        starts, places, values = map(
            torch.from_numpy, (transposed.indptr, transposed.indices, transposed.data)
        )
        return SparseFactor(starts, places, values, rows)

    @property
    def _row_indices(self) -> torch.Tensor:
        """The row index of each stored (nonzero) value."""
        return torch.repeat_interleave(self.starts.diff())

    def _sum_rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum `numbers`, one per stored value, over each row of the matrix."""
        return numbers.new_zeros(len(self.starts) - 1).index_add_(0, self._row_indices, numbers)


def _column_slices(columns: int) -> Iterator[slice]:
    """Divide columns into as few slices as possible, of about equal width."""
    parts = max(1, -(-columns // _COLUMNS_MAX))
    step = -(-columns // (parts * _COLUMN_MULTIPLE)) * _COLUMN_MULTIPLE
    for start in range(0, columns, step):
        yield slice(start, min(start + step, columns))
