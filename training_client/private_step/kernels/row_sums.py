"""Sums along rows in double precision.

In double precision the squares of single-precision values neither overflow nor underflow; callers
allow for other rounding with `rounding_bounds`. PyTorch would first copy a tensor into double
precision, which takes longer than the sum.

On an accelerator single precision is added up in parts, and rounded up (`accelerator_sums`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy import float64

from training_client.private_step.kernels import accelerator_sums
from training_client.private_step.kernels.compiled import compile_loop, is_on_cpu


def squared_norms(rows: torch.Tensor) -> torch.Tensor:
    """Return each row's squared norm; of single precision, rounded up on an accelerator."""
    if is_on_cpu(rows):
        return _run_row_loop(_squared_norms, rows)
    if accelerator_sums.are_summable(rows):
        return accelerator_sums.squared_norms(rows)
    return rows.double().square().sum(1)


def mapped_squared_norms(
    rows: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each row's squared norm after `shift` is added and the sum multiplied by `scale`.

    Single precision is rounded up on an accelerator.

    Args:
        rows: r.
        scale: d, one row; on an accelerator it may have one for each of `rows`.
        shift: b, likewise; None for 0.
    """
    if not is_on_cpu(rows):
        if accelerator_sums.are_summable(rows):
            return accelerator_sums.mapped_squared_norms(rows, scale, shift)
        shifted = rows.double() if shift is None else rows.double() + shift
        return (shifted * scale).square_().sum(1)
    if shift is None:
        return _run_row_loop(_scaled_squared_norms, rows, scale.numpy())
    return _run_row_loop(_mapped_squared_norms, rows, scale.numpy(), shift.numpy())


def add_row_dots(
    rows: torch.Tensor,
    others: torch.Tensor,
    total: torch.Tensor,
    start: int = 0,
    *,
    squared: bool = False,
) -> None:
    """Add each row's dot product with `others`' same row, from column `start` on, to `total`.

    Single precision is rounded up on an accelerator.

    Args:
        rows: one row an example.
        others: the rows that they are multiplied with.
        total: one number an example, in double precision.
        start: the first column of `others` that is used.
        squared: square the entries of `others` first.
    """
    if is_on_cpu(rows):
        loop = _add_row_dots_of_squares if squared else _add_row_dots
        compile_loop(loop)(rows.numpy(), others.numpy(), start, total.numpy())
    else:
        total += _dots(rows, others[:, start : start + rows.shape[1]], squared=squared)


def _dots(rows: torch.Tensor, others: torch.Tensor, *, squared: bool) -> torch.Tensor:
    """Return each row's dot product with `others`' same row, or with its squares, rounded up."""
    if accelerator_sums.are_summable(rows):
        return accelerator_sums.dots(rows, others, squared=squared)
    numbers = others.double()
    return (rows * (numbers.square() if squared else numbers)).sum(1)


def normalized_squares(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row to norm 1 and square its entries; also return the rows' squared norms.

    A row of zeros stays one. Squares that would underflow are rounded up to the smallest normal
    number, because a large D² may multiply them later. On an accelerator the squared norms are
    rounded up, and the entries are divided by them.
    """
    least = float(torch.finfo(rows.dtype).tiny)
    if is_on_cpu(rows):
        squares = torch.empty_like(rows)
        return squares, _run_row_loop(_normalized_squares, rows, squares.numpy(), least)
    if accelerator_sums.are_summable(rows):
        return accelerator_sums.normalized_squares(rows)
    exact = rows.double().square()
    norms = exact.sum(1)
    inverse = norms.reciprocal().masked_fill_(norms == 0, 0.0)
    squares = (exact * inverse[:, None]).clamp_min_(least).to(rows.dtype)
    return squares.masked_fill_(rows == 0, 0.0), norms


def _run_row_loop(loop: Callable[..., None], rows: torch.Tensor, *more: Any) -> torch.Tensor:
    """Run a compiled loop that computes one number per row; return these numbers."""
    result = rows.new_empty(len(rows), dtype=torch.float64)
    compile_loop(loop)(rows.numpy(), *more, result.numpy())
    return result


def _squared_norms(rows: Any, result: Any) -> None:
    """Write each row's squared norm to `result`."""
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        for j in range(len(row)):
            total += float64(row[j]) ** 2
        result[i] = total


def _scaled_squared_norms(rows: Any, scale: Any, result: Any) -> None:
    """Write each row's squared norm, after multiplication by `scale`, to `result`."""
    for i in range(len(rows)):
        total, row, scales = 0.0, rows[i], scale[0]
        for j in range(len(row)):
            total += (float64(row[j]) * float64(scales[j])) ** 2
        result[i] = total


def _mapped_squared_norms(rows: Any, scale: Any, shift: Any, result: Any) -> None:
    """Write each row's squared norm, after shift and multiplication by `scale`, to `result`."""
    for i in range(len(rows)):
        total, row, scales, shifts = 0.0, rows[i], scale[0], shift[0]
        for j in range(len(row)):
            total += ((float64(row[j]) + float64(shifts[j])) * float64(scales[j])) ** 2
        result[i] = total


def _add_row_dots(rows: Any, others: Any, start: int, result: Any) -> None:
    """Add each row's dot product with `others`' same row, from column `start` on, to `result`."""
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        other = others[i, start : start + len(row)]
        for j in range(len(row)):
            total += float64(row[j]) * float64(other[j])
        result[i] += total


def _add_row_dots_of_squares(rows: Any, others: Any, start: int, result: Any) -> None:
    """Add each row's dot product with `others`' squared row, from column `start`, to `result`."""
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        other = others[i, start : start + len(row)]
        for j in range(len(row)):
            total += float64(row[j]) * float64(other[j]) ** 2
        result[i] += total


def _normalized_squares(rows: Any, squares: Any, least: Any, result: Any) -> None:
    """Write squared entries of rows scaled to norm 1 to `squares`, squared norms to `result`."""
    for i in range(len(rows)):
        total, row, square = 0.0, rows[i], squares[i]
        for j in range(len(row)):
            total += float64(row[j]) ** 2
        inverse = 1.0 / total if total != 0.0 else 0.0
        for j in range(len(row)):
            unit = float64(row[j]) ** 2 * inverse
            unit = least if unit < least else unit
            square[j] = unit if row[j] != 0 else 0.0
        result[i] = total
