"""Weighted sums of rows, such as held per-example gradients, added up in double precision.

A CPU reads each row once, in single precision, and its products and sums are in double precision.
An accelerator, on which double precision may be slow, adds up blocks of rows in their own.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from numpy import float64

from training_client.private_step.kernels.compiled import compile_loop, is_on_cpu

_CHUNK: Final = 1024  # columns whose sums stay in a CPU's first cache
_DOUBLES_MAX: Final = 1 << 24  # numbers that are copied in double precision at a time


def add_weighted_rows(
    rows: torch.Tensor, weights: torch.Tensor, block: int, total: torch.Tensor
) -> None:
    """Add Σ wᵢ·rowᵢ to `total`.

    Args:
        rows: one row per example.
        weights: w, one per example.
        block: how many rows an accelerator may add up in their own precision; 0 for none.
        total: a contiguous vector in double precision.
    """
    if is_on_cpu(rows):
        given = rows.contiguous().numpy(), weights.numpy(), total.numpy()
        compile_loop(_add_weighted_rows)(*given, _CHUNK)
        return
    step = block or max(1, _DOUBLES_MAX // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part, of = rows[start : start + step], weights[start : start + step]
        total += torch.mv(part.T, of) if block else torch.mv(part.double().T, of.double())


def add_rows_at(
    places: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    examples: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Add w[exampleᵢ]·rowᵢ to the row `places`[i] of `total`, for all i.

    Args:
        places: an index of a row of `total` for each row.
        rows: the rows.
        weights: w, one per example.
        examples: the example of each row.
        total: a contiguous matrix in double precision.
    """
    if is_on_cpu(rows):
        given = [each.numpy() for each in (places, rows, weights, examples, total)]
        compile_loop(_add_rows_at)(*given)
        return
    total.index_add_(0, places, (rows * weights[examples][:, None]).double())


def _add_weighted_rows(rows: Any, weights: Any, total: Any, chunk: Any) -> None:
    """Add weighted rows to `total`, some columns at a time."""
    count = len(rows)
    for start in range(0, len(total), chunk):
        sums, i = total[start : start + chunk], 0
        while i + 4 <= count:  # four at a time: sums are read and written less often
            u, v = float64(weights[i]), float64(weights[i + 1])
            w, x = float64(weights[i + 2]), float64(weights[i + 3])
            a, b = rows[i, start : start + chunk], rows[i + 1, start : start + chunk]
            c, d = rows[i + 2, start : start + chunk], rows[i + 3, start : start + chunk]
            for j in range(len(sums)):
                sums[j] += (u * float64(a[j]) + v * float64(b[j])) + (
                    w * float64(c[j]) + x * float64(d[j])
                )
            i += 4
        while i < count:
            u, a = float64(weights[i]), rows[i, start : start + chunk]
            for j in range(len(sums)):
                sums[j] += u * float64(a[j])
            i += 1


def _add_rows_at(places: Any, rows: Any, weights: Any, examples: Any, total: Any) -> None:
    """Add weighted rows to the rows of `total` that `places` names."""
    for i in range(len(rows)):
        weight, row, sums = float64(weights[examples[i]]), rows[i], total[places[i]]
        for j in range(len(sums)):
            sums[j] += weight * float64(row[j])
