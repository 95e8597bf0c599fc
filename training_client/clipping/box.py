"""Sums of clamped outer products: the one thing that needs every example's gradient by element.

On a processor it is one compiled pass that holds none of them (numba); PyTorch, operation by
operation, took eight times as long. On an accelerator it is done a few examples at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch

_ELEMENTS: Final = 1 << 26  # of per-example gradients at a time, on an accelerator
_ROWS: Final = 4  # of the sum at a time: an example's inputs stay in the cache for all of them


def clamped_products(
    gradients: torch.Tensor, inputs: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Σᵢ clamp(D∘(gᵢaᵢᵀ), ±1); what is no number counts as 0.

    Args:
        gradients: g, one row an example.
        inputs: a, one row an example.
        scale: D, of shape (columns of g, columns of a).
    """
    total = torch.zeros_like(scale)
    if scale.device.type == "cpu":
        arrays = [each.numpy() for each in (gradients, inputs, scale, total)]
        with _as_many_threads():
            _kernel()(*arrays, arrays[0].dtype.type(1))
        return total
    rows = max(1, _ELEMENTS // scale.numel())
    for at in range(0, len(gradients), rows):
        part = slice(at, at + rows)
        each = gradients[part, :, None] * inputs[part, None, :]
        total += clamped(each.mul_(scale)).sum(0)
    return total


def clamped(values: torch.Tensor) -> torch.Tensor:
    """Within ±1, in place; 0 for what is no number."""
    return values.nan_to_num_(0.0, 1.0, -1.0).clamp_(-1.0, 1.0)


@contextmanager
def _as_many_threads() -> Iterator[None]:
    """PyTorch's threads stay as many as they were: numba sets those of the library they share."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def _kernel() -> Callable[..., None]:
    """Compiled when first asked for, in a second or two."""
    import numba

    numba.set_num_threads(min(torch.get_num_threads(), numba.get_num_threads()))

    def add(gradients: Any, inputs: Any, scale: Any, total: Any, one: Any) -> None:
        for group in numba.prange((len(scale) + _ROWS - 1) // _ROWS):
            for example in range(len(gradients)):
                for row in range(group * _ROWS, min((group + 1) * _ROWS, len(scale))):
                    gradient = gradients[example, row]
                    for column in range(scale.shape[1]):
                        value = gradient * inputs[example, column] * scale[row, column]
                        value = one if value > one else value
                        value = -one if value < -one else value
                        total[row, column] += value if value == value else one - one

    compiled: Callable[..., None] = numba.njit(parallel=True)(add)
    return compiled
