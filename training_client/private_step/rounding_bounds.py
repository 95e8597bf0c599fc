"""Floating-point error bounds for clipped norms and sums.

A computed norm must not be below the true one, and what sums lose must be negligible beside the
clipping bound, whatever values an example has. Every source of error, and what pays for it:

- rounding of a norm: `rounding_error` times the terms of the norm is added to it;
- rounding of a weighted gradient: the bound is reduced by the share `weight_rounding`;
- rounding of a sum over one example's sequence, in which terms may cancel: `sequence_rounding`
  times an upper bound on the sum of the terms' magnitudes is added to the norm, once for each
  matrix product that computes the sum;
- underflow in a norm: `norm_underflow` is added to it, also through `squared_norm_upper_bounds` and
  `shift_norm_upper_bound`;
- underflow in a weighted gradient: an example that would lose more than `negligible_share` of the
  bound is excluded (`has_excessive_underflow`);
- overflow of sums that D would make small again: `overflow_guard` is added to the norm, so that
  weighted gradients stay far below it.

That is about one record. **The sum over a batch** is rounded too, and one record more changes the
rounding of all others. Let n records have clipped gradients of norm ≤ C, rounding included. Added
up in any order, in blocks of k in a precision of half epsilon u, the sum moves from the exact one
by at most n·(k + c)·u·C, with c for the products and for underflow, if the sums of blocks are added
up in double precision (Higham, Lemma 3.1). Neighbouring batches have two such errors. So a record
moves the computed sum by at most C(1 + a), if each error is at most a·C/2:

- a = `sum_share` comes from the plan, and the noise is made for C(1 + a): it depends on no data;
- products of a dense or sparse matrix in single precision: blocks of k = `single_precision_block`
  records, which is chosen for n and a. If k is too small to be worth it, products in double;
- gradients that are held, or computed for one record at a time (sequences, embeddings, boxes,
  damping): u is that of double precision on a CPU. An accelerator adds up blocks of k records;
- with a shift b, D∘∇ and D∘b cancel. Each may be `_cancellation` times as long as their sum, and
  no longer, because the norm allows for their rounding. Then all is in double precision, k is n.

`require_precise_sum` refuses batches too large for that. Several physical batches are added up in
double precision, with n the whole batch's number of records. A process of several has a share of a.
What is assumed: a record's own gradient is computed alike beside other records.

`safe_bound_range` gives the clipping bounds at which all of this holds. On an accelerator sums
along rows in single precision are rounded up where they are computed, and need no more from here
(`kernels/accelerator_sums.py`). No other file makes allowances for floating point.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from training_client.private_step.kernels.row_sums import squared_norms

# Rounding of weights and weighted gradients, and what underflow may take, relative to the bound:
# a power of ten above a few roundings of the precision.
_WEIGHT_ROUNDING: Final = {torch.float32: 1e-6, torch.float64: 1e-7}
_NEGLIGIBLE_PART: Final = 0.1  # of the rounding of weights

_SEQUENCE_ROUNDINGS: Final = 8  # of a product's term and its weight
_EXTRA_ROUNDINGS: Final = 64  # of the terms of a sum, and of sums other than matrix products
_EXAMPLES_MAX: Final = float(1 << 32)  # more than are ever summed
_BOUND_MIN: Final = 1e-140  # and 1/_BOUND_MIN is the largest: their squares are finite and > 0
SHARE_MAX: Final = 0.01  # of the clip norm: a
_ROUNDINGS_OF_SUM: Final = 6  # c: two of products, three for underflow, one for second order
_BLOCK_MIN: Final = 32  # records; for smaller blocks, products in double precision are as fast
_MANTISSA: Final = float(1 << 24)  # of single precision; factors below `tiny` times it lose digits

Scalar = float | torch.Tensor  # a one-element tensor on an accelerator


def weight_rounding(dtype: torch.dtype) -> float:
    """Return how far rounding may raise a clipped gradient's norm, relative to the clip norm."""
    return _WEIGHT_ROUNDING[dtype]


def negligible_share(dtype: torch.dtype) -> float:
    """Return the largest underflow error allowed per example, relative to the clip norm."""
    return _NEGLIGIBLE_PART * weight_rounding(dtype)


def sum_share(expected_records: float) -> float:
    """Return a: how far rounding may move a sum besides the record, relative to the clip norm.

    It is what one block of 1.5 times the expected number of records needs, and at most 1 %.
    """
    usual = 1.5 * expected_records + 64
    return min(SHARE_MAX, usual * usual * float(torch.finfo(torch.float32).eps))


def single_precision_block(records: int, share: float) -> int:
    """Return k: how many records may be added up in single precision; 0 for none.

    Args:
        records: n, of the whole batch.
        share: a, of which the sums with and without a record have half each.
    """
    block = math.floor(share / (max(records, 1) * float(torch.finfo(torch.float32).eps)))
    block -= _ROUNDINGS_OF_SUM
    return block if block >= min(_BLOCK_MIN, records) else 0


def require_precise_sum(
    records: int, share: float, dtype: torch.dtype, *, is_shifted: bool
) -> None:
    """Raise if sums in double precision may move further than a.

    Args:
        records: n, of the whole batch.
        share: a.
        dtype: the precision of the gradients.
        is_shifted: whether gradients are shifted before the clip.

    Raises:
        ValueError: see above.
    """
    unit = float(torch.finfo(torch.float64).eps) * (_cancellation(dtype) if is_shifted else 1.0)
    if not records * (records + _ROUNDINGS_OF_SUM) * unit <= share:
        raise ValueError(
            f"the rounding of a sum over {records} records in {dtype} is not bounded by "
            f"{share:.1e} of the clip norm: use smaller batches, or single precision"
        )


def _cancellation(dtype: torch.dtype) -> float:
    """Bound (‖D∘∇‖ + ‖D∘b‖)/‖u‖ for the norm ‖u‖ of D∘(∇ + b) with its rounding allowance.

    The squared norm has at least `rounding_error` times ‖D∘∇‖² + ‖D∘b‖², or three times it times
    ‖D∘b‖². So the quotient is at most √(2/error); twice that leaves room for its own rounding.
    """
    return 2 * math.sqrt(2 / rounding_error(dtype))


def safe_bound_range(dtype: torch.dtype, size: int) -> tuple[float, float]:
    """Return the smallest and largest safe clip norm for gradients of `size` coordinates."""
    smallest = _smallest_normal(dtype) * math.sqrt(size) / negligible_share(dtype)
    return max(smallest, _BOUND_MIN), min(_largest_finite(dtype) / _EXAMPLES_MAX, 1 / _BOUND_MIN)


def smallest_safe_factor(dtype: torch.dtype) -> float:
    """Return the smallest weight or noise scale with which products do not underflow.

    Products with anything smaller may underflow.
    """
    return _smallest_normal(dtype) * _MANTISSA


def rounding_error(dtype: torch.dtype, terms: int = 0) -> float:
    """Return an upper bound on the rounding errors of two sums, relative to a computed sum.

    With k = (n + 64)u for n terms and u half an epsilon, a sum loses at most γ = k/(1 − k) of the
    sum P of its |terms|, in any order (Higham, Accuracy and Stability of Numerical Algorithms, 2nd
    edition, Lemma 3.1); 64 pays for the roundings of a term. A squared norm with a shift is P plus
    a sum that may cancel, whose |terms| add up to at most P. So both lose at most 2γP. The computed
    P is at least (1 − γ)P, and 2γ/(1 − γ) = 2k/(1 − 2k) of it is at least 2γP.

    Args:
        dtype: the precision in which the terms are computed.
        terms: n, the number of terms added up in that precision; 0 if they are added up in double.

    Returns:
        2k/(1 − 2k); ∞ if there are too many terms for a bound.
    """
    return _with_products((terms + _EXTRA_ROUNDINGS) * float(torch.finfo(dtype).eps))


def sequence_rounding(dtype: torch.dtype, terms: int) -> float:
    """Bound the rounding error of a matrix product over positions, relative to its Σ|terms|.

    Each of the additions, in any order, and each rounding of a term or of its weight takes at most
    half an epsilon of the sum of magnitudes; 1 % is added.

    Args:
        dtype: the precision of the product.
        terms: the number of terms added up for one example.

    Returns:
        The bound; ∞ if there are too many terms for one.
    """
    return _with_products((0.505 * terms + _SEQUENCE_ROUNDINGS) * float(torch.finfo(dtype).eps))


def _with_products(share: float) -> float:
    """Return k/(1 − k) for a sum k of roundings: it bounds their products too."""
    return share / (1 - share) if share < 1 else math.inf


def sequence_underflow(
    scale_norm: Scalar, coordinates: int, terms: int, dtype: torch.dtype
) -> Scalar:
    """Return an upper bound on the norm of the underflow error of a matrix product.

    Every product and every partial sum may lose the smallest normal number, which D multiplies.

    Args:
        scale_norm: ‖D‖²; without D the largest D², which is 1, is enough.
        coordinates: the number of coordinates of the gradient.
        terms: the number of terms added up for one example.
        dtype: the precision of the product.
    """
    return weighted_underflow(coordinates, scale_norm, dtype) * (2 * terms)


def gram_underflow(
    gradient_squares: torch.Tensor, input_squares: torch.Tensor, rows: int, columns: int, terms: int
) -> torch.Tensor:
    """Bound the underflow errors of squared gradient norms that are computed by Gram matrices.

    The Gram matrices G of g and A of a are computed in double precision; an entry of G loses at
    most the smallest normal number t for each of its terms, which an entry of A multiplies, and
    conversely. The sum of |entries| of A is at most T‖a‖², for T terms.

    Args:
        gradient_squares: ‖g‖² of each example, over its whole sequence.
        input_squares: ‖a‖², likewise.
        rows: the number of terms in an entry of G.
        columns: the number of terms in an entry of A.
        terms: T, the length of the sequence.
    """
    least = 4 * _smallest_normal(torch.float64)
    return (
        input_squares * (rows * terms) + gradient_squares * (columns * terms) + terms * terms
    ) * least


def mapped_magnitude_underflow(
    gradient_squares: torch.Tensor, input_squares: torch.Tensor, coordinates: int
) -> torch.Tensor:
    """Bound the underflow error of ‖D∘(gaᵀ)‖² for output gradient g, input a and scale D.

    Args:
        gradient_squares: Σₒ g²ₒ of each example.
        input_squares: Σᵢ a²ᵢ of each example.
        coordinates: the number of coordinates of the gradient.
    """
    return (gradient_squares * input_squares + gradient_squares + 1) * (
        4 * coordinates * _smallest_normal(torch.float64)
    )


def overflow_guard(bound: float, dtype: torch.dtype) -> float:
    """Return a factor c; c·‖gradient‖² added to squared norms keeps gradient sums from overflow.

    It is (B/m)², where m is the largest norm that a weighted gradient may have: with ‖∇‖²(B/m)² in
    ‖u‖², the weight w = B/‖u‖ makes w‖∇‖ ≤ m.

    In double precision it underflows; the smallest normal number serves as well for B up to 1e140.
    """
    return max(
        (bound / _largest_finite(dtype) * _EXAMPLES_MAX) ** 2, _smallest_normal(torch.float64)
    )


def squared_norm_upper_bounds(
    rows: torch.Tensor, norms: torch.Tensor | None = None
) -> torch.Tensor:
    """Return upper bounds on the rows' squared norms, valid even if squares underflow.

    Args:
        rows: in the precision that they are multiplied in.
        norms: their computed squared norms, if known.
    """
    norms = squared_norms(rows) if norms is None else norms
    return norms + rows.shape[1] * _underflow_square(rows.dtype)


def shift_norm_upper_bound(
    computed: Scalar, scale_norm: Scalar, shift_norm: Scalar, dtype: torch.dtype
) -> Scalar:
    """Return an upper bound on ‖D·b‖² for scale D and shift b, even if squares underflow.

    Args:
        computed: the computed Σ D²b², with D² in the precision of `dtype`.
        scale_norm: ‖D‖².
        shift_norm: ‖b‖².
        dtype: the precision of D and b.
    """
    return computed + scale_norm * _underflow_square(dtype) + shift_norm * _smallest_normal(dtype)


def norm_underflow(
    gradient_squares: torch.Tensor,
    input_squares: torch.Tensor,
    scale_norm: Scalar,
    coordinates: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Bound the underflow errors of squared norms of scaled and shifted gradients.

    Each underflow takes at most the smallest normal number t, once per coordinate: where D² or a
    product with it underflows, t is multiplied by ‖g‖²‖a‖²; where a square does, by D²; where a
    product with a shift does, by ‖g‖ and ‖a‖, with ‖g‖√(1 + ‖a‖²) ≤ (1 + ‖g‖²(1 + ‖a‖²))/2. (Where
    D² in 2·D²·g·a·b underflows, the loss is at most that of the squares of ga and of b.)

    Args:
        gradient_squares: ‖g‖² of each example.
        input_squares: ‖a‖² of each example.
        scale_norm: ‖D‖².
        coordinates: the number of coordinates of the gradient.
        dtype: the precision of g, a and D.
    """
    least = 4 * coordinates * _smallest_normal(dtype)
    of_squares = scale_norm * (coordinates * _underflow_square(dtype))
    of_weighted = of_squares + 2 * coordinates * _smallest_normal(torch.float64)
    found = gradient_squares.mul(1.5 * least).add_(of_weighted).mul_(input_squares)
    return found.add_(gradient_squares * (of_squares + least / 2)).add_(least / 2)


def weighted_underflow(coordinates: int, scale_norm: Scalar, dtype: torch.dtype) -> Scalar:
    """Return an upper bound on the norm of the underflow error of one clipped gradient.

    The smallest numbers are rounded up or to 0, and D multiplies the error. A shift is weighted
    separately, so it no longer cancels what has underflowed.

    Args:
        coordinates: the number of coordinates of the gradient.
        scale_norm: ‖D‖².
        dtype: the precision of the gradient.
    """
    length: Scalar = scale_norm**0.5
    return length * (_smallest_normal(dtype) * math.sqrt(coordinates))


def has_excessive_underflow(
    largest: torch.Tensor,
    scale_norm: Scalar,
    bound: float,
    coordinates: int,
    dtype: torch.dtype,
    terms: int = 1,
) -> torch.Tensor:
    """Return, per example, whether underflow would change the clipped gradient too much.

    That happens where one factor is so large that the other, weighted, underflows. The other is
    multiplied by the first, or by the 1 of a shift, and by D: the error has at most the norm
    `weighted_underflow` times √m + 1, whose square is at most 2m + 2. A sum over a sequence loses
    that at most once for each of its terms.

    Args:
        largest: m, the squared norm of the larger factor of each example.
        scale_norm: ‖D‖²; without D the largest D², which is 1, is enough.
        bound: the clipping bound on the whole gradient.
        coordinates: the number of coordinates of the gradient.
        dtype: the precision of the factors.
        terms: the number of products that an example's gradient is the sum of.
    """
    lost = weighted_underflow(coordinates, scale_norm, dtype) / bound / negligible_share(dtype)
    lost = lost * terms
    part = 2 * lost * lost
    return largest * (part + 256 / _largest_finite(dtype)) >= 1 - part


def _smallest_normal(dtype: torch.dtype) -> float:
    """Return the smallest positive normal number of a dtype; smaller ones lose digits."""
    return float(torch.finfo(dtype).tiny)


def _largest_finite(dtype: torch.dtype) -> float:
    """Return the largest finite number of a dtype."""
    return float(torch.finfo(dtype).max)


def _underflow_square(dtype: torch.dtype) -> float:
    """Return an upper bound on x² over all numbers x such that x or x² underflows in a dtype."""
    return max(_smallest_normal(dtype) ** 2, 2 * _smallest_normal(torch.float64))
