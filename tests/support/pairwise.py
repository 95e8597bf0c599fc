"""Few cases in which every two values of different axes meet."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

Case = dict[str, Any]


def pairwise(**axes: Iterable[Any]) -> list[Case]:
    """Return cases, one value of each axis, so that all pairs of values of two axes occur.

    Every case begins with a pair that is not covered yet. It takes, axis by axis, the value that
    covers the most new pairs; among equals the least used, then the first. No chance is involved.
    """
    values = {name: list(each) for name, each in axes.items()}
    if not all(values.values()):
        raise ValueError("an axis has no values")
    if len(values) < 2:
        return [dict(zip(values, each, strict=True)) for each in zip(*values.values(), strict=True)]
    names = sorted(values, key=lambda name: -len(values[name]))
    places = {name: range(len(values[name])) for name in names}
    missing = {
        frozenset([(one, i), (other, j)]): None  # a dict keeps the order
        for one, other in itertools.combinations(names, 2)
        for i in places[one]
        for j in places[other]
    }
    used = dict.fromkeys(((name, i) for name in names for i in places[name]), 0)
    cases = []
    while missing:
        chosen = dict(sorted(next(iter(missing)), key=lambda each: names.index(each[0])))
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    places[name],
                    key=lambda i, name=name: (
                        sum(frozenset([(name, i), each]) in missing for each in chosen.items()),
                        -used[name, i],
                    ),
                )
        for each in chosen.items():
            used[each] += 1
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        cases.append({name: values[name][chosen[name]] for name in values})
    return cases
