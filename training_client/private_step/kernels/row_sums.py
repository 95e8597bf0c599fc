"""Sums along rows in double precision.

In double precision the squares of single-precision values neither overflow nor underflow; callers
allow for other rounding with `rounding_bounds`. PyTorch would first copy a tensor into double
precision, which takes longer than the sum.

On an accelerator the squared norms of single-precision rows are added up in single precision, 64
squares at a time, and only these partial sums in double precision. The result is raised so that it
is an upper bound. Proof, for a row x of n values with S = Σx², and u = 2⁻²⁴:

1. The row is multiplied by a power of two s, which is exact but for underflow, such that the
   largest |y| of y = s·x is in [1, 4), or in [2⁻²³, 1) if all of x is denormal. So Σy² ≥ 2⁻⁴⁶, and
   no square or sum of 64 squares (at most 2¹⁰) overflows.
2. A y below 2⁻¹²⁶ may become 0, and its square is below 2⁻²⁵². A square loses at most a share u of
   itself, or 2⁻¹²⁶ by underflow, and so may its addition. So underflow takes at most n·2⁻¹²⁴,
   which is at most n·2⁻⁷⁸·Σy², and below u/64·Σy² for n ≤ 2⁴⁸.
3. In a sum of 64 terms that are not negative, each takes part in at most 63 additions, in any
   order, and loses a share of at most 63u. With fused multiplications it loses no more.
4. The n/64 partial sums are added up in double precision, which takes a share n/64·2⁻⁵³, below u/64
   for n ≤ 2²⁹; more are added up in double precision from the start.
5. So the computed sum is at least (1 − 65u)·Σy². Multiplied by 1 + 68u it is at least
   (1 + 2u)·Σy², and exact powers of two make it an upper bound of S. It is at most
   (1 + 68u)(1 + 65u), less than 1 + 8·10⁻⁶, times S.

∞ and NaN stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from numpy import float64

from training_client.private_step.kernels.compiled import compile_loop, is_on_cpu

_PART: Final = 64  # squares that are added up in single precision
_COLUMNS_MAX: Final = 1 << 29
_ROUNDED_UP: Final = 1 + 68 * 2.0**-24
_MANTISSA_BITS, _EXPONENT_BIAS, _EXPONENT_MASK = 23, 127, 255  # of single precision


def squared_norms(rows: torch.Tensor) -> torch.Tensor:
    """Return each row's squared norm, in double precision; on an accelerator rounded up."""
    if is_on_cpu(rows):
        return _run_row_loop(_squared_norms, rows)
    if rows.dtype == torch.float32 and 0 < rows.shape[1] <= _COLUMNS_MAX:
        return _upper_bounds_by_parts(rows)
    return rows.double().square().sum(1)


def _upper_bounds_by_parts(rows: torch.Tensor) -> torch.Tensor:
    """Return the squared norms of single-precision rows, rounded up; see the proof above."""
    smallest, largest = rows.aminmax(dim=1)
    exponents = torch.maximum(largest, -smallest).view(torch.int32) >> _MANTISSA_BITS
    exponents = (2 * _EXPONENT_BIAS - (exponents & _EXPONENT_MASK)).clamp_(1, 253)
    powers = (exponents << _MANTISSA_BITS).view(torch.float32)
    part = min(_PART, rows.shape[1])
    width = -(-rows.shape[1] // part) * part
    scaled = rows.new_zeros(len(rows), width)
    torch.mul(rows, powers[:, None], out=scaled[:, : rows.shape[1]])
    parts = scaled.square_().view(len(rows), width // part, part).sum(2)
    return parts.double().sum(1).mul_(_ROUNDED_UP).div_(powers.double().square_())


def mapped_squared_norms(
    rows: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each row's squared norm after `shift` is added and the sum multiplied by `scale`.

    Args:
        rows: r.
        scale: d, one row.
        shift: b, one row; None for 0.
    """
    if not is_on_cpu(rows):
        shifted = rows.double() if shift is None else rows.double() + shift
        return (shifted * scale).square_().sum(1)
    if shift is None:
        return _run_row_loop(_scaled_squared_norms, rows, scale.numpy())
    return _run_row_loop(_mapped_squared_norms, rows, scale.numpy(), shift.numpy())


def add_row_dots(
    rows: torch.Tensor, others: torch.Tensor, total: torch.Tensor, start: int = 0
) -> None:
    """Add each row's dot product with `others`' same row, from column `start` on, to `total`."""
    if is_on_cpu(rows):
        compile_loop(_add_row_dots)(rows.numpy(), others.numpy(), start, total.numpy())
    else:
        total += (rows * others[:, start : start + rows.shape[1]].double()).sum(1)


def add_row_dots_of_squares(
    rows: torch.Tensor, others: torch.Tensor, total: torch.Tensor, start: int = 0
) -> None:
    """Add each row's dot product with `others`' squared row, from column `start`, to `total`."""
    if is_on_cpu(rows):
        compile_loop(_add_row_dots_of_squares)(rows.numpy(), others.numpy(), start, total.numpy())
    else:
        total += (rows * others[:, start : start + rows.shape[1]].double().square()).sum(1)


def normalized_squares(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale each row to norm 1 and square its entries; also return the rows' squared norms.

    A row of zeros stays one. Squares that would underflow are rounded up to the smallest normal
    number, because a large D² may multiply them later.
    """
    least = float(torch.finfo(rows.dtype).tiny)
    if is_on_cpu(rows):
        squares = torch.empty_like(rows)
        return squares, _run_row_loop(_normalized_squares, rows, squares.numpy(), least)
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
