"""Matrices without their zeros, of which images and bags of words are mostly made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch.nn.functional import embedding_bag

_COLUMNS: Final = 112  # of a result at a time: so many sums stay in a processor's registers
_MULTIPLE: Final = 8  # of them
_LARGEST: Final = 1 << 31  # of numbers, whose places have 31 bits


@dataclass(frozen=True)
class Sparse:
    """A matrix's numbers that are not 0, row after row, in single precision on a processor.

    Attributes:
        starts: where each row's begin among them, and where the last one's end.
        places: the column of each.
        values: they themselves.
        columns: how many the matrix has.
    """

    starts: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor
    columns: int

    @classmethod
    def of(cls, matrix: torch.Tensor) -> Sparse:
        """A matrix's."""
        numbers = matrix.numpy()
        filled = numbers != 0
        found = np.flatnonzero(filled)  # of truth values: of numbers it takes seven times as long
        rows = np.arange(len(numbers) + 1) * filled.shape[1]
        begins = np.searchsorted(found, rows)
        columns = found - np.repeat(rows[:-1], np.diff(begins))
        values = torch.from_numpy(numbers.reshape(-1)[found])
        kind = np.int32 if filled.size < _LARGEST else np.int64
        starts, places = (torch.from_numpy(each.astype(kind)) for each in (begins, columns))
        return cls(starts, places, values, filled.shape[1])

    def squared_norms(self) -> torch.Tensor:
        """See `Factor`."""
        return self._sums(self.values.double().square_())

    def unit_squares(self) -> tuple[Sparse, torch.Tensor]:
        """See `Factor`."""
        squares = self.values.double().square_()
        norms = self._sums(squares)
        inverse = norms.reciprocal().index_select(0, self._rows)
        least = float(torch.finfo(self.values.dtype).tiny)
        unit = squares.mul_(inverse).clamp_min_(least).to(self.values.dtype)
        return Sparse(self.starts, self.places, unit, self.columns), norms

    def products(self, right: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """See `Factor`; PyTorch's sum of a table's rows, each with a weight, is what does it."""
        for columns in _parts(right.shape[1]):
            table = np.ascontiguousarray(right[:, columns].numpy())  # thrice as fast as PyTorch's
            yield slice(0, len(self.starts) - 1), columns, embedding_bag(
                self.places, torch.from_numpy(table), self.starts,
                mode="sum", per_sample_weights=self.values, include_last_offset=True,
            )  # fmt: skip

    def add_up(self, left: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """See `Factor`."""
        for _, columns, found in self._turned.products(left * weights[:, None]):
            out.numpy()[columns] = found.numpy().T

    @cached_property
    def _turned(self) -> Sparse:
        """Its columns as rows."""
        from scipy.sparse import csr_array  # takes a tenth of a process' start, and few need it

        arrays = (each.numpy() for each in (self.values, self.places, self.starts))
        rows = len(self.starts) - 1
        turned = csr_array(tuple(arrays), shape=(rows, self.columns)).tocsc()
        starts, places, values = map(torch.from_numpy, (turned.indptr, turned.indices, turned.data))
        return Sparse(starts, places, values, rows)

    @property
    def _rows(self) -> torch.Tensor:
        """Of each number."""
        return torch.repeat_interleave(self.starts.diff())

    def _sums(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of each row."""
        return numbers.new_zeros(len(self.starts) - 1).index_add_(0, self._rows, numbers)


def _parts(columns: int) -> Iterator[slice]:
    """As few as there may be, and about the same of each."""
    parts = max(1, -(-columns // _COLUMNS))
    step = -(-columns // (parts * _MULTIPLE)) * _MULTIPLE
    for start in range(0, columns, step):
        yield slice(start, min(start + step, columns))
