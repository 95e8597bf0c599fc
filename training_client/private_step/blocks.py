"""All trained parameters as one flat vector, cut into blocks that fit into a CPU's cache.

Elementwise work (scales, noise, statistics) is done one block after another, and an optimizer's
state is kept in vectors of all coordinates. So no temporary tensor is as large as the model, many
small parameters take no more calls than one large one, and a step takes less time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

_BLOCK_SIZE: Final = 2 << 16  # coordinates of a block on a CPU: half a MiB in single precision
_ACCELERATOR_BLOCK_SIZE: Final = 1 << 24  # larger, because there each call costs time
_ROW_MULTIPLE: Final = 64  # rows of a piece: matrix products are faster for multiples of it


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one parameter tensor that lie in one block of the flat parameter vector.

    Attributes:
        index: the parameter's index among the trained parameters.
        rows: the rows, along the parameter's first dimension.
        shape: the shape of these rows.
        coordinates: the position of the rows in the block.
    """

    index: int
    rows: slice
    shape: tuple[int, ...]
    coordinates: slice

    def select_rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a view of these rows, given one tensor per parameter."""
        return rows_of(tensors[self.index])[self.rows]

    def view_in(self, block_values: torch.Tensor) -> torch.Tensor:
        """Return a view of the rows, in their own shape, given the values of the whole block."""
        return block_values[self.coordinates].view(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """A range of consecutive coordinates in the flat vector of all trained parameters.

    Attributes:
        coordinates: the position of the block in the vector.
        pieces: the rows of parameters that the block consists of.
    """

    coordinates: slice
    pieces: tuple[Piece, ...]

    def view_in(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a view of the block, given a flat vector of all trained coordinates."""
        return vector[self.coordinates]

    @property
    def size(self) -> int:
        """The number of coordinates in the block."""
        return int(self.coordinates.stop - self.coordinates.start)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with at least one dimension: a single number has one row."""
    return tensor if tensor.dim() else tensor[None]


def flatten_tensors(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Copy tensors, one per parameter, into one flat vector of all trained coordinates."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def unflatten_vector(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat vector, one shaped like each parameter."""
    sizes = [each.numel() for each in like]
    parts = zip(torch.split(vector, sizes), like, strict=True)
    return [part.view(each.shape) for part, each in parts]


def cut_into_blocks(parameters: Sequence[torch.Tensor]) -> list[Block]:
    """Divide all trained coordinates into blocks; on a GPU no parameter is divided."""
    blocks: list[Block] = []
    pieces: list[Piece] = []
    start = size = 0
    size_max = _BLOCK_SIZE if parameters[0].is_cpu else _ACCELERATOR_BLOCK_SIZE
    for index, rows, shape in _cut_rows(parameters):
        if pieces and size + prod(shape) > size_max:
            blocks.append(Block(slice(start, start + size), tuple(pieces)))
            start, size, pieces = start + size, 0, []
        pieces.append(Piece(index, rows, shape, slice(size, size + prod(shape))))
        size += prod(shape)
    return [*blocks, Block(slice(start, start + size), tuple(pieces))]


def _cut_rows(parameters: Sequence[torch.Tensor]) -> Iterator[tuple[int, slice, tuple[int, ...]]]:
    """Yield rows of parameters that fit into a block: parameter index, slice of rows and shape."""
    for index, parameter in enumerate(parameters):
        step = _rows_per_block(parameter)
        length = len(rows_of(parameter))
        for start in range(0, length, step):
            rows = slice(start, min(start + step, length))
            yield index, rows, (rows.stop - rows.start, *parameter.shape[1:])


def _rows_per_block(parameter: torch.Tensor) -> int:
    """Return how many rows of a parameter fit into one block."""
    length = len(rows_of(parameter))
    if not parameter.is_cpu:
        return max(1, length)
    rows = _BLOCK_SIZE * length // max(1, parameter.numel())
    return max(1, rows - rows % _ROW_MULTIPLE if rows > _ROW_MULTIPLE else rows)
