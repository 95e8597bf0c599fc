"""Rows of a parameter, few enough that what is done to them stays in a processor's cache.

Everything element by element (scales, noise, updates) is done to one block after another. No
other tensor of a parameter's size is then needed for what lies between, and it takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

_ELEMENTS: Final = 2 << 16  # half a MiB in single precision
_MULTIPLE: Final = 64  # of rows: products of matrices are faster for it


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of one parameter.

    Attributes:
        at: the parameter's place among those that are trained.
        rows: of its first dimension.
    """

    at: int
    rows: slice

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Its part, a view, of tensors that are shaped like the parameters."""
        return tensors[self.at][self.rows]


def blocks_of(parameters: Sequence[torch.Tensor]) -> list[Block]:
    """All of them, cut into blocks; on an accelerator each parameter is one."""
    return [
        Block(at, slice(start, start + rows))
        for at, parameter in enumerate(parameters)
        for rows in [_rows(parameter)]
        for start in range(0, len(parameter), rows)
    ]


def _rows(parameter: torch.Tensor) -> int:
    """Rows of a block."""
    if parameter.device.type != "cpu":
        return max(1, len(parameter))
    rows = _ELEMENTS * len(parameter) // max(1, parameter.numel())
    return max(1, rows - rows % _MULTIPLE if rows > _MULTIPLE else rows)
