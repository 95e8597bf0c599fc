"""Sums of what is made of an example's gradient number by number: no product of matrices is one.

Every example's ∇ = g aᵀ is gone through, x = D∘∇. On a processor a compiled pass holds none of them
(numba); PyTorch, operation by operation, took eight times as long. On an accelerator it is done a
few examples at a time.

In a box, x is clamped to ±1. Damped, it becomes u = (x + D∘b)/√(1 + (c·x)²), twice: for ‖u‖, and
for the sum. Both passes take the same operations in the same order and on the same thread, so that
the u that is summed is the one whose norm was found, however it was rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from training_client.clipping.transform import Affine
from training_client.compiled import on_processor

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
    if on_processor(scale):
        arrays = [each.numpy() for each in (gradients, inputs, scale, total)]
        with _as_many_threads():
            _clamping()(*arrays, arrays[0].dtype.type(1))
        return total
    for _, each in _a_few_at_a_time(gradients, inputs):
        total += clamped(each.mul_(scale)).sum(0)
    return total


def clamped(values: torch.Tensor) -> torch.Tensor:
    """Within ±1, in place; 0 for what is no number."""
    return values.nan_to_num_(0.0, 1.0, -1.0).clamp_(-1.0, 1.0)


def damped_squares(
    gradients: torch.Tensor, inputs: torch.Tensor, affine: Affine, damping: float
) -> torch.Tensor:
    """‖u‖² of each example, in double precision; ∞ or no number if a number of u is.

    Args:
        gradients: g, one row an example.
        inputs: a, one row an example.
        affine: D and b, of shape (columns of g, columns of a).
        damping: c > 0.
    """
    found = gradients.new_zeros(len(gradients), dtype=torch.float64)
    if on_processor(gradients):
        _damping(_add_squares)(*_arrays(gradients, inputs, affine, damping), found.numpy())
        return found
    for part, each in _a_few_at_a_time(gradients, inputs):
        found[part] = _damped(each, affine, damping).double().square_().flatten(1).sum(1)
    return found


def damped_sum(
    gradients: torch.Tensor,
    inputs: torch.Tensor,
    affine: Affine,
    damping: float,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Σᵢ wᵢuᵢ.

    Args:
        gradients: g, one row an example.
        inputs: a, one row an example.
        affine: D and b, of shape (columns of g, columns of a).
        damping: c > 0.
        weights: w, one for each example.
    """
    assert affine.scale is not None
    total = torch.zeros_like(affine.scale)
    if on_processor(gradients):
        arrays = _arrays(gradients, inputs, affine, damping)
        _damping(_add_weighted)(*arrays, weights.numpy(), total.numpy())
        return total
    for part, each in _a_few_at_a_time(gradients, inputs):
        total += _damped(each, affine, damping).mul_(weights[part, None, None]).sum(0)
    return total


def _a_few_at_a_time(
    gradients: torch.Tensor, inputs: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Which examples, and ∇ of each of them."""
    rows = max(1, _ELEMENTS // (gradients.shape[1] * inputs.shape[1]))
    for at in range(0, len(gradients), rows):
        part = slice(at, at + rows)
        yield part, gradients[part, :, None] * inputs[part, None, :]


def _damped(each: torch.Tensor, affine: Affine, damping: float) -> torch.Tensor:
    """u of ∇."""
    assert affine.scale is not None
    x = each.mul_(affine.scale)
    roots = (x * damping).square_().add_(1).sqrt_()
    return (x if affine.shift is None else x.add_(affine.scale * affine.shift)).div_(roots)


def _arrays(
    gradients: torch.Tensor, inputs: torch.Tensor, affine: Affine, damping: float
) -> list[Any]:
    """What a loop is given: all of one kind of numbers, so that no operation widens another's."""
    assert affine.scale is not None
    shift = None if affine.shift is None else (affine.scale * affine.shift).numpy()
    arrays = [each.numpy() for each in (gradients, inputs, affine.scale)]
    kind = arrays[0].dtype.type
    return [*arrays, shift, kind(damping), kind(1)]


@contextmanager
def _as_many_threads() -> Iterator[None]:
    """PyTorch's threads stay as many as they were: numba sets those of the library they share."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def _clamping() -> Callable[..., None]:
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


@cache
def _damping(loop: Callable[..., None]) -> Callable[..., None]:
    """Compiled when first asked for, with no operation contracted or taken in another order."""
    import numba

    compiled: Callable[..., None] = numba.njit(error_model="numpy")(loop)
    return compiled


def _add_squares(
    gradients: Any, inputs: Any, scale: Any, shift: Any, damping: Any, one: Any, found: Any
) -> None:
    squares = np.zeros(scale.shape[1])
    for example in range(len(gradients)):
        squares[:] = 0
        for row in range(len(scale)):
            gradient = gradients[example, row]
            for column in range(scale.shape[1]):
                x = gradient * inputs[example, column] * scale[row, column]
                root = np.sqrt(one + (damping * x) * (damping * x))
                u = (x if shift is None else x + shift[row, column]) / root
                squares[column] += np.float64(u) ** 2
        found[example] = squares.sum()


def _add_weighted(
    gradients: Any, inputs: Any, scale: Any, shift: Any, damping: Any, one: Any,
    weights: Any, total: Any,
) -> None:  # fmt: skip
    for first in range(0, len(scale), _ROWS):
        for example in range(len(gradients)):
            weight = weights[example]
            for row in range(first, min(first + _ROWS, len(scale))):
                gradient = gradients[example, row]
                for column in range(scale.shape[1]):
                    x = gradient * inputs[example, column] * scale[row, column]
                    root = np.sqrt(one + (damping * x) * (damping * x))
                    u = (x if shift is None else x + shift[row, column]) / root
                    total[row, column] += weight * u
