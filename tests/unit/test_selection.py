"""Private selection by whole numbers: its probabilities are exactly those of the mechanism."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from itertools import permutations

import pytest

from training_client.lab.selection import flip_exponential_coin, permute_and_flip


def test_a_coin_of_e_to_the_minus_x_falls_as_often_as_it_should() -> None:
    for exponent in (Fraction(0), Fraction(1, 3), Fraction(1), Fraction(5, 2)):
        heads = sum(flip_exponential_coin(exponent) for _ in range(8000))
        share = math.exp(-exponent)
        assert abs(heads / 8000 - share) <= 5 * math.sqrt(share * (1 - share) / 8000)


def chances(scores: list[int], sensitivity: int, epsilon: float) -> list[float]:
    """Return the probability of each choice: over all orders, the first whose coin shows heads."""
    heads = [math.exp(epsilon * (each - max(scores)) / (2 * sensitivity)) for each in scores]
    found = [0.0] * len(scores)
    for order in permutations(range(len(scores))):
        before = 1 / math.factorial(len(scores))
        for choice in order:
            found[choice] += before * heads[choice]
            before *= 1 - heads[choice]
    return found


def test_choices_are_as_likely_as_in_permute_and_flip_and_differ_by_epsilon_at_most() -> None:
    scores, sensitivity, epsilon = [7, 4, 9, 0], 3, 1.5
    drawn = Counter(permute_and_flip(scores, sensitivity, epsilon) for _ in range(6000))
    for choice, share in enumerate(chances(scores, sensitivity, epsilon)):
        assert abs(drawn[choice] / 6000 - share) <= 5 * math.sqrt(share * (1 - share) / 6000)
    neighbour = [each + change for each, change in zip(scores, (3, 0, -3, 1), strict=True)]
    pairs = zip(chances(scores, 3, epsilon), chances(neighbour, 3, epsilon), strict=True)
    assert all(abs(math.log(one / other)) <= epsilon + 1e-12 for one, other in pairs)


@pytest.mark.parametrize("wrong", [([], 1, 1.0), ([1], 0, 1.0), ([1], 1, 0.0), ([1], 1, math.inf)])
def test_a_selection_without_a_meaning_is_refused(wrong: tuple[list[int], int, float]) -> None:
    with pytest.raises(ValueError, match="expected scores"):
        permute_and_flip(*wrong)
