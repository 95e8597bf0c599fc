"""Sums of squares in single precision, rounded up, for accelerators.

PyTorch would copy a tensor into double precision before it adds it up so, and many accelerators
compute slowly there. Here 64 terms at a time are added up in single precision, and only these
partial sums in double precision. Let u = 2⁻²⁴ and τ = 2⁻¹²⁶, the smallest normal number. A result
of an operation may lose a share u of itself, or τ if it underflows; numbers below τ are read as
they are.

**The squared norm** S = Σx² of a row x of n values (`squared_norms`):

1. The row is multiplied by a power of two s, which is exact but for underflow, such that the
   largest |y| of y = s·x is in [1, 4), or in [2⁻²³, 1) if all of x is denormal. So Σy² ≥ 2⁻⁴⁶, and
   no square or sum of 64 squares (at most 2¹⁰) overflows.
2. A y below τ may become 0, and its square is below 2⁻²⁵². A square loses at most a share u of
   itself, or τ by underflow, and so may its addition. So underflow takes at most n·2⁻¹²⁴,
   which is at most n·2⁻⁷⁸·Σy², and below u/64·Σy² for n ≤ 2⁴⁸.
3. In a sum of 64 terms that are not negative, each takes part in at most 63 additions, in any
   order, and loses a share of at most 63u. With fused multiplications it loses no more.
4. The n/64 partial sums are added up in double precision, which takes a share n/64·2⁻⁵³, below u/64
   for n ≤ 2²⁹; more are added up in double precision from the start.
5. So the computed sum is at least (1 − 65u)·Σy². Multiplied by 1 + 68u it is at least
   (1 + 2u)·Σy², and exact powers of two make it an upper bound of S. It is at most
   (1 + 68u)(1 + 65u), less than 1 + 8·10⁻⁶, times S.

**After a map** (`mapped_squared_norms`), S = Σ(d·(x + b))²:

1. x and b are multiplied by one power of two s, and d by another, t, such that the largest of |x|
   and |b|, and of |d|, become less than 4. Each may lose τ by underflow.
2. So y = s·(x + b) is less than 8, and is computed with an error of at most u|y| + 4τ, however
   much of it cancels. With e = t·d, which is less than 4 and may have lost τ, the product loses a
   share u or τ. In all, the computed v has |y·e| ≤ (1 + 3u)|v| + 32τ.
3. By the triangle inequality √S·st ≤ (1 + 3u)‖v‖ + √n·32τ. ‖v‖² is bounded as above, with a power
   of two of its own. The factor 1 + 4u also pays for the double precision of this last line.
4. The result is at most 1 + 9·10⁻⁶ times S, but for √n·2⁻¹²⁰ times the largest |x| or |b| (no less
   than 2⁻¹²⁶) times the largest |d| (likewise) in the norm.

**Dot products** Σxz and Σxz² (`dots`): x and z are scaled as above, to values below 4.

1. No product (at most 2⁶) or sum of 64 overflows. Underflow of x or z (at most τ(16 + 32)), of z²
   (4τ) and of a product or sum (2τ) takes at most n·64τ, which is added.
2. The sum loses at most 63u in sums, 2u in products and u/64 in double precision of the sum of all
   |terms|. That sum is computed likewise, and is at least 1 − 66u of the exact one. It is added
   68u times.

**Squares of unit rows** (`normalized_squares`), with y and N the upper bound of Σy²: the entry for
x is y²/N, and the squared norm is N/s². Their product is at least (1 − 3u)·x²: y², 1/N and their
product are rounded once each. What underflows is raised to τ, and was less: N ≥ 1 where an y² can
underflow.

**Sums over positions** (`square_sums`, `mapped_products`): Gₒ = Σₜg²ₜₒ and Aᵢ = Σₜa²ₜᵢ over T
positions give P = Σₒᵢ GₒD²ₒᵢAᵢ, each factor scaled to values below 4. With N = o + i + 2T:

1. No sum overflows: P ≤ 2¹²·T²·o·i. Only sums with N ≤ 2²⁰ are computed so.
2. Each term takes part in at most N additions and 8 products, so the computed P is at least
   (1 − (N + 8)u)·P, in any order. As (N + 8)u < 1/8, a factor 1 + 2(N + 8)u makes it an upper
   bound.
3. Underflow takes at most 2Tτ of each G and A, 2τ of each D², and 2τ of each product. Each is
   multiplied by at most 2⁸·T²·o·i, so all take less than T²·o·i·2¹²·τ, which is added.

∞ and NaN stay what they are, or become NaN.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

_PART: Final = 64  # terms that are added up in single precision
_COLUMNS_MAX: Final = 1 << 29
_PRODUCT_ROUNDINGS: Final = 1 << 20
_ROUNDING: Final = 2.0**-24  # u
_UNDERFLOW: Final = 2.0**-126  # τ
_ROUNDED_UP: Final = 1 + 68 * _ROUNDING
_MAPPED_UP: Final = 1 + 4 * _ROUNDING
_MANTISSA_BITS, _EXPONENT_BIAS, _EXPONENT_MASK = 23, 127, 255  # of single precision


class SquareSums(NamedTuple):
    """Sums of scaled squares over the positions of each example.

    Attributes:
        sums: one row per example.
        powers: the power of two that the example's values were multiplied by.
        terms: the number of positions.
    """

    sums: torch.Tensor
    powers: torch.Tensor
    terms: int


def are_summable(rows: torch.Tensor) -> bool:
    """Return whether rows are in single precision, not empty, and not too long for the proofs."""
    return rows.dtype == torch.float32 and 0 < rows.shape[1] <= _COLUMNS_MAX


def are_multipliable(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether `mapped_products` bounds the products of two factors of sequences."""
    sizes = *left.shape[1:], right.shape[2]
    fits = min(sizes) > 0 and sum(sizes) + left.shape[1] <= _PRODUCT_ROUNDINGS
    return fits and left.dtype == torch.float32


def squared_norms(rows: torch.Tensor) -> torch.Tensor:
    """Return upper bounds on the rows' squared norms, in double precision."""
    powers = _inverse_magnitudes(_largest(rows))
    return _sum_of_squares(rows * powers[:, None]).div_(powers.double().square_())


def mapped_squared_norms(
    rows: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None
) -> torch.Tensor:
    """Return upper bounds on the rows' squared norms after shift and scale, in double precision.

    Args:
        rows: x.
        scale: d; one row, or one for each of `rows`.
        shift: b, likewise; None for 0.
    """
    largest = _largest(rows)
    if shift is not None:
        largest = torch.maximum(largest, _largest(shift))
    powers, scale_powers = _inverse_magnitudes(largest), _inverse_magnitudes(_largest(scale))
    mapped = rows * powers[:, None]
    if shift is not None:
        mapped.addcmul_(powers[:, None], shift)
    mapped.mul_(scale * scale_powers[:, None])
    again = _inverse_magnitudes(_largest(mapped))
    lengths = _sum_of_squares(mapped.mul_(again[:, None])).sqrt_().div_(again)
    lengths.mul_(_MAPPED_UP).add_(math.sqrt(rows.shape[1]) * 32 * _UNDERFLOW)
    return lengths.div_(powers.double() * scale_powers).square_()


def dots(rows: torch.Tensor, others: torch.Tensor, *, squared: bool) -> torch.Tensor:
    """Return upper bounds on each row's dot product with `others`' same row, or with its squares.

    Args:
        rows: x.
        others: z.
        squared: multiply by z² rather than z.
    """
    powers, other_powers = (_inverse_magnitudes(_largest(each)) for each in (rows, others))
    terms = others * other_powers[:, None]
    terms = (terms.square_() if squared else terms).mul_(rows * powers[:, None])
    found = _sum_by_parts(terms)
    found.add_(_sum_by_parts(terms.abs_()), alpha=_ROUNDED_UP - 1)
    found.add_(rows.shape[1] * 64 * _UNDERFLOW)
    unit = other_powers.double()
    return found.div_((unit.square() if squared else unit) * powers)


def normalized_squares(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return squares of the rows scaled to norm 1, at least `tiny` or 0, and squared norms."""
    powers = _inverse_magnitudes(_largest(rows))
    squares = rows * powers[:, None]
    norms = _sum_of_squares(squares)
    squares.mul_(norms.reciprocal().to(rows.dtype)[:, None]).clamp_min_(_UNDERFLOW)
    return squares.masked_fill_(rows == 0, 0.0), norms.div_(powers.double().square_())


def square_sums(factor: torch.Tensor) -> SquareSums:
    """Return Σₜx² for each example and column.

    Args:
        factor: x, of shape (examples, positions, columns).
    """
    powers = _inverse_magnitudes(_largest(factor.flatten(1)))
    sums = (factor * powers[:, None, None]).square_().sum(1)
    return SquareSums(sums, powers, factor.shape[1])


def mapped_products(left: SquareSums, right: SquareSums, scale: torch.Tensor) -> torch.Tensor:
    """Return upper bounds on Σₒᵢ GₒD²ₒᵢAᵢ for each example, in double precision.

    Args:
        left: the sums G.
        right: the sums A.
        scale: D, of shape (columns of G, columns of A).
    """
    power = _inverse_magnitudes(_largest(scale.reshape(1, -1)))
    found = torch.mm(right.sums, (scale * power).square_().T).mul_(left.sums).sum(1).double()
    rounding = (sum(scale.shape) + 2 * left.terms + 8) * _ROUNDING
    found.mul_(1 + 2 * rounding).add_(left.terms**2 * scale.numel() * 2**12 * _UNDERFLOW)
    return found.div_((left.powers.double() * right.powers * power).square_())


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """Return each row's largest magnitude; NaN if one of its values is."""
    smallest, largest = rows.aminmax(dim=1)
    return torch.maximum(largest, -smallest)


def _inverse_magnitudes(numbers: torch.Tensor) -> torch.Tensor:
    """Return the power of two that brings each number ≥ 0 into [1, 4), but for denormal ones."""
    exponents = (numbers.view(torch.int32) >> _MANTISSA_BITS) & _EXPONENT_MASK
    exponents = (2 * _EXPONENT_BIAS - exponents).clamp_(1, 253)
    return (exponents << _MANTISSA_BITS).view(torch.float32)


def _sum_of_squares(scaled: torch.Tensor) -> torch.Tensor:
    """Square scaled rows in place; return upper bounds on their sums, in double precision."""
    return _sum_by_parts(scaled.square_()).mul_(_ROUNDED_UP)


def _sum_by_parts(terms: torch.Tensor) -> torch.Tensor:
    """Add up each row, 64 terms at a time in single and the rest in double precision."""
    whole = terms.shape[1] // _PART
    parts = torch.unflatten(terms[:, : whole * _PART], 1, (whole, _PART)).sum(2)
    return parts.double().sum(1).add_(terms[:, whole * _PART :].sum(1))
