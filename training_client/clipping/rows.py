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
    rows: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """Σⱼ dⱼ²(rᵢⱼ + bⱼ)² of each row."""
    if on_processor(rows):
        return _sums(_affine_squared_norms, rows, scale.numpy(), shift.numpy())
    return (rows.double() + shift).mul_(scale).square_().sum(1)


def dots(rows: torch.Tensor, others: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Σⱼ pᵢⱼ·gᵢⱼ of each row, with the columns of the others from `start` on."""
    if on_processor(rows):
        return _sums(_dots, rows, others.numpy(), start)
    return (rows * others[:, start : start + rows.shape[1]].double()).sum(1)


def dots_of_squares(rows: torch.Tensor, others: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Σⱼ pᵢⱼ·gᵢⱼ² of each row, with the columns of the others from `start` on."""
    if on_processor(rows):
        return _sums(_dots_of_squares, rows, others.numpy(), start)
    return (rows * others[:, start : start + rows.shape[1]].double().square()).sum(1)


def unit_squares(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rᵢⱼ/‖rᵢ‖)², in the precision given, and ‖rᵢ‖²; a row of zeros stays one."""
    if on_processor(rows):
        squares = torch.empty_like(rows)
        return squares, _sums(_unit_squares, rows, squares.numpy())
    norms = squared_norms(rows)
    inverse = norms.reciprocal().masked_fill_(norms == 0, 0.0)
    return (rows.double().square() * inverse[:, None]).to(rows.dtype), norms


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


def _affine_squared_norms(rows: Any, scale: Any, shift: Any, found: Any) -> None:
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        for j in range(len(row)):
            total += ((float64(row[j]) + float64(shift[j])) * float64(scale[j])) ** 2
        found[i] = total


def _dots(rows: Any, others: Any, start: int, found: Any) -> None:
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        other = others[i, start : start + len(row)]
        for j in range(len(row)):
            total += float64(row[j]) * float64(other[j])
        found[i] = total


def _dots_of_squares(rows: Any, others: Any, start: int, found: Any) -> None:
    for i in range(len(rows)):
        total, row = 0.0, rows[i]
        other = others[i, start : start + len(row)]
        for j in range(len(row)):
            total += float64(row[j]) * float64(other[j]) ** 2
        found[i] = total


def _unit_squares(rows: Any, squares: Any, found: Any) -> None:
    for i in range(len(rows)):
        total, row, square = 0.0, rows[i], squares[i]
        for j in range(len(row)):
            total += float64(row[j]) ** 2
        inverse = 1.0 / total if total != 0.0 else 0.0
        for j in range(len(row)):
            square[j] = float64(row[j]) ** 2 * inverse
        found[i] = total
