"""The cover of all pairs of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairwise import pairwise


@pytest.mark.parametrize(
    ("sizes", "most"), [((3,), 3), ((4, 3), 12), ((5, 4, 3, 2, 2), 22), ((2,) * 10, 12)]
)
def test_every_pair_of_values_occurs_in_few_cases(sizes: tuple[int, ...], most: int) -> None:
    axes = {f"axis {at}": [f"{at}:{i}" for i in range(size)] for at, size in enumerate(sizes)}
    cases = pairwise(**axes)
    assert len(cases) <= most
    assert all(list(case) == list(axes) for case in cases)
    for one, other in combinations(axes, 2):
        found = {(case[one], case[other]) for case in cases}
        assert found == set(product(axes[one], axes[other]))
    assert pairwise(**axes) == cases
