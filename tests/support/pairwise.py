"""Cases that cover all pairs of values, in place of the product of all values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairwise(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Return cases in which every two values of different axes occur together.

    The choice is greedy: a case begins with a pair that no earlier case has, and takes for each
    further axis the value that adds most new pairs, or that was used least. It is always the same.

    Args:
        axes: the values of each axis.
    """
    names = sorted(axes, key=lambda name: -len(axes[name]))
    if len(names) == 1:
        return [{names[0]: value} for value in axes[names[0]]]
    missing = {
        ((one, i), (other, j)): None
        for one, other in combinations(names, 2)
        for i in range(len(axes[one]))
        for j in range(len(axes[other]))
    }
    used = {(name, i): 0 for name in names for i in range(len(axes[name]))}
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for name in names:
            if name not in case:
                case[name] = max(
                    range(len(axes[name])),
                    key=lambda i, name=name: (  # type: ignore[misc]
                        sum(
                            ((other, j), (name, i)) in missing or ((name, i), (other, j)) in missing
                            for other, j in case.items()
                        ),
                        -used[name, i],
                    ),
                )
        for place in case.items():
            used[place] += 1
        for pair in combinations([(name, case[name]) for name in names], 2):
            missing.pop(pair, None)
        cases.append({name: axes[name][case[name]] for name in axes})
    return cases
