"""Clamped and damped sums, which need each coordinate of each example's gradient.

Every coordinate of every example's ∇ = g aᵀ is computed, x = D∘∇; matrix products cannot do it.
On a CPU one compiled pass holds none of the gradients in memory (numba); PyTorch, operation by
operation, took eight times as long. On an accelerator a few examples are computed at a time.

In a box, x is clamped to ±1. With damping it becomes u = (x + D∘b)/√(1 + (c·x)²), computed twice:
for ‖u‖, and for the sum. Both passes use the same operations in the same order on the same thread,
so that the u that is summed is the one whose norm was computed, however it was rounded. Sums over
examples are in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import numpy as np
import torch

from training_client.private_step.kernels.compiled import compile_and_keep, is_on_cpu
from training_client.private_step.kernels.elementwise import AffineMap
from training_client.private_step.kernels.row_sums import squared_norms

_ELEMENTS_MAX: Final = 1 << 26  # of per-example gradients at a time, on an accelerator
_ROW_GROUP: Final = 4  # rows of the sum at a time: an example's inputs stay in the cache for all


def clamped_sum(gradients: torch.Tensor, inputs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the sum of scaled per-example gradients, each coordinate clamped to ±1, in double.

    NaN counts as 0.

    Args:
        gradients: g, one row per example.
        inputs: a, one row per example.
        scale: D, of shape (columns of g, columns of a).
    """
    total = torch.zeros_like(scale, dtype=torch.float64)
    if is_on_cpu(scale):
        arrays = [each.numpy() for each in (gradients, inputs, scale, total)]
        with _preserved_thread_count():
            _compile_clamped_sum()(*arrays, arrays[0].dtype.type(1))
        return total
    for _, each in _gradients_of_few_examples(gradients, inputs):
        total += clamp_in_place(each.mul_(scale)).sum(0, dtype=torch.float64)
    return total


def clamp_in_place(values: torch.Tensor) -> torch.Tensor:
    """Clamp values to ±1 in place, and NaN to 0."""
    return values.nan_to_num_(0.0, 1.0, -1.0).clamp_(-1.0, 1.0)


def damped_squared_norms(
    gradients: torch.Tensor, inputs: torch.Tensor, affine: AffineMap, damping: float
) -> torch.Tensor:
    """Return each example's squared norm after an affine map and soft clipping (damping).

    The affine map gives v = D∘(∇ + b), and damping by c limits it to v/√(1 + (c·D∘∇)²).

    The norm is ∞ or NaN if a coordinate of the damped gradient is. On an accelerator it is rounded
    up.

    Args:
        gradients: g, one row per example.
        inputs: a, one row per example.
        affine: D and b, of shape (columns of g, columns of a).
        damping: c > 0.
    """
    result = gradients.new_zeros(len(gradients), dtype=torch.float64)
    if is_on_cpu(gradients):
        _compile_damped_loop(_write_damped_squares)(
            *_loop_arguments(gradients, inputs, affine, damping), result.numpy()
        )
        return result
    for part, each in _gradients_of_few_examples(gradients, inputs):
        result[part] = squared_norms(_damp_in_place(each, affine, damping).flatten(1))
    return result


def damped_sum(
    gradients: torch.Tensor,
    inputs: torch.Tensor,
    affine: AffineMap,
    damping: float,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of gradients after an affine map and soft clipping, in double.

    Args:
        gradients: as in `damped_squared_norms`.
        inputs: likewise.
        affine: likewise.
        damping: likewise.
        weights: w, one per example.
    """
    assert affine.scale is not None
    total = torch.zeros_like(affine.scale, dtype=torch.float64)
    if is_on_cpu(gradients):
        arrays = _loop_arguments(gradients, inputs, affine, damping)
        _compile_damped_loop(_add_weighted_damped)(*arrays, weights.numpy(), total.numpy())
        return total
    for part, each in _gradients_of_few_examples(gradients, inputs):
        weight = weights[part, None, None]
        damped = _damp_in_place(each, affine, damping).mul_(weight)
        kept = damped.masked_fill_(weight == 0, 0.0)  # it may be 0·∞
        total += kept.sum(0, dtype=torch.float64)
    return total


def _gradients_of_few_examples(
    gradients: torch.Tensor, inputs: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of a few examples, with the outer products of their gradients and inputs."""
    rows = max(1, _ELEMENTS_MAX // (gradients.shape[1] * inputs.shape[1]))
    for at in range(0, len(gradients), rows):
        part = slice(at, at + rows)
        yield part, gradients[part, :, None] * inputs[part, None, :]


def _damp_in_place(each: torch.Tensor, affine: AffineMap, damping: float) -> torch.Tensor:
    """Apply `affine` to gradients, then soft-clip (damp) them, in place."""
    assert affine.scale is not None
    x = each.mul_(affine.scale)
    roots = (x * damping).square_().add_(1).sqrt_()
    return (x if affine.shift is None else x.add_(affine.scale * affine.shift)).div_(roots)


def _loop_arguments(
    gradients: torch.Tensor, inputs: torch.Tensor, affine: AffineMap, damping: float
) -> list[Any]:
    """Return the arguments of the compiled damping loops, converted to one dtype."""
    assert affine.scale is not None
    shift = None if affine.shift is None else (affine.scale * affine.shift).numpy()
    arrays = [each.numpy() for each in (gradients, inputs, affine.scale)]
    dtype = arrays[0].dtype.type
    return [*arrays, shift, dtype(damping), dtype(1)]


@contextmanager
def _preserved_thread_count() -> Iterator[None]:
    """Restore PyTorch's number of threads, which numba changes, after the `with` block."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@cache
def _compile_clamped_sum() -> Callable[..., None]:
    """Compile the parallel loop of `clamped_sum`; this takes a second or two."""
    import numba

    numba.set_num_threads(min(torch.get_num_threads(), numba.get_num_threads()))

    def add_clamped(gradients: Any, inputs: Any, scale: Any, total: Any, one: Any) -> None:
        """Add each example's scaled gradient, clamped to ±1, to `total`."""
        for group in numba.prange((len(scale) + _ROW_GROUP - 1) // _ROW_GROUP):
            for example in range(len(gradients)):
                for row in range(group * _ROW_GROUP, min((group + 1) * _ROW_GROUP, len(scale))):
                    gradient = gradients[example, row]
                    for column in range(scale.shape[1]):
                        value = gradient * inputs[example, column] * scale[row, column]
                        value = one if value > one else value
                        value = -one if value < -one else value
                        total[row, column] += np.float64(value if value == value else one - one)

    return compile_and_keep(add_clamped, parallel=True)


@cache
def _compile_damped_loop(loop: Callable[..., None]) -> Callable[..., None]:
    """Compile a damping loop without reordering its floating-point operations."""
    return compile_and_keep(loop, error_model="numpy")


def _write_damped_squares(
    gradients: Any, inputs: Any, scale: Any, shift: Any, damping: Any, one: Any, result: Any
) -> None:
    """Write each example's squared norm, after scale, shift and soft clipping, to `result`."""
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
        result[example] = squares.sum()


def _add_weighted_damped(
    gradients: Any, inputs: Any, scale: Any, shift: Any, damping: Any, one: Any,
    weights: Any, total: Any,
) -> None:  # fmt: skip
    """Add the weighted sum of scaled, shifted and soft-clipped (damped) gradients to `total`."""
    for first in range(0, len(scale), _ROW_GROUP):
        for example in range(len(gradients)):
            weight = weights[example]
            for row in range(first, min(first + _ROW_GROUP, len(scale))):
                gradient = gradients[example, row]
                for column in range(scale.shape[1]):
                    x = gradient * inputs[example, column] * scale[row, column]
                    root = np.sqrt(one + (damping * x) * (damping * x))
                    u = (x if shift is None else x + shift[row, column]) / root
                    total[row, column] += np.float64(weight * u)
