"""Logarithms and exponentials of rational numbers between two close rational bounds.

Privacy costs of single releases that have a closed form are computed here, so that a budget of
exactly such a cost is compared with it correctly. `decimal` rounds each operation correctly.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Final

_DIGITS: Final = 60
_ERROR: Final = Decimal("1e-40")  # relative, far above that of a dozen operations
_SHOWN: Final = 45  # digits of the bounds
_LEAST: Final = Decimal("1e-320")  # below it the lower bound is 0


def sampled_epsilon(rate: Fraction, epsilon: Fraction) -> tuple[Fraction, Fraction]:
    """Return bounds on log(1 + q·(e^ε − 1)), the ε of a sample of an ε-DP release; q, ε ≥ 0."""
    if rate * epsilon == 0:
        return Fraction(), Fraction()
    return _enclose(
        lambda: (1 + _decimal(rate) * (_decimal(epsilon).exp() - 1)).ln(), rate * epsilon
    )


def response_epsilon(categories: int, flip: Fraction) -> tuple[Fraction, Fraction]:
    """Return bounds on log(1 + k·(1 − f)/f), the ε of randomized response; 0 < f ≤ 1."""
    odds = categories * (1 - flip) / flip
    return _enclose(lambda: (1 + _decimal(odds)).ln(), odds) if odds else (Fraction(), Fraction())


def truncated_mass(
    scale: Fraction, bound: Fraction, sensitivity: Fraction
) -> tuple[Fraction, Fraction]:
    """Return bounds on the probability of outputs that only one of two datasets has.

    The noise is Laplace noise of scale b on [−A, A], and the datasets differ by Δ ≤ A:
    ½·e^{−(A − Δ)/b}·(1 − e^{−Δ/b})/(1 − e^{−A/b}).
    """

    def mass() -> Decimal:
        """Compute it."""
        start = (_decimal((sensitivity - bound) / scale)).exp()
        moved, kept = (1 - _decimal(-each / scale).exp() for each in (sensitivity, bound))
        return start * moved / kept / 2

    return _enclose(mass, min(sensitivity / scale, Fraction(1)))


def _enclose(compute: Callable[[], Decimal], least: Fraction) -> tuple[Fraction, Fraction]:
    """Return bounds on a positive number.

    Args:
        compute: computes it with the precision of the context.
        least: the smallest number to which 1 is added; as many digits more are computed.
    """
    extra = max(0, len(str(least.denominator // least.numerator)))
    with decimal.localcontext(prec=_DIGITS + extra, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX):
        value = compute()
        if value < _LEAST:
            return Fraction(), Fraction(_LEAST)
        low, high = value * (1 - _ERROR), value * (1 + _ERROR)
    return _round(low, decimal.ROUND_FLOOR), _round(high, decimal.ROUND_CEILING)


def _round(value: Decimal, direction: str) -> Fraction:
    """Round a number to a few digits, in a direction, as a fraction."""
    return Fraction(decimal.Context(prec=_SHOWN, rounding=direction).plus(value))


def _decimal(value: Fraction) -> Decimal:
    """Convert a fraction, rounded to the precision of the context."""
    return Decimal(value.numerator) / Decimal(value.denominator)
