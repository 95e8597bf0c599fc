"""Sparse matrices and their products, for inputs that are mostly 0: images, bags of words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy import float64
from torch.nn.functional import embedding_bag

from training_client.private_step.kernels.compiled import compile_loop

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
        self, left: torch.Tensor, weights: torch.Tensor, _: int, out: torch.Tensor
    ) -> None:
        """Write the weighted sum of outer products Σ wᵢ·leftᵢ·selfᵢᵀ over rows i into `out`.

        All is added up in double precision.
        """
        of = self._transposed
        arrays = [each.numpy() for each in (of.starts, of.places, of.values)]
        weighted, total = (left * weights[:, None]).numpy(), out.numpy()
        for columns in _column_slices(left.shape[1]):
            found = np.zeros((self.columns, columns.stop - columns.start))
            table = np.ascontiguousarray(weighted[:, columns])
            compile_loop(_add_weighted_bags)(*arrays, table, found)
            total[columns] = found.T

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


def _add_weighted_bags(starts: Any, places: Any, values: Any, table: Any, total: Any) -> None:
    """Add to each row of `total`, in double precision, the rows of `table` that its bag names."""
    for row in range(len(starts) - 1):
        sums, i = total[row], starts[row]
        while i + 4 <= starts[row + 1]:  # four at a time: sums are read and written less often
            u, v = float64(values[i]), float64(values[i + 1])
            w, x = float64(values[i + 2]), float64(values[i + 3])
            a, b = table[places[i]], table[places[i + 1]]
            c, d = table[places[i + 2]], table[places[i + 3]]
            for j in range(len(sums)):
                sums[j] += (u * float64(a[j]) + v * float64(b[j])) + (
                    w * float64(c[j]) + x * float64(d[j])
                )
            i += 4
        while i < starts[row + 1]:
            u, a = float64(values[i]), table[places[i]]
            for j in range(len(sums)):
                sums[j] += u * float64(a[j])
            i += 1


def _column_slices(columns: int) -> Iterator[slice]:
    """Divide columns into as few slices as possible, of about equal width."""
    parts = max(1, -(-columns // _COLUMNS_MAX))
    step = -(-columns // (parts * _COLUMN_MULTIPLE)) * _COLUMN_MULTIPLE
    for start in range(0, columns, step):
        yield slice(start, min(start + step, columns))
