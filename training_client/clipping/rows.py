"""Sums along rows in double precision.

Squares of single precision fit into double precision, so that none of them overflows or is lost;
what may be lost otherwise is for `gradients` to allow for. PyTorch would first copy a tensor into
double precision, which takes longer than the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy import float64

from training_client.compiled import compiled, on_processor


def squared_norms(rows: torch.Tensor) -> torch.Tensor:
    """Σⱼ rᵢⱼ² of each row."""
    if on_processor(rows):
        return _sums(_squared_norms, rows)
    return rows.double().square().sum(1)


def affine_squared_norms(
    rows: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Σⱼ dⱼ²(rᵢⱼ + bⱼ)² of each row.

    Args:
        rows: r.
        scale: d, one row.
        shift: b, one row; None for 0.
    """
    if not on_processor(rows):
        shifted = rows.double() if shift is None else rows.double() + shift
        return (shifted * scale).square_().sum(1)
    if shift is None:
        return _sums(_scaled_squared_norms, rows, scale.numpy())
    return _sums(_affine_squared_norms, rows, scale.numpy(), shift.numpy())


def add_dots(rows: torch.Tensor, others: torch.Tensor, total: torch.Tensor, start: int = 0) -> None:
    """Add Σⱼ pᵢⱼ·gᵢⱼ of each row to a total, with the columns of the others from `start` on."""
    if on_processor(rows):
        compiled(_add_dots)(rows.numpy(), others.numpy(), start, total.numpy())
    else:
        total += (rows * others[:, start : start + rows.shape[1]].double()).sum(1)


def add_dots_of_squares(
    rows: torch.Tensor, others: torch.Tensor, total: torch.Tensor, start: int = 0
) -> None:
    """Add Σⱼ pᵢⱼ·gᵢⱼ² of each row to a total, with the columns of the others from `start` on."""
    if on_processor(rows):
        compiled(_add_dots_of_squares)(rows.numpy(), others.numpy(), start, total.numpy())
    else:
        total += (rows * others[:, start : start + rows.shape[1]].double().square()).sum(1)


def unit_squares(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rᵢⱼ/‖rᵢ‖)², in the precision given, and ‖rᵢ‖²; a row of zeros stays one.

    What would be taken for 0 is rounded up to the smallest normal number: a weight may be large.
    """
    least = float(torch.finfo(rows.dtype).tiny)
    if on_processor(rows):
        squares = torch.empty_like(rows)
        return squares, _sums(_unit_squares, rows, squares.numpy(), least)
    norms = squared_norms(rows)
    inverse = norms.reciprocal().masked_fill_(norms == 0, 0.0)
    squares = (rows.double().square() * inverse[:, None]).clamp_min_(least).to(rows.dtype)
    return squares.masked_fill_(rows == 0, 0.0), norms


def _sums(loop: Callable[..., None], rows: torch.Tensor, *more: Any) -> torch.Tensor:
    found = rows.new_empty(len(rows), dtype=torch.float64)
    compiled(loop)(rows.numpy(), *more, found.numpy())
    return found


def _squared_norms(rows: Any, found: Any) -> None:
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        for j in range(len(row)):
            total += float64(row[j]) ** 2
        found[i] = total


def _scaled_squared_norms(rows: Any, scale: Any, found: Any) -> None:
    for i in range(len(rows)):
        total, row, scales = 0.0, rows[i], scale[0]
        for j in range(len(row)):
            total += (float64(row[j]) * float64(scales[j])) ** 2
        found[i] = total


def _affine_squared_norms(rows: Any, scale: Any, shift: Any, found: Any) -> None:
    for i in range(len(rows)):
        total, row, scales, shifts = 0.0, rows[i], scale[0], shift[0]
        for j in range(len(row)):
            total += ((float64(row[j]) + float64(shifts[j])) * float64(scales[j])) ** 2
        found[i] = total


def _add_dots(rows: Any, others: Any, start: int, found: Any) -> None:
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        other = others[i, start : start + len(row)]
        for j in range(len(row)):
            total += float64(row[j]) * float64(other[j])
        found[i] += total


def _add_dots_of_squares(rows: Any, others: Any, start: int, found: Any) -> None:
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        other = others[i, start : start + len(row)]
        for j in range(len(row)):
            total += float64(row[j]) * float64(other[j]) ** 2
        found[i] += total


def _unit_squares(rows: Any, squares: Any, least: Any, found: Any) -> None:
    for i in range(len(rows)):
        total, row, square = 0.0, rows[i], squares[i]
        for j in range(len(row)):
            total += float64(row[j]) ** 2
        inverse = 1.0 / total if total != 0.0 else 0.0
        for j in range(len(row)):
            unit = float64(row[j]) ** 2 * inverse
            unit = least if unit < least else unit
            square[j] = unit if row[j] != 0 else 0.0
        found[i] = total
