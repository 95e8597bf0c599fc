"""All trained numbers as one vector, and blocks of it that stay in a processor's cache.

Everything element by element (scales, noise, statistics) is done to one block after another, with
what an optimizer keeps in vectors of all numbers. No other tensor of a model's size is then needed
for what lies between; many small parameters take no more calls than one; and it takes less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

_ELEMENTS: Final = 2 << 16  # of a block; half a MiB in single precision
_ON_ACCELERATORS: Final = 1 << 24  # where calls are what takes time
_MULTIPLE: Final = 64  # of rows: products of matrices are faster for it


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one parameter, in a block.

    Attributes:
        at: the parameter's place among those that are trained.
        rows: of its first dimension.
        shape: of these rows.
        numbers: where they are in the block.
    """

    at: int
    rows: slice
    shape: tuple[int, ...]
    numbers: slice

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Its part, a view, of tensors that are shaped like the parameters."""
        return tensors[self.at][self.rows]

    def within(self, numbers: torch.Tensor) -> torch.Tensor:
        """Its part, a view in its shape, of the block's numbers."""
        return numbers[self.numbers].view(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """Some of all numbers, one after another.

    Attributes:
        numbers: where they are in the vector.
        pieces: of parameters, that they are made of.
    """

    numbers: slice
    pieces: tuple[Piece, ...]

    def of(self, vector: torch.Tensor) -> torch.Tensor:
        """Its part, a view, of a vector of all numbers."""
        return vector[self.numbers]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return int(self.numbers.stop - self.numbers.start)


def joined(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The vector of all numbers of tensors that are shaped like the parameters, a copy."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def split(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of a vector of all numbers, shaped like the parameters."""
    sizes = [each.numel() for each in like]
    parts = zip(torch.split(vector, sizes), like, strict=True)
    return [part.view(each.shape) for part, each in parts]


def blocks_of(parameters: Sequence[torch.Tensor]) -> list[Block]:
    """All numbers, cut into blocks; on an accelerator no parameter is cut."""
    blocks: list[Block] = []
    pieces: list[Piece] = []
    start = size = 0
    most = _ELEMENTS if parameters[0].is_cpu else _ON_ACCELERATORS
    for at, rows, shape in _cut(parameters):
        if pieces and size + prod(shape) > most:
            blocks.append(Block(slice(start, start + size), tuple(pieces)))
            start, size, pieces = start + size, 0, []
        pieces.append(Piece(at, rows, shape, slice(size, size + prod(shape))))
        size += prod(shape)
    return [*blocks, Block(slice(start, start + size), tuple(pieces))]


def _cut(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Rows of parameters, no more than a block holds, and their shape."""
    for at, parameter in enumerate(parameters):
        step = _rows(parameter)
        for start in range(0, len(parameter), step):
            rows = slice(start, min(start + step, len(parameter)))
            yield at, rows, (rows.stop - rows.start, *parameter.shape[1:])


def _rows(parameter: torch.Tensor) -> int:
    """Rows of a block."""
    if not parameter.is_cpu:
        return max(1, len(parameter))
    rows = _ELEMENTS * len(parameter) // max(1, parameter.numel())
    return max(1, rows - rows % _MULTIPLE if rows > _MULTIPLE else rows)
