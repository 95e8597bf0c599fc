"""The cover of pairs: complete, and not much larger than it must be."""

from __future__ import annotations

import itertools

import pytest

from tests.support.pairwise import pairwise


@pytest.mark.parametrize("sizes", [(3,), (2, 2), (12, 15, 5), (12, 3, 6, 3), (5, 5, 5, 5)])
def test_every_two_values_meet_in_few_cases(sizes: tuple[int, ...]) -> None:
    axes = {f"axis{n}": range(size) for n, size in enumerate(sizes)}
    cases = pairwise(**axes)
    for one, other in itertools.combinations(axes, 2):
        found = {(case[one], case[other]) for case in cases}
        assert found == set(itertools.product(axes[one], axes[other]))
    assert all(list(case) == list(axes) for case in cases)
    first, second = sorted((*sizes, 1), reverse=True)[:2]
    assert len(cases) <= 1.6 * first * second
    assert cases == pairwise(**axes)


def test_values_need_no_hash_and_an_empty_axis_is_refused() -> None:
    assert len(pairwise(a=[{}, []], b=[[1], [2]])) == 4
    with pytest.raises(ValueError, match="no values"):
        pairwise(a=[1], b=[])
