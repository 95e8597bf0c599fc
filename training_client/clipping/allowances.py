"""What a precision may take from norms and sums, and what is allowed for it.

A norm that is found may not be below the true one, and what sums lose must be nothing beside the
bound, whatever numbers an example brings. What is lost, and where it is allowed for:

- rounding, in a norm: `rounding` of what the norm is made of is added to it;
- rounding, in a weighted gradient: `WEIGHTED` is taken off the bound;
- numbers that are taken for 0, in a norm: `underflow` and `squared_norms_at_most` are added to it;
- numbers that are taken for 0, in a weighted gradient: an example that would lose more of it than
  `NEGLIGIBLE` of the bound is left out (`loses_digits`);
- sums that pass all numbers, where D would make them small again: `share` is added to the norm,
  so that no weighted gradient comes near.

`usual_bounds` are those at which all of this holds. Nothing else in the package allows for any.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from training_client.clipping.rows import squared_norms

WEIGHTED: Final = 1e-6  # rounding of a weight, and of what is weighted, over the bound
NEGLIGIBLE: Final = 1e-7  # of the bound

_ROUNDINGS: Final = 64  # of a sum that is not a matrix product, and of its terms
_EXAMPLES: Final = float(1 << 32)  # more than are ever summed
_LEAST: Final = 1e-140  # of a bound, and one over the most: their squares are numbers
_DIGITS: Final = float(1 << 24)  # of single precision; a factor below `tiny` times it loses some

Number = float | torch.Tensor  # a tensor of one on an accelerator


def usual_bounds(kind: torch.dtype, size: int) -> tuple[float, float]:
    """The least and the largest bound at which numbers of a kind can tell sums of so many."""
    least = _tiny(kind) * math.sqrt(size) / NEGLIGIBLE
    return max(least, _LEAST), min(_largest(kind) / _EXAMPLES, 1 / _LEAST)


def least_factor(kind: torch.dtype) -> float:
    """The least weight or noise standard deviation whose products keep their digits.

    Products of anything smaller may underflow.
    """
    return _tiny(kind) * _DIGITS


def rounding(kind: torch.dtype, terms: int = 0) -> float:
    """What a sum of so many products may be off by, over what their sizes add up to, in any order.

    Args:
        kind: in which they are added up.
        terms: 0 if it is double precision.
    """
    return (terms + _ROUNDINGS) * float(torch.finfo(kind).eps)


def share(bound: float, kind: torch.dtype) -> float:
    """(B/m)² for the most m that a weighted gradient may be: with ‖∇‖²(B/m)² found, w‖∇‖ ≤ m.

    In double precision it is no number, and the smallest does as well for B up to 1e140.
    """
    return max((bound / _largest(kind) * _EXAMPLES) ** 2, _tiny(torch.float64))


def squared_norms_at_most(rows: torch.Tensor, norms: torch.Tensor | None = None) -> torch.Tensor:
    """‖·‖² of each row, and what entries or squares that are taken for 0 may have added to it.

    Args:
        rows: in the precision that they are multiplied in.
        norms: their squared norms, if they are known.
    """
    norms = squared_norms(rows) if norms is None else norms
    return norms + rows.shape[1] * _least_square(rows.dtype)


def constant_at_most(constant: Number, scales: Number, shifts: Number, kind: torch.dtype) -> Number:
    """‖D∘b‖² and what it lacks where D² or b² is taken for 0.

    Args:
        constant: Σ D²b², with D² in the precision of `kind`.
        scales: ‖D‖².
        shifts: ‖b‖².
        kind: of the numbers.
    """
    return constant + scales * _least_square(kind) + shifts * _tiny(kind)


def underflow(
    heights: torch.Tensor, widths: torch.Tensor, scales: Number, numbers: int, kind: torch.dtype
) -> torch.Tensor:
    """What ‖D∘(gaᵀ + b)‖² lacks where numbers are taken for 0, at most.

    It is the smallest number t at a time, for each number of the gradient: of a weight D² or a
    product with it, which is then multiplied by ‖g‖²‖a‖²; of a square, by D²; of a product with
    a shift, by ‖g‖ and ‖a‖, where ‖g‖√(1 + ‖a‖²) ≤ (1 + ‖g‖²(1 + ‖a‖²))/2. (What 2·D²·g·a·b
    lacks with D² is at most what the squares of ga and of b lack.)

    Args:
        heights: ‖g‖² of each example.
        widths: ‖a‖².
        scales: ‖D‖².
        numbers: of the gradient.
        kind: of the numbers.
    """
    least = 4 * numbers * _tiny(kind)
    of_squares = scales * (numbers * _least_square(kind))
    of_weighted = of_squares + 2 * numbers * _tiny(torch.float64)
    found = heights.mul(1.5 * least).add_(of_weighted).mul_(widths)
    return found.add_(heights * (of_squares + least / 2)).add_(least / 2)


def weighted_underflow(numbers: int, scales: Number, kind: torch.dtype) -> Number:
    """The norm of what a weighted gradient lacks in u, or has too much, where it is taken for 0.

    The smallest numbers are rounded to 0 or up, D multiplies what that leaves, and what a shift
    cancels is no longer cancelled: the shift is weighted by itself.

    Args:
        numbers: of the gradient.
        scales: ‖D‖².
        kind: of the numbers.
    """
    length: Number = scales**0.5
    return length * (_tiny(kind) * math.sqrt(numbers))


def loses_digits(
    largest: torch.Tensor, scales: Number, bound: float, numbers: int, kind: torch.dtype
) -> torch.Tensor:
    """Where one factor of gaᵀ is so large that too much of the other, weighted, is taken for 0.

    The other is multiplied by the first, or by the 1 of a shift, and by D: what is lost has a norm
    of `weighted_underflow` times √m + 1, whose square is at most 2m + 2.

    Args:
        largest: m, the squared norm of the larger factor, of each example.
        scales: ‖D‖²; without D the largest D² will do, which is 1.
        bound: of the whole.
        numbers: of the gradient.
        kind: of the numbers.
    """
    lost = weighted_underflow(numbers, scales, kind) / bound / NEGLIGIBLE
    part = 2 * lost * lost
    return largest * (part + 256 / _largest(kind)) >= 1 - part


def _tiny(kind: torch.dtype) -> float:
    """The smallest number with all its digits; what is smaller may be taken for 0."""
    return float(torch.finfo(kind).tiny)


def _largest(kind: torch.dtype) -> float:
    return float(torch.finfo(kind).max)


def _least_square(kind: torch.dtype) -> float:
    """At most this is the square of an entry whose square, or which itself, is taken for 0."""
    return max(_tiny(kind) ** 2, 2 * _tiny(torch.float64))
