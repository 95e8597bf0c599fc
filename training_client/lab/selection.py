"""Private selection: permute-and-flip on whole scores, without floating-point numbers.

McKenna and Sheldon 2020, arXiv 2010.12603, Algorithm 1. The coins are those of Canonne, Kamath and
Steinke 2020, arXiv 2004.00010, Algorithm 1: exact for rational numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from fractions import Fraction

Draw = Callable[[int], int]  # of a whole number from 0 to n − 1, each as likely


def permute_and_flip(
    scores: Sequence[int], sensitivity: int, epsilon: float, draw: Draw = secrets.randbelow
) -> int:
    """Return the index of a score near the largest: an ε-differentially private selection.

    Args:
        scores: one whole number for each choice; private.
        sensitivity: Δ ≥ 1, how much one record changes a score at most.
        epsilon: ε > 0, of the release.
        draw: uniform whole numbers; by default the operating system's.

    Raises:
        ValueError: there is no score, or Δ or ε is out of range.
    """
    if not (scores and sensitivity >= 1 and 0 < epsilon < float("inf")):
        raise ValueError(
            f"expected scores, sensitivity ≥ 1 and finite epsilon > 0, got {len(scores)} scores, "
            f"{sensitivity} and {epsilon}"
        )
    best, rate = max(scores), Fraction(epsilon) / (2 * sensitivity)
    left = list(range(len(scores)))
    while True:
        chosen = left.pop(draw(len(left)))
        if flip_exponential_coin(rate * (best - scores[chosen]), draw):
            return chosen


def flip_exponential_coin(exponent: Fraction, draw: Draw = secrets.randbelow) -> bool:
    """Return True with probability e^(−x) exactly, for a rational x ≥ 0."""
    whole, rest = divmod(exponent, 1)
    heads = all(_flip_small(Fraction(1), draw) for _ in range(int(whole)))
    return heads and _flip_small(rest, draw)


def _flip_small(exponent: Fraction, draw: Draw) -> bool:
    """Return True with probability e^(−x), for x in [0, 1]: whether an even number of coins fall.

    The coins have the probabilities x, x/2, x/3, …, until one fails.
    """
    count = 1
    while draw(exponent.denominator * count) < exponent.numerator:
        count += 1
    return count % 2 == 1
